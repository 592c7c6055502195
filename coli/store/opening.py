"""From layouts and a number of bytes to a running ExpertStore: pools, read mode, places and readers, chosen once."""

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from coli.errors import OptionError
from coli.store import syscalls
from coli.store.expert_store import ExpertStore
from coli.store.limits import filesystem_type
from coli.store.memory import MemoryGuard, megabytes
from coli.store.places import MappedPlaces, RecordPlaces, SlabPlaces
from coli.store.policy import ResidencyPolicy
from coli.store.pools import PoolPlan, plan_pools
from coli.store.record_files import IoMode, Notice, SlotFiles
from coli.store.records import RecordLayout
from coli.store.stats import TraceSink

PREFETCH_SLOTS = 16
_PREFETCH_SHARE = 8  # guesses get at most one in so many of the places
# Two direct readers saturate an idle machine's device; the others cover for those that wait for a busy core.
_READER_THREADS = 4
_CACHED_SHARE = 0.9
_SMALL_BYTES = 1_000_000_000


def open_store(
    layouts: Mapping[int, RecordLayout],
    *,
    num_layers: int,
    num_experts: int,
    num_experts_per_tok: int,
    capacity_bytes: int,
    notice: Notice,
    io: str = "auto",
    cap: int | None = None,
    pinned: Collection[int] = (),
    reader_threads: int | None = None,
    prefetch: bool = False,
    trace: TraceSink | None = None,
    guard: MemoryGuard | None = None,
) -> ExpertStore:
    """Open the records of `layouts` (by layer index) within `capacity_bytes`.

    Args:
        io: "auto", "mmap", "pread" or "direct".
        cap: expert slots per layer at most.
        pinned: keys (layer_idx * num_experts + expert_id) that are loaded now and stay.
        prefetch: let `ExpertStore.prefetch` read guesses into some of the places.
        guard: watches the memory limits while running; None: this machine's.

    Raises:
        MemoryBudgetError: the bytes do not hold one record.
        OptionError: an unknown read mode.
    """
    if io not in ("auto", *IoMode):
        raise OptionError(f"--io: expected auto, mmap, pread or direct, found {io!r}")
    record_bytes = {layer_idx: layout.record_bytes for layer_idx, layout in layouts.items()}
    shape = num_layers, num_experts, num_experts_per_tok, capacity_bytes
    plan = plan_pools(record_bytes, *shape, cap=cap, pinned=pinned)
    ahead = min(PREFETCH_SLOTS, capacity_bytes // (_PREFETCH_SHARE * max(record_bytes.values()))) if prefetch else 0
    if ahead and not plan.everything:
        plan = plan_pools(record_bytes, *shape, cap=cap, pinned=pinned, prefetch_slots=ahead)
    else:
        ahead = 0
    if plan.capacity_bytes < plan.cycle_bytes and not plan.everything:
        notice(_cliff(plan, len(layouts), num_experts_per_tok))
    paths = sorted({layout.path for layout in layouts.values()})
    mode = choose_mode(paths, plan.everything) if io == "auto" else IoMode(io)
    policy = ResidencyPolicy(num_layers, num_experts, plan.pool_of_layer, plan.pool_sizes, pinned=pinned)
    places: RecordPlaces
    if mode is IoMode.MMAP:
        places = MappedPlaces(layouts, num_experts)
    else:
        places = SlabPlaces(layouts, num_experts, SlotFiles(paths, mode, notice), plan.slots_of_size)
    return ExpertStore(
        layouts,
        policy,
        places,
        reader_threads=reader_threads or _READER_THREADS,
        prefetch_slots=ahead,
        trace=trace,
        guard=guard or MemoryGuard(),
        notice=notice,
    )


def choose_mode(paths: Iterable[Path], everything_fits: bool) -> IoMode:
    """`auto`: views when every record fits and the files are in memory already or small, else direct reads.

    Views of a small file leave it cached for the next run; for a large one that is not worth its slow first reading.
    On tmpfs the files are memory: slots would hold the bytes twice. A refusal of direct reads is found and told when
    the files are opened for them.
    """
    paths = list(paths)
    if all(filesystem_type(path) in ("tmpfs", "ramfs") for path in paths):
        return IoMode.MMAP
    small = sum(path.stat().st_size for path in paths) <= _SMALL_BYTES
    if everything_fits and (small or cached_share(paths) >= _CACHED_SHARE):
        return IoMode.MMAP
    return IoMode.DIRECT


def cached_share(paths: Iterable[Path]) -> float:
    """Share of the files' bytes that is in the page cache; what the system does not tell counts as absent."""
    total = cached = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            total += size
            cached += min(size, syscalls.cached_bytes(fd, 0, size) or 0)
        finally:
            os.close(fd)
    return cached / max(1, total)


def _cliff(plan: PoolPlan, layers: int, num_experts_per_tok: int) -> str:
    slots = sum(pool.slots for pool in plan.pool_sizes)
    return (
        f"memory: {megabytes(plan.capacity_bytes)} for experts are less than one token uses "
        f"({layers} layers x {num_experts_per_tok} experts = {megabytes(plan.cycle_bytes)}): a layer finds "
        f"{slots / max(1, layers):.1f} of its experts at most; {megabytes(plan.cycle_bytes - plan.capacity_bytes)} "
        "more would hold a whole token"
    )
