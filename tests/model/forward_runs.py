"""Runs of the forward on one sequence in different cuts, for comparing bits."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli.model.kv_cache import KVCache, new_cache
from coli.model.loader import load_weights
from coli.model.tensors import container_spec
from coli.model.transformer import Transformer
from coli.store.container import Container
from coli.store.expert_store import ExpertStore
from coli.store.opening import open_store


class Runner:
    """A model opened from a container, with as many experts in memory as `slots` records (None: all)."""

    def __init__(
        self,
        path: Path,
        *,
        slots: int | None = None,
        threads: int = 1,
        kv: str = "f32",
        io: str = "mmap",
        prefetch: bool = False,
        reader_threads: int | None = None,
        pinned: tuple[int, ...] = (),
    ) -> None:
        self.container = Container.open(path)
        self.spec = container_spec(self.container)
        layouts = {i: self.container.expert_layout(i) for i in self.container.moe_layers}
        self.store: ExpertStore | None = None
        if layouts:
            record = max(layout.record_bytes for layout in layouts.values())
            count = slots or len(layouts) * self.spec.num_experts
            self.store = open_store(
                layouts,
                num_layers=self.spec.num_stored_layers,
                num_experts=self.spec.num_experts,
                num_experts_per_tok=self.spec.num_experts_per_tok,
                capacity_bytes=count * record,
                notice=lambda line: None,
                io=io,
                prefetch=prefetch,
                reader_threads=reader_threads,
                pinned=pinned,
            )
        self.model = Transformer(self.spec, load_weights(self.container, self.spec), self.store, threads)
        self._kv = kv

    def cache(self, capacity: int = 128) -> KVCache:
        return new_cache(self.spec, capacity, self._kv)

    def chunks(self, ids: list[int], sizes: list[int], *, prefill: bool = False) -> NDArray[np.float32]:
        """Logits (T, V) of all positions, computed in chunks of the given sizes."""
        assert sum(sizes) == len(ids)
        cache, out, at = self.cache(max(128, len(ids))), [], 0
        for size in sizes:
            positions = np.arange(at, at + size, dtype=np.int64)
            rows = np.arange(size, dtype=np.int64)
            chunk = np.array(ids[at : at + size], np.int64)
            out.append(self.model.forward(cache, chunk, positions, None, rows, prefill=prefill).copy())
            self.model.settle(rows)
            at += size
        return np.concatenate(out)
