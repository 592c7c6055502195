"""What the store reports about itself, and the seam through which routes are recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coli.store.policy import ResidencyPolicy


class TraceSink(Protocol):
    """Hears every union and every commit, in order."""

    def union(self, layer_idx: int, expert_ids: NDArray[np.int64], *, prefill: bool) -> None: ...

    def settled(self, committed_rows: int | Sequence[int] | NDArray[np.int64]) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters since the store was opened, of distinct experts per union; hits include pinned hits.

    wait_s: the model stood still for a read; reading_s: at least one read was under way.
    """

    mode: str
    hits: int
    pinned_hits: int
    misses: int
    evictions: int
    prefill_hits: int
    prefill_pinned_hits: int
    prefill_misses: int
    prefetched: int
    prefetch_hits: int
    reads: int
    bytes_read: int
    wait_s: float
    reading_s: float
    resident_bytes: int
    capacity_bytes: int

    @property
    def hit_rate(self) -> float:
        """Of the decode unions."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def pinned_hit_rate(self) -> float:
        return self.pinned_hits / max(1, self.hits + self.misses)

    @staticmethod
    def of(
        policy: ResidencyPolicy,
        record_bytes: Mapping[int, int],
        *,
        mode: str,
        reads: int,
        bytes_read: int,
        wait_s: float,
        reading_s: float,
        prefetched: int,
        prefetch_hits: int,
    ) -> "StoreStats":
        decode, prefill = policy.counts, policy.prefill_counts
        layer_of = policy.num_experts
        held = [*policy.pinned, *policy.resident()]
        largest = max(record_bytes.values(), default=0)
        pinned_bytes = sum(record_bytes[key // layer_of] for key in policy.pinned)
        return StoreStats(
            mode=mode,
            hits=decode.hits,
            pinned_hits=decode.pinned_hits,
            misses=decode.misses,
            evictions=decode.evictions + prefill.evictions,
            prefill_hits=prefill.hits,
            prefill_pinned_hits=prefill.pinned_hits,
            prefill_misses=prefill.misses,
            prefetched=prefetched,
            prefetch_hits=prefetch_hits,
            reads=reads,
            bytes_read=bytes_read,
            wait_s=wait_s,
            reading_s=reading_s,
            resident_bytes=sum(record_bytes[key // layer_of] for key in held),
            capacity_bytes=sum(pool.slots for pool in policy.pools) * largest + pinned_bytes,
        )


@dataclass(frozen=True, slots=True)
class StoreGlance:
    """What any thread may see of a store at work: exact after `catch_up`, else up to QUIET_FORWARDS forwards behind.

    `resident` (L, E): in memory now, pinned ones included; `usage` (L, E): selections by committed rows so far.
    """

    hits: int
    pinned_hits: int
    misses: int
    prefill_hits: int
    prefill_pinned_hits: int
    prefill_misses: int
    evictions: int
    reads: int
    bytes_read: int
    wait_s: float
    resident: NDArray[np.bool_]
    usage: NDArray[np.int64]
