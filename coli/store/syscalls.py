"""System calls Python lacks or wraps badly: madvise on an address, cachestat, statx direct-I/O alignment.

ctypes.CDLL lets go of the interpreter lock during a call; mmap.madvise() holds it (measured: 300 ms for 400 MB).
Every call here is harmless where the kernel or the C library does not know it: it raises OSError or returns None.
"""

import ctypes
import mmap
import os
import struct

PAGE_BYTES = mmap.PAGESIZE

MADV_RANDOM = 1
MADV_WILLNEED = 3
MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22  # Linux 5.14
MADV_POPULATE_WRITE = 23  # Linux 5.14

_NR_CACHESTAT = 451
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long


def madvise(address: int, nbytes: int, advice: int) -> None:
    """madvise on the pages that hold [address, address + nbytes).

    Raises:
        OSError: the kernel refuses the advice, or (POPULATE_READ of a file) the pages cannot be read.
    """
    start = address & ~(PAGE_BYTES - 1)
    if _libc.madvise(start, address + nbytes - start, advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def cached_bytes(fd: int, offset: int, nbytes: int) -> int | None:
    """Bytes of the file's range in the page cache (Linux 6.5); None: unknown. Through overlayfs always 0."""
    extent = (ctypes.c_uint64 * 2)(offset, nbytes)
    stat = (ctypes.c_uint64 * 5)()
    if _libc.syscall(_NR_CACHESTAT, fd, extent, stat, 0):
        return None
    return int(stat[0]) * PAGE_BYTES


def direct_io_alignment(fd: int) -> tuple[int, int] | None:
    """(memory, offset) alignment direct reads of this file need (Linux 6.1); (0, 0): none possible; None: unknown."""
    try:
        statx = _libc.statx
    except AttributeError:
        return None
    buffer = ctypes.create_string_buffer(256)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer):
        return None
    if not struct.unpack_from("I", buffer, 0)[0] & _STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("II", buffer, 152)
    return memory, offset
