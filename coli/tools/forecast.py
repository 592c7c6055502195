"""How many tokens per second a budget may give, from sizes and measured speeds: a band, with its assumptions.

The slow end takes routes without any preference, so that the hit rate is the share of experts in memory, and no overlap
of reading and computing. The fast end takes clearly skewed routes (of what would miss, the share in memory hits after
all) and full overlap. Below one token cycle of expert memory nothing hits at the slow end.
"""

from dataclasses import dataclass

from coli.tools.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens per second and hit rates at the slow and the fast end, with `experts_bytes` of memory for experts."""

    experts_bytes: int
    slow_tps: float
    fast_tps: float
    slow_hit_rate: float
    fast_hit_rate: float


def forecast(sizes: ModelSizes, experts_bytes: int, disk_bytes_per_s: float, memory_bytes_per_s: float) -> Forecast:
    """Decoding one token at a time, drafts not counted."""
    share = min(1.0, experts_bytes / sizes.experts_bytes) if sizes.experts_bytes else 1.0
    slow = share if share == 1 or experts_bytes >= sizes.cycle_bytes else 0.0
    fast = 1 - (1 - share) ** 2
    compute = (sizes.dense_read_bytes + sizes.cycle_bytes) / memory_bytes_per_s
    slow_s = compute + (1 - slow) * sizes.cycle_bytes / disk_bytes_per_s
    fast_s = max(compute, (1 - fast) * sizes.cycle_bytes / disk_bytes_per_s)
    return Forecast(experts_bytes, 1 / slow_s, 1 / fast_s, slow, fast)
