"""The experts of a model behind one table of addresses: a layer asks for a union, the store brings what is missing.

First form: zero-copy views of the memory-mapped files; an expert counts as resident while the policy holds it, and
eviction gives its pages back to the system. Called by the one thread that runs the model.
"""

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli.errors import MemoryBudgetError
from coli.store import syscalls
from coli.store.policy import ResidencyPolicy
from coli.store.records import RecordLayout

# madvise(WILLNEED) silently ignores what exceeds the device's read-ahead limit: ask in pieces.
_WILLNEED_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened; hits and misses count distinct experts per union."""

    hits: int
    pinned_hits: int
    misses: int
    evictions: int
    reads: int
    bytes_read: int
    wait_s: float
    resident_bytes: int
    capacity_bytes: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)


class ExpertStore:
    """Routed experts of a container within a budget of bytes.

    `residency` (L, E) int64 holds the address of each resident record, 0 for the others.
    """

    def __init__(
        self, layouts: Mapping[int, RecordLayout], num_layers: int, num_experts: int, capacity_bytes: int
    ) -> None:
        """
        Args:
            layouts: by layer index, the layers that have routed experts.
            capacity_bytes: memory the resident records may take.

        Raises:
            MemoryBudgetError: the budget does not hold one record.
        """
        self.num_experts = num_experts
        self.residency: NDArray[np.int64] = np.zeros((num_layers, num_experts), np.int64)
        self._layouts = dict(layouts)
        self._record_bytes = max((layout.record_bytes for layout in layouts.values()), default=1)
        slots = min(capacity_bytes // self._record_bytes, len(layouts) * num_experts)
        if layouts and slots < 1:
            raise MemoryBudgetError(
                f"experts: {capacity_bytes} bytes are left for experts, "
                f"one record takes {self._record_bytes}: raise --ram"
            )
        pools: list[int | None] = [0 if layer_idx in layouts else None for layer_idx in range(num_layers)]
        self.policy = ResidencyPolicy(num_layers, num_experts, pools, [max(1, slots)])
        self._files: dict[Path, tuple[int, mmap.mmap, int]] = {}
        for layout in layouts.values():
            if layout.path not in self._files:
                self._files[layout.path] = _map(layout.path)
        self._base = {i: self._files[layout.path][2] + layout.offset for i, layout in self._layouts.items()}
        self._bytes_read = 0
        self._reads = 0

    def fetch(self, layer_idx: int, expert_ids: NDArray[np.int64], *, prefill: bool) -> Iterator[NDArray[np.int64]]:
        """Bring the union of `expert_ids` (S, A) and yield its distinct ids as their records become available.

        Each id comes exactly once, resident ones first (prefill: all in ascending order). An id stays valid until the
        next item is requested.
        """
        plan = self.policy.request(layer_idx, expert_ids, prefill=prefill)
        if not plan.admissions:
            yield np.array(plan.expert_ids, np.int64)
            return
        absent = {admission.expert_id: admission.evicted for admission in plan.admissions}
        present = [e for e in plan.expert_ids if e not in absent]
        order = plan.expert_ids if prefill else [*present, *absent]
        for e in absent:
            self._advise(layer_idx, e, syscalls.MADV_WILLNEED)
        run: list[int] = []
        for e in order:
            if e in absent:
                if run:
                    yield np.array(run, np.int64)
                    run = []
                self._admit(layer_idx, e, absent[e])
                yield np.array([e], np.int64)
            else:
                run.append(e)
        if run:
            yield np.array(run, np.int64)

    def touched(self, layer_idx: int, expert_ids: NDArray[np.int64], *, prefill: bool = False) -> None:
        """Account for a layer that ran entirely from `residency`; expert_ids (S, A)."""
        plan = self.policy.request(layer_idx, expert_ids, prefill=prefill)
        assert not plan.admissions

    def settle(self, committed_rows: int | Sequence[int] | NDArray[np.int64]) -> None:
        """End a forward: `committed_rows` (a count of leading rows, or row indices) were kept."""
        self.policy.settle(committed_rows)

    def stats(self) -> StoreStats:
        decode, prefill = self.policy.counts, self.policy.prefill_counts
        return StoreStats(
            hits=decode.hits + prefill.hits,
            pinned_hits=decode.pinned_hits + prefill.pinned_hits,
            misses=decode.misses + prefill.misses,
            evictions=decode.evictions + prefill.evictions,
            reads=self._reads,
            bytes_read=self._bytes_read,
            wait_s=0.0,
            resident_bytes=int(np.count_nonzero(self.residency)) * self._record_bytes,
            capacity_bytes=sum(pool.slots for pool in self.policy.pools) * self._record_bytes,
        )

    def close(self) -> None:
        """Addresses in `residency` are invalid from here on."""
        self.residency[:] = 0
        for fd, mapping, _ in self._files.values():
            mapping.close()
            os.close(fd)
        self._files.clear()

    def _admit(self, layer_idx: int, expert_id: int, evicted: int | None) -> None:
        if evicted is not None:
            self._evict(*divmod(evicted, self.num_experts))
        self.residency[layer_idx, expert_id] = self._address(layer_idx, expert_id)
        self._reads += 1
        self._bytes_read += self._layouts[layer_idx].record_bytes

    def _evict(self, layer_idx: int, expert_id: int) -> None:
        """Unmap the record's pages, then drop them from the page cache (mapped pages survive the second call)."""
        self.residency[layer_idx, expert_id] = 0
        self._advise(layer_idx, expert_id, syscalls.MADV_DONTNEED)
        layout = self._layouts[layer_idx]
        offset = layout.offset + expert_id * layout.record_bytes
        os.posix_fadvise(self._files[layout.path][0], offset, layout.record_bytes, os.POSIX_FADV_DONTNEED)

    def _address(self, layer_idx: int, expert_id: int) -> int:
        return int(self._base[layer_idx]) + expert_id * self._layouts[layer_idx].record_bytes

    def _advise(self, layer_idx: int, expert_id: int, advice: int) -> None:
        address, size = self._address(layer_idx, expert_id), self._layouts[layer_idx].record_bytes
        step = _WILLNEED_BYTES if advice == syscalls.MADV_WILLNEED else size
        for start in range(0, size, step):
            syscalls.madvise(address + start, min(step, size - start), advice)


def _map(path: Path) -> tuple[int, mmap.mmap, int]:
    """Descriptor, mapping and address of a whole file, read-only."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    return fd, mapping, int(np.frombuffer(mapping, np.uint8).ctypes.data)
