"""Eviction orders: which resident key of a pool goes first. Pure; used by the engine's store and by the replay.

Each order keeps one stamp per key, larger is safer, and lazy heaps of lower bounds: a touch is O(1), an eviction
O(layers + log n) amortised. `LruOrder` is what the engine runs; the others are there to be compared with it.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EvictionOrder(Protocol):
    """Resident, evictable keys of one pool, and which of them goes first.

    by_layer: what a decode union does depends on its own layer's only, so `touch_unions` may take a layer at a time.
    """

    by_layer: bool

    def __contains__(self, key: int) -> bool: ...

    def keys(self) -> Iterable[int]: ...

    def begin_request(self, layer_idx: int, *, scan: bool, speculative: bool) -> None:
        """A union of that layer follows.

        `scan`: it belongs to a prefill flood; `speculative`: `demote` may have to undo its effect.
        """
        ...

    def end_request(self) -> None: ...

    def admit(self, key: int, rows: int) -> None:
        """Add an absent key that `rows` rows of the union chose."""
        ...

    def touch(self, key: int, rows: int) -> None:
        """A resident key is used again."""
        ...

    def touch_all(self, layer_idx: int, keys: Sequence[int]) -> None:
        """A decode union of that layer used these resident keys and needs nothing else."""
        ...

    def touch_unions(self, layer_idx: int, keys: NDArray[np.int64], without: AbstractSet[int]) -> None:
        """`touch_all` for unions of that layer one after the other, each a row of keys (n, A), leaving some out."""
        ...

    def victim(self, keep: AbstractSet[int]) -> int | None:
        """Remove and return the key to go first that is not in `keep`; None: all are."""
        ...

    def release(self, key: int) -> None:
        """`key` has left the `keep` of the running request."""
        ...

    def discard(self, key: int) -> bool:
        """Remove the key; False when it was absent."""
        ...

    def demote(self, keys: Iterable[int]) -> None:
        """Undo what this forward's uses did for keys that only rejected rows used."""
        ...

    def settled(self) -> None:
        """The forward is over: what `demote` would restore is forgotten."""
        ...


def cold_stamp(rows: int, clock: int) -> int:
    """Stamp of a key in the cold zone, below every warm one (negative).

    What fewer rows of the flood chose goes first, then what came last: a flood comes round again, and of a cycle the
    newest is needed last.
    """
    return -(1 << 62) + (min(rows, 1 << 20) << 40) - clock


class StampHeap:
    """Keys with stamps; pops the key of the least stamp. Stamps may move both ways; ties go to the lowest key."""

    def __init__(self) -> None:
        self.stamps: dict[int, float] = {}
        self.heap: list[tuple[float, int]] = []  # heap[0][0] bounds all stamps outside the bench from below
        self._entry: dict[int, float] = {}  # the one heap entry of a key that counts, at most its stamp
        self._bench: dict[int, float] = {}  # entries popped while kept: back into the heap on release

    def set(self, key: int, stamp: float) -> None:
        """Give `key` a stamp. Raising one costs nothing: the heap entry stays behind as a lower bound."""
        self.stamps[key] = stamp
        entry = self._entry.get(key)
        if entry is None or stamp < entry:
            self._bench.pop(key, None)
            self._entry[key] = stamp
            heapq.heappush(self.heap, (stamp, key))

    def discard(self, key: int) -> bool:
        if self.stamps.pop(key, None) is None:
            return False
        del self._entry[key]
        self._bench.pop(key, None)
        return True

    def settle_least(self, keep: AbstractSet[int]) -> float:
        """Make the bound exact: the least stamp outside `keep`, infinite when there is none."""
        heap, stamps, entries = self.heap, self.stamps, self._entry
        while heap:
            entry, key = heap[0]
            if entries.get(key) != entry:
                heapq.heappop(heap)
                continue
            stamp = stamps[key]
            if stamp != entry:
                entries[key] = stamp
                heapq.heapreplace(heap, (stamp, key))
            elif key in keep:
                self._bench[key] = entry
                heapq.heappop(heap)
            else:
                return entry
        return math.inf

    def pop_least(self, keep: AbstractSet[int] = frozenset()) -> int | None:
        """Remove and return the key of the least stamp outside `keep`; None: there is none."""
        if self.settle_least(keep) == math.inf:
            return None
        _, key = heapq.heappop(self.heap)
        del self.stamps[key], self._entry[key]
        return key

    def release(self, key: int) -> bool:
        """Take the key off the bench; False when it was not there."""
        entry = self._bench.pop(key, None)
        if entry is None:
            return False
        heapq.heappush(self.heap, (entry, key))
        return True

    def release_all(self) -> None:
        for key, entry in self._bench.items():
            heapq.heappush(self.heap, (entry, key))
        self._bench.clear()


class LruOrder:
    """Least recently used first, in visits of the layer; prefill floods enter a cold zone below all that decoding used.

    Every token walks through all layers, so by the clock the oldest keys are those of the layers that come next: the
    worst ones to lose. What counts instead is how often a key's layer has been visited since the key was used; of equal
    ones, those of the layer visited last go first, since theirs is the longest way round.
    """

    by_layer = True
    visits_per_unit = 1.0  # visits of a layer after which an unused key has lost one unit of its stamp

    def __init__(self, slots: int, num_experts: int) -> None:
        self._num_experts = num_experts
        self._heaps: dict[int, StampHeap] = {}
        self._layers: list[int] = []  # ascending
        self._now: dict[int, float] = {}  # visits of each layer, in units of stamps
        self._layer_idx = 0
        self._clock = 0  # of floods
        self._source_idx: int | None = None  # the layer that loses keys until its least reaches `_next`
        self._next = math.inf
        self._before_next = False
        self._scan = False
        self._speculative = False
        self._before: dict[int, float] = {}

    def __contains__(self, key: int) -> bool:
        heap = self._heaps.get(key // self._num_experts)
        return heap is not None and key in heap.stamps

    def keys(self) -> Iterable[int]:
        return [key for heap in self._heaps.values() for key in heap.stamps]

    def begin_request(self, layer_idx: int, *, scan: bool, speculative: bool) -> None:
        self._scan, self._speculative = scan, speculative
        self._visit(layer_idx, 0 if scan else 1)

    def end_request(self) -> None:
        self._heaps[self._layer_idx].release_all()  # only members of the union are ever kept
        self._source_idx = None

    def admit(self, key: int, rows: int) -> None:
        if self._scan:
            self._clock += 1
            self._source_idx = None
        self._heaps[self._layer_idx].set(key, cold_stamp(rows, self._clock) if self._scan else self._used(None))

    def touch(self, key: int, rows: int) -> None:
        heap = self._heaps[self._layer_idx]
        old = heap.stamps[key]
        if self._scan:
            self._clock += 1
            if old < 0:
                heap.set(key, max(old, cold_stamp(rows, self._clock)))
            return
        if self._speculative:
            self._before[key] = old
        heap.stamps[key] = self._used(old)  # only ever raised: the heap need not hear of it

    def touch_all(self, layer_idx: int, keys: Sequence[int]) -> None:
        self._visit(layer_idx, 1)
        self._heaps[layer_idx].stamps.update(dict.fromkeys(keys, self._used(None)))

    def touch_unions(self, layer_idx: int, keys: NDArray[np.int64], without: AbstractSet[int]) -> None:
        before = self._now.get(layer_idx, 0.0)
        self._visit(layer_idx, len(keys))
        stamps = np.repeat(before + np.arange(1.0, len(keys) + 1), keys.shape[1])
        used = dict(zip(keys.ravel().tolist(), stamps.tolist(), strict=True))  # the last use of a key counts
        for key in without:
            used.pop(key, None)
        self._heaps[layer_idx].stamps.update(used)

    def victim(self, keep: AbstractSet[int]) -> int | None:
        while True:
            if self._source_idx is not None:
                heap = self._heaps[self._source_idx]
                left = self._left(self._source_idx, heap.settle_least(keep))
                if left < self._next or (left == self._next and self._before_next):
                    return heap.pop_least(keep)
            if not self._choose_source():
                return None

    def release(self, key: int) -> None:
        if self._heaps[self._layer_idx].release(key):
            self._source_idx = None

    def discard(self, key: int) -> bool:
        heap = self._heaps.get(key // self._num_experts)
        return heap is not None and heap.discard(key)

    def demote(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self:
                self._heaps[key // self._num_experts].set(key, self._before.get(key, cold_stamp(0, self._clock)))

    def settled(self) -> None:
        self._before.clear()

    def _visit(self, layer_idx: int, count: int) -> None:
        if layer_idx not in self._heaps:
            self._heaps[layer_idx], self._now[layer_idx] = StampHeap(), 0.0
            insort(self._layers, layer_idx)
        self._now[layer_idx] += count / self.visits_per_unit
        self._layer_idx = layer_idx
        self._source_idx = None

    def _left(self, layer_idx: int, stamp: float) -> float:
        """What is left of a stamp now: minus the visits since the use; cold ones are left as they are."""
        return stamp - self._now[layer_idx] if stamp >= 0 else stamp

    def _choose_source(self) -> bool:
        """Find the layer to evict from, by bounds, and up to which stamp it stays the one; False: nothing is left."""
        here = bisect_left(self._layers, self._layer_idx)
        # The farthest next visit first, so that the first of equals wins; nearest is the current layer, in use now.
        farthest_first = self._layers[:here][::-1] + self._layers[here:][::-1]
        least = following = math.inf
        source_at = following_at = -1
        for at, layer_idx in enumerate(farthest_first):
            heap = self._heaps[layer_idx].heap
            if not heap:
                continue
            left = heap[0][0]
            if left >= 0:
                left -= self._now[layer_idx]
            if left < least:
                following, following_at = least, source_at
                least, source_at = left, at
            elif left < following:
                following, following_at = left, at
        self._source_idx = farthest_first[source_at] if source_at >= 0 else None
        self._next, self._before_next = following, source_at < following_at
        return source_at >= 0

    def _used(self, old: float | None) -> float:
        """Stamp of a key used in this visit whose stamp was `old`; None: any, or admitted now."""
        return self._now[self._layer_idx]


class LfruOrder(LruOrder):
    """Frequency and recency in one number (LRFU, Lee et al. 2001): a use counts 1 and halves every four visits.

    The stamp is log2(sum of 2^(visit of use / 4)), so that stamps need no ageing.
    """

    visits_per_unit = 4.0

    def touch_all(self, layer_idx: int, keys: Sequence[int]) -> None:
        self.begin_request(layer_idx, scan=False, speculative=False)
        for key in keys:
            self.touch(key, 1)

    def touch_unions(self, layer_idx: int, keys: NDArray[np.int64], without: AbstractSet[int]) -> None:
        for union in np.sort(keys, axis=1).tolist():
            self.touch_all(layer_idx, [key for key in union if key not in without])

    def _used(self, old: float | None) -> float:
        now = self._now[self._layer_idx]
        return now if old is None or old < 0 else now + math.log2(1.0 + 2.0 ** (old - now))


class ClockOrder:
    """Textbook LRU: the key whose last use lies farthest back goes first, whatever its layer."""

    by_layer = False

    def __init__(self, slots: int, num_experts: int) -> None:
        self._heap = StampHeap()
        self._clock = 0
        self._scan = False
        self._speculative = False
        self._before: dict[int, float] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._heap.stamps

    def keys(self) -> Iterable[int]:
        return self._heap.stamps.keys()

    def begin_request(self, layer_idx: int, *, scan: bool, speculative: bool) -> None:
        self._scan, self._speculative = scan, speculative

    def end_request(self) -> None:
        self._heap.release_all()

    def admit(self, key: int, rows: int) -> None:
        self._clock += 1
        self._heap.set(key, cold_stamp(rows, self._clock) if self._scan else self._clock)

    def touch(self, key: int, rows: int) -> None:
        self._clock += 1
        old = self._heap.stamps[key]
        if self._scan:
            if old < 0:
                self._heap.set(key, max(old, cold_stamp(rows, self._clock)))
            return
        if self._speculative:
            self._before[key] = old
        self._heap.set(key, self._clock)

    def touch_all(self, layer_idx: int, keys: Sequence[int]) -> None:
        self.begin_request(layer_idx, scan=False, speculative=False)
        for key in keys:
            self.touch(key, 1)

    def touch_unions(self, layer_idx: int, keys: NDArray[np.int64], without: AbstractSet[int]) -> None:
        for union in np.sort(keys, axis=1).tolist():
            self.touch_all(layer_idx, [key for key in union if key not in without])

    def victim(self, keep: AbstractSet[int]) -> int | None:
        return self._heap.pop_least(keep)

    def release(self, key: int) -> None:
        self._heap.release(key)

    def discard(self, key: int) -> bool:
        return self._heap.discard(key)

    def demote(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self:
                self._heap.set(key, self._before.get(key, cold_stamp(0, self._clock)))

    def settled(self) -> None:
        self._before.clear()


class SlruOrder(ClockOrder):
    """Segmented LRU: a second use protects; four fifths of the slots at most are protected."""

    def __init__(self, slots: int, num_experts: int) -> None:
        super().__init__(slots, num_experts)
        self._most = slots * 4 // 5
        self._protected = StampHeap()

    def __contains__(self, key: int) -> bool:
        return key in self._heap.stamps or key in self._protected.stamps

    def keys(self) -> Iterable[int]:
        return [*self._heap.stamps, *self._protected.stamps]

    def end_request(self) -> None:
        self._heap.release_all()
        self._protected.release_all()

    def touch(self, key: int, rows: int) -> None:
        if self._scan or self._most == 0:
            if key in self._heap.stamps:
                super().touch(key, rows)
            return
        self._clock += 1
        if self._speculative:
            self._before[key] = self._heap.stamps.get(key, math.inf)  # inf: was protected already
        self._heap.discard(key)
        self._protected.set(key, self._clock)
        if len(self._protected.stamps) > self._most:
            oldest = self._protected.pop_least()
            assert oldest is not None
            self._clock += 1
            self._heap.set(oldest, self._clock)

    def victim(self, keep: AbstractSet[int]) -> int | None:
        key = self._heap.pop_least(keep)
        return key if key is not None else self._protected.pop_least(keep)

    def release(self, key: int) -> None:
        self._heap.release(key)
        self._protected.release(key)

    def discard(self, key: int) -> bool:
        return self._heap.discard(key) or self._protected.discard(key)

    def demote(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self and self._before.get(key) != math.inf:
                self._protected.discard(key)
                self._heap.set(key, self._before.get(key, cold_stamp(0, self._clock)))
