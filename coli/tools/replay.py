"""What other policies and budgets would have read for a recorded run.

Drives the engine's own policy objects, so replaying the recorded setup gives the run's own hit counts. Belady, which
knows the future and may keep anything or nothing of a union, bounds them all.
"""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli.store.orders import ClockOrder, EvictionOrder, LfruOrder, LruOrder, SlruOrder
from coli.store.pins import most_used
from coli.store.policy import ResidencyPolicy
from coli.store.pools import plan_pools
from coli.tools.trace import Commit, HitCounts, Setup, Trace, Union

ORDERS: Mapping[str, Callable[[int, int], EvictionOrder]] = {
    "lru": LruOrder,
    "lfru": LfruOrder,
    "clock": ClockOrder,
    "slru": SlruOrder,
}
POLICIES = (*ORDERS, "pinned", "belady")
_PINNED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Replay:
    """One simulated policy at one budget, counted after the warm-up; bytes are those of the misses."""

    policy: str
    capacity_bytes: int
    counts: HitCounts
    bytes_read: int
    tokens: int

    @property
    def bytes_per_token(self) -> float:
        """Of everything read, prefill included, per committed decode token."""
        return self.bytes_read / max(1, self.tokens)


def replay_setup(trace: Trace, setup: Setup, order: Callable[[int, int], EvictionOrder] = LruOrder) -> HitCounts:
    """Hit counts of a setup from a cold start; of the trace's own setup: what the run counted."""
    return _drive(_policy(trace, setup, order), trace, 0)[0]


def replay(
    trace: Trace,
    policy: str,
    capacity_bytes: int,
    *,
    cap: int | None = None,
    per_layer: bool = False,
    pinned: Collection[int] = (),
    warmup: float = 0.0,
) -> Replay:
    """Simulate `policy` (of POLICIES) with `capacity_bytes` for experts.

    Args:
        cap, per_layer: places of each layer's own, as in `plan_pools`.
        pinned: keys; empty with policy "pinned": the most used of the warm-up, in half the capacity.
        warmup: share of the trace's events that fills the cache and is not counted.

    Raises:
        MemoryBudgetError: the capacity does not hold one record.
    """
    model = trace.model
    first = int(len(trace.events) * warmup)
    if policy == "pinned" and not pinned:
        pinned, _ = most_used(_use(trace, first), model.record_bytes, capacity_bytes * _PINNED_SHARE)
    plan = plan_pools(
        model.record_bytes,
        model.num_layers,
        model.num_experts,
        model.num_experts_per_tok,
        capacity_bytes,
        cap=cap,
        per_layer=per_layer,
        pinned=pinned,
    )
    setup = Setup(plan.pool_of_layer, plan.pool_sizes, tuple(pinned))
    if policy == "belady":
        counts, bytes_read = _belady(trace, setup, first)
    else:
        counts, bytes_read = _drive(_policy(trace, setup, ORDERS.get(policy, LruOrder)), trace, first)
    tokens = sum(len(event.rows) for i, event in enumerate(trace) if i >= first and isinstance(event, Commit))
    return Replay(policy, capacity_bytes, counts, bytes_read, tokens)


def compare(trace: Trace, policies: Sequence[str], capacities: Sequence[int], *, warmup: float = 0.5) -> list[Replay]:
    """Every policy at every capacity, warmed up by the first half of the trace and judged on the second."""
    return [replay(trace, policy, capacity, warmup=warmup) for capacity in capacities for policy in policies]


def _policy(trace: Trace, setup: Setup, order: Callable[[int, int], EvictionOrder]) -> ResidencyPolicy:
    model = trace.model
    return ResidencyPolicy(
        model.num_layers, model.num_experts, setup.pool_of_layer, setup.pool_sizes, pinned=setup.pinned, order=order
    )


def _drive(policy: ResidencyPolicy, trace: Trace, first: int) -> tuple[HitCounts, int]:
    bytes_read, before = 0, HitCounts()
    for i, event in enumerate(trace):
        if i == first:
            bytes_read, before = 0, HitCounts.of(policy)
        if isinstance(event, Commit):
            policy.settle(event.rows)
        else:
            plan = policy.request(event.layer_idx, event.expert_ids, prefill=event.prefill)
            bytes_read += len(plan.admissions) * trace.model.record_bytes[event.layer_idx]
    return _since(HitCounts.of(policy), before), bytes_read


def _belady(trace: Trace, setup: Setup, first: int) -> tuple[HitCounts, int]:
    """Keep, after every union, the keys of the pool that are wanted soonest (MIN with bypass)."""
    E = trace.model.num_experts
    unions = [
        (i, event, (event.layer_idx * E + np.unique(event.expert_ids)).tolist())
        for i, event in enumerate(trace)
        if isinstance(event, Union)
    ]
    upcoming: list[list[int | None]] = []
    seen: dict[int, int] = {}
    for n in range(len(unions) - 1, -1, -1):
        keys = unions[n][2]
        upcoming.append([seen.get(key) for key in keys])
        if unions[n][0] >= first:  # hits of the warm-up are worth nothing
            seen.update((key, n) for key in keys)
    upcoming.reverse()

    held: list[dict[int, int]] = [{} for _ in setup.pool_sizes]  # key -> index of the union that wants it next
    heaps: list[list[tuple[int, int]]] = [[] for _ in setup.pool_sizes]
    totals = {True: [0, 0], False: [0, 0]}  # by prefill: hits, misses
    bytes_read = 0
    for (i, event, keys), following in zip(unions, upcoming, strict=True):
        pool_idx = setup.pool_of_layer[event.layer_idx]
        assert pool_idx is not None
        pool, heap = held[pool_idx], heaps[pool_idx]
        misses = sum(key not in pool for key in keys)
        if i >= first:
            totals[event.prefill][0] += len(keys) - misses
            totals[event.prefill][1] += misses
            bytes_read += misses * trace.model.record_bytes[event.layer_idx]
        for key, wanted in zip(keys, following, strict=True):
            if wanted is None:
                pool.pop(key, None)
            else:
                pool[key] = wanted
                heapq.heappush(heap, (-wanted, key))
        while len(pool) > setup.pool_sizes[pool_idx].slots:
            wanted, key = heapq.heappop(heap)
            if pool.get(key) == -wanted:
                del pool[key]
    counts = HitCounts(
        hits=totals[False][0], misses=totals[False][1], prefill_hits=totals[True][0], prefill_misses=totals[True][1]
    )
    return counts, bytes_read


def _use(trace: Trace, last: int) -> NDArray[np.float64]:
    """Selections (L, E) of the first `last` events."""
    use = np.zeros((trace.model.num_layers, trace.model.num_experts), np.float64)
    for i, event in enumerate(trace):
        if i >= last:
            break
        if isinstance(event, Union):
            np.add.at(use[event.layer_idx], event.expert_ids.ravel(), 1.0)
    return use


def _since(after: HitCounts, before: HitCounts) -> HitCounts:
    return HitCounts(*(getattr(after, name) - getattr(before, name) for name in HitCounts.__slots__))
