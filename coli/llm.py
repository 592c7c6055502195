"""The composition root: open a model folder, wire tokenizer, store, forward and engine; generate; close.

The only module that knows all the others. Takes frozen options, never a flag or a variable; called by the command line,
the server and scripts, from one thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from coli.drafts.merge import MergedSources
from coli.drafts.opening import open_sources
from coli.engine.engine import Engine, Limits
from coli.engine.sampling import Sampler
from coli.engine.session import Session
from coli.engine.stats import RunStats
from coli.engine.stops import StopMatcher
from coli.errors import ContextLengthError, MemoryBudgetError
from coli.kernels import runtime
from coli.model.kv_cache import KVCache, kv_bytes_per_token
from coli.model.loader import load_weights
from coli.model.tensors import container_spec
from coli.model.transformer import Transformer
from coli.options import DraftOptions, EngineOptions, GenerateOptions
from coli.report import ProcessUse, StoreCounters, run_report
from coli.store.container import Container
from coli.store.expert_store import ExpertStore
from coli.store.opening import open_store
from coli.text.chat import ChatTemplate
from coli.text.detokenizer import ByteDecoder
from coli.text.prompt import chat_ids, plain_ids
from coli.text.tokenizer import Tokenizer

Notice = Callable[[str], None]

PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished response. `report` has the field names of the JSON report, `lines` the draft sources' own lines."""

    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    report: dict[str, Any]
    lines: tuple[str, ...]


class Generation:
    """A running response: iterate for pieces of text, then ask for `result`."""

    def __init__(self, llm: LLM, prompt_ids: Sequence[int], options: GenerateOptions, drafts: DraftOptions) -> None:
        self._llm = llm
        self._prompt_ids = tuple(prompt_ids)
        sampler = options.sampler
        self._seed = secrets.randbits(63) if sampler.seed is None else sampler.seed
        self._drafts, self._drafter = drafts, llm.draft_sources(drafts)
        self._stats = RunStats()
        self._stops = StopMatcher([stop.encode() for stop in options.stop])
        self._starts: list[int] = []  # offset in the byte stream at which each emitted id begins
        self._ids: list[int] = []
        self._text: list[str] = []
        self._before = llm.store_counters(), ProcessUse.now().major_faults
        self._pieces = self._run(options)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def result(self) -> GenerationResult:
        """What came out; runs to the end first if the iteration has not."""
        for _ in self._pieces:
            pass
        ids = self._ids
        if self._stops.matched:
            ids = [i for i, start in zip(ids, self._starts, strict=True) if start < self._stops.kept_bytes]
        store, faults = self._before
        report = run_report(
            text="".join(self._text),
            token_ids=ids,
            seed=self._seed,
            stats=self._stats,
            store=self._llm.store_counters().since(store),
            time_s=self._llm.seconds(self._stats),
            drafts={
                name: {"proposed": c.proposed, "judged": c.judged, "accepted": c.accepted}
                for name, c in self._drafter.counters.items()
            },
            gate=self._drafts.gate,
            memory_budget_bytes=self._llm.memory_budget_bytes,
            faults_before=faults,
            machine=self._llm.machine(),
        )
        return GenerationResult(
            text=report["text"],
            token_ids=tuple(ids),
            prompt_ids=self._prompt_ids,
            finish_reason=self._stats.finish_reason,
            seed=self._seed,
            report=report,
            lines=tuple(self._drafter.report_lines()),
        )

    def _run(self, options: GenerateOptions) -> Iterator[str]:
        llm, stops, decoder = self._llm, self._stops, ByteDecoder()
        context = llm.check_context(len(self._prompt_ids), options.max_tokens)
        session = llm.new_session(context)
        end_ids = frozenset() if options.ignore_eos else llm.tokenizer.end_ids
        sampler = Sampler(options.sampler, self._seed, llm.spec.vocab_size)
        limits = Limits(options.max_tokens, context, end_ids)
        seen = 0
        for token_id in llm.engine.generate(session, self._prompt_ids, limits, sampler, self._drafter, self._stats):
            data = llm.tokenizer.token_bytes(token_id)
            self._ids.append(token_id)
            self._starts.append(seen)
            seen += len(data)
            if piece := decoder.push(stops.push(data)):
                self._text.append(piece)
                yield piece
            if stops.matched:
                self._stats.finish_reason = "stop"
                break
        if piece := decoder.push(stops.flush()) + decoder.flush():
            self._text.append(piece)
            yield piece


class LLM:
    """An open model. Use as a context manager, or call `close`."""

    def __init__(
        self,
        container: Container,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        options: EngineOptions,
        notice: Notice,
    ) -> None:
        self.container = container
        self.tokenizer = tokenizer
        self.chat_template = template
        self.spec = container_spec(container)
        self._options = options
        self._notice = notice
        self._kv_dtype = self._kv_type(options.kv)
        self._threads = options.threads or psutil.cpu_count(logical=False) or 1
        weights = load_weights(container, self.spec)
        self.memory_budget_bytes = options.memory_budget_bytes or psutil.virtual_memory().available
        self.store = self._open_store(weights.nbytes)
        self.model = Transformer(self.spec, weights, self.store, self._threads)
        self.engine = Engine(self.model, PREFILL_CHUNK)

    @classmethod
    def open(cls, path: Path, options: EngineOptions, notice: Notice) -> LLM:
        """Open the container in folder `path`.

        Raises NotConvertedError, CheckpointError, TokenizerError, UnsupportedModelError, MemoryBudgetError.
        """
        runtime.configure(options.simd, threads=options.threads)
        container = Container.open(path)
        tokenizer = Tokenizer.load(path)
        template = ChatTemplate.load(path)
        return cls(container, tokenizer, template, options, notice)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give files and memory back; the object is unusable afterwards."""
        if self.store is not None:
            self.store.close()

    def prompt_ids(
        self, text: str, *, raw: bool = False, system: str | None = None, think: bool | None = None
    ) -> list[int]:
        """Ids of one user message: through the model's chat template when it has one, unless `raw`."""
        if raw or self.chat_template is None:
            return plain_ids(self.tokenizer, text)
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        return chat_ids(self.tokenizer, self.chat_template, messages, enable_thinking=think)

    def generate(
        self, prompt_ids: Sequence[int], options: GenerateOptions, drafts: DraftOptions | None = None
    ) -> Generation:
        """Start one response; nothing is computed before the first piece is asked for."""
        return Generation(self, prompt_ids, options, drafts or DraftOptions())

    # what a Generation needs

    def check_context(self, prompt_tokens: int, max_tokens: int) -> int:
        """Positions of this response. Raises ContextLengthError when the prompt leaves no room for an answer."""
        limit = self.spec.max_position_embeddings
        context = min(self._options.context or prompt_tokens + max_tokens, limit)
        if prompt_tokens < 1:
            raise ContextLengthError("the prompt has no tokens; give some text")
        if prompt_tokens >= context:
            which = "--ctx" if self._options.context and self._options.context <= limit else "the model's context"
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens, {which} is {context}: shorten the prompt"
                + (" or raise --ctx" if which == "--ctx" else "")
            )
        return context

    def new_session(self, context: int) -> Session:
        spec = self.spec
        return Session(
            KVCache(spec.num_hidden_layers, spec.num_key_value_heads, spec.head_dim, context, self._kv_dtype)
        )

    def draft_sources(self, options: DraftOptions) -> MergedSources:
        return open_sources(options, self.spec.vocab_size, self._notice, lambda: self.tokenizer.fingerprint)

    def store_counters(self) -> StoreCounters:
        if self.store is None:
            return StoreCounters()
        stats = self.store.stats()
        return StoreCounters(stats.hits, stats.misses, stats.pinned_hits, stats.bytes_read, stats.reads, stats.wait_s)

    def seconds(self, stats: RunStats) -> dict[str, float]:
        return {"total": stats.prefill_s + stats.decode_s}

    def machine(self) -> dict[str, Any]:
        return {"threads": self._threads, "simd": runtime.simd_path(), "kv": self._kv_dtype}

    def _kv_type(self, wanted: str) -> str:
        """`auto`: float32 where the dense weights are float32 (oracles), else float16."""
        if wanted != "auto":
            return wanted
        return "f32" if self.container.matrix("model.embed_tokens.weight").kind == 0 else "f16"

    def _open_store(self, dense_bytes: int) -> ExpertStore | None:
        layers = self.container.moe_layers
        if not layers:
            return None
        per_token = kv_bytes_per_token(
            self.spec.num_hidden_layers, self.spec.num_key_value_heads, self.spec.head_dim, self._kv_dtype
        )
        reserved = dense_bytes + per_token * (self._options.context or 4096) + 300_000_000
        capacity = self.memory_budget_bytes - reserved
        if capacity <= 0:
            raise MemoryBudgetError(
                f"--ram: {self.memory_budget_bytes} bytes do not hold the {reserved} bytes of "
                "dense weights, cache and buffers"
            )
        layouts = {layer_idx: self.container.expert_layout(layer_idx) for layer_idx in layers}
        return open_store(
            layouts,
            num_layers=self.spec.num_hidden_layers,
            num_experts=self.spec.num_experts,
            num_experts_per_tok=self.spec.num_experts_per_tok,
            capacity_bytes=capacity,
            notice=self._notice,
        )
