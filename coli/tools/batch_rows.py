"""The two files of a batch: rows of requests to read, one JSON object a line, and records of answers to append.

A record is {"id", "custom_id", "response", "error"}, always all four; `id` is a hash of the row, the model and the
options, so a record belongs to exactly one question, and a batch that is started again knows which rows are done. A
record is one write; what a kill leaves of one is cut off by the next start. Knows no model.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from coli.errors import OptionError, ReadError, WriteError

MAX_ROW_BYTES = 16 << 20
MAX_ID = 512  # characters of a custom_id
SYNC_S = 1.0
INTERNAL, OTHER_MODEL = "server_error", "model_not_found"
RETRIED = (INTERNAL, OTHER_MODEL)  # codes of records that another start tries again
STDOUT = Path("-")
_BEGIN = b'{"id": "'  # of every record
_FIELDS = ("custom_id", "method", "url", "body")


class RowError(Exception):
    """A row that cannot be answered: `code` and what is wrong with which field."""

    def __init__(self, message: str, code: str = "invalid_request", field: str | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.field = message, code, field


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the input. `fault`: why it has no body."""

    number: int
    record_id: str
    custom_id: str | None
    url: str = ""
    body: Any = None
    fault: RowError | None = None


def open_input(path: Path) -> BinaryIO:
    """The file of rows; OptionError if it is none."""
    try:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "no such file" if not path.exists() else "is no regular file"
            raise OptionError(f"{path}: {what}; expected a file of rows, one JSON object a line")
        return path.open("rb")
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}") from None


def read_rows(file: BinaryIO, identity: str) -> Iterator[Row]:
    """The rows of `file` from its beginning; empty lines are none. identity: of model and options."""
    seen: set[str] = set()
    file.seek(0)
    number = 0
    try:
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            too_long = len(line) > MAX_ROW_BYTES
            while too_long and not line.endswith(b"\n") and (more := file.readline(MAX_ROW_BYTES)):
                line = line[:64] + more[-1:]
            data = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if data:
                yield _row(number, data, too_long, identity, seen)
    except OSError as error:
        raise ReadError(f"{file.name}: line {number + 1}: {error.strerror or error}") from None


def _row(number: int, data: bytes, too_long: bool, identity: str, seen: set[str]) -> Row:
    custom_id: str | None = None
    try:
        if too_long:
            raise RowError(f"line {number}: longer than {MAX_ROW_BYTES} bytes", "row_too_long")
        row = _parse(number, data)
        custom_id = _custom_id(number, row)
        if custom_id in seen:
            raise RowError(f"line {number}: custom_id: another row has it already", "duplicate_custom_id", "custom_id")
        seen.add(custom_id)
        for name in row:
            if name not in _FIELDS:
                raise RowError(f"line {number}: {name[:64]}: unknown field", "unknown_field", name[:64])
        if row.get("method", "POST") != "POST":
            raise RowError(f"line {number}: method: expected POST", field="method")
        if not isinstance(row.get("url"), str):
            raise RowError(f"line {number}: url: expected a text", field="url")
        if not isinstance(row.get("body"), dict):
            raise RowError(f"line {number}: body: expected an object", field="body")
    except RowError as error:
        return Row(number, _record_id(identity, data, number), custom_id, fault=error)
    return Row(number, _record_id(identity, data), custom_id, row["url"], row["body"])


def _parse(number: int, data: bytes) -> dict[str, Any]:
    try:
        row = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(f"line {number}: not UTF-8 at byte {error.start + 1}", "invalid_utf8") from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"line {number}: not JSON: {error}", "invalid_json") from None
    if not isinstance(row, dict):
        raise RowError(f"line {number}: expected an object, found a {type(row).__name__}", "invalid_json")
    return row


def _custom_id(number: int, row: dict[str, Any]) -> str:
    found = row.get("custom_id")
    if not isinstance(found, str) or not 1 <= len(found) <= MAX_ID:
        raise RowError(f"line {number}: custom_id: expected a text of 1 to {MAX_ID} characters", field="custom_id")
    return found


def _record_id(identity: str, data: bytes, number: int | None = None) -> str:
    """Of a good row independent of where it stands."""
    digest = hashlib.sha256(f"{identity}\0{number}\0".encode())
    digest.update(data)
    return f"batch_req_{digest.hexdigest()[:32]}"


def answer_record(row: Row, body: dict[str, Any]) -> dict[str, Any]:
    """The record of an answered row."""
    response = {"status_code": 200, "request_id": row.record_id, "body": body}
    return {"id": row.record_id, "custom_id": row.custom_id, "response": response, "error": None}


def error_record(row: Row, error: RowError) -> dict[str, Any]:
    """The record of a row that could not be answered."""
    fault = {"code": error.code, "message": error.message, "param": error.field}
    return {"id": row.record_id, "custom_id": row.custom_id, "response": None, "error": fault}


class Output:
    """The file of records, ours alone while it is open; `done`: record ids in it, True where there is an error."""

    def __init__(self, path: Path) -> None:
        self._to_stdout = path == STDOUT
        self._synced = time.monotonic()
        self.done: dict[str, bool] = {}
        if self._to_stdout:
            return
        if path.exists() and not path.is_file():
            raise OptionError(f"{path}: is no regular file, to which a batch could come back; expected a file, or -")
        self._path = path = path.resolve()  # behind a link is the file that may be replaced
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OptionError(f"{path}: cannot be written: {error.strerror}") from None
        try:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise OptionError(f"{path}: another batch is writing it; wait for that one") from None
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _read(self) -> None:
        """Learn what is there, and leave it as it is."""
        self._retried: list[tuple[int, int]] = []
        self._end = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    if not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
                        self._record(b"")  # no record that was cut off
                    break
                record = self._record(line)
                error = record.get("error")
                if error is not None and error.get("code") in RETRIED:
                    self._retried.append((self._end, self._end + len(line)))
                else:
                    self.done[record["id"]] = error is not None
                self._end += len(line)

    def resume(self) -> None:
        """Leave out records to be tried again and the rest of one that was cut off. Before the first `append`."""
        if self._to_stdout:
            return
        if self._retried:
            self._end = self._drop(self._retried, self._end)
        self._cut(self._end)

    def _record(self, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
            if isinstance(record["id"], str) and isinstance(record["error"], dict | None):
                return dict(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise OptionError(f"{self._path}: holds something else than records of a batch: choose another file")

    def _drop(self, spans: list[tuple[int, int]], end: int) -> int:
        """Move what is behind each of `spans` forward. A kill meanwhile leaves a record twice at worst, never half."""
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}.new")
        try:
            with fresh.open("xb") as file:
                at = 0
                for start, stop in [*spans, (end, end)]:
                    file.write(os.pread(self._descriptor, start - at, at))
                    at = stop
                file.flush()
                os.fchmod(file.fileno(), os.fstat(self._descriptor).st_mode & 0o777)
                os.fsync(file.fileno())
                length = file.tell()
            descriptor = os.open(fresh, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(fresh, self._path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise self._failed(error) from None
        os.close(self._descriptor)
        self._descriptor = descriptor
        return length

    def append(self, record: dict[str, Any]) -> None:
        """Add a record. Raises WriteError, BrokenPipeError (standard output)."""
        text = json.dumps(record, ensure_ascii=False) + "\n"
        try:
            data = text.encode()
        except UnicodeEncodeError:  # a lone half of a surrogate pair in an id
            data = (json.dumps(record) + "\n").encode()
        if self._to_stdout:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            return
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._end + written)
            if time.monotonic() - self._synced >= SYNC_S:
                self.sync()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._cut(self._end)
            raise self._failed(error) from None
        self._end += len(data)

    def sync(self) -> None:
        """Have everything on the disk."""
        if not self._to_stdout:
            os.fsync(self._descriptor)
            self._synced = time.monotonic()

    def _cut(self, end: int) -> None:
        if os.fstat(self._descriptor).st_size != end:
            os.ftruncate(self._descriptor, end)

    def _failed(self, error: OSError) -> WriteError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = ": free some space and give the same command again, it goes on from there" if full else ""
        return WriteError(f"{self._path}: {error.strerror}{remedy}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._to_stdout:
            with contextlib.suppress(OSError):
                self.sync()
            os.close(self._descriptor)
