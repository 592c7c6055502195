"""The engine seen from outside while it works: one JSON-ready object of counters, residency and memory.

Reads only what other threads may read (`ExpertStore.glance`, plain counters) and never waits for the engine: exact
while nobody runs, a few forwards behind while somebody does. Fields in docs/server.md; the page draws nothing else.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
from starlette.concurrency import run_in_threadpool

from coli.errors import ReadError
from coli.llm import LLM
from coli.server.worker import Worker
from coli.store.stats import StoreGlance

PROBE_SECONDS = 0.5
EVENT_SECONDS = 0.25  # between two looks of a watcher
HEARTBEAT_SECONDS = 5.0  # when nothing has changed
MAX_WATCHERS = 16
ON_DISK, CACHED, PINNED = ".", "c", "p"


class DiskSpeed(Protocol):
    """What a disk delivers in random reads (coli.tools.probe)."""

    @property
    def bytes_per_s(self) -> float: ...
    @property
    def direct(self) -> bool: ...


# (files, bytes of one read, seconds); raises ReadError
Probe = Callable[[Sequence[Path], int, float], DiskSpeed]


class EngineView:
    """What there is to see of one worker's engine."""

    def __init__(self, llm: LLM, worker: Worker, model_name: str, probe: Probe | None) -> None:
        """probe: measures the disk, for those who watch."""
        self._worker, self._container = worker, llm.container
        self._loaded = llm.load(worker.context)
        self._layers = list(llm.container.moe_layers)
        self._record_bytes = {i: llm.container.expert_layout(i).record_bytes for i in self._layers}
        spec = llm.spec
        self._num_experts = spec.num_experts
        store = self._loaded.store
        self._capacity = 0 if store is None else min(store.stats().capacity_bytes, self._all_bytes)
        self._model = {
            "name": model_name,
            "layers": self._layers,
            "num_experts": spec.num_experts if self._layers else 0,
            "num_experts_per_tok": spec.num_experts_per_tok if self._layers else 0,
            "expert_bytes": [self._record_bytes[i] for i in self._layers],
        }
        self._process = psutil.Process()
        self._started = time.monotonic()
        self._probe_of = probe
        self._disk: DiskSpeed | None = None
        self._probed: asyncio.Task[None] | None = None
        self.watchers = 0
        self.leaving: Callable[[], bool] = lambda: False  # whether the server ends: then watchers are let go

    def state(self) -> dict[str, Any]:
        """Everything the page shows, JSON-ready."""
        worker, counts = self._worker, self._worker.counts
        store, plan = worker.glance(), self._loaded.plan
        return {
            "time_s": round(time.monotonic() - self._started, 3),
            "model": self._model,
            "tokens": {
                "prompt": counts.prompt_tokens,
                "cached": counts.cached_tokens,
                "generated": counts.first_tokens + counts.step_tokens,
                "decoded": counts.step_tokens,
            },
            "forwards": {"shared": counts.steps, "responses": counts.step_rows},
            "requests": {
                "running": worker.num_slots - worker.free_slots,
                "waiting": worker.waiting,
                "slots": worker.num_slots,
                "finished": counts.finished,
                "cancelled": counts.cancelled,
                "failed": counts.failed,
                "refused": counts.refused,
            },
            "drafts": worker.draft_counters(),
            "experts": self._experts(store),
            "memory": {
                "budget_bytes": plan.budget_bytes,
                "process_bytes": self._process.memory_info().rss,
                "expert_capacity_bytes": self._capacity,
                "expert_resident_bytes": self._resident_bytes(store),
                "expert_total_bytes": self._all_bytes,
            },
            "disk": None
            if self._disk is None
            else {"bytes_per_s": round(self._disk.bytes_per_s), "direct": self._disk.direct},
            "map": self._map(store),
        }

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events: the state now, and again whenever it has changed; a comment when nothing does."""
        self.watchers += 1
        try:
            told: tuple[object, ...] = ()
            told_at = 0.0
            while not self.leaving():
                self._probe_disk()
                now, seen = time.monotonic(), self._moving()
                if seen != told:
                    told, told_at = seen, now
                    yield f"data: {json.dumps(self.state())}\n\n"
                elif now - told_at >= HEARTBEAT_SECONDS:
                    told_at = now
                    yield ": nothing new\n\n"
                await asyncio.sleep(EVENT_SECONDS)
        finally:
            self.watchers -= 1

    def _moving(self) -> tuple[object, ...]:
        """What changes whenever anything does, cheaply: an idle page costs next to nothing."""
        worker, store = self._worker, self._worker.glance()
        counted = () if store is None else (store.hits, store.prefill_hits, store.reads, store.evictions)
        return *astuple(worker.counts), worker.waiting, worker.free_slots, *counted, self._disk

    @property
    def _all_bytes(self) -> int:
        return sum(self._record_bytes.values()) * self._num_experts

    def _resident_bytes(self, store: StoreGlance | None) -> int:
        if store is None:
            return 0
        return sum(int(store.resident[i].sum()) * size for i, size in self._record_bytes.items())

    def _experts(self, store: StoreGlance | None) -> dict[str, int | float]:
        names = ("hits", "pinned_hits", "misses", "prefill_hits", "prefill_pinned_hits", "prefill_misses")
        found = {name: getattr(store, name) for name in (*names, "evictions", "reads", "bytes_read")} if store else {}
        return {**found, "wait_s": round(store.wait_s, 6)} if store else {}

    def _map(self, store: StoreGlance | None) -> dict[str, Any]:
        """Per layer of `model.layers` one character and one count an expert."""
        if store is None or self._loaded.store is None:
            return {"state": [], "used": []}
        codes = np.where(store.resident, CACHED, ON_DISK)
        for key in self._loaded.store.policy.pinned:
            codes.flat[key] = PINNED
        return {
            "state": ["".join(codes[i]) for i in self._layers],
            "used": [store.usage[i].tolist() for i in self._layers],
        }

    def _probe_disk(self) -> None:
        """Measure what the disk delivers, once, when the engine is idle; not needed where every expert fits."""
        idle = self._worker.free_slots == self._worker.num_slots and not self._worker.waiting
        if self._probe_of is not None and self._probed is None and idle and self._capacity < self._all_bytes:
            self._probed = asyncio.create_task(self._probe(self._probe_of))

    async def _probe(self, probe: Probe) -> None:
        files = sorted({self._container.expert_layout(i).path for i in self._layers})
        try:
            self._disk = await run_in_threadpool(probe, files, max(self._record_bytes.values()), PROBE_SECONDS)
        except ReadError:
            self._disk = None
