"""Where records live in memory: slots of slabs (direct, pread) or views of the mapped files (mmap).

A place is taken before its read is submitted and given back when the expert is evicted; both by the thread that runs
the model. `perform` and `finish` run in reader threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coli.store.reader import Read
from coli.store.record_files import IoMode, MappedFiles, SlotFiles
from coli.store.records import RecordLayout
from coli.store.slab import SlabToucher, Slot, SlotArena


class RecordPlaces(Protocol):
    """Places of records by key."""

    @property
    def mode(self) -> IoMode: ...

    def take(self, key: int) -> Read:
        """Give `key` a place and return the read that fills it."""
        ...

    def holds(self, key: int) -> bool: ...

    def address(self, key: int) -> int: ...

    def give_back(self, key: int) -> None: ...

    def perform(self, read: Read) -> None: ...

    def finish(self, read: Read) -> None: ...

    def last_slab(self) -> "SlabContents | None":
        """The piece of memory to give back to the system next; None: none can be spared."""
        ...

    def release_slab(self, contents: "SlabContents") -> None:
        """Unmap it; its keys have been given back."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SlabContents:
    """A slab of `slots` slots of `slot_bytes` and the keys that live in it."""

    slot_bytes: int
    slab_idx: int
    slots: int
    keys: list[int]


@dataclass(frozen=True, slots=True)
class FileRange:
    """`nbytes` at `offset` of one file."""

    path: Path
    offset: int
    nbytes: int


def file_range(layouts: Mapping[int, RecordLayout], num_experts: int, key: int) -> FileRange:
    """Where the record of `key` lies."""
    layer_idx, expert_id = divmod(key, num_experts)
    layout = layouts[layer_idx]
    return FileRange(layout.path, layout.offset + expert_id * layout.record_bytes, layout.record_bytes)


class SlabPlaces:
    """Records are read into slots; one arena per record size."""

    def __init__(
        self, layouts: Mapping[int, RecordLayout], num_experts: int, files: SlotFiles, slots: Mapping[int, int]
    ) -> None:
        """
        Args:
            slots: number of slots by record size in bytes.
        """
        self._layouts = layouts
        self._num_experts = num_experts
        self._files = files
        self._arenas = {record_bytes: SlotArena(record_bytes, count) for record_bytes, count in slots.items()}
        self._slots: dict[int, tuple[SlotArena, Slot]] = {}
        self.toucher = SlabToucher(list(self._arenas.values()))

    @property
    def mode(self) -> IoMode:
        return self._files.mode

    def take(self, key: int) -> Read:
        extent = file_range(self._layouts, self._num_experts, key)
        arena = self._arenas[extent.nbytes]
        slot = arena.take()
        self._slots[key] = (arena, slot)
        return Read(key, (extent, slot.view))

    def holds(self, key: int) -> bool:
        return key in self._slots

    def address(self, key: int) -> int:
        return self._slots[key][1].address

    def give_back(self, key: int) -> None:
        arena, slot = self._slots.pop(key)
        arena.give_back(slot)

    def perform(self, read: Read) -> None:
        extent, view = read.place
        self._files.read(extent.path, extent.offset, view)

    def finish(self, read: Read) -> None:
        pass

    def last_slab(self) -> SlabContents | None:
        arena = max(self._arenas.values(), key=lambda arena: arena.nbytes)
        if len(arena.slabs) < 2:
            return None
        slab_idx = max(arena.slabs)
        keys = [key for key, (owner, slot) in self._slots.items() if owner is arena and slot.slab_idx == slab_idx]
        return SlabContents(arena.slot_bytes, slab_idx, arena.slabs[slab_idx].count, keys)

    def release_slab(self, contents: SlabContents) -> None:
        self.toucher.close()
        self._arenas[contents.slot_bytes].release_slab(contents.slab_idx)

    def close(self) -> None:
        self.toucher.close()
        self._files.close()
        self._slots.clear()
        self._arenas.clear()


class MappedPlaces:
    """Records are used in the mapped files; giving one back drops its pages."""

    def __init__(self, layouts: Mapping[int, RecordLayout], num_experts: int) -> None:
        self._layouts = layouts
        self._num_experts = num_experts
        self._files = MappedFiles({layout.path for layout in layouts.values()})
        self._held: set[int] = set()
        self._to_drop: set[int] = set()

    @property
    def mode(self) -> IoMode:
        return IoMode.MMAP

    def take(self, key: int) -> Read:
        self._held.add(key)
        self._to_drop.discard(key)
        drops = [file_range(self._layouts, self._num_experts, dropped) for dropped in sorted(self._to_drop)]
        self._to_drop.clear()
        return Read(key, (file_range(self._layouts, self._num_experts, key), drops))

    def holds(self, key: int) -> bool:
        return key in self._held

    def address(self, key: int) -> int:
        extent = file_range(self._layouts, self._num_experts, key)
        return self._files.address(extent.path, extent.offset)

    def give_back(self, key: int) -> None:
        """The next read's thread drops the pages: that costs half a millisecond a record."""
        self._held.discard(key)
        self._to_drop.add(key)

    def perform(self, read: Read) -> None:
        extent, _ = read.place
        self._files.populate(extent.path, extent.offset, extent.nbytes)

    def last_slab(self) -> SlabContents | None:
        """Views can be given back one by one."""
        return SlabContents(max(layout.record_bytes for layout in self._layouts.values()), 0, 1, [])

    def release_slab(self, contents: SlabContents) -> None:
        for key in sorted(self._to_drop):
            extent = file_range(self._layouts, self._num_experts, key)
            self._files.drop(extent.path, extent.offset, extent.nbytes)
        self._to_drop.clear()

    def finish(self, read: Read) -> None:
        _, drops = read.place
        for extent in drops:
            self._files.drop(extent.path, extent.offset, extent.nbytes)

    def close(self) -> None:
        self._files.close()
