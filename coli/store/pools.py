"""How many expert records stay in memory, and which layers share their places: arithmetic, before any byte is taken.

All layers share one pool per record size: the eviction order counts visits of a layer, so that layers do not push each
other out even below the cliff (one token's cycle, layers x experts_per_tok x record), where a textbook LRU never hits.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from coli.errors import MemoryBudgetError
from coli.store.policy import OVERLAP, PoolSize


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Places for records. `slots_of_size` is what has to be allocated, by record size in bytes."""

    pool_of_layer: tuple[int | None, ...]
    pool_sizes: tuple[PoolSize, ...]
    slots_of_size: dict[int, int]
    cycle_bytes: int
    capacity_bytes: int
    per_layer: bool
    everything: bool

    @property
    def nbytes(self) -> int:
        return sum(size * count for size, count in self.slots_of_size.items())


def cycle_bytes(record_bytes: Mapping[int, int], num_experts_per_tok: int) -> int:
    """Expert bytes one token uses: below this much memory a shared LRU cannot hit."""
    return sum(record_bytes.values()) * num_experts_per_tok


def plan_pools(
    record_bytes: Mapping[int, int],
    num_layers: int,
    num_experts: int,
    num_experts_per_tok: int,
    capacity_bytes: int,
    *,
    cap: int | None = None,
    per_layer: bool = False,
    pinned: Collection[int] = (),
    prefetch_slots: int = 0,
) -> PoolPlan:
    """Divide `capacity_bytes` among pins, pools and the places that reads pass through.

    Args:
        record_bytes: by layer index, of the layers that have routed experts.
        cap: places per layer at most (CAP); the layers then share nothing.
        per_layer: give each layer an equal share of its own, for comparison.
        pinned: keys that get a place each, outside of the pools.

    Raises:
        MemoryBudgetError: not even one record per record size fits beside the pins.
    """
    sizes = sorted(set(record_bytes.values()))
    layers_of_size = {size: [i for i, n in sorted(record_bytes.items()) if n == size] for size in sizes}
    pins_of_size = {size: sum(record_bytes[key // num_experts] == size for key in pinned) for size in sizes}
    pinned_bytes = sum(size * count for size, count in pins_of_size.items())
    cycle = cycle_bytes(record_bytes, num_experts_per_tok)
    unpinned = {size: len(layers_of_size[size]) * num_experts - pins_of_size[size] for size in sizes}
    total_bytes = sum(size * count for size, count in unpinned.items())
    room = capacity_bytes - pinned_bytes
    everything = cap is None and room >= total_bytes + prefetch_slots * sum(sizes)
    apart = not everything and (cap is not None or per_layer)

    pool_of_layer: list[int | None] = [None] * num_layers
    pools: list[PoolSize] = []
    slots_of_size: dict[int, int] = {}
    for size in sizes:
        layers = layers_of_size[size]
        share = unpinned[size] if everything else room * unpinned[size] // max(1, total_bytes)
        slots = min(share - prefetch_slots, unpinned[size])
        if slots < 1 and unpinned[size] > 0:
            raise MemoryBudgetError(
                f"experts: {capacity_bytes} bytes are left for experts, {pinned_bytes} of them pinned, and one record "
                f"takes {size}: raise --ram"
            )
        slots = max(1, slots)
        own = _own_slots(slots, len(layers), num_experts, cap) if apart else None
        if own is None:
            for layer_idx in layers:
                pool_of_layer[layer_idx] = len(pools)
            pools.append(PoolSize(slots))
        else:
            for layer_idx, quota in zip(layers, own, strict=True):
                pool_of_layer[layer_idx] = len(pools)
                pools.append(PoolSize(quota, OVERLAP))
            slots = sum(own) + OVERLAP
        slots_of_size[size] = slots + prefetch_slots + pins_of_size[size]
    return PoolPlan(
        pool_of_layer=tuple(pool_of_layer),
        pool_sizes=tuple(pools),
        slots_of_size=slots_of_size,
        cycle_bytes=cycle,
        capacity_bytes=capacity_bytes,
        per_layer=any(pool.transient_slots for pool in pools),
        everything=everything,
    )


def _own_slots(slots: int, layers: int, num_experts: int, cap: int | None) -> list[int] | None:
    """Places per layer beside the ones reads pass through; None: too few to give every layer one."""
    if slots < OVERLAP + layers:
        return None
    quota, rest = divmod(slots - OVERLAP, layers)
    if cap is not None and cap <= quota:
        quota, rest = cap, 0
    return [min(quota + (n < rest), num_experts) for n in range(layers)]
