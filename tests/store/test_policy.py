"""The policy's decisions: exact LRU, floods that leave no trace, waves that always make progress."""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store.fake_records import routes

from coli.store.orders import ClockOrder, EvictionOrder, LfruOrder, LruOrder, SlruOrder, StampHeap
from coli.store.policy import OVERLAP, PoolSize, ResidencyPolicy, UnionPlan

L, E, A = 4, 16, 3
ORDERS = [LruOrder, LfruOrder, ClockOrder, SlruOrder]


def one_pool(slots: int, order: Callable[[int, int], EvictionOrder] = LruOrder, **kwargs: object) -> ResidencyPolicy:
    return ResidencyPolicy(L, E, [0] * L, [PoolSize(slots)], order=order, **kwargs)  # type: ignore[arg-type]


def request(policy: ResidencyPolicy, layer_idx: int, *ids: int, prefill: bool = False) -> UnionPlan:
    return policy.request(layer_idx, np.array([ids], np.int64), prefill=prefill)


def naive_clock(slots: int, unions: list[tuple[int, list[int]]]) -> list[int]:
    """Hits per union of a plain LRU whose unions fit, hits used before misses."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for layer_idx, ids in unions:
        keys = [layer_idx * E + e for e in ids]
        present = [key for key in keys if key in held]
        hits.append(len(present))
        for key in present:
            held.move_to_end(key)
        for key in (key for key in keys if key not in present):
            if len(held) == slots:
                held.popitem(last=False)
            held[key] = None
    return hits


def naive_visits(slots: int, unions: list[tuple[int, list[int]]]) -> list[int]:
    """Hits per union of an LRU that counts visits of the layer since the last use, found by looking at every key."""
    used: dict[int, int] = {}
    visits = [0] * L
    hits = []
    for layer_idx, ids in unions:
        visits[layer_idx] += 1
        keys = [layer_idx * E + e for e in ids]
        present = [key for key in keys if key in used]
        hits.append(len(present))
        used.update((key, visits[layer_idx]) for key in present)

        def rank(key: int, now: int = layer_idx) -> tuple[int, int, int]:
            layer = key // E
            next_visit = (layer - now) % L  # 0: the current layer, whose union is in use
            return used[key] - visits[layer], -next_visit, key

        for key in (key for key in keys if key not in present):
            if len(used) == slots:
                del used[min((k for k in used if k not in keys), key=rank)]
            used[key] = visits[layer_idx]
    return hits


@pytest.mark.parametrize(("order", "naive"), [(LruOrder, naive_visits), (ClockOrder, naive_clock)])
@given(slots=st.integers(A, L * E), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_decoding_equals_a_cache_that_looks_at_every_key(
    order: Callable[[int, int], EvictionOrder],
    naive: Callable[[int, list[tuple[int, list[int]]]], list[int]],
    slots: int,
    seed: int,
) -> None:
    policy = one_pool(slots, order)
    unions = [
        (layer_idx, ids[0].tolist()) for forward in routes(seed, 20, L, E, A) for layer_idx, ids in enumerate(forward)
    ]
    hits = []
    for layer_idx, ids in unions:
        before = policy.counts.hits
        request(policy, layer_idx, *ids)
        hits.append(policy.counts.hits - before)
    assert hits == naive(slots, unions)


@given(st.lists(st.tuples(st.sampled_from("spdr"), st.integers(0, 15), st.integers(0, 99)), max_size=200))
@settings(max_examples=100)
def test_stamp_heap_pops_the_least_stamp(steps: list[tuple[str, int, int]]) -> None:
    heap, twin = StampHeap(), {}
    keep: set[int] = set()
    for what, key, stamp in steps:
        if what == "s":
            heap.set(key, stamp)
            twin[key] = stamp
        elif what == "d":
            assert heap.discard(key) == (twin.pop(key, None) is not None)
        elif what == "r":
            keep ^= {key}
            heap.release_all()
        else:
            least = min(((s, k) for k, s in twin.items() if k not in keep), default=None)
            assert heap.pop_least(keep) == (least[1] if least else None)
            heap.release_all()
            if least:
                del twin[least[1]]
    assert heap.stamps == twin


def play(policy: ResidencyPolicy, plan: UnionPlan, layer_idx: int, places: set[int], size: int, prefill: bool) -> None:
    """Carry a plan out the way the store does; the walk may never need more than `size` places or wait for itself."""
    base = layer_idx * E
    misses = {base + a.expert_id for a in plan.admissions}
    order = plan.expert_ids if prefill else [*plan.cached, *(a.expert_id for a in plan.admissions)]
    used: set[int] = set()
    waiting = list(plan.admissions)

    def issue() -> None:
        while waiting and not (waiting[0].after_use and waiting[0].evicted not in used):
            admission = waiting.pop(0)
            if admission.evicted is not None:
                places.remove(admission.evicted)
            assert base + admission.expert_id not in places
            places.add(base + admission.expert_id)
            assert len(places) <= size

    for e in order:
        if e in plan.pinned:
            continue
        issue()
        assert base + e in places, "the walk waits for itself"
        used.add(base + e)
    issue()
    assert not waiting
    places.difference_update(plan.dropped)
    assert misses <= used
    assert places == set(policy.resident())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [[PoolSize(n)] for n in (1, 2, 5, 20)] + [[PoolSize(n, OVERLAP)] * L for n in (1, 4)])
@pytest.mark.parametrize("rows", [1, 6])
def test_every_plan_can_be_carried_out_in_its_places(
    order: Callable[[int, int], EvictionOrder], sizes: list[PoolSize], rows: int
) -> None:
    rng = np.random.default_rng(7)
    pool_of_layer = [0] * L if len(sizes) == 1 else list(range(L))
    policy = ResidencyPolicy(L, E, pool_of_layer, sizes, order=order, pinned={3, E + 1})
    places: set[int] = set()
    total = sum(size.slots for size in sizes) + sizes[0].transient_slots
    for forward in routes(11, 60, L, E, A, rows):
        prefill = bool(rng.integers(0, 2))
        for layer_idx, ids in enumerate(forward):
            before = set(policy.resident())
            union = set(np.unique(ids).tolist())
            plan = policy.request(layer_idx, ids, prefill=prefill)
            assert plan.expert_ids == sorted(union)
            assert {layer_idx * E + e for e in plan.cached} <= before
            assert {*plan.pinned, *plan.cached, *(a.expert_id for a in plan.admissions)} == union
            assert len(plan.pinned) + len(plan.cached) + len(plan.admissions) == len(union)
            play(policy, plan, layer_idx, places, total, prefill)
        policy.settle(int(rng.integers(1, rows + 1)))
        assert places == set(policy.resident())


def flood(policy: ResidencyPolicy, chunks: int = 1) -> None:
    for _ in range(chunks):
        for layer_idx in range(L):
            policy.request(layer_idx, np.arange(E, dtype=np.int64)[:, None], prefill=True)


@pytest.mark.parametrize("order", ORDERS)
def test_a_prefill_flood_takes_only_the_places_it_needs(order: Callable[[int, int], EvictionOrder]) -> None:
    policy = one_pool(24, order)
    for _ in range(3):
        for layer_idx in range(L):
            request(policy, layer_idx, 1, 5, 7, 9, 12)
    warm = set(policy.resident())
    flood(policy, chunks=3)
    assert len(warm - set(policy.resident())) <= OVERLAP - (24 - len(warm))


def test_a_flood_that_comes_round_again_finds_what_fits() -> None:
    policy = one_pool(40)
    flood(policy, chunks=6)
    counts = policy.prefill_counts
    assert counts.hits >= 5 * (40 - OVERLAP)


def test_of_a_flood_the_most_chosen_experts_stay() -> None:
    policy = one_pool(6 + OVERLAP)
    popular = [3, 11]
    for layer_idx in range(L):
        ids = np.array([[e, *popular] for e in range(E) if e not in popular], np.int64)
        policy.request(layer_idx, ids, prefill=True)
    assert {layer_idx * E + e for layer_idx in range(L - 1) for e in popular} <= set(policy.resident())


@pytest.mark.parametrize("order", ORDERS)
def test_rejected_rows_leave_no_trace(order: Callable[[int, int], EvictionOrder]) -> None:
    """What only rejected rows used goes first; what was there before keeps the rank it had."""
    policy = one_pool(6, order)
    request(policy, 0, 1, 2, 3)
    policy.settle(1)
    request(policy, 0, 4, 5)
    policy.settle(1)
    policy.request(0, np.array([[4, 4], [1, 6]], np.int64), prefill=False)  # row 1: an old one and a new one
    policy.settle(1)
    plan = request(policy, 1, 0)
    assert plan.admissions[0].evicted == 6
    plan = request(policy, 1, 1)
    assert plan.admissions[0].evicted == 1


def test_settle_takes_rows_of_a_tree() -> None:
    policy = one_pool(L * E)
    policy.request(0, np.array([[1], [2], [3]], np.int64), prefill=False)
    policy.settle(np.array([0, 2]))
    assert policy.usage[:E].nonzero()[0].tolist() == [1, 3]


def test_a_forward_without_settle_counts_as_committed() -> None:
    policy = one_pool(L * E)
    for _ in range(2):
        for layer_idx in range(L):
            request(policy, layer_idx, 2, 4)
    policy.settle(1)
    assert policy.usage.sum() == 2 * L * 2


def test_pinned_experts_need_no_place_and_never_leave() -> None:
    policy = one_pool(1, pinned={5})
    for ids in ([5, 6], [7, 8], [5, 9]):
        plan = request(policy, 0, *ids)
        assert plan.pinned == [e for e in ids if e == 5]
        assert all(a.evicted != 5 for a in plan.admissions)
    assert policy.counts.pinned_hits == 2


def test_pools_do_not_evict_from_each_other() -> None:
    policy = ResidencyPolicy(L, E, list(range(L)), [PoolSize(2)] * L)
    request(policy, 0, 1, 2)
    for layer_idx in range(1, L):
        request(policy, layer_idx, *range(10))
    assert request(policy, 0, 1, 2).cached == [1, 2]


def test_below_the_cliff_layers_do_not_push_each_other_out() -> None:
    """A textbook LRU of less than one token's cycle never hits: all keys leave before their layer comes round."""
    rates = []
    for order in (LruOrder, ClockOrder):
        policy = one_pool(L * A - A, order)
        for _ in range(20):
            for layer_idx in range(L):
                request(policy, layer_idx, 2, 5, 9)
            policy.settle(1)
        rates.append(policy.counts.hits / (policy.counts.hits + policy.counts.misses))
    assert rates[0] > 0.6
    assert rates[1] == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pinned", [(), (1, 2, E + 3)])
def test_forwards_told_together_leave_what_single_unions_leave(
    order: Callable[[int, int], EvictionOrder], pinned: tuple[int, ...]
) -> None:
    """`touched_all` and its waiting forwards, against `request` layer by layer: hits, usage, and every later victim."""
    rng = np.random.default_rng(5)
    together, single = (one_pool(L * E - 9, order, pinned=pinned) for _ in "ab")
    for policy in (together, single):
        for layer_idx in range(L):
            request(policy, layer_idx, *range(E))
            policy.settle(None)
    for step in range(150):
        if step % 40 == 39:  # a layer that misses, in the middle of a forward
            ids = np.array([[int(rng.integers(E))]])
            plans = [policy.request(2, ids, prefill=False) for policy in (together, single)]
            assert plans[0] == plans[1]
            together.settle(1)
            single.settle(1)
            continue
        resident = set(single.resident()) | set(pinned)
        held = [[e for e in range(E) if layer_idx * E + e in resident] for layer_idx in range(L)]
        ids = np.array([rng.choice(held[layer_idx], A, replace=False) for layer_idx in range(L)])
        together.touched_all(list(range(L)), ids)
        for layer_idx in range(L):
            single.request(layer_idx, ids[layer_idx][None], prefill=False)
        kept = step % 7 != 0
        together.settle(np.zeros(int(kept), np.int64))
        single.settle(np.zeros(int(kept), np.int64))
        if step % 11 == 0:
            assert together.counts == single.counts
    assert together.counts == single.counts
    assert together.usage.tolist() == single.usage.tolist()
    assert together.shrink([0], L * E - 9 - 1) == single.shrink([0], L * E - 9 - 1)
