"""Files a command makes for the user: looked at before the work begins, whole under their name or not there at all.

A link stays a link, what it leads to is written. Knows no format; called by the graph and corpus tools.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from coli.errors import OptionError, WriteError


def checked_target(target: Path, inputs: Sequence[str] = ()) -> Path:
    """Where `target` really is, links followed.

    Raises OptionError for a folder, a pipe or a device, one of `inputs`, and a place that cannot be written.
    """
    if target.is_dir():
        raise OptionError(f"{target}: is a folder, expected the name of the file to write")
    if target.exists() and not target.is_file():
        raise OptionError(f"{target}: is a pipe or a device, expected the name of the file to write")
    place = _behind_links(target)
    for written in (target, _temporary(place)):
        if written.exists() and any(os.path.isfile(name) and written.samefile(name) for name in inputs):
            raise OptionError(f"{written}: is an input too, and would be overwritten; choose another file for -o")
    if not place.parent.is_dir():
        raise OptionError(f"{target}: its folder does not exist")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise OptionError(f"{target}: its folder cannot be written; choose another file")
    return place


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `target`, or of what that leads to, when the block ends well.

    Raises WriteError for what goes wrong with the disk; then, and for every other error, nothing has changed.
    """
    place = _behind_links(target)
    temporary = _temporary(place)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            temporary.chmod(stat.S_IMODE(place.stat().st_mode))
        temporary.replace(place)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise write_error(target, error) from None
        raise


def _behind_links(target: Path) -> Path:
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def _temporary(place: Path) -> Path:
    return place.with_name(place.name + ".tmp")


def write_error(path: Path, error: OSError) -> WriteError:
    """The error for a failed write to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteError(f"{path}: disk full; free some space and give the same command again")
    return WriteError(f"{path}: cannot be written: {error.strerror or error}")
