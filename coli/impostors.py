"""Files that are not what their name says: pipes, and what downloads leave in place of the real file.

For readers of model files in `store`, `text` and `convert`; knows no format.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO


def impostor(start: bytes) -> str | None:
    """What a file that begins with `start` is and what to do, if it is known not to be a model's file."""
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself: run `git lfs pull` in its folder or download the file"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page (of a login or an error?), not the file itself: download it again"
    return None


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read; OSError for a pipe or device under its name, which could make us wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if stat.S_ISDIR(mode := os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_input(path: Path, most: int) -> BinaryIO:
    """Open a file, or a pipe that somebody writes to (as in `<(command)`), of which at most `most` bytes are read.

    OSError for a pipe that nobody has open for writing: it could make us wait for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        try:
            first = os.read(descriptor, 1)
        except BlockingIOError:  # a writer is there and has not written yet
            first = b""
        else:
            if not first:
                raise OSError(errno.EINVAL, "a pipe nobody writes to", str(path))
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "rb", closefd=False) as pipe:
            content = io.BytesIO(first + pipe.read(most - len(first)))
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return content
