"""Eviction orders: which resident key of a pool goes first. Pure; used by the engine's store and by the replay.

Each order keeps one stamp per key, larger is safer, and a lazy heap of lower bounds: a touch is O(1), an eviction
O(log n) amortised. `LruOrder` is what the engine runs; the others are there to be compared with it.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol


class EvictionOrder(Protocol):
    """Resident, evictable keys of one pool, and which of them goes first."""

    def __contains__(self, key: int) -> bool: ...

    def keys(self) -> Iterable[int]: ...

    def begin_request(self, *, scan: bool, speculative: bool) -> None:
        """A union follows. `scan`: of a prefill flood; `speculative`: `demote` may have to undo its effect."""
        ...

    def end_request(self) -> None: ...

    def admit(self, key: int, rows: int) -> None:
        """Add an absent key that `rows` rows of the union chose."""
        ...

    def touch(self, key: int, rows: int) -> None:
        """A resident key is used again."""
        ...

    def touch_all(self, keys: Sequence[int]) -> None:
        """Resident keys are used again, outside of a request, one after the other."""
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
        self._heap: list[tuple[float, int]] = []
        self._entry: dict[int, float] = {}  # the one heap entry of a key that counts, at most its stamp
        self._bench: dict[int, float] = {}  # entries popped while kept: back into the heap on release

    def set(self, key: int, stamp: float) -> None:
        """Give `key` a stamp. Raising one costs nothing: the heap entry stays behind as a lower bound."""
        self.stamps[key] = stamp
        entry = self._entry.get(key)
        if entry is None or stamp < entry:
            self._bench.pop(key, None)
            self._entry[key] = stamp
            heapq.heappush(self._heap, (stamp, key))

    def discard(self, key: int) -> bool:
        if self.stamps.pop(key, None) is None:
            return False
        del self._entry[key]
        self._bench.pop(key, None)
        return True

    def pop_least(self, keep: AbstractSet[int] = frozenset()) -> int | None:
        """Remove and return the key of the least stamp outside `keep`; None: there is none."""
        heap, stamps, entries = self._heap, self.stamps, self._entry
        while heap:
            entry, key = heapq.heappop(heap)
            if entries.get(key) != entry:
                continue
            stamp = stamps[key]
            if stamp != entry:
                entries[key] = stamp
                heapq.heappush(heap, (stamp, key))
            elif key in keep:
                self._bench[key] = entry
            else:
                del stamps[key], entries[key]
                return key
        return None

    def release(self, key: int) -> None:
        entry = self._bench.pop(key, None)
        if entry is not None:
            heapq.heappush(self._heap, (entry, key))

    def release_all(self) -> None:
        for key, entry in self._bench.items():
            heapq.heappush(self._heap, (entry, key))
        self._bench.clear()


class LruOrder:
    """Least recently used first; prefill floods enter a cold zone below everything that decoding used."""

    def __init__(self, slots: int) -> None:
        self._heap = StampHeap()
        self._stamps = self._heap.stamps
        self._clock = 0
        self._scan = False
        self._speculative = False
        self._before: dict[int, float] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._stamps

    def keys(self) -> Iterable[int]:
        return self._stamps.keys()

    def begin_request(self, *, scan: bool, speculative: bool) -> None:
        self._scan, self._speculative = scan, speculative

    def end_request(self) -> None:
        self._heap.release_all()

    def admit(self, key: int, rows: int) -> None:
        self._clock += 1
        self._heap.set(key, cold_stamp(rows, self._clock) if self._scan else self._warm(None))

    def touch(self, key: int, rows: int) -> None:
        self._clock += 1
        old = self._stamps[key]
        if self._scan:
            if old < 0:
                self._heap.set(key, max(old, cold_stamp(rows, self._clock)))
            return
        if self._speculative:
            self._before[key] = old
        self._stamps[key] = self._warm(old)  # only ever raised: the heap need not hear of it

    def touch_all(self, keys: Sequence[int]) -> None:
        first = self._clock + 1
        self._clock += len(keys)
        self._stamps.update(zip(keys, range(first, first + len(keys)), strict=True))

    def victim(self, keep: AbstractSet[int]) -> int | None:
        return self._heap.pop_least(keep)

    def release(self, key: int) -> None:
        self._heap.release(key)

    def discard(self, key: int) -> bool:
        return self._heap.discard(key)

    def demote(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self._stamps:
                self._heap.set(key, self._before.get(key, cold_stamp(0, self._clock)))

    def settled(self) -> None:
        self._before.clear()

    def _warm(self, old: float | None) -> float:
        """Stamp of a key used now whose stamp was `old`; None: admitted now."""
        return self._clock


class _OneByOne(LruOrder):
    """Orders whose touches depend on each other."""

    def touch_all(self, keys: Sequence[int]) -> None:
        self.begin_request(scan=False, speculative=False)
        for key in keys:
            self.touch(key, 1)


class LfruOrder(_OneByOne):
    """Frequency and recency in one number (LRFU, Lee et al. 2001): a use counts 1 and halves every `half_life` uses.

    The stamp is log2(sum of 2^(time of use / half_life)), so that stamps need no ageing.
    """

    def __init__(self, slots: int, half_life: float | None = None) -> None:
        super().__init__(slots)
        self._half_life = half_life if half_life is not None else 4.0 * slots

    def _warm(self, old: float | None) -> float:
        now = self._clock / self._half_life
        return now if old is None or old < 0 else now + math.log2(1.0 + 2.0 ** (old - now))


class SlruOrder(_OneByOne):
    """Segmented LRU: a second use protects; four fifths of the slots at most are protected."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._most = slots * 4 // 5
        self._protected = StampHeap()

    def __contains__(self, key: int) -> bool:
        return key in self._stamps or key in self._protected.stamps

    def keys(self) -> Iterable[int]:
        return [*self._stamps, *self._protected.stamps]

    def end_request(self) -> None:
        self._heap.release_all()
        self._protected.release_all()

    def touch(self, key: int, rows: int) -> None:
        if self._scan or self._most == 0:
            if key in self._stamps:
                super().touch(key, rows)
            return
        self._clock += 1
        old = self._protected.stamps.get(key, self._stamps.get(key))
        if self._speculative and old is not None:
            self._before[key] = old if key in self._stamps else math.inf
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
            if key in self and self._before.get(key) != math.inf:  # inf: was protected already, stays
                self._protected.discard(key)
                self._heap.set(key, self._before.get(key, cold_stamp(0, self._clock)))
