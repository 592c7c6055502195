"""Files that are not what their name says: pipes, and what downloads leave in place of the real file.

For readers of model files in `store`, `text` and `convert`; knows no format.
"""

import errno
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
