"""What stream_bench.py starts in each memory cgroup: one engine in a process, driven over standard input.

    python scripts/stream_workers.py coli|llama.cpp MODEL MODE THREADS CONTEXT CHUNK

Imports an engine only when it is asked for: each runs in an environment of its own.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Coli:
    """coli's forward, one id at a time."""

    def __init__(self, path: str, mode: str, threads: int, context: int, chunk: int) -> None:
        import numpy as np

        from coli import loading
        from coli.llm import LLM
        from coli.options import EngineOptions
        from coli.tools.trace import TraceRecorder

        loading.PREFILL_CHUNK = self._chunk = chunk  # the plan has to count its buffers
        self._recorder = TraceRecorder()

        self._np = np
        io, _, prefetch = mode.partition("+")
        options = EngineOptions(threads=threads, io=io, prefetch=bool(prefetch), pin="off", usage_save=False)
        began = time.perf_counter()
        self._llm = LLM.open(Path(path), options, lambda line: print(f"coli: {line}", file=sys.stderr),
                             trace=self._recorder)  # fmt: skip
        self.open_s = time.perf_counter() - began
        self._loaded = self._llm.load(context)
        self.load_s = time.perf_counter() - began - self.open_s
        self.touch_s = self._touched()
        self._cache = self._loaded.new_cache(context)
        self.planned = self._planned(Path(path))
        self.vocab_size = self._llm.spec.vocab_size

    def run(self, ids: Sequence[int], prefill: bool) -> dict[str, Any]:
        np, before = self._np, self._loaded.store_counters()
        step = self._chunk if prefill else 1
        for start in range(0, len(ids), step):
            rows = np.array(ids[start : start + step], np.int64)
            at, last = self._cache.length + np.arange(len(rows)), np.array([len(rows) - 1], np.int64)
            self._loaded.model.forward(self._cache, rows, at, None, last, prefill=prefill)
            if not prefill:
                self._loaded.model.settle(last)
        counted = self._loaded.store_counters().since(before)
        return {
            "hit_rate": counted.hit_rate(), "bytes": counted.bytes_read, "wait_s": counted.wait_s,
            "reading_s": counted.reading_s, "prefetched": counted.prefetched, "prefetch_hits": counted.prefetch_hits,
        }  # fmt: skip

    def _touched(self) -> float:
        """Wait until the slabs are touched; the seconds that took beside everything else."""
        from coli.store.places import SlabPlaces

        places = None if self._loaded.store is None else self._loaded.store._places
        if not isinstance(places, SlabPlaces):
            return 0.0
        places.toucher.wait()
        return places.toucher.seconds

    def _planned(self, path: Path) -> list[float] | None:
        """The band of bytes `coli plan` expects a decoded id to read; None for a dense model."""
        from coli.tools.forecast import forecast
        from coli.tools.sizes import model_sizes

        sizes = model_sizes(path)
        if not sizes.experts_bytes:
            return None
        room = min(self._loaded.plan.experts_bytes, sizes.experts_bytes)
        expected = forecast(sizes, room, 1.0, 1.0)  # speeds do not matter for it
        return [sizes.cycle_bytes * (1 - hits) for hits in (expected.fast_hit_rate, expected.slow_hit_rate)]

    def replayed(self) -> float | None:
        """Bytes the replay of this process's own trace reads, as a share of those it read."""
        from coli.tools.replay import replay_setup
        from coli.tools.trace import traced_model

        store, spec = self._loaded.store, self._llm.spec
        if store is None or not store.bytes_read:
            return None
        model = traced_model(self._llm.container, spec.num_stored_layers, spec.num_experts_per_tok)
        trace = self._recorder.trace(model, store.policy)
        counts = replay_setup(trace, trace.setup)
        record = model.experts_bytes / len(model.record_bytes) / model.num_experts
        return (counts.misses + counts.prefill_misses) * record / store.bytes_read


class LlamaCpp:
    """llama.cpp through llama-cpp-python: the file mapped, as it does by default; no repacked copy."""

    open_s = touch_s = 0.0
    planned = None

    def __init__(self, path: str, mode: str, threads: int, context: int, chunk: int) -> None:
        began = time.perf_counter()
        from llama_cpp import Llama, llama_cpp

        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False  # else every weight is copied, rearranged, into memory
        llama_cpp.llama_model_default_params = lambda: params
        self._llama = Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
        self.vocab_size = self._llama.n_vocab()
        self.load_s = time.perf_counter() - began

    def run(self, ids: Sequence[int], prefill: bool) -> dict[str, Any]:
        before = _bytes_read()
        for token_id in ids:
            self._llama.eval([token_id])
        return {"hit_rate": None, "bytes": _bytes_read() - before, "wait_s": None, "reading_s": None}

    def replayed(self) -> float | None:
        return None


def _bytes_read() -> int:
    """What this process caused to be read from disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def _resident_bytes() -> int:
    """The most memory this process had resident so far, mapped file pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(engine: str, path: str, mode: str, threads: int, context: int, chunk: int) -> None:
    """Do what each line of standard input says, "decode N", "prefill N" or "replay 0"; one JSON object a line back."""
    model = (Coli if engine == "coli" else LlamaCpp)(path, mode, threads, context, chunk)
    rng = random.Random(1)
    start = {name: getattr(model, name) for name in ("open_s", "load_s", "touch_s", "planned")}
    print(json.dumps(start), flush=True)
    for line in sys.stdin:
        verb, count = line.split()
        ids = [rng.randrange(min(model.vocab_size, 32000)) for _ in range(int(count))]
        began = time.perf_counter()
        counted = {"replayed": model.replayed()} if verb == "replay" else model.run(ids, verb == "prefill")
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "resident": _resident_bytes(), **counted}), flush=True)


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
