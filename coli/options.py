"""The settings door: frozen option objects, and the only place that reads the environment.

`resolve` takes flags and environment to the checked values of `coli.settings_table`, which remember where they came
from; the `*_options` functions turn those into frozen objects. Nothing below the command line sees a flag or a
variable.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli.errors import OptionError
from coli.settings_table import BY_NAME, OWN_PREFIXES, TABLE, EnvName, Setting


@dataclass(frozen=True, slots=True)
class Value:
    """A checked value; `origin` is "flag", "environment NAME" or "default"."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Checked values by setting name, and the notices to print (one line each)."""

    values: Mapping[str, Value]
    notices: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def given(self, name: str) -> bool:
        """Whether a flag or the environment gave the setting."""
        return self.values[name].origin != "default"

    def report(self) -> dict[str, dict[str, Any]]:
        """The report's `settings` object: {name: {"value": ..., "from": ...}}, JSON-ready."""
        return {name: {"value": _plain(v.value), "from": v.origin} for name, v in self.values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return "all" if value == math.inf else value


def resolve(
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    names: Iterable[str] | None = None,
) -> Resolved:
    """Check flags and environment into values: flag beats environment beats default, an empty variable is unset.

    flags: setting name -> text, bool or tuple of texts as click gives it; None and () mean not given.
    environ: None reads the process environment. names: the settings a command uses (default: all); the others are
    not looked at, so a bad value of theirs cannot stop it. Raises OptionError (name, value, what is allowed).
    """
    environ = os.environ if environ is None else environ
    notices = _unknown_variables(environ)
    values: dict[str, Value] = {}
    for setting in TABLE if names is None else [BY_NAME[name] for name in names]:
        origin, raw = _raw(setting, flags.get(setting.name), environ)
        if raw is None:
            values[setting.name] = Value(setting.default, "default")
            continue
        shown = setting.flag.split("/")[0] if origin == "flag" else origin.removeprefix("environment ")
        if setting.later and origin == "flag":
            raise OptionError(f"{shown}: this version does not have {setting.later} yet; leave it out")
        value = setting.parse(raw, shown)
        if setting.later:
            if value != setting.default:
                notices.append(f"{shown} is set, but this version does not have {setting.later} yet: no effect")
            values[setting.name] = Value(setting.default, "default")
            continue
        if setting.bounds.cap and value != int(str(raw)):
            notices.append(f"{shown}: {raw} is outside {setting.bounds.allowed(setting.kind)}: using {value}")
        values[setting.name] = Value(value, origin)
    return Resolved(values, tuple(notices))


def _raw(setting: Setting, flag: object, environ: Mapping[str, str]) -> tuple[str, object]:
    """(origin, unchecked value) of the first source that gives the setting; ("", None) when none does."""
    if flag is not None and flag != () and not (setting.kind == "flag" and flag is False):
        return "flag", flag
    found: list[tuple[EnvName, str]] = []
    for env in setting.env:
        raw: str | None = environ.get(env.name, "")
        if raw and env.translate is not None:
            raw = env.translate(raw, env.name)
        if raw:
            found.append((env, raw))
    if not found:
        return "", None
    (first, text), *others = found
    for env, raw in others:  # two switches of one setting; plain names have their order
        if first.translate and env.translate and raw != text:
            raise OptionError(f"{first.name} and {env.name} are both set: one asks for {text}, the other for {raw}")
    return f"environment {first.name}", text


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = [env.name for setting in TABLE for env in setting.env]
    notices = []
    for name in sorted(environ):
        if name.startswith(OWN_PREFIXES) and name not in known and environ[name]:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            notices.append(
                f"unknown environment variable {name}: ignored" + (f"; did you mean {near[0]}?" if near else "")
            )
    return notices


def model_home(resolved: Resolved) -> Path | None:
    """The folder that holds models by name: COLI_HOME, else the user's data folder, None without a home."""
    if resolved["home"] is not None:
        return Path(resolved["home"])
    base = os.environ.get("XDG_DATA_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "coli"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ("Library/Application Support" if sys.platform == "darwin" else ".local/share") / "coli"


def kernel_cache(resolved: Resolved) -> Path | None:
    """The folder of compiled kernels: COLI_KERNEL_CACHE, else below XDG_CACHE_HOME, None for ~/.cache."""
    if resolved["kernel_cache"] is not None:
        return Path(resolved["kernel_cache"])
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base) / "coli" if os.path.isabs(base) else None


def set_for_libraries(name: str, value: str) -> None:
    """Set a variable that another library reads, unless the user has set it."""
    os.environ.setdefault(name, value)


def debug_wanted() -> bool:
    """COLI_DEBUG, read leniently: an error is already on its way to the user when this is asked."""
    return os.environ.get("COLI_DEBUG", "").strip().lower() not in ("", "0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """temperature 0: greedy; top_k 0, top_p 1, min_p 0, repeat_penalty 1, penalties 0: off; seed None: drawn."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One answer: at most `max_tokens` ids, ended by the end ids (unless `ignore_eos`) or a `stop` text."""

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    sampler: SamplerOptions = SamplerOptions()


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What opening a model needs to know; None: chosen by the machine, the model or the prompt."""

    threads: int | None = None
    memory_budget_bytes: int | None = None
    io: str = "auto"
    kv: str = "auto"
    context: int | None = None
    simd: str = "auto"
    kernel_cache: Path | None = None
    prefetch: bool = False
    cap: int | None = None
    pin: str = "auto"
    pin_bytes: int | float | None = None  # math.inf: all
    autopin: bool = True
    usage: Path | None = None
    usage_save: bool = True
    usage_decay: float | None = None
    gate_file: Path | None = None
    gate_save: bool = True
    mtp: bool = True  # load the model's MTP head, if it has one


@dataclass(frozen=True, slots=True)
class GraphKnobs:
    """How a graph drafts; order None: the graph's own. The last four serve `attentive` mixing."""

    k: int = 5
    order: int | None = None
    strategy: str = "greedy"
    mix: str = "attentive"
    order_bias: float = 1.0
    mix_temperature: float = 1.0
    reliability_weight: float = 1.0
    entropy_penalty: float = 0.5


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Draft sources of one answer; None: off, or for `draft` and `mtp` left to the gate and the model."""

    enabled: bool = True
    grammar: Path | None = None
    schema: Path | None = None
    grammar_draft: int = 24
    corpus: Path | None = None
    corpus_k: int = 8
    corpus_minacc: int = 50
    draft: int | None = None
    mtp: bool | None = None
    graph: Path | None = None
    gate: str = "auto"
    accept: str = "match"
    knobs: GraphKnobs = GraphKnobs()


def generate_options(r: Resolved) -> GenerateOptions:
    """GenerateOptions from resolved settings."""
    sampler = SamplerOptions(
        temperature=r["temp"], top_k=r["top_k"], top_p=r["top_p"], min_p=r["min_p"],
        repeat_penalty=r["repeat_penalty"], presence_penalty=r["presence_penalty"],
        frequency_penalty=r["frequency_penalty"], seed=r["seed"],
    )  # fmt: skip
    return GenerateOptions(max_tokens=r["ngen"], stop=r["stop"], ignore_eos=r["ignore_eos"], sampler=sampler)


def engine_options(r: Resolved) -> EngineOptions:
    """EngineOptions from resolved settings."""
    return EngineOptions(
        threads=r["threads"], memory_budget_bytes=r["ram"], io=r["io"], kv=r["kv"], context=r["ctx"], simd=r["simd"],
        kernel_cache=kernel_cache(r), prefetch=r["prefetch"], cap=r["cap"], pin=r["pin"], pin_bytes=r["pin_gb"],
        autopin=r["autopin"], usage=r["usage"], usage_save=r["usage_save"], usage_decay=r["usage_decay"],
        gate_file=r["gate_file"], gate_save=r["gate_save"],
        mtp=not r["no_drafts"] and r["mtp"] is not False and r["draft"] != 0,
    )  # fmt: skip


def draft_options(r: Resolved) -> DraftOptions:
    """DraftOptions from resolved settings. Raises OptionError for settings that contradict each other."""
    rejecting = r["accept"] == "rejection"
    if rejecting and r["gate"] == "auto" and r.given("gate"):
        raise OptionError(
            "--accept rejection: one source's drafts are judged at a time, --gate auto mixes them: use --gate seed"
        )
    return DraftOptions(
        enabled=not r["no_drafts"], grammar=r["grammar"], schema=r["schema"], grammar_draft=r["grammar_draft"],
        corpus=r["corpus"], corpus_k=r["corpus_k"], corpus_minacc=r["corpus_minacc"], draft=r["draft"], mtp=r["mtp"],
        graph=r["graph"], gate="seed" if rejecting and r["gate"] == "auto" else r["gate"], accept=r["accept"],
        knobs=graph_knobs(r),
    )  # fmt: skip


def graph_knobs(r: Resolved) -> GraphKnobs:
    """GraphKnobs from resolved settings."""
    return GraphKnobs(
        k=r["graph_k"], order=r["graph_order"], strategy=r["strategy"], mix=r["mix"], order_bias=r["order_bias"],
        mix_temperature=r["mix_temperature"], reliability_weight=r["reliability_weight"],
        entropy_penalty=r["entropy_penalty"],
    )  # fmt: skip
