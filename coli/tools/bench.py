"""`coli bench`: how fast a model is, in llama-bench's terms, and what it had to read, hold and compute for that.

ppN computes N ids in chunks, tgN decodes N times one id through the engine, vrN computes forwards of N rows as a draft
of N - 1 ids costs, all behind a context of `n_depth` ids. The ids are random with a fixed seed. Writes no history:
what a benchmark asked for says nothing about its user.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from coli import __version__
from coli.drafts.merge import MergedSources
from coli.engine.engine import Limits
from coli.engine.sampling import Sampler
from coli.engine.session import Session
from coli.engine.stats import RunStats
from coli.errors import OptionError
from coli.kernels import probe, runtime
from coli.llm import LLM
from coli.loading import PREFILL_CHUNK, LoadedModel
from coli.model.kv_cache import KVCache
from coli.model.tensors import container_spec
from coli.options import EngineOptions, SamplerOptions
from coli.process_use import peak_memory_bytes
from coli.processors import processor_name, usable_cores
from coli.store.container import Container
from coli.store.layout import MatrixShape
from coli.tools.probe import memory_speed

SEED = 1
HIGHEST_ID = 32_000  # of the random ids: behind it vocabularies hold rare pieces and placeholders
VERIFIED = 8  # forwards of so many rows in one repetition
WARM, COLD = "warm", "cold"

Forecast = Callable[[LoadedModel, "Test"], tuple[float, float] | None]  # expected tokens per second, from .. to


@dataclass(frozen=True, slots=True)
class Test:
    """One measurement; one of n_prompt, n_gen and n_rows is not 0."""

    n_prompt: int
    n_gen: int
    n_depth: int
    n_rows: int = 0

    @property
    def name(self) -> str:
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}" if self.n_gen else f"vr{self.n_rows}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name

    @property
    def positions(self) -> int:
        """Context it needs; decoding begins with an id that is not counted."""
        return self.n_depth + (self.n_prompt or self.n_rows or self.n_gen + 1)

    @property
    def ids(self) -> int:
        """Ids whose time is taken."""
        return self.n_prompt or self.n_gen or self.n_rows * VERIFIED


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure. `cache_states`: warm begins behind a warmup, cold opens the model anew for every repetition,
    its files dropped from the page cache."""

    tests: tuple[Test, ...]
    threads: tuple[int | None, ...] = (None,)
    repetitions: int = 5
    warmup: bool = True
    cache_states: tuple[str, ...] = (WARM,)

    @property
    def num_threads(self) -> tuple[int, ...]:
        return tuple(threads or usable_cores() for threads in self.threads)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the machine reached on so many threads; 0: not measured. `weights_bytes_per_s` are those of a product of one
    row, which `coli plan` reckons with."""

    read_bytes_per_s: float = 0.0
    macs_per_s: float = 0.0
    weights_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What one id costs in weights: bytes read and multiply-adds, attention aside; and how big the model is."""

    bytes_per_id: int
    macs_per_id: int
    params: int
    nbytes: int

    @staticmethod
    def of(llm: LLM) -> ModelWork:
        """From the manifest: every dense matrix but a lookup embedding, and the experts one id chooses."""
        container, spec = llm.container, llm.spec
        nbytes = macs = params = 0
        for name, shape in container.manifest.tensors.items():
            if not isinstance(shape, MatrixShape):
                params += shape
                continue
            params += shape.rows * shape.cols
            if name != "model.embed_tokens.weight" or spec.tie_word_embeddings:
                nbytes += shape.weights_bytes + shape.scales_bytes
                macs += shape.rows * shape.cols
        size = sum(container.array(name).nbytes for name in container.tensor_names())
        for layer_idx in container.moe_layers:
            layout = container.expert_layout(layer_idx)
            size += layout.record_bytes * spec.num_experts
            for part in layout.parts.values():
                params += spec.num_experts * part.rows * part.cols
                nbytes += spec.num_experts_per_tok * (part.shape.weights_bytes + part.shape.scales_bytes)
                macs += spec.num_experts_per_tok * part.rows * part.cols
        return ModelWork(nbytes, macs, params, size)


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition. Rates of distinct experts per union; `time_s` are seconds by what they went into."""

    seconds: float
    hits: int
    misses: int
    bytes_read: int
    reading_s: float
    time_s: dict[str, float]


def bench(
    path: Path,
    engine: EngineOptions,
    options: BenchOptions,
    notice: Callable[[str], None],
    progress: Callable[[str], None] = lambda line: None,
    ceilings: Mapping[int, Ceiling] | None = None,
    forecast: Forecast = lambda loaded, test: None,
) -> Iterator[dict[str, Any]]:
    """A JSON-ready result for every combination, as soon as it is measured.

    `ceilings` by number of threads. Raises what `check` and opening the model raise.
    """
    check(path, options)
    runtime.configure(engine.simd, engine.kernel_cache, max(options.num_threads))
    for threads in options.num_threads:
        ceiling = (ceilings or {}).get(threads, Ceiling())
        for state in options.cache_states:
            chosen = replace(engine, threads=threads, pin="off", usage_save=False, gate_save=False)
            runner = _Runner(path, chosen, options, state, ceiling, notice, progress, forecast)
            with runner:
                yield from (runner.measure(test) for test in options.tests)


def check(path: Path, options: BenchOptions) -> None:
    """Raise OptionError for tests the model cannot do, and what opening a container raises."""
    container = Container.open(path)
    longest = max(options.tests, key=lambda test: test.positions)
    limit = container_spec(container).max_position_embeddings
    if longest.positions > limit:
        raise OptionError(f"{longest.name}: needs {longest.positions} positions, the model has {limit}: ask for fewer")
    if COLD in options.cache_states and not container.moe_layers:
        raise OptionError(f"--cache cold: {path} is a dense model, which is in memory while it runs; leave it out")


def measure_ceilings(
    counts: Sequence[int], engine: EngineOptions, progress: Callable[[str], None] = lambda line: None
) -> dict[int, Ceiling]:
    """What the machine reaches. Asked before a model is loaded, so that the probe's memory does not count as its."""
    runtime.configure(engine.simd, engine.kernel_cache, max(counts))
    found = {}
    for threads in dict.fromkeys(counts):
        progress(f"measuring memory and processor on {threads} threads")
        found[threads] = Ceiling(probe.read_bandwidth(threads), probe.integer_rate(threads), memory_speed(threads))
    with suppress(OSError):  # Linux: forget the peak so far
        Path("/proc/self/clear_refs").write_text("5")
    return found


class _Runner:
    """One model at one number of threads, from one cache state."""

    def __init__(
        self,
        path: Path,
        engine: EngineOptions,
        options: BenchOptions,
        state: str,
        ceiling: Ceiling,
        notice: Callable[[str], None],
        progress: Callable[[str], None],
        forecast: Forecast,
    ) -> None:
        self._path, self._engine, self._options, self._state = path, engine, options, state
        self._ceiling, self._notice, self._progress, self._forecast = ceiling, notice, progress, forecast
        self._context = max(test.positions for test in options.tests)
        self._llm: LLM | None = None
        self._session: Session | None = None

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def measure(self, test: Test) -> dict[str, Any]:
        """All repetitions of one test."""
        samples: list[Sample] = []
        for number in range(self._options.repetitions):
            self._progress(f"{test.name}: {number + 1} of {self._options.repetitions}")
            if self._state == COLD:
                self._close()
                _drop_from_page_cache(self._path)
            loaded, session = self._open()
            if self._state == WARM and number == 0 and self._options.warmup:
                self._run(loaded, session, _shorter(test), -1)
            samples.append(self._run(loaded, session, test, number))
        assert self._llm is not None
        return self._result(self._llm, loaded, test, samples)

    def _open(self) -> tuple[LoadedModel, Session]:
        if self._llm is None:
            self._llm = LLM.open(self._path, self._engine, self._notice)
        loaded = self._llm.load(self._context)
        if self._session is None:
            self._session = Session(loaded.new_cache(self._context))
        return loaded, self._session

    def _close(self) -> None:
        self._session = None
        if self._llm is not None:
            self._llm.close()
            self._llm = None

    def _run(self, loaded: LoadedModel, session: Session, test: Test, number: int) -> Sample:
        ids = _random_ids(loaded, test.positions, test.n_depth)
        if _streams(loaded):  # what has been computed before finds its experts
            own = (test.n_depth, test.n_prompt, test.n_gen, test.n_rows, number + 1)
            ids[test.n_depth :] = _random_ids(loaded, test.positions - test.n_depth, *own)
        _seek(loaded, session, ids[: test.n_depth], test.n_depth + (test.n_prompt or 1))
        held = _cache(session).held_windows()
        begin = _prompt if test.n_prompt else _decoding if test.n_gen else _verifying
        work = begin(loaded, session, ids[test.n_depth :])
        before, phases = _counters(loaded), loaded.model.phase_seconds()
        began = time.perf_counter()
        for _ in work:
            pass
        seconds = time.perf_counter() - began
        after = _counters(loaded)
        hits, misses, nbytes, waited, reading = (now - then for now, then in zip(after, before, strict=True))
        time_s = _divided(phases, loaded.model.phase_seconds())
        time_s["disk_wait"] = waited
        time_s["python"] = max(0.0, seconds - sum(time_s.values()))
        del session.token_ids[test.n_depth :]
        _cache(session).return_to(held)
        return Sample(seconds, int(hits), int(misses), int(nbytes), reading, time_s)

    def _result(self, llm: LLM, loaded: LoadedModel, test: Test, samples: Sequence[Sample]) -> dict[str, Any]:
        work, machine = ModelWork.of(llm), loaded.machine()
        count = test.ids
        nanoseconds = [round(sample.seconds * 1e9) for sample in samples]
        speeds = [count / sample.seconds for sample in samples]
        hits, misses = sum(s.hits for s in samples), sum(s.misses for s in samples)
        total = sum(sample.seconds for sample in samples)
        nbytes, reading = sum(s.bytes_read for s in samples), sum(s.reading_s for s in samples)
        speed = sum(speeds) / len(speeds)
        shares = {name: sum(s.time_s[name] for s in samples) / total for name in samples[0].time_s}
        return {
            "build_version": __version__,
            "cpu_info": processor_name(),
            "backends": "CPU",
            "system": platform.platform(terse=True),
            "model_filename": str(self._path),
            "model_type": model_type(llm),
            "model_size": work.nbytes,
            "model_n_params": work.params,
            "n_batch": PREFILL_CHUNK,
            "n_threads": machine["threads"],
            "type_k": machine["kv"],
            "type_v": machine["kv"],
            "n_prompt": test.n_prompt,
            "n_gen": test.n_gen,
            "n_depth": test.n_depth,
            "n_rows": test.n_rows,
            "test_time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "avg_ns": round(sum(nanoseconds) / len(nanoseconds)),
            "stddev_ns": round(deviation(nanoseconds)),
            "avg_ts": round(speed, 6),
            "stddev_ts": round(deviation(speeds), 6),
            "samples_ns": nanoseconds,
            "samples_ts": [round(value, 6) for value in speeds],
            "simd": machine["simd"],
            "io": machine["io"],
            "cache": self._state if llm.container.moe_layers else "dense",
            "expert_hit_rate": hits / (hits + misses) if hits + misses else None,
            "bytes_per_token": round(nbytes / (count * len(samples))),
            "reading_bytes_per_s": round(nbytes / reading) if reading else None,
            "peak_memory_bytes": peak_memory_bytes(),
            "memory_budget_bytes": loaded.plan.budget_bytes,
            "read_bytes_per_s": round(self._ceiling.read_bytes_per_s) or None,
            "macs_per_s": round(self._ceiling.macs_per_s) or None,
            # only a decode reads all its weights for each id
            "bandwidth_share": _share(speed * work.bytes_per_id * bool(test.n_gen), self._ceiling.read_bytes_per_s),
            "integer_share": _share(speed * work.macs_per_id, self._ceiling.macs_per_s),
            "time_shares": {name: round(value, 6) for name, value in sorted(shares.items())},
            # what is planned is a running model, not one whose caches are still empty
            "forecast_ts": None if self._state == COLD else self._forecast(loaded, test),
        }


def model_type(llm: LLM) -> str:
    """Family and kinds in llama-bench's manner: `qwen3_moe q8, experts q4`."""
    kinds = llm.container.manifest.quantization
    experts = f", experts {kinds['experts']}" if llm.container.moe_layers else ""
    return f"{llm.spec.model_type} {kinds['dense']}{experts}"


def deviation(values: Sequence[float]) -> float:
    """Of the sample; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _divided(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds in kernels by phase. Their sum is exact; the phases are shares of all since loading, so their differences
    may be a little off and are brought to that sum."""
    total = sum(after.values()) - sum(before.values())
    parts = {name: max(0.0, after[name] - before[name]) for name in after}
    whole = sum(parts.values())
    return {name: total * part / whole if whole else 0.0 for name, part in parts.items()}


def _share(rate: float, ceiling: float) -> float | None:
    return round(rate / ceiling, 6) if ceiling and rate else None


def _shorter(test: Test) -> Test:
    """The warmup: the whole prompt, or a few ids, behind the same context."""
    return replace(test, n_gen=min(test.n_gen, 8))


def _random_ids(loaded: LoadedModel, count: int, *seed: int) -> list[int]:
    rng = np.random.default_rng([SEED, *seed])
    return [int(i) for i in rng.integers(0, min(loaded.spec.vocab_size, HIGHEST_ID), count)]


def _streams(loaded: LoadedModel) -> bool:
    """Whether not all experts have room in memory."""
    layouts = [loaded.container.expert_layout(layer_idx) for layer_idx in loaded.container.moe_layers]
    return loaded.plan.experts_bytes < sum(layout.record_bytes for layout in layouts) * loaded.spec.num_experts


def _counters(loaded: LoadedModel) -> tuple[float, ...]:
    """Hits and misses of all unions, prefill included, bytes read, seconds waited and seconds with reads under way."""
    if loaded.store is None:
        return 0, 0, 0, 0.0, 0.0
    stats = loaded.store.stats()
    hits, misses = stats.hits + stats.prefill_hits, stats.misses + stats.prefill_misses
    return hits, misses, stats.bytes_read, stats.wait_s, stats.reading_s


def _cache(session: Session) -> KVCache:
    """The session's cache, which is a model's."""
    assert isinstance(session.cache, KVCache)
    return session.cache


def _seek(loaded: LoadedModel, session: Session, ids: Sequence[int], prompt_length: int) -> None:
    """Make `ids` the context of a prompt of `prompt_length` ids, computing only what is not there. The engine would
    take `ids` for the whole prompt, whose length decides how longrope turns them."""
    cache = _cache(session)
    cache.expect(prompt_length)
    if session.token_ids[: len(ids)] != list(ids):
        session.rewind(0)
    session.rewind(min(len(session.token_ids), len(ids)))
    session.token_ids[:] = ids
    for at in range(cache.length, len(ids), PREFILL_CHUNK):  # from 0 where a window does not reach back that far
        chunk = np.array(ids[at : at + PREFILL_CHUNK], np.int64)
        positions = np.arange(at, at + len(chunk), dtype=np.int64)
        loaded.model.forward(cache, chunk, positions, None, np.empty(0, np.int64), prefill=True)


def _prompt(loaded: LoadedModel, session: Session, ids: Sequence[int]) -> Iterator[int]:
    """Reads the ids when it is iterated."""
    loaded.engine.prefill(session, ids, RunStats())
    yield from ()


def _decoding(loaded: LoadedModel, session: Session, ids: Sequence[int]) -> Iterator[int]:
    """Reads the first id now; iterated it decodes the others, with sampling and the engine's bookkeeping."""
    vocab_size = loaded.spec.vocab_size
    limits = Limits(len(ids), len(session.token_ids) + len(ids) + 1, frozenset())
    sampler, drafter = _Forced(ids[1:], vocab_size), MergedSources((), vocab_size=vocab_size)
    tokens = loaded.engine.generate(session, ids[:1], limits, sampler, drafter, RunStats())
    next(tokens)
    return tokens


def _verifying(loaded: LoadedModel, session: Session, ids: Sequence[int]) -> Iterator[int]:
    """Computes the ids as the rows of one forward, again and again; nothing of them stays."""
    cache = _cache(session)
    start, count = cache.length, len(ids)
    rows = np.arange(count, dtype=np.int64)
    for _ in range(VERIFIED):
        loaded.model.forward(cache, np.array(ids, np.int64), start + rows, rows - 1, rows, prefill=False)
        loaded.model.settle(rows)
        cache.rewind(start)
        yield count


class _Forced(Sampler):
    """Samples as greedy decoding does, then says the next of the given ids, so that every run computes the same."""

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        super().__init__(SamplerOptions(), SEED, vocab_size)
        self._ids = iter([*ids, 0])

    def sample(self, logits: np.ndarray, position: int) -> int:
        super().sample(logits, position)
        return next(self._ids)


def _drop_from_page_cache(folder: Path) -> None:
    """Ask the system to forget the files of a model; what it cannot forget stays."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
