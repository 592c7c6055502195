"""From a container to a model that runs: kernels ready, memory divided, weights loaded, experts behind the store.

Owns the order in which memory is planned and taken, and gives it back. Called by `llm`, once per opened model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coli.builtin import is_builtin
from coli.drafts.base import MAX_DRAFT_TOKENS
from coli.drafts.index_file import SEARCHED_BYTES
from coli.drafts.opening import Drafter, bind_predictor
from coli.engine.engine import Engine
from coli.engine.sampling import Sampler
from coli.errors import OptionError
from coli.kernels import attention, runtime
from coli.model.config import ModelSpec
from coli.model.kv_cache import KVCache, kv_bytes, mtp_cache_spec, new_cache
from coli.model.loader import load_weights, loaded_tensors
from coli.model.transformer import Transformer
from coli.options import EngineOptions, SamplerOptions
from coli.processors import usable_cores
from coli.report import StoreCounters
from coli.store.container import Container
from coli.store.memory import MemoryNeeds, MemoryPlan, plan_memory

if TYPE_CHECKING:  # a dense model needs none of these at run time
    from coli.store.expert_store import ExpertStore
    from coli.store.stats import StoreGlance, TraceSink
    from coli.store.usage import UsageFile

Notice = Callable[[str], None]

PREFILL_CHUNK = 512
USAGE_FILE = "usage.json"


class LoadedModel:
    """A model in memory, with room for `sessions` sequences of `context` positions."""

    def __init__(
        self,
        container: Container,
        spec: ModelSpec,
        options: EngineOptions,
        context: int,
        notice: Notice,
        trace: TraceSink | None = None,
        sessions: int = 1,
        drafts_bytes: int = 0,
    ) -> None:
        """drafts_bytes: of mapped corpora and graphs.

        Raises MemoryBudgetError when the parts do not fit the budget, with the arithmetic.
        """
        if not options.mtp:
            spec = replace(spec, mtp=None)
        self.container, self.spec, self.options = container, spec, options
        self._notice = notice
        self._trace = trace
        self.kv_dtype = kv_type(container, options.kv)
        self.threads = options.threads or usable_cores()
        prepare_kernels(notice)
        self.plan = self._plan(context, sessions, drafts_bytes)
        weights = load_weights(container, spec)
        self._usage: UsageFile | None = None
        self.store = self._open_store() if container.moe_layers else None
        self.model = Transformer(spec, weights, self.store, self.threads)
        self.engine = Engine(self.model, PREFILL_CHUNK)

    def new_cache(self, context: int) -> KVCache:
        """The attention memory of one sequence of up to `context` positions."""
        spec = self.spec
        cache = new_cache(spec, context, self.kv_dtype)
        if spec.mtp is not None:
            from coli.model.mtp import MtpMemory

            head = new_cache(mtp_cache_spec(spec, spec.mtp), context + MAX_DRAFT_TOKENS, self.kv_dtype)
            cache.follower = MtpMemory(head, spec.hidden_size)
        return cache

    def predict_for(self, drafter: Drafter, cache: Any, sampler: SamplerOptions, seed: int) -> None:
        """Let the MTP head, if the model has one, guess for the sequence in `cache`, drawing as the target will."""
        if self.model.mtp is None or cache.follower is None:
            return
        from coli.model.mtp import Predictor

        neutral = replace(sampler, repeat_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        choose = Sampler(neutral, seed, self.spec.vocab_size).sample
        bind_predictor(drafter, Predictor(self.model.mtp, cache.follower, choose))

    def store_counters(self) -> StoreCounters:
        """What the store has counted since it was opened; prefill included."""
        if self.store is None:
            return StoreCounters()
        stats = self.store.stats()
        return StoreCounters(
            hits=stats.hits,
            misses=stats.misses,
            pinned_hits=stats.pinned_hits,
            bytes_read=stats.bytes_read,
            reads=stats.reads,
            wait_s=stats.wait_s,
            reading_s=stats.reading_s,
            prefetched=stats.prefetched,
            prefetch_hits=stats.prefetch_hits,
        )

    def glance(self) -> StoreGlance | None:
        """Counters and residency for another thread; None without routed experts."""
        return None if self.store is None else self.store.glance()

    def cache_state(self) -> str:
        """What a response starts from: experts in memory, and how much of the files the system holds."""
        if self.store is None:
            return "dense"
        from coli.store.opening import cached_share

        stats, paths = self.store.stats(), {self.container.expert_layout(i).path for i in self.container.moe_layers}
        total = sum(self.container.expert_layout(i).record_bytes for i in self.container.moe_layers)
        resident = stats.resident_bytes / (total * self.spec.num_experts)
        return f"{resident:.0%} of experts resident, {cached_share(paths):.0%} of their files in the page cache"

    def machine(self) -> dict[str, Any]:
        """What the run ran on, for the report."""
        return {
            "threads": self.threads,
            "simd": runtime.simd_path(),
            "threading_layer": runtime.threading_layer(),
            "kv": self.kv_dtype,
            "io": "none" if self.store is None else self.store.stats().mode,
        }

    def close(self) -> None:
        """Save what was learnt, give files and memory back."""
        if self.store is None:
            return
        kept = self.options.usage is not None or not is_builtin(self.container.path)
        if self._usage is not None and self.options.usage_save and kept:
            shape = (self._num_layers, self.spec.num_experts)
            try:
                self._usage.save(self.store.policy.usage.reshape(shape))
            except (OSError, OptionError) as error:
                if self.options.usage is not None:  # a model folder that cannot be written is nobody's mistake
                    self._notice(f"usage history not written: {error}")
        self.store.close()

    @property
    def _num_layers(self) -> int:
        """Of the store and its history: with the container's MTP head, wanted or not."""
        return max(self.spec.num_hidden_layers, *(1 + layer_idx for layer_idx in self.container.moe_layers))

    def _plan(self, context: int, sessions: int, drafts_bytes: int) -> MemoryPlan:
        spec, container = self.spec, self.container
        records = {i: container.expert_layout(i).record_bytes for i in container.moe_layers}
        window = 0
        if spec.mtp is not None:
            from coli.model.mtp import WINDOW

            window = 4 * WINDOW * spec.hidden_size
        needs = MemoryNeeds(
            dense_bytes=sum(container.array(name).nbytes for name in loaded_tensors(container, spec)),
            kv_bytes=(kv_bytes(spec, self.kv_dtype, context) + window) * sessions,
            working_bytes=working_bytes(spec, min(PREFILL_CHUNK, context), context, self.threads),
            drafts_bytes=min(drafts_bytes, SEARCHED_BYTES),
        )
        return plan_memory(
            needs,
            ram=self.options.memory_budget_bytes,
            smallest_experts_bytes=max(records.values(), default=0) * spec.num_experts_per_tok,
            all_experts_bytes=sum(size * spec.num_experts for size in records.values()),
        )

    def _open_store(self) -> ExpertStore:
        from coli.store.opening import open_store
        from coli.store.pins import pinned_experts
        from coli.store.usage import UsageFile, UsageHistory

        spec, container, options = self.spec, self.container, self.options
        layouts = {i: container.expert_layout(i) for i in container.moe_layers}
        path = options.usage or container.path / USAGE_FILE
        dimensions = container.fingerprint, self._num_layers, spec.num_experts
        self._usage = UsageFile(path, *dimensions, decay=options.usage_decay)
        try:
            history = self._usage.read()
        except OptionError as error:
            if options.usage is not None:
                raise
            self._notice(f"{error}; not used")  # found beside the model, not named: do without
            self._usage, history = None, UsageHistory(*dimensions)
        pins = pinned_experts(
            history,
            {i: layout.record_bytes for i, layout in layouts.items()},
            spec.num_experts_per_tok,
            self.plan.experts_bytes,
            pin=options.pin,
            pin_bytes=options.pin_bytes,
            autopin=options.autopin,
        )
        return open_store(
            layouts,
            num_layers=self._num_layers,
            num_experts=spec.num_experts,
            num_experts_per_tok=spec.num_experts_per_tok,
            capacity_bytes=self.plan.experts_bytes,
            notice=self._notice,
            io=options.io,
            cap=options.cap,
            prefetch=options.prefetch,
            pinned=pins.keys,
            trace=self._trace,
        )


def kv_type(container: Container, wanted: str) -> str:
    """f16 or f32; `auto` is f32 where the dense weights are float32 (oracles), else f16."""
    if wanted != "auto":
        return wanted
    return "f32" if container.matrix("model.embed_tokens.weight").scales is None else "f16"


def working_bytes(spec: ModelSpec, rows: int, context: int, threads: int) -> int:
    """Scratch memory of a forward of `rows` rows, and the logits of a verify (64 rows)."""
    N, K, D, A = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.num_experts_per_tok
    attended = (2 * N + 2 * K) * D
    dense = 4 * max(spec.intermediate_size, spec.shared_expert_intermediate_size)
    routed = A * (4 * spec.moe_intermediate_size + 2 * spec.hidden_size) + spec.num_experts
    floats = rows * (5 * spec.hidden_size + attended + dense + routed) + 64 * spec.vocab_size
    if spec.mtp is not None:
        floats += rows * 7 * spec.hidden_size + spec.vocab_size
    if spec.latent is None:
        return 4 * floats + attention.working_bytes(rows, N, K, D, context, threads)
    from coli.kernels import indexer, latent

    part, rank = spec.latent, latent.padded(spec.latent.kv_lora_rank)
    floats += rows * (N * (2 * rank + part.qk_rope_head_dim + part.qk_nope_head_dim + 2 * part.v_head_dim) + rank)
    if part.indexer is not None:
        H, width = part.indexer.index_n_heads, part.indexer.index_head_dim
        floats += rows * (H * width + width + H + 2 * min(part.indexer.index_topk, context))
        floats += indexer.working_bytes(H, width, context, threads) // 4
    return 4 * floats + latent.working_bytes(rows, N, rank, part.qk_rope_head_dim, context, threads)


def prepare_kernels(notice: Notice) -> None:
    """Compile what is not in the cache yet, and say so before it takes its time."""
    if note := runtime.cache_note():
        notice(note)
    if runtime.threading_layer() != "omp":
        notice("threads: no OpenMP library (libgomp), every kernel launch costs more; install libgomp1")
    if runtime.cold():
        notice("compiling kernels for this processor, once: about half a minute")
        runtime.warm()
