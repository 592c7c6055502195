"""One JSON object to a file, whole or not at all, or to standard output."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coli.cli.streams import write_output
from coli.errors import OptionError

STDOUT = Path("-")


def check_target(path: Path | None) -> None:
    """Raise OptionError early for a file that could not be written after minutes of work."""
    if path is None or path == STDOUT:
        return
    if path.is_dir():
        raise OptionError(f"--json: {path}: is a folder; expected a file")
    if not path.parent.is_dir():
        raise OptionError(f"--json: {path.parent}: no such folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OptionError(f"--json: {path}: cannot be written")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` and a newline. A regular file appears under its name only when it is complete."""
    data = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n"
    if path == STDOUT:
        write_output(data)
    elif path.exists() and not path.is_file():  # a pipe or a device: nothing to rename
        try:
            with path.open("wb") as file:
                file.write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    else:
        try:
            _replace(path.resolve(), data)
        except OSError as error:
            raise OSError(
                error.errno, f"{error.strerror}; --json needs a place that can be written", str(path)
            ) from None


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
