"""What this machine's disk and memory deliver, measured in a second or two each.

The disk is read past the page cache where the file system allows it, at random places, as experts are; the memory by
the kernel that decoding spends its time in. Nothing is written.
"""

import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coli.errors import ReadError
from coli.kernels import activations, matmul
from coli.store.slab import Slab

READERS = 4
ALIGNMENT = 4096
PROBE_SECONDS = 1.5
MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """`direct`: read past the page cache; otherwise cached parts count as disk and the figure may be too good."""

    bytes_per_s: float
    direct: bool


def disk_speed(files: Sequence[Path], block_bytes: int, seconds: float = PROBE_SECONDS) -> DiskSpeed:
    """Random reads of `block_bytes` (rounded up to 4096) from `files` by READERS threads, into huge pages.

    Raises:
        ReadError: no file can be read, or they are smaller than one block.
    """
    block = -(-block_bytes // ALIGNMENT) * ALIGNMENT
    try:
        places = [(path, (path.stat().st_size - block) // ALIGNMENT) for path in files]
        places = [(path, last) for path, last in places if last >= 0]
        if not places:
            raise ReadError(f"disk probe: no file of {block} bytes or more to read")
        return _read(places, block, seconds, direct=True) or _read(places, block, seconds, direct=False)  # type: ignore[return-value]
    except OSError as error:
        raise ReadError(f"disk probe: {error.filename or files[0]}: {error.strerror}") from None


def _read(places: list[tuple[Path, int]], block: int, seconds: float, *, direct: bool) -> DiskSpeed | None:
    """None where direct reads are refused."""
    flags = os.O_RDONLY | os.O_CLOEXEC | (getattr(os, "O_DIRECT", 0) if direct else 0)
    try:
        opened = [(os.open(path, flags), last) for path, last in places]
    except OSError:
        if direct:
            return None
        raise
    done, failures = [0] * READERS, list[OSError]()
    # Where the store's reads go: into scattered small pages the same device gives a third to a half.
    slab = Slab(0, block, READERS)
    slots = slab.slots()
    for slot in slots:
        slot.view[:] = bytes(block)
    stop = time.perf_counter() + seconds

    def work(number: int) -> None:
        rng = random.Random()  # other places each time: a virtual disk's host keeps what was read before
        try:
            while time.perf_counter() < stop and not failures:
                fd, last = rng.choice(opened)
                done[number] += os.preadv(fd, [slots[number].view], ALIGNMENT * rng.randint(0, last))
        except OSError as error:
            failures.append(error)

    began = time.perf_counter()
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    for fd, _ in opened:
        os.close(fd)
    if failures:
        if direct:
            return None
        raise failures[0]
    return DiskSpeed(sum(done) / elapsed, direct)


def memory_speed(threads: int, nbytes: int = MEMORY_BYTES) -> float:
    """Bytes/s of q4 weights streamed from memory by the matrix product of one row; best of a few passes."""
    rows, groups = 4096, 64
    tiles = rows // 16
    each = tiles * groups * matmul.WEIGHT_BYTES[matmul.KIND_Q4]
    count = max(1, nbytes // each)
    weights = activations.aligned(count * each)
    weights[:] = 0x88
    scales = activations.aligned(tiles * groups * 16, np.float16)
    scales[:] = 1
    packed = activations.aligned(activations.x_bytes(matmul.KIND_Q4, 1, groups))
    activations.pack_rows(np.ones((1, groups * 32), np.float32), np.zeros(1, np.int64), matmul.KIND_Q4, packed)
    out = activations.aligned(rows, np.float32)
    jobs = matmul.job_table(count)
    for i, job in enumerate(jobs):
        job[:] = (
            matmul.KIND_Q4, weights.ctypes.data + i * each, scales.ctypes.data, tiles, groups, 1, 0, 0, rows, 0
        )  # fmt: skip
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for job in jobs:
            matmul.run_jobs(job[None].copy(), packed, out, threads)
        best = min(best, time.perf_counter() - began)
    return count * each / best
