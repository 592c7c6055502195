"""Which experts stay in memory: pure bookkeeping on integer keys; no bytes, no threads, no clock.

The engine's store and the offline replay drive the same object with the same unions (`request`) and the same commits
(`settle`), so simulated and real hit counts are equal. Hits are decided at the union request, whatever arrives when.
A key is `layer_idx * num_experts + expert_id`. Called by the one thread that runs the model.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coli.store.orders import EvictionOrder, LruOrder

# Forwards of one row, all of it resident, that wait to be accounted for together.
QUIET_FORWARDS = 32
# Records of a union that may be in memory at once while it recycles its own slots: reads in flight plus the one in use.
OVERLAP = 8


class Admission(NamedTuple):
    """One miss: `expert_id` takes the place of `evicted` (a key), or a free one (None).

    `after_use`: the evicted key belongs to the same union and comes earlier in it: first it has to be used.
    """

    expert_id: int
    evicted: int | None
    after_use: bool = False


@dataclass(frozen=True, slots=True)
class UnionPlan:
    """What one union does to the cache; expert ids ascend everywhere.

    `dropped` are keys that leave when the union has been used: the pool borrowed transient places for them.
    """

    expert_ids: list[int]
    pinned: list[int]
    cached: list[int]
    admissions: list[Admission]
    dropped: list[int]


@dataclass(slots=True)
class UnionCounts:
    """Distinct experts of all unions so far, by what the request found."""

    unions: int = 0
    hits: int = 0
    pinned_hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class PoolSize:
    """`slots` places, at least one; a union may borrow `transient_slots` more until it has been used.

    Borrowed places let reads overlap in pools that hold less than a union; pools may share them, since one union runs
    at a time.
    """

    slots: int
    transient_slots: int = 0


@dataclass(slots=True)
class Pool:
    """Layers that share `slots` places; `free` of them hold nothing."""

    slots: int
    transient_slots: int
    order: EvictionOrder
    free: int = field(init=False)

    def __post_init__(self) -> None:
        self.free = self.slots


class ResidencyPolicy:
    """Pins, pools and their eviction orders behind two verbs: `request` a union, `settle` a forward."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        pool_of_layer: Sequence[int | None],
        pool_sizes: Sequence[PoolSize],
        *,
        pinned: Iterable[int] = (),
        order: Callable[[int, int], EvictionOrder] = LruOrder,
    ) -> None:
        """
        Args:
            pool_of_layer: (L,) index into `pool_sizes`, None for a layer without routed experts.
            pool_sizes: places of each pool; pinned experts need none of them.
            pinned: keys that are always resident.
            order: makes the eviction order of a pool from its slots and num_experts.
        """
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.pools = [Pool(size.slots, size.transient_slots, order(size.slots, num_experts)) for size in pool_sizes]
        self.pinned = frozenset(pinned)
        self._counts = UnionCounts()
        self.prefill_counts = UnionCounts()
        self.told_usage: NDArray[np.int64] = np.zeros(num_layers * num_experts, np.int64)
        self.pool_of_layer = list(pool_of_layer)
        self._forward: list[tuple[int, NDArray[np.int64]]] = []  # decode unions (layer, keys (S, A)) of this forward
        self._untold = 0  # how many of the last of them the eviction orders have not heard of
        # forwards of one row, all of it resident, as (layers, keys (n, A)): the running one, and settled ones untold
        self._row: tuple[list[int], NDArray[np.int64]] | None = None
        self._quiet: list[tuple[list[int], NDArray[np.int64]]] = []
        self._by_layer = all(pool.order.by_layer for pool in self.pools)

    def pool_of(self, key: int) -> int:
        pool = self.pool_of_layer[key // self.num_experts]
        assert pool is not None
        return pool

    @property
    def usage(self) -> NDArray[np.int64]:
        """Selections by committed rows, (L * E,): what the usage history learns from."""
        self.catch_up()
        return self.told_usage

    def request(self, layer_idx: int, expert_ids: NDArray[np.int64], *, prefill: bool) -> UnionPlan:
        """Decide hits, misses and evictions of one layer's union, expert_ids (S, A), and account for them."""
        self._begin(layer_idx)
        self._tell()
        S = expert_ids.shape[0]
        if prefill:
            unique, row_counts = np.unique(expert_ids, return_counts=True)
            union, rows = unique.tolist(), row_counts.tolist()
            np.add.at(self.told_usage, layer_idx * self.num_experts + unique, row_counts)
        else:
            union, rows = sorted(set(expert_ids.ravel().tolist())), []
            self._forward.append((layer_idx, expert_ids + layer_idx * self.num_experts))
        return self._place(layer_idx, union, rows, prefill, speculative=S > 1 and not prefill)

    def touched(self, layer_idx: int, expert_ids: NDArray[np.int64], *, prefill: bool) -> None:
        """`request` of a union whose experts are all resident, in a microsecond for one row."""
        if prefill or expert_ids.shape[0] > 1:
            plan = self.request(layer_idx, expert_ids, prefill=prefill)
            assert not plan.admissions, "touched() is for unions that are wholly resident"
            return
        self._begin(layer_idx)
        self._forward.append((layer_idx, expert_ids + layer_idx * self.num_experts))
        self._untold += 1

    def touched_all(self, layer_idxs: list[int], expert_ids: NDArray[np.int64]) -> None:
        """`touched` for layers of a forward of one row, in their order; expert_ids (n, A)."""
        self._begin(layer_idxs[0])
        self._row = layer_idxs, expert_ids + np.array(layer_idxs)[:, None] * self.num_experts
        if self._forward or not self._by_layer:
            self._unfold()

    def settle(self, committed_rows: int | Sequence[int] | NDArray[np.int64] | None) -> None:
        """End a forward: count the committed rows' selections, demote what only the others used.

        Args:
            committed_rows: how many leading rows, or which rows, were committed; None: all.
        """
        if self._row is not None and _includes_a_row(committed_rows):
            self._quiet.append(self._row)
            self._row = None
            if len(self._quiet) == QUIET_FORWARDS:
                self.catch_up()
            return
        self._tell()
        counted = []
        for layer_idx, keys in self._forward:  # keys (S, A)
            if committed_rows is None:
                kept = keys
            elif isinstance(committed_rows, (int, np.integer)):
                kept = keys[:committed_rows]
            else:
                kept = keys[np.asarray(committed_rows, np.int64)]
            counted.append(kept.ravel())
            if len(kept) < len(keys) and len(keys) > 1:
                used = set(kept.ravel().tolist())
                self._order(layer_idx).demote(sorted(set(keys.ravel().tolist()) - used))
        if counted:
            np.add.at(self.told_usage, np.concatenate(counted), 1)
        self._forward.clear()
        for pool in self.pools:
            pool.order.settled()

    @property
    def counts(self) -> UnionCounts:
        """Of decode unions."""
        self._tell()
        return self._counts

    @property
    def told_counts(self) -> tuple[UnionCounts, UnionCounts]:
        """Of decode and prefill unions, without those of up to QUIET_FORWARDS last forwards: any thread may ask."""
        return self._counts, self.prefill_counts

    def discard(self, key: int) -> None:
        """Forget a resident key (its read failed or was given up); its place is free again."""
        self._tell()
        pool = self.pools[self.pool_of(key)]
        if pool.order.discard(key):
            pool.free += 1

    def can_shrink(self, pool_idxs: Sequence[int], places: int) -> bool:
        """Whether every pool keeps a place when `places` are taken away."""
        return sum(self.pools[i].slots - 1 for i in pool_idxs) >= places

    def shrink(self, pool_idxs: Sequence[int], places: int) -> list[int]:
        """Take `places` away for good, empty ones of the largest pools first; return the keys that had to leave."""
        assert self.can_shrink(pool_idxs, places)
        pools = [self.pools[i] for i in pool_idxs]
        self._tell()
        evicted = []
        for _ in range(places):
            pool = max((p for p in pools if p.slots > 1), key=lambda p: (p.free > 0, p.slots))
            if pool.free:
                pool.free -= 1
            else:
                coldest = pool.order.victim(frozenset())
                assert coldest is not None
                evicted.append(coldest)
            pool.slots -= 1
        return evicted

    def resident(self) -> list[int]:
        """Cached keys of every pool, ascending; pins not included."""
        return sorted(key for pool in self.pools for key in pool.order.keys())  # noqa: SIM118

    def _begin(self, layer_idx: int) -> None:
        """A layer at or before the last one starts a new forward: without a settle, all rows were committed."""
        if self._row is not None:
            if layer_idx <= self._row[0][-1]:
                self.settle(None)
            else:
                self._unfold()
        if self._forward and layer_idx <= self._forward[-1][0]:
            self.settle(None)

    def _tell(self) -> None:
        """Pass unions noted by `touched` on to the eviction orders, in bulk and before anything can depend on them."""
        self.catch_up()
        self._unfold()
        if not self._untold:
            return
        noted = self._forward[-self._untold :]
        self._untold = 0
        unions = np.sort(np.concatenate([keys for _, keys in noted]), axis=1).tolist()
        for (layer_idx, _), union in zip(noted, unions, strict=True):
            touched = [key for key in union if key not in self.pinned] if self.pinned else union
            self._order(layer_idx).touch_all(layer_idx, touched)
            self._counts.pinned_hits += len(union) - len(touched)
            self._counts.hits += len(union)
        self._counts.unions += len(unions)

    def _unfold(self) -> None:
        """Note the forward of `touched_all` layer by layer after all."""
        if self._row is not None:
            (layer_idxs, keys), self._row = self._row, None
            self._forward += zip(layer_idxs, keys[:, None], strict=True)
            self._untold += len(layer_idxs)

    def catch_up(self) -> None:
        """Account for the forwards in `_quiet`, a layer at a time: all that are settled are in `told_counts` then."""
        quiet, self._quiet = self._quiet, []
        for layer_idxs, forwards in groupby(quiet, key=itemgetter(0)):
            keys = np.array([keys for _, keys in forwards])  # (forwards, n, A)
            np.add.at(self.told_usage, keys.ravel(), 1)
            for at, layer_idx in enumerate(layer_idxs):
                self._order(layer_idx).touch_unions(layer_idx, keys[:, at], self.pinned)
            self._counts.unions += len(keys) * len(layer_idxs)
            self._counts.hits += keys.size
            if self.pinned:
                self._counts.pinned_hits += int(np.isin(keys, list(self.pinned)).sum())

    def _order(self, layer_idx: int) -> EvictionOrder:
        pool = self.pool_of_layer[layer_idx]
        assert pool is not None
        return self.pools[pool].order

    def _place(
        self, layer_idx: int, union: list[int], rows: list[int], prefill: bool, *, speculative: bool
    ) -> UnionPlan:
        base = layer_idx * self.num_experts
        pinned = [e for e in union if base + e in self.pinned] if self.pinned else []
        wanted = [e for e in union if base + e not in self.pinned] if pinned else union
        pool_idx = self.pool_of_layer[layer_idx]
        assert pool_idx is not None, f"layer {layer_idx} has no experts"
        pool = self.pools[pool_idx]
        order = pool.order
        order.begin_request(layer_idx, scan=prefill, speculative=speculative)
        counts = self.prefill_counts if prefill else self._counts
        admissions: list[Admission] = []
        dropped: list[int] = []
        cached: list[int] = []
        if prefill:
            row_count = dict(zip(union, rows, strict=True))
            dropped = self._walk(pool, base, wanted, row_count, cached, admissions)
        else:
            missing = []
            for e in wanted:
                if base + e in order:
                    order.touch(base + e, 1)
                    cached.append(e)
                else:
                    missing.append(e)
            if missing:
                dropped = self._walk(pool, base, cached + missing, None, [], admissions)
        counts.unions += 1
        counts.pinned_hits += len(pinned)
        counts.hits += len(cached) + len(pinned)
        counts.misses += len(admissions)
        counts.evictions += sum(a.evicted is not None for a in admissions) + len(dropped)
        return UnionPlan(union, pinned, cached, admissions, dropped)

    def _walk(
        self,
        pool: Pool,
        base: int,
        members: list[int],
        row_count: dict[int, int] | None,
        cached: list[int],
        admissions: list[Admission],
    ) -> list[int]:
        """Admit the absent of `members`, listed in the order they will be used; return the keys to drop at the end.

        A place comes from outside the union first; once the union has to live on its own places, a member may give up
        its place OVERLAP members later, when it has been used.
        """
        order = pool.order
        scan = row_count is not None
        borrowed = 0
        used: set[int | None] = set()
        keep = {base + e for e in members}
        for position, e in enumerate(members):
            key = base + e
            if position >= OVERLAP:
                passed = base + members[position - OVERLAP]
                keep.discard(passed)
                order.release(passed)
            rows = row_count[e] if row_count is not None else 1
            if key in order:
                if scan:
                    order.touch(key, rows)
                    cached.append(e)
                used.add(key)
                continue
            evicted: int | None = None
            if pool.free:
                pool.free -= 1
            elif borrowed < pool.transient_slots:
                borrowed += 1
            else:
                evicted = order.victim(keep)
                if evicted is None:
                    evicted = self._recycle(order, base, members, position)
            after_use = evicted in used
            used.add(key)
            order.admit(key, rows)
            admissions.append(Admission(e, evicted, after_use))
        order.end_request()
        dropped = []
        for _ in range(borrowed):
            surplus = order.victim(frozenset())
            assert surplus is not None
            dropped.append(surplus)
        return dropped

    @staticmethod
    def _recycle(order: EvictionOrder, base: int, members: list[int], position: int) -> int:
        """A place from the union itself: the member used longest ago, else the resident one used last of all.

        In the second case that member is read again when its turn comes, so the walk never waits for itself.
        """
        for e in [*members[:position], *reversed(members[position + 1 :])]:
            if order.discard(base + e):
                return base + e
        raise AssertionError("a pool without free places holds nothing")


def _includes_a_row(committed_rows: int | Sequence[int] | NDArray[np.int64] | None) -> bool:
    """Whether the one row of a forward is among its committed rows."""
    if committed_rows is None or isinstance(committed_rows, (int, np.integer)):
        return committed_rows is None or committed_rows > 0
    return len(committed_rows) > 0
