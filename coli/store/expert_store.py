"""The experts of a model behind one table of addresses: a layer asks for a union, the store brings what is missing.

The policy decides hits and evictions at the request; reader threads fill places while the layer computes what is there.
Arrival order, read mode and number of readers change when an expert is yielded, never what is resident afterwards.
Called by the one thread that runs the model.
"""

import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli.store.memory import MemoryGuard, megabytes
from coli.store.places import RecordPlaces, SlabContents
from coli.store.policy import ResidencyPolicy, UnionPlan
from coli.store.reader import Read, ReaderThreads
from coli.store.record_files import IoMode, Notice
from coli.store.records import RecordLayout
from coli.store.stats import StoreGlance, StoreStats, TraceSink

# Reader threads need the interpreter lock for some microseconds a record; 5 ms would starve them.
_SWITCH_INTERVAL_S = 0.0005


@dataclass(slots=True)
class _Union:
    """A union being delivered: what is still to be read, and what the layer has finished with."""

    layer_idx: int
    plan: UnionPlan
    waiting: deque[tuple[int, int | None, bool]]  # (key, evicted key, after use), in the order to read
    released: set[int]


class ExpertStore:
    """Routed experts of a container in a fixed number of places.

    `residency` (L, E) int64 holds the address of each resident record, 0 for the others.
    """

    def __init__(
        self,
        layouts: Mapping[int, RecordLayout],
        policy: ResidencyPolicy,
        places: RecordPlaces,
        *,
        reader_threads: int = 2,
        prefetch_slots: int = 0,
        trace: TraceSink | None = None,
        guard: MemoryGuard | None = None,
        notice: Notice = lambda line: None,
    ) -> None:
        """
        Args:
            layouts: by layer index, the layers that have routed experts.
            guard: asked after every forward whether memory has to be given back.
            places: at least as many as the policy's slots, its transient slots, its pins and `prefetch_slots`.
            prefetch_slots: records that `prefetch` may hold before they are demanded; 0: no prefetch.
        """
        self.policy = policy
        self.num_experts = policy.num_experts
        self.residency: NDArray[np.int64] = np.zeros((policy.num_layers, policy.num_experts), np.int64)
        self._layouts = dict(layouts)
        self._places = places
        self._trace = trace
        self._guard = guard
        self._notice = notice
        self._inflight: dict[int, Read] = {}
        self._staged: dict[int, Read] = {}  # prefetched and not demanded yet, oldest first
        self._prefetch_slots = prefetch_slots
        self._union: _Union | None = None
        self._reads = self._bytes_read = self._prefetched = self._prefetch_hits = 0
        self._wait_s = 0.0
        self._given_back = self._told_of = 0  # bytes, in all and by the last notice
        self._readers = ReaderThreads(places.perform, reader_threads, places.finish)
        self.reads_ahead = prefetch_slots > 0
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_interval, _SWITCH_INTERVAL_S))
        self._load_pins()

    def fetch(self, layer_idx: int, expert_ids: NDArray[np.int64], *, prefill: bool) -> Iterator[NDArray[np.int64]]:
        """Bring the union of `expert_ids` (S, A) and yield its distinct ids as their records become available.

        Reads start now, not at the first item. Each id comes exactly once: resident ones first, then as they arrive
        (prefill: all in ascending order). An id stays valid until the next item is requested.

        Raises:
            ReadError: (from the iterator) a record could not be read; the store stays usable.
        """
        self._end_union()
        if self.residency[layer_idx][expert_ids].all():
            self.touched(layer_idx, expert_ids, prefill=prefill)
            return iter((np.sort(expert_ids[0]) if len(expert_ids) == 1 else np.unique(expert_ids),))
        if self._trace is not None:
            self._trace.union(layer_idx, expert_ids, prefill=prefill)
        plan = self.policy.request(layer_idx, expert_ids, prefill=prefill)
        base = layer_idx * self.num_experts
        union = _Union(
            layer_idx, plan, deque((base + a.expert_id, a.evicted, a.after_use) for a in plan.admissions), set()
        )
        self._union = union
        if self._staged:
            self._call_off({base + expert_id for expert_id in plan.expert_ids})
        self._reread_lost(plan.cached, base)
        self._issue(union)
        if self._inflight:
            time.sleep(0)  # gives the interpreter lock away: the disk hears of the reads now, not with the next kernel
        return self._deliver_ascending(union) if prefill else self._deliver(union)

    def touched(self, layer_idx: int, expert_ids: NDArray[np.int64], *, prefill: bool = False) -> None:
        """Account for a layer that ran entirely from `residency`; expert_ids (S, A)."""
        self._end_union()
        if self._trace is not None:
            self._trace.union(layer_idx, expert_ids, prefill=prefill)
        self.policy.touched(layer_idx, expert_ids, prefill=prefill)

    def touched_all(self, layer_idxs: list[int], expert_ids: NDArray[np.int64]) -> None:
        """`touched` for the layers of a forward of one row, in their order; expert_ids (n, A)."""
        self._end_union()
        if self._trace is not None:
            for layer_idx, ids in zip(layer_idxs, expert_ids, strict=True):
                self._trace.union(layer_idx, ids[None], prefill=False)
        self.policy.touched_all(layer_idxs, expert_ids)

    def settle(self, committed_rows: int | Sequence[int] | NDArray[np.int64]) -> None:
        """End a forward: `committed_rows` (a count of leading rows, or row indices) were kept."""
        self._end_union()
        if self._trace is not None:
            self._trace.settled(committed_rows)
        self.policy.settle(committed_rows)
        if self._guard is not None:
            excess, source = self._guard.excess(self._mapped_bytes)
            if excess and (freed := self.shrink(excess)):
                self._given_back += freed
                if self._given_back >= 2 * self._told_of:  # a limit that stays close is not told of every two seconds
                    self._told_of = self._given_back
                    self._notice(
                        f"memory: {source} is nearly used up: gave back {megabytes(self._given_back)} of experts so far"
                    )

    def shrink(self, nbytes: int) -> int:
        """Give at least `nbytes` back to the system, coldest experts first; return how many could be given."""
        self._end_union()
        freed = 0
        while freed < nbytes:
            slab = self._places.last_slab()
            if slab is None or self.policy.pinned.intersection(slab.keys) or not self._vacate(slab):
                break
            self._places.release_slab(slab)
            freed += slab.slots * slab.slot_bytes
        return freed

    def prefetch(self, layer_idx: int, expert_ids: Sequence[int]) -> None:
        """Read experts that may be wanted soon, behind all demanded reads and into places of their own.

        Earlier guesses whose reads have not begun are given up.
        """
        self._call_off()
        for key in (layer_idx * self.num_experts + int(e) for e in expert_ids):
            if self._places.holds(key) or key in self.policy.pinned:
                continue
            if len(self._staged) >= self._prefetch_slots and not self._unstage_oldest():
                return
            read = self._places.take(key)
            read.prefetch = True
            self._staged[key] = self._inflight[key] = read
            self._prefetched += 1
            self._readers.submit(read)

    def take_usage(self) -> NDArray[np.int64]:
        """Selections (L, E) by committed rows since the last call: what the usage history learns from."""
        usage = self.policy.usage.reshape(self.policy.num_layers, self.num_experts).copy()
        self.policy.usage[:] = 0
        return usage

    @property
    def bytes_read(self) -> int:
        """Bytes of all records read so far, pins and prefill included."""
        return self._bytes_read

    def stats(self) -> StoreStats:
        record_bytes = {i: layout.record_bytes for i, layout in self._layouts.items()}
        return StoreStats.of(
            self.policy,
            record_bytes,
            mode=str(self._places.mode),
            reads=self._reads,
            bytes_read=self._bytes_read,
            wait_s=self._wait_s,
            reading_s=self._readers.reading_s,
            prefetched=self._prefetched,
            prefetch_hits=self._prefetch_hits,
        )

    def catch_up(self) -> None:
        """Let `glance` show all forwards there were."""
        self.policy.catch_up()

    def glance(self) -> StoreGlance:
        """Counters and residency for an onlooker; the one method that other threads may call."""
        decode, prefill = self.policy.told_counts
        return StoreGlance(
            hits=decode.hits,
            pinned_hits=decode.pinned_hits,
            misses=decode.misses,
            prefill_hits=prefill.hits,
            prefill_pinned_hits=prefill.pinned_hits,
            prefill_misses=prefill.misses,
            evictions=decode.evictions + prefill.evictions,
            reads=self._reads,
            bytes_read=self._bytes_read,
            wait_s=self._wait_s,
            resident=self.residency != 0,
            usage=self.policy.told_usage.reshape(self.residency.shape).copy(),
        )

    def close(self) -> None:
        """End the reader threads and give the memory back; addresses in `residency` are invalid from here on."""
        self._union = None
        self._readers.close()
        self.residency[:] = 0
        self._places.close()
        sys.setswitchinterval(self._switch_interval)

    def _deliver(self, union: _Union) -> Iterator[NDArray[np.int64]]:
        row, base = self.residency[union.layer_idx], union.layer_idx * self.num_experts
        ready = [e for e in union.plan.expert_ids if row[e]]
        awaited = set(union.plan.expert_ids) - set(ready)
        while True:
            if ready:
                yield np.array(ready, np.int64)
                union.released.update(base + e for e in ready)
            if not awaited:
                break
            while not (ready := self._arrived(union, awaited)):
                self._receive(union, block=True)
            awaited.difference_update(ready)
        self._finish(union)

    def _deliver_ascending(self, union: _Union) -> Iterator[NDArray[np.int64]]:
        row, base = self.residency[union.layer_idx], union.layer_idx * self.num_experts
        ids = union.plan.expert_ids
        start = 0
        while start < len(ids):
            while not self._arrived(union, ids[start : start + 1]):
                self._receive(union, block=True)
            stop = start
            while stop < len(ids) and row[ids[stop]]:
                stop += 1
            yield np.array(ids[start:stop], np.int64)
            union.released.update(base + e for e in ids[start:stop])
            start = stop
        self._finish(union)

    def _arrived(self, union: _Union, expert_ids: Iterable[int]) -> list[int]:
        """Which of them are resident, ascending, after all that can be done without waiting."""
        while self._inflight and self._receive(union, block=False):
            pass
        self._issue(union)
        row = self.residency[union.layer_idx]
        return sorted(e for e in expert_ids if row[e])

    def _issue(self, union: _Union) -> None:
        """Submit the reads whose places are free or can be freed now."""
        while union.waiting:
            key, evicted, after_use = union.waiting[0]
            if evicted is not None:
                if (after_use and evicted not in union.released) or evicted in self._inflight:
                    return
                self._evict(evicted)
            union.waiting.popleft()
            staged = self._staged.pop(key, None)
            if staged is not None:
                self._prefetch_hits += 1
                if key in self._inflight:
                    self._readers.promote(staged)
                else:
                    self.residency.flat[key] = self._places.address(key)
                continue
            self._submit(key)

    def _reread_lost(self, expert_ids: Sequence[int], base: int) -> None:
        """Experts the policy holds but nobody brought: an interrupt hit between a read and its bookkeeping."""
        for key in (base + e for e in expert_ids):
            if not self.residency.flat[key] and key not in self._inflight:
                if self._places.holds(key):
                    self._places.give_back(key)
                self._submit(key)

    def _submit(self, key: int) -> None:
        read = self._places.take(key)
        self._inflight[key] = read
        self._readers.submit(read)

    def _receive(self, union: _Union | None, *, block: bool) -> bool:
        """Take one finished read; False when there is none and `block` is false."""
        if block:
            assert self._inflight, "waiting for a record that nobody reads"
            start = time.perf_counter()
            read = self._readers.receive(block=True)
            self._wait_s += time.perf_counter() - start
        else:
            read = self._readers.receive(block=False)
        if read is None:
            return False
        key = read.key
        del self._inflight[key]
        if read.error is not None:
            self._staged.pop(key, None)
            self.policy.discard(key)
            self._places.give_back(key)
            if union is not None and key - union.layer_idx * self.num_experts in union.plan.expert_ids:
                self._end_union()
                raise read.error
            return True
        self._reads += 1
        self._bytes_read += self._layouts[key // self.num_experts].record_bytes
        if key not in self._staged:
            self.residency.flat[key] = self._places.address(key)
        return True

    def _finish(self, union: _Union) -> None:
        for key in union.plan.dropped:
            self._evict(key)
        self._union = None

    def _end_union(self) -> None:
        """Give up the rest of a union that was not consumed to its end."""
        union, self._union = self._union, None
        if union is None:
            return
        for key, evicted, _ in union.waiting:
            if evicted is not None:
                self._evict(evicted)
            self.policy.discard(key)
        union.waiting.clear()
        for key in union.plan.dropped:
            self._evict(key)

    def _evict(self, key: int) -> None:
        """Take the key's place away; a read still on its way is waited for."""
        while key in self._inflight:
            self._receive(None, block=True)
        if self._places.holds(key):
            self.residency.flat[key] = 0
            self._places.give_back(key)

    def _vacate(self, slab: SlabContents) -> bool:
        """Empty a slab and take its places away from the pools of that record size; False: they are the last."""
        layers = [i for i, layout in self._layouts.items() if layout.record_bytes == slab.slot_bytes]
        pools = sorted({self.policy.pool_of(i * self.num_experts) for i in layers})
        if not self.policy.can_shrink(pools, slab.slots):
            return False
        for key in slab.keys:
            self._evict(key)
            self._staged.pop(key, None)
            self.policy.discard(key)
        for key in self.policy.shrink(pools, slab.slots):
            self._evict(key)
        return True

    def _call_off(self, kept: Collection[int] = ()) -> None:
        """Give up guesses that no reader has begun, but for the keys in `kept`."""
        for key in [key for key in self._staged if key in self._inflight and key not in kept]:
            if self._readers.call_off(self._staged[key]):
                del self._staged[key], self._inflight[key]
                self._places.give_back(key)
                self._prefetched -= 1

    def _unstage_oldest(self) -> bool:
        for key in self._staged:
            if key not in self._inflight:
                del self._staged[key]
                self._places.give_back(key)
                return True
        return False

    def _mapped_bytes(self) -> int:
        """Of resident records whose pages the system may drop."""
        if self._places.mode is not IoMode.MMAP:
            return 0
        held = np.count_nonzero(self.residency, axis=1)
        return sum(int(held[layer_idx]) * layout.record_bytes for layer_idx, layout in self._layouts.items())

    def _load_pins(self) -> None:
        for key in sorted(self.policy.pinned):
            self._submit(key)
        while self._inflight:
            self._receive(None, block=True)
