"""Where row costs are kept between runs: a small JSON file, one entry per container and machine, the newest first.

The file is not trusted: what is not exactly of this form is named in an error and left alone, never overwritten. It
appears whole or not at all. Holds costs only; nothing in it can change what a model writes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coli.drafts.costs import MAX_ROWS, RowCosts
from coli.errors import OptionError

_FORMAT, _VERSION = "coli-gate", 1
MOST_BYTES = 256 << 10
MOST_ENTRIES = 32
_LONGEST_NAME = 300
_MOST_EXPERT_BYTES = 1 << 40

Entry = dict[str, Any]


class GateFile:
    """The costs of one container (by fingerprint) on one machine (a line that says what makes costs differ)."""

    def __init__(self, path: Path, fingerprint: str, machine: str) -> None:
        self.path = path
        self._key = fingerprint[:_LONGEST_NAME], machine[:_LONGEST_NAME]

    def read_into(self, costs: RowCosts) -> None:
        """Let `costs` remember what is kept; nothing if there is no file or no entry.

        Raises:
            OptionError: something else than such a file.
        """
        for entry in self._entries():
            if (entry["container"], entry["machine"]) == self._key:
                for rows, (ratio, expert_bytes) in entry["rows"].items():
                    costs.remember(int(rows), ratio, expert_bytes)
                return

    def save(self, costs: RowCosts) -> None:
        """Put what `costs` has measured in front of the other entries: temporary name, then rename.

        Raises:
            OptionError: the file that is there is something else.
            OSError: it cannot be written.
        """
        measured = costs.measured()
        if not any(rows > 1 for rows in measured):
            return
        entries = self._entries()
        rows: dict[str, list[float]] = {}
        for entry in entries:
            if (entry["container"], entry["machine"]) == self._key:
                rows = dict(entry["rows"])
        rows |= {str(count): [round(ratio, 5), round(size)] for count, (ratio, size) in measured.items()}
        container, machine = self._key
        others = [e for e in entries if (e["container"], e["machine"]) != self._key]
        entries = [{"container": container, "machine": machine, "rows": rows}, *others][:MOST_ENTRIES]
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "entries": entries})
        target = Path(os.path.realpath(self.path))  # a link stays one
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            if target.exists():
                shutil.copymode(target, temporary)
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _entries(self) -> list[Entry]:
        """Checked entries; an absent or empty file has none."""
        path = self.path
        try:
            if not path.is_file():
                if path.exists():
                    raise OptionError(f"{path}: not a file; the gate's costs cannot be kept there")
                return []
            size = path.stat().st_size
            if size > MOST_BYTES:
                raise OptionError(f"{path}: {size} bytes are too many for the gate's costs; remove it or name another")
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"{path}: cannot be read as the gate's costs: {error}") from None
        if not text.strip():
            return []
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"{path}: not the gate's costs ({error}); remove it or name another file") from None
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (_FORMAT, _VERSION):
            raise OptionError(f"{path}: not the gate's costs ({_FORMAT} {_VERSION}); remove it or name another file")
        entries = data.get("entries")
        if not isinstance(entries, list) or len(entries) > MOST_ENTRIES:
            raise OptionError(f"{path}: entries: expected a list of at most {MOST_ENTRIES}; remove the file")
        for number, entry in enumerate(entries):
            if not _is_entry(entry):
                raise OptionError(f"{path}: entry {number} is damaged; remove the file")
        return entries


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, Mapping) or set(entry) != {"container", "machine", "rows"}:
        return False
    names = entry["container"], entry["machine"]
    if not all(isinstance(name, str) and len(name) <= _LONGEST_NAME for name in names):
        return False
    rows = entry["rows"]
    return isinstance(rows, Mapping) and all(_is_row(count, cost) for count, cost in rows.items())


def _is_row(count: object, cost: object) -> bool:
    """Whether a row count and its [ratio, expert bytes] are within what can be."""
    if not (isinstance(count, str) and count.isascii() and count.isdigit() and 1 <= len(count) <= 2):
        return False
    if not 1 <= int(count) <= MAX_ROWS or not (isinstance(cost, list) and len(cost) == 2):
        return False
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in cost):
        return False
    ratio, expert_bytes = cost
    return bool(0 < ratio <= 4 * MAX_ROWS and math.isfinite(ratio) and 0 <= expert_bytes <= _MOST_EXPERT_BYTES)
