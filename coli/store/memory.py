"""One budget for everything the process takes and the page cache it causes; what is left of it goes to experts.

Plans before anything is allocated, refuses what cannot fit with the arithmetic, and watches the limits while running.
Knows sizes in bytes only.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coli.errors import MemoryBudgetError
from coli.store.limits import MemoryLevel, ProcessMemory, memory_levels, process_memory

# Left alone of what a limit leaves: other processes, the kernel's own share, buffers nobody counted.
_RESERVE_SHARE = 0.04
_RESERVE_BYTES = (128_000_000, 1_000_000_000)
# Growth of the process itself after planning: tokenizer, compiled kernels, heap fragmentation.
_SLACK_BYTES = 160_000_000
PROCESS_VARIES_BYTES = 4_000_000
_WATCH_SECONDS = 2.0
_WATCH_ROOM_BYTES = 96_000_000


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes that will be allocated after planning, beside experts."""

    dense_bytes: int
    kv_bytes: int
    working_bytes: int
    drafts_bytes: int = 0  # pages of mapped corpora and graphs

    @property
    def nbytes(self) -> int:
        return self.dense_bytes + self.kv_bytes + self.working_bytes + self.drafts_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the budget goes; `experts_bytes` may be spent on records."""

    budget_bytes: int
    source: str
    process_bytes: int
    needs: MemoryNeeds
    slack_bytes: int
    experts_bytes: int

    def arithmetic(self) -> str:
        """The sum in one line."""
        return _arithmetic(self.budget_bytes, self.source, self.process_bytes, self.needs, self.slack_bytes)


def plan_memory(
    needs: MemoryNeeds,
    *,
    ram: int | None,
    smallest_experts_bytes: int,
    all_experts_bytes: int,
    levels: Sequence[MemoryLevel] | None = None,
    process: ProcessMemory | None = None,
) -> MemoryPlan:
    """Divide the memory, before the dense weights are loaded.

    Args:
        ram: bytes of `--ram`; None: as much as the tightest limit leaves.
        smallest_experts_bytes: what experts need at least; 0 for a dense model.
        all_experts_bytes: what they can use at most; a larger budget stays unspent.
        levels, process: of this machine when None.

    Raises:
        MemoryBudgetError: the parts do not fit the budget, or the budget and what is planned exceed a limit.
    """
    levels = memory_levels() if levels is None else levels
    process = process_memory() if process is None else process
    own = process.anonymous_bytes + process.file_bytes
    tightest = min(levels, key=lambda level: level.room_bytes, default=None)
    if ram is None and tightest is None:
        raise MemoryBudgetError("memory: this system does not say how much there is: give --ram")
    budget, source = ram or 0, "--ram"
    if ram is None and tightest is not None:
        reserve = int(min(max(tightest.limit_bytes * _RESERVE_SHARE, _RESERVE_BYTES[0]), _RESERVE_BYTES[1]))
        budget, source = max(0, tightest.room_bytes - reserve) + own, tightest.source
    fixed = own + needs.nbytes + _SLACK_BYTES
    room = budget - fixed
    if room < smallest_experts_bytes:
        raise MemoryBudgetError(
            f"memory: {_arithmetic(budget, source, own, needs, _SLACK_BYTES)}, experts need at least "
            f"{megabytes(smallest_experts_bytes)}: {_remedy(ram, fixed + smallest_experts_bytes)}"
        )
    plan = MemoryPlan(budget, source, own, needs, _SLACK_BYTES, min(room, all_experts_bytes))
    planned = needs.nbytes + plan.experts_bytes
    if ram is not None and tightest is not None and planned > tightest.room_bytes:
        raise MemoryBudgetError(
            f"memory: --ram {megabytes(ram)} plans {megabytes(planned)} more than the process has now, "
            f"{tightest.source} leaves {megabytes(tightest.room_bytes)}: lower --ram to "
            f"{megabytes(own + tightest.room_bytes)} or less"
        )
    return plan


def megabytes(count: int) -> str:
    """For messages: "512 MB", "1.95 GB"."""
    return f"{count / 1e9:.2f} GB" if abs(count) >= 1e9 else f"{count / 1e6:.0f} MB"


class MemoryGuard:
    """Asks every two seconds whether a limit has come too close; cheap to ask more often."""

    def __init__(
        self,
        levels: Callable[[], Sequence[MemoryLevel]] = memory_levels,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._levels = levels
        self._clock = clock
        self._next = clock() + _WATCH_SECONDS

    def excess(self, mapped_bytes: Callable[[], int] = lambda: 0) -> tuple[int, str]:
        """Bytes to give back now, 0 for none, and the limit that asks for them.

        Args:
            mapped_bytes: what we hold in mapped files, asked when a limit is close. No limit counts it as used, so
                giving it back makes no room; what exceeds the room cannot stay in memory.
        """
        now = self._clock()
        if now < self._next:
            return 0, ""
        self._next = now + _WATCH_SECONDS
        tightest = min(self._levels(), key=lambda level: level.room_bytes, default=None)
        if tightest is None or tightest.room_bytes >= _WATCH_ROOM_BYTES:
            return 0, ""
        if mapped := mapped_bytes():
            return max(0, mapped - tightest.room_bytes), tightest.source
        over = max(0, tightest.used_bytes - tightest.limit_bytes)
        return _WATCH_ROOM_BYTES - tightest.room_bytes + over, tightest.source


def _arithmetic(budget: int, source: str, own: int, needs: MemoryNeeds, slack: int) -> str:
    parts = [
        ("process", own),
        ("dense weights", needs.dense_bytes),
        ("KV cache", needs.kv_bytes),
        ("buffers", needs.working_bytes),
        ("corpora and graphs", needs.drafts_bytes),
        ("slack", slack),
    ]
    terms = " - ".join(f"{megabytes(count)} {name}" for name, count in parts if count)
    left = budget - own - needs.nbytes - slack
    return f"{megabytes(budget)} ({source}) - {terms} = {megabytes(left)} for experts"


def _remedy(ram: int | None, needed: int) -> str:
    if ram is not None:
        # Rounded up, and a little above what counts now: the next process is not of exactly this one's size.
        return f"--ram {math.ceil((needed + PROCESS_VARIES_BYTES) / 1e7) / 100:.2f} or more is needed"
    return f"{megabytes(needed)} are needed: free some memory, raise the limit or shorten --ctx"
