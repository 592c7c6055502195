"""Open files of expert records and the three ways to get bytes out of them: direct, pread, mmap.

Knows paths, offsets and sizes. A failed or short read is a ReadError that names file and offset. `read` and `populate`
are called from reader threads, the rest from the thread that opened the files.
"""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path

import numpy as np

from coli.errors import ReadError
from coli.store import syscalls

PAGE_BYTES = 4096
# madvise(WILLNEED) silently ignores what exceeds the device's read-ahead limit: ask in pieces.
_WILLNEED_BYTES = 4 << 20
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)

Notice = Callable[[str], None]
# os.preadv(fd, [view], offset) -> bytes read; tests inject faults through it.
Preadv = Callable[[int, list[memoryview], int], int]


class IoMode(StrEnum):
    """How records come into memory: as views of mapped files, read through the page cache, or past it."""

    MMAP = "mmap"
    PREAD = "pread"
    DIRECT = "direct"


def direct_refusal(path: Path) -> str | None:
    """Why O_DIRECT cannot be used for this file, None when it can.

    Refusal shows in one of three places: in open, in the first read, or nowhere (tmpfs and some others quietly read
    through the page cache), so statx is asked as well.
    """
    o_direct: int | None = getattr(os, "O_DIRECT", None)  # Linux only
    if o_direct is None:
        return "this system has no O_DIRECT"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | o_direct)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return f"open: {error.strerror}"
    try:
        alignment = syscalls.direct_io_alignment(fd)
        if alignment == (0, 0):
            return "the file system offers no direct reads"
        if alignment is not None and max(alignment) > PAGE_BYTES:
            return f"the device needs an alignment of {max(alignment)} bytes"
        with mmap.mmap(-1, PAGE_BYTES) as probe:
            os.preadv(fd, [probe], 0)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return f"read: {error.strerror}"
    finally:
        os.close(fd)
    return None


class SlotFiles:
    """Whole records into memory of ours, by O_DIRECT or through the page cache."""

    def __init__(self, paths: Iterable[Path], mode: IoMode, notice: Notice, preadv: Preadv = os.preadv) -> None:
        self.mode = mode
        self._preadv = preadv
        self._notice = notice
        self._lock = threading.Lock()
        self._open_files: dict[Path, tuple[int, IoMode]] = {}  # one entry holds both: readers see no mixture
        self._retired: list[int] = []
        paths = list(paths)
        if mode is IoMode.DIRECT:
            refused = next(((path, why) for path in paths if (why := direct_refusal(path))), None)
            if refused:
                self.mode = IoMode.PREAD
                self._notice(_fallback(*refused))
        for path in paths:
            self._open_files[path] = (self._open(path), self.mode)

    def read(self, path: Path, offset: int, view: memoryview) -> None:
        """Fill `view` from the file's bytes at `offset`.

        Raises:
            ReadError: the read failed or the file is shorter than it was when it was opened.
        """
        fd, mode = self._open_files[path]
        try:
            self._fill(path, fd, mode, offset, view)
        except OSError as error:
            if mode is IoMode.DIRECT and error.errno in _REFUSALS:
                self._fall_back(path, error)
                self.read(path, offset, view)
                return
            raise ReadError(f"{path}: reading {len(view)} bytes at offset {offset} failed: {error.strerror}") from None

    def close(self) -> None:
        for fd in [*(fd for fd, _ in self._open_files.values()), *self._retired]:
            os.close(fd)
        self._open_files.clear()
        self._retired.clear()

    def _open(self, path: Path) -> int:
        if self.mode is IoMode.DIRECT:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead past the record
        return fd

    def _fill(self, path: Path, fd: int, mode: IoMode, offset: int, view: memoryview) -> None:
        need, got = len(view), 0
        # The page cache a read causes counts against the budget; what others had cached before does not.
        drop = mode is IoMode.PREAD and (syscalls.cached_bytes(fd, offset, need) or 0) < need
        while got < need:
            count = self._preadv(fd, [view[got:]], offset + got)
            got += count
            # A direct read that stops inside a page has met the end of the file: nothing more can come.
            if count == 0 or (mode is IoMode.DIRECT and got < need and got % PAGE_BYTES):
                raise ReadError(
                    f"{path}: the file ends at byte {offset + got}, a record needs {need - got} more: "
                    "it was cut after it was opened"
                )
        if drop:
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, offset, need, os.POSIX_FADV_DONTNEED)

    def _fall_back(self, path: Path, error: OSError) -> None:
        """Reopen every file buffered, once; other threads may still be reading through the old descriptors."""
        with self._lock:
            if self.mode is not IoMode.DIRECT:
                return
            self.mode = IoMode.PREAD
            for name, (fd, _) in list(self._open_files.items()):
                self._open_files[name] = (self._open(name), self.mode)
                self._retired.append(fd)
            self._notice(_fallback(path, f"read: {error.strerror}"))


class MappedFiles:
    """Zero-copy views: records are used where the kernel maps them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._fds: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._base: dict[Path, int] = {}
        for path in paths:
            self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._maps[path] = mmap.mmap(self._fds[path], 0, prot=mmap.PROT_READ)
            self._base[path] = int(np.frombuffer(self._maps[path], np.uint8).ctypes.data)

    def address(self, path: Path, offset: int) -> int:
        return self._base[path] + offset

    def populate(self, path: Path, offset: int, nbytes: int) -> None:
        """Bring the range in and map it, so that the kernels that use it do not fault.

        Raises:
            ReadError: the pages cannot be read (the file was cut, or the device failed).
        """
        address = self._base[path] + offset
        for start in range(0, nbytes, _WILLNEED_BYTES):
            with contextlib.suppress(OSError):
                size = min(_WILLNEED_BYTES, nbytes - start)
                syscalls.madvise(address + start, size, syscalls.MADV_WILLNEED)
        try:
            syscalls.madvise(address, nbytes, syscalls.MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: before Linux 5.14, the kernels fault the pages in
                raise ReadError(
                    f"{path}: reading {nbytes} bytes at offset {offset} failed: the file was cut after it was opened, "
                    "or its device fails"
                ) from None

    def drop(self, path: Path, offset: int, nbytes: int) -> None:
        """Give the range's pages back: unmap first, since the page cache keeps what is mapped."""
        with contextlib.suppress(OSError):
            syscalls.madvise(self._base[path] + offset, nbytes, syscalls.MADV_DONTNEED)
            os.posix_fadvise(self._fds[path], offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for mapping in self._maps.values():
            mapping.close()
        for fd in self._fds.values():
            os.close(fd)
        self._maps.clear()
        self._fds.clear()


def _fallback(path: Path, why: str) -> str:
    return f"direct reads are refused ({path.name}: {why}): reading through the page cache instead"
