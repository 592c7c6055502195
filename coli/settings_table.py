"""The table of settings: each once, with flags, environment names, bounds, default and the counter that shows it.

Click options, `--help`, docs/settings.md and the list of known variables come from it. A table and nothing else:
`coli.options` looks values up in the environment and resolves them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli.setting_values import NUMERIC, UNBOUNDED, Bounds, Kind, parse_value

MAX_DRAFT_TOKENS = 48  # rows of one verify batch a grammar or corpus proposal may fill
OWN_PREFIXES = ("COLI_", "SPECULANT_")


@dataclass(frozen=True, slots=True)
class EnvName:
    """One environment variable of a setting; `translate(text, name)` gives the setting's text, None = as if unset."""

    name: str
    translate: Callable[[str, str], str | None] | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `flag` is a click declaration; `later` names a feature that is not in this version yet."""

    name: str
    group: str
    kind: Kind
    default: Any
    effect: str
    flag: str = ""
    env: tuple[EnvName, ...] = ()
    bounds: Bounds = UNBOUNDED
    default_text: str = ""
    counter: str = ""
    later: str = ""

    def parse(self, raw: object, origin: str) -> Any:
        """Checked value of `raw` (text, or bool or tuple from click); OptionError names `origin`, value, allowed."""
        return parse_value(self.kind, self.bounds, raw, origin)


def _switch_for(wanted: str) -> Callable[[str, str], str | None]:
    """A switch variable: true means the value `wanted` of its setting, false means unset."""
    return lambda raw, name: wanted if parse_value("bool", UNBOUNDED, raw, name) else None


def _if_numeric(raw: str, name: str) -> str | None:
    return raw if NUMERIC.fullmatch(raw) else None  # TEMP is a folder on some systems


def _if_model_folder(raw: str, name: str) -> str | None:
    return raw if any((Path(raw) / name).is_file() for name in ("coli.json", "config.json")) else None


def _attentive_or_single(raw: str, name: str) -> str | None:
    return "attentive" if parse_value("bool", UNBOUNDED, raw, name) else "single"


def _env(*names: str | EnvName) -> tuple[EnvName, ...]:
    return tuple(EnvName(name) if isinstance(name, str) else name for name in names)


def _choices(*allowed: str) -> Bounds:
    return Bounds(choices=allowed)


TABLE: tuple[Setting, ...] = (
    # prompt
    Setting("model", "model", "name", None, "container folder, or a name under the model home", "--model",
            _env("COLI_MODEL", "SPECULANT_VERIFIER__MODEL_NAME", EnvName("SNAP", _if_model_folder)),
            default_text="none", counter="settings.model"),
    Setting("home", "model", "path", None, "folder that holds models by name", "", _env("COLI_HOME"),
            default_text="the user's data folder", counter="settings.home"),
    Setting("prompt", "prompt", "text", None, "the prompt, where no argument gives one", "", _env("PROMPT"),
            default_text="standard input if it is not a terminal", counter="prompt_tokens"),
    Setting("prompt_ids", "prompt", "ids", None, "the prompt as token ids: no template, no BOS added", "--prompt-ids",
            default_text="none", counter="prompt_tokens"),
    Setting("raw", "prompt", "flag", False, "feed the prompt as it is, without the chat template", "--raw",
            counter="prompt_tokens"),
    Setting("system", "prompt", "text", None, "system message for the chat template", "--system",
            default_text="the template's own", counter="prompt_tokens"),
    Setting("think", "prompt", "bool", None, "ask the template for thinking or against it", "--think/--no-think",
            _env("THINK"), default_text="the template's own", counter="prompt_tokens"),
    # generation
    Setting("ngen", "generate", "int", 256, "tokens to generate at most", "--ngen",
            _env("NGEN", "SPECULANT_GENERATION__MAX_TOKENS"), Bounds(1, 2**31 - 1), counter="generated_tokens"),
    Setting("stop", "generate", "texts", (), "end before this text appears (repeatable)", "--stop",
            default_text="none", counter="finish_reason"),
    Setting("ignore_eos", "generate", "flag", False, "go on past the model's end tokens", "--ignore-eos",
            counter="finish_reason"),
    Setting("temp", "generate", "float", 0.0, "sampling temperature; 0 takes the best token", "--temp",
            _env("COLI_TEMP", "SPECULANT_GENERATION__TEMPERATURE", EnvName("TEMP", _if_numeric)), Bounds(0, 100),
            counter="token_ids"),
    Setting("top_k", "generate", "int", 0, "sample from the k best tokens; 0 is off", "--top-k", _env("COLI_TOP_K"),
            Bounds(0, 2**31 - 1), counter="token_ids"),
    Setting("top_p", "generate", "float", 1.0, "sample from the smallest set with this probability; 1 is off",
            "--top-p", _env("NUCLEUS"), Bounds(0, 1), counter="token_ids"),
    Setting("min_p", "generate", "float", 0.0, "drop tokens below this share of the best probability; 0 is off",
            "--min-p", _env("COLI_MIN_P"), Bounds(0, 1), counter="token_ids"),
    Setting("repeat_penalty", "generate", "float", 1.0, "divide the logit of tokens already seen; 1 is off",
            "--repeat-penalty", bounds=Bounds(0.01, 100), counter="token_ids"),
    Setting("presence_penalty", "generate", "float", 0.0, "subtract from tokens already generated; 0 is off",
            "--presence-penalty", bounds=Bounds(-100, 100), counter="token_ids"),
    Setting("frequency_penalty", "generate", "float", 0.0, "subtract per time a token was generated; 0 is off",
            "--frequency-penalty", bounds=Bounds(-100, 100), counter="token_ids"),
    Setting("seed", "generate", "int", None, "seed of the sampling noise", "--seed",
            _env("SEED", "SPECULANT_GENERATION__SEED"), Bounds(0, 2**64 - 1), default_text="drawn once, reported",
            counter="seed"),
    # engine
    Setting("ctx", "engine", "int", None, "positions of the context", "--ctx", _env("CTX"), Bounds(1, 2**31 - 1),
            default_text="prompt + ngen, at most the model's", counter="finish_reason"),
    Setting("kv", "engine", "choice", "auto", "number type of keys and values", "--kv", _env("COLI_KV"),
            _choices("auto", "f16", "f32"), counter="peak_memory_bytes"),
    Setting("threads", "engine", "int", None, "compute threads", "--threads", _env("COLI_THREADS"), Bounds(1, 4096),
            default_text="physical cores this process may use", counter="decode_tps"),
    Setting("simd", "engine", "choice", "auto", "instruction set of the kernels (for tests)", "", _env("COLI_SIMD"),
            _choices("auto", "avx512", "avx2", "generic"), default_text="best of this CPU", counter="settings.simd"),
    Setting("kernel_cache", "engine", "path", None, "folder of compiled kernels", "", _env("COLI_KERNEL_CACHE"),
            default_text="coli in the user's cache folder, else a temporary one", counter="settings.kernel_cache"),
    Setting("device", "engine", "choice", "cpu", "what computes; only the processor can", "",
            _env("SPECULANT_VERIFIER__DEVICE"), _choices("cpu"), counter="settings.device"),
    # store
    Setting("ram", "engine", "size", None, "memory of the whole process and the page cache it causes; a bare number "
            "is GB", "--ram", _env("RAM_GB"), default_text="auto", counter="memory_budget_bytes"),
    Setting("io", "engine", "choice", "auto", "how experts are read", "--io",
            _env(EnvName("DIRECT", _switch_for("direct")), EnvName("COLI_MMAP", _switch_for("mmap"))),
            _choices("auto", "mmap", "pread", "direct"), counter="reads"),
    Setting("prefetch", "engine", "bool", False, "read ahead what the next layer's router would choose now",
            "--prefetch/--no-prefetch", _env("COLI_PREFETCH"), counter="prefetch"),
    Setting("cap", "engine", "int", None, "expert slots per layer at most", "", _env("CAP"), Bounds(1, 2**20),
            default_text="what the budget holds", counter="expert_hit_rate"),
    Setting("pin", "engine", "name", "auto", "which experts stay in memory: auto, off or a history file", "--pin",
            _env("PIN"), counter="pinned_hit_rate"),
    Setting("pin_gb", "engine", "size_or_all", None, "memory for pinned experts, or all; a bare number is GB",
            "--pin-gb", _env("PIN_GB"), default_text="auto", counter="pinned_hit_rate"),
    Setting("autopin", "engine", "bool", True, "pin from history when it pays", "", _env("AUTOPIN"),
            counter="pinned_hit_rate"),
    Setting("usage", "engine", "path", None, "file of the usage history", "", _env("COLI_USAGE"),
            default_text="beside the model", counter="pinned_hit_rate"),
    Setting("usage_save", "engine", "bool", True, "write the usage history", "", _env("USAGE_SAVE"),
            counter="pinned_hit_rate"),
    Setting("usage_decay", "engine", "float", None, "factor on old counts, once per run", "",
            _env("COLI_USAGE_DECAY"), Bounds(0, 1, above=True), default_text="a half-life in selections",
            counter="pinned_hit_rate"),
    # drafts
    Setting("no_drafts", "drafts", "flag", False, "turn every draft source off", "--no-drafts", counter="drafts"),
    Setting("grammar", "drafts", "path", None, "GBNF file whose forced spans are drafted", "--grammar",
            _env("GRAMMAR"), default_text="off", counter="drafts.grammar"),
    Setting("schema", "drafts", "path", None, "JSON Schema file whose forced spans are drafted", "--schema",
            _env("SCHEMA"), default_text="off", counter="drafts.grammar"),
    Setting("grammar_draft", "drafts", "int", 24, "forced tokens per forward at most", "--grammar-draft",
            _env("GRAMMAR_DRAFT"), Bounds(1, MAX_DRAFT_TOKENS, cap=True, below=24), counter="drafts.grammar"),
    Setting("corpus", "drafts", "path", None, "file of token ids of earlier runs to draft from", "--corpus",
            _env("COLI_DRAFT_CORPUS"), default_text="off", counter="drafts.corpus"),
    Setting("corpus_k", "drafts", "int", 8, "corpus tokens per forward at most", "--corpus-k", _env("COLI_CORPUS_K"),
            Bounds(1, MAX_DRAFT_TOKENS, cap=True), counter="drafts.corpus"),
    Setting("corpus_minacc", "drafts", "int", 50, "pause the corpus below this acceptance in percent",
            "--corpus-minacc", _env("COLI_CORPUS_MINACC"), Bounds(0, 100), counter="drafts.corpus"),
    Setting("draft", "drafts", "int", None, "n-gram and MTP tokens per forward at most; 0 is off", "--draft",
            _env("DRAFT"), Bounds(0, 63), default_text="the gate decides; 0 with `--gate seed`",
            counter="drafts.ngram"),
    Setting("mtp", "drafts", "bool", None, "draft with the model's own MTP head", "--mtp/--no-mtp", _env("MTP"),
            default_text="on when present", counter="drafts.mtp"),
    Setting("graph", "drafts", "path", None, "n-gram graph to draft from", "--graph", _env("COLI_DRAFT_GRAPH"),
            default_text="off", counter="drafts.graph"),
    Setting("graph_k", "drafts", "int", 5, "graph tokens per forward at most", "--graph-k", _env("SPECULANT_DRAFT__K"),
            Bounds(1, 63), counter="drafts.graph.judged_at"),
    Setting("graph_order", "drafts", "int", None, "longest context the graph drafts from", "--graph-order",
            _env("SPECULANT_DRAFT__MAX_ORDER"), Bounds(1, 10), default_text="the graph's",
            counter="drafts.graph.orders"),
    Setting("strategy", "drafts", "choice", "greedy", "what the graph drafts: its likeliest tokens, or a sample of its "
            "law", "--strategy", _env("SPECULANT_DRAFT__STRATEGY"), _choices("greedy", "sampling"),
            counter="drafts.graph.strategy"),
    Setting("mix", "drafts", "choice", "attentive", "how the graph's orders are weighed", "--mix",
            _env("SPECULANT_DRAFT__MIX", EnvName("SPECULANT_DRAFT__ATTENTIVE_MIX", _attentive_or_single)),
            _choices("attentive", "single", "witten-bell"), counter="drafts.graph.mix"),
    Setting("order_bias", "drafts", "float", 1.0, "attentive: weight of the order", "--order-bias",
            _env("SPECULANT_DRAFT__ORDER_BIAS"), Bounds(-1000, 1000), counter="drafts.graph.mean_probability"),
    Setting("mix_temperature", "drafts", "float", 1.0, "attentive: above 1 evens the weights, below 1 sharpens them",
            "--mix-temperature", _env("SPECULANT_DRAFT__MIX_TEMPERATURE"), Bounds(0, 1000, above=True),
            counter="drafts.graph.mean_probability"),
    Setting("reliability_weight", "drafts", "float", 1.0, "attentive: weight of how often a context was seen",
            "--reliability-weight", _env("SPECULANT_DRAFT__RELIABILITY_WEIGHT"), Bounds(-1000, 1000),
            counter="drafts.graph.mean_probability"),
    Setting("entropy_penalty", "drafts", "float", 0.5, "attentive: what an uncertain context loses",
            "--entropy-penalty", _env("SPECULANT_DRAFT__ENTROPY_PENALTY"), Bounds(-1000, 1000),
            counter="drafts.graph.mean_probability"),
    Setting("gate", "drafts", "choice", "auto",
            "which drafts are worth a forward: auto weighs measured costs, seed by fixed thresholds, always all",
            "--gate", _env("COLI_GATE"), _choices("auto", "seed", "always"), counter="gate"),
    Setting("gate_file", "drafts", "path", None, "file in which `--gate auto` keeps what row counts cost", "",
            _env("COLI_GATE_FILE"), default_text="gate.json beside the usage history", counter="drafting.costs"),
    Setting("gate_save", "drafts", "bool", True, "write that file (`USAGE_SAVE=0` turns it off too)", "",
            _env("COLI_GATE_SAVE"), counter="drafting.costs"),
    Setting("accept", "drafts", "choice", "match", "how drafts are judged: match keeps every "
            "byte, rejection the law alone", "--accept", _env("COLI_ACCEPT"),
            _choices("match", "rejection"), counter="drafts"),
    # fetching and building graphs
    Setting("hf_token", "hub", "text", None, "token that `coli pull` shows the hub, for gated models", "",
            _env("SPECULANT_VERIFIER__HF_TOKEN", "SPECULANT_GRAPH__HF_TOKEN"), default_text="the hub's own (HF_TOKEN)",
            counter="the files that arrive"),
    Setting("download_mode", "hub", "choice", "auto", "how `coli pull` fetches from the hub: auto through hf_xet "
            "where it can, hf_transfer for high bandwidth, default plainly", "--download-mode",
            _env("SPECULANT_VERIFIER__DOWNLOAD_MODE", "SPECULANT_GRAPH__DOWNLOAD_MODE"),
            _choices("auto", "hf_transfer", "default"), counter="the notice that names the accelerator"),
    Setting("tokenizer_name", "graph", "name", None, "model whose tokenizer a graph is built with, without --model",
            "", _env("SPECULANT_GRAPH__TOKENIZER_NAME"), default_text="the model", counter="coli graph info"),
    Setting("max_order", "graph", "int", 5, "longest context a graph is built for, where --max-order does not say", "",
            _env("SPECULANT_GRAPH__MAX_ORDER"), Bounds(1, 10), counter="coli graph info"),
    Setting("chunk_size", "graph", "int", None, "characters encoded at a time, where --chunk-size does not say", "",
            _env("SPECULANT_GRAPH__CHUNK_SIZE"), Bounds(1, 2**31 - 1), default_text="as is fastest",
            counter="coli graph build --verbose"),
    # output
    Setting("json", "output", "path", None, "write the report as one JSON object; - is standard output", "--json",
            default_text="off", counter="settings"),
    Setting("tokens", "output", "bool", False, "list prompt and generated ids on standard error", "--tokens",
            _env("TOKENS"), counter="token_ids"),
    Setting("quiet", "output", "flag", False, "no notices, no progress, no end report", "--quiet"),
    Setting("verbose", "output", "flag", False, "more in the end report: every setting and where it came from",
            "--verbose"),
    Setting("color", "output", "choice", "auto", "colour on standard error", "--color",
            _env(EnvName("NO_COLOR", lambda raw, name: "never")), _choices("auto", "always", "never")),
    Setting("debug", "output", "bool", False, "show the traceback of an error", "", _env("COLI_DEBUG")),
    # server
    Setting("host", "server", "name", "127.0.0.1", "address to listen on; others than this machine need it",
            "--host", counter="the line that names the address"),
    Setting("port", "server", "int", 8000, "port to listen on; 0 takes a free one", "--port", bounds=Bounds(0, 65535),
            counter="the line that names the address"),
    Setting("api_key", "server", "text", None, "key that clients must send", "--api-key", _env("COLI_API_KEY"),
            default_text="none", counter="/health"),
    Setting("slots", "server", "int", 4, "conversations kept in memory and decoded together", "--slots",
            bounds=Bounds(1, 16), counter="/props"),
    Setting("queue", "server", "int", 32, "requests that may wait for a slot; more are told to come back", "--queue",
            bounds=Bounds(0, 100000), counter="/metrics"),
    Setting("session", "session", "path", None, "file that conversations are read from and kept in", "--session",
            _env("KVSAVE"), default_text="off", counter="/props, prompt_tokens"),
)  # fmt: skip

BY_NAME: dict[str, Setting] = {setting.name: setting for setting in TABLE}
