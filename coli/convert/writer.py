"""Output files of a conversion: safetensors written piece by piece and read back, and small files written whole.

Every write and fsync is checked; a failed one is a WriteError that names the file. Nothing here renames into place:
the work folder (work.py) does that once everything is complete.
"""

import errno
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from coli.convert.plan import Entry
from coli.errors import WriteError
from coli.store.layout import RECORD_ALIGNMENT, round_up

_CHUNK = 8 << 20


def header_bytes(entries: Sequence[Entry]) -> bytes:
    """A safetensors header (length prefix included), padded with spaces so that data starts at a multiple of 4096."""
    table: dict[str, object] = {"__metadata__": {"format": "coli"}}
    end = 0
    for entry in entries:
        offsets = [end, end + entry.nbytes]
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    size = round_up(8 + len(text), RECORD_ALIGNMENT) - 8
    return size.to_bytes(8, "little") + text.ljust(size)


class FileWriter:
    """One safetensors file being written in any order, checked against what the disk gives back.

    `fresh`: it does not exist yet and begins with its header; otherwise parts of it were written by an earlier writer.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], *, fresh: bool) -> None:
        self._path, self._fresh = path, fresh
        self._header = header_bytes(entries)
        self._nbytes = len(self._header) + sum(entry.nbytes for entry in entries)
        self._pieces: list[tuple[int, int, int]] = []  # offset, bytes, crc32
        self._position = 0
        flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if fresh else 0)
        try:
            self._descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise write_error(path, error) from None

    def write(self, data: memoryview, at: int) -> None:
        """Put the bytes of `data` (C-contiguous, of any item type) at byte `at` of the tensor data."""
        self._put(data.cast("B"), len(self._header) + at)

    def zeros(self, nbytes: int, at: int) -> None:
        """Put `nbytes` zeros at byte `at` of the tensor data."""
        for start in range(0, nbytes, _CHUNK):
            self.write(memoryview(bytes(min(_CHUNK, nbytes - start))), at + start)

    def finish(self) -> str | None:
        """Force what was written to the disk and compare it with what comes back from there.

        Returns the file's sha256 if that was all of it, None if other writers have written or will write the rest.
        """
        try:
            if os.fstat(self._descriptor).st_size != self._nbytes:
                os.ftruncate(self._descriptor, self._nbytes)
            os.fsync(self._descriptor)
        except OSError as error:
            raise write_error(self._path, error) from None
        digest, end = hashlib.sha256(), 0
        with self._path.open("rb", buffering=_CHUNK) as file:
            _forget_cached(file.fileno())
            for offset, nbytes, crc in sorted(self._pieces):
                file.seek(offset)
                data = file.read(nbytes)
                if zlib.crc32(data) != crc:
                    raise WriteError(f"{self._path}: reads back differently from what was written: the disk is failing")
                if offset == end:
                    digest.update(data)
                    end += nbytes
            _forget_cached(file.fileno())
        return digest.hexdigest() if end == self._nbytes else None

    def _put(self, view: memoryview, offset: int) -> None:
        if offset != self._position:
            os.lseek(self._descriptor, offset, os.SEEK_SET)
        write_all(self._descriptor, view, self._path)
        self._position = offset + len(view)
        self._pieces.append((offset, len(view), zlib.crc32(view)))

    def __enter__(self) -> Self:
        if self._fresh:
            self._put(memoryview(self._header), 0)
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)


def file_digest(path: Path) -> str:
    """sha256 of the file as the disk holds it: its cached pages are dropped first and not kept afterwards."""
    with path.open("rb", buffering=0) as file:
        _forget_cached(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        _forget_cached(file.fileno())
    return digest


def _forget_cached(descriptor: int) -> None:
    if sys.platform == "linux":
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_file(path: Path, data: bytes) -> str:
    """Write a small file so that it appears whole or not at all; returns its sha256."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(descriptor, memoryview(data), path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError as error:
        raise write_error(path, error) from None
    return hashlib.sha256(data).hexdigest()


def write_all(descriptor: int, view: memoryview, path: Path) -> None:
    """Write all of `view` at the end of the open file; WriteError names `path`."""
    done = 0
    while done < len(view):
        try:
            done += os.write(descriptor, view[done : done + _CHUNK])
        except OSError as error:
            raise write_error(path, error) from None


def write_error(path: Path, error: OSError) -> WriteError:
    """The error for a failed write to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteError(f"{path}: disk full: free some space and convert again")
    return WriteError(f"{path}: cannot be written: {error.strerror or error}")


def sync_folder(path: Path) -> None:
    """Make renames and new names inside the folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise write_error(path, error) from None
    finally:
        os.close(descriptor)
