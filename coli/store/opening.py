"""From layouts and a number of bytes to a running ExpertStore: pools, read mode, places and readers, chosen once."""

from collections.abc import Collection, Mapping

from coli.store.expert_store import ExpertStore
from coli.store.places import MappedPlaces, RecordPlaces, SlabPlaces
from coli.store.policy import ResidencyPolicy
from coli.store.pools import plan_pools
from coli.store.record_files import IoMode, Notice, SlotFiles
from coli.store.records import RecordLayout
from coli.store.stats import TraceSink

PREFETCH_SLOTS = 16
_READERS = {IoMode.DIRECT: 2, IoMode.PREAD: 4, IoMode.MMAP: 4}


def open_store(
    layouts: Mapping[int, RecordLayout],
    *,
    num_layers: int,
    num_experts: int,
    num_experts_per_tok: int,
    capacity_bytes: int,
    notice: Notice,
    io: str = "mmap",
    cap: int | None = None,
    pinned: Collection[int] = (),
    reader_threads: int | None = None,
    prefetch: bool = False,
    trace: TraceSink | None = None,
) -> ExpertStore:
    """Open the records of `layouts` (by layer index) within `capacity_bytes`.

    Raises:
        MemoryBudgetError: the bytes do not hold one record.
    """
    record_bytes = {layer_idx: layout.record_bytes for layer_idx, layout in layouts.items()}
    prefetch_slots = PREFETCH_SLOTS if prefetch else 0
    plan = plan_pools(
        record_bytes, num_layers, num_experts, num_experts_per_tok, capacity_bytes,
        cap=cap, pinned=pinned, prefetch_slots=prefetch_slots,
    )  # fmt: skip
    policy = ResidencyPolicy(
        num_layers, num_experts, plan.pool_of_layer, plan.pool_sizes, pinned=pinned
    )
    mode = IoMode(io)
    places: RecordPlaces
    if mode is IoMode.MMAP:
        places = MappedPlaces(layouts, num_experts)
    else:
        files = SlotFiles(sorted({layout.path for layout in layouts.values()}), mode, notice)
        places = SlabPlaces(layouts, num_experts, files, plan.slots_of_size)
    return ExpertStore(
        layouts, policy, places,
        reader_threads=reader_threads or _READERS[places.mode], prefetch_slots=prefetch_slots, trace=trace,
    )  # fmt: skip
