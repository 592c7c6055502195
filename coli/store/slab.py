"""Memory for records: anonymous huge-page slabs cut into slots, touched ahead of use and reused for ever.

Direct reads into scattered 4 KiB pages run at a third of the device's speed, into huge pages at all of it, and giving
single slots back splits the huge pages; so slots are recycled here and only whole slabs are returned to the system.
Owned by the thread that runs the model; the touching thread writes no byte.
"""

import contextlib
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli.store import syscalls

HUGE_PAGE_BYTES = 2 << 20
SLAB_BYTES = 256 << 20
_TOUCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Slot:
    """`nbytes` of writable memory at `address`."""

    address: int
    view: memoryview
    slab_idx: int


class Slab:
    """One private anonymous mapping, starting on a huge page, cut into `slots` of `slot_bytes` (a page multiple)."""

    def __init__(self, slab_idx: int, slot_bytes: int, slots: int) -> None:
        # MAP_PRIVATE: Python's default is shared memory, whose pages ignore MADV_HUGEPAGE.
        self._map = mmap.mmap(-1, slot_bytes * slots + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raw: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        skip = -int(raw.ctypes.data) % HUGE_PAGE_BYTES
        self._array = raw[skip : skip + slot_bytes * slots]
        self.address = int(self._array.ctypes.data)
        self.nbytes = self._array.nbytes
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower reads, same bytes
            syscalls.madvise(self.address, self.nbytes, syscalls.MADV_HUGEPAGE)
        self.count = slots
        self._slot_bytes = slot_bytes
        self._slab_idx = slab_idx

    def slots(self) -> list[Slot]:
        view, size = memoryview(self._array), self._slot_bytes  # type: ignore[arg-type]  # arrays are buffers
        return [
            Slot(self.address + start, view[start : start + size], self._slab_idx)
            for start in range(0, self.nbytes, size)
        ]


class SlotArena:
    """All slots of one size. `take` and `give_back` are a stack, so few slots stay few pages."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        assert slot_bytes % mmap.PAGESIZE == 0
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.slabs: dict[int, Slab] = {}
        self._free: list[Slot] = []
        per_slab = max(1, SLAB_BYTES // slot_bytes)
        for slab_idx, start in enumerate(range(0, slots, per_slab)):
            slab = self.slabs[slab_idx] = Slab(slab_idx, slot_bytes, min(per_slab, slots - start))
            self._free.extend(slab.slots())
        self._free.reverse()  # the first slab, touched first, is used first

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs.values())

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> Slot:
        return self._free.pop()

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)

    def release_slab(self, slab_idx: int) -> None:
        """Unmap a slab whose slots are all free; nobody may hold a view of it."""
        kept = [slot for slot in self._free if slot.slab_idx != slab_idx]
        assert len(self._free) - len(kept) == self.slabs[slab_idx].count
        self._free = kept
        self.slots -= self.slabs.pop(slab_idx).count


class SlabToucher:
    """Faults the slabs in from a thread of its own, so that reads do not pay for it. Changes no byte."""

    def __init__(self, arenas: Sequence[SlotArena]) -> None:
        self._ranges = [(slab.address, slab.nbytes) for arena in arenas for slab in arena.slabs.values()]
        self._stop = False
        self.touched_bytes = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="coli-touch", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def close(self) -> None:
        """Stop; the slabs may be unmapped afterwards."""
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        start = time.perf_counter()
        for address, nbytes in self._ranges:
            for offset in range(0, nbytes, _TOUCH_BYTES):
                if self._stop:
                    return
                size = min(_TOUCH_BYTES, nbytes - offset)
                try:
                    syscalls.madvise(address + offset, size, syscalls.MADV_POPULATE_WRITE)
                except OSError:
                    return  # before Linux 5.14: the reads fault the pages in
                self.touched_bytes += size
                self.seconds = time.perf_counter() - start
