"""What an index is built from: files, folders, globs and standard input, as documents of text or of token ids.

Finds inputs in a stable order and cuts them into documents, each with the byte it begins at. Reads piece by piece.
Knows nothing of tokenizers or of the index.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
import stat
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from coli.errors import CorpusError, OptionError

TEXT, JSON_LINES, IDS, LOG = "text", "jsonl", "ids", "log"
KINDS = (TEXT, JSON_LINES, IDS, LOG)
SUFFIXES = {".txt": TEXT, ".md": TEXT, ".jsonl": JSON_LINES}
STDIN = "-"
PIECE_BYTES = 1 << 20
MAX_LINE_BYTES = 256 << 20
_LOG_LINE = re.compile(rb"\[TOKENS\][0-9 ]*generated:([0-9 ]*)")
_NOT_IDS = re.compile(rb"[^0-9+\- \t\n\r\v\f]")
# a negative number between white space; the text begins with a field or white space
_SEPARATOR = re.compile(rb"(?<![^ \t\n\r\v\f])-(?=[0-9]*[1-9])[0-9]{1,18}(?![^ \t\n\r\v\f])")


@dataclass(frozen=True, slots=True)
class Input:
    """One file or `-`. kind: how it is read; size and mtime_ns tell whether it changed (0 for a stream)."""

    path: str
    kind: str
    size: int
    mtime_ns: int

    @property
    def shown(self) -> str:
        """The name for people."""
        return "standard input" if self.path == STDIN else self.path


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading an input begins: a byte of it and the number of that line; inside: of a document (a text)."""

    offset: int = 0
    line: int = 1
    inside: bool = False


BEGINNING = Start()


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text or a run of ids that n-grams do not leave. offset, line: where in its input it begins.

    Exactly one of `text` (to be read once, in order) and `ids` is given.
    """

    offset: int
    text: Iterator[str] | None = None
    ids: NDArray[np.int32] | None = None
    line: int = 1


def find_inputs(names: Sequence[str], kind: str | None) -> list[Input]:
    """The inputs behind files, folders (their .txt, .md and .jsonl files, all levels), globs and `-`.

    kind: read all of them as this; None: by name and content. Raises OptionError for a name that leads nowhere.
    """
    found: list[Input] = []
    for name in names:
        if name == STDIN:
            found.append(Input(STDIN, kind or TEXT, 0, 0))
            continue
        matches = sorted(glob.glob(name, recursive=True)) if not os.path.lexists(name) else [name]
        if not matches:
            raise OptionError(f"{name}: no such file or folder")
        for match in matches:
            paths = _in_folder(Path(match)) if os.path.isdir(match) else [Path(match)]
            if not paths:
                raise OptionError(f"{match}: no .txt, .md or .jsonl file in this folder")
            found.extend(_input(path, kind) for path in paths)
    return found


def _in_folder(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise OptionError(f"{error.filename}: {error.strerror or error}")

    paths = (Path(parent, name) for parent, _, names in os.walk(folder, onerror=refuse) for name in names)
    return sorted(path for path in paths if path.suffix.lower() in SUFFIXES and path.is_file())


def _input(path: Path, kind: str | None) -> Input:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # its beginning could not be read twice
            raise OptionError(f"{path}: is a pipe or a device; give a file, or - and pipe it into standard input")
        if kind is None:
            kind = SUFFIXES.get(path.suffix.lower(), TEXT)
            if kind == TEXT:
                kind = _sniffed(path)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}") from None
    return Input(str(path), kind, status.st_size, status.st_mtime_ns)


def _sniffed(path: Path) -> str:
    """A frozen corpus of the seed, a log with [TOKENS] lines, or plain text."""
    with path.open("rb") as file:
        start = file.read(1 << 16)
    if _LOG_LINE.search(start):
        return LOG
    return IDS if start.strip() and not _NOT_IDS.search(start) else TEXT


def documents(
    source: Input, *, field: str = "text", vocab_size: int, start: Start = BEGINNING
) -> Generator[Document, None, None]:
    """The documents of one input from `start` on (of a document, or inside a text), in order. Ids are checked against
    the vocabulary.

    Raises CorpusError naming the input, the byte or line and what is wrong with it.
    """
    try:
        if source.path == STDIN:
            yield from _documents(sys.stdin.buffer, source, field, vocab_size, BEGINNING)
        else:
            with open(source.path, "rb") as file:
                file.seek(start.offset)
                yield from _documents(file, source, field, vocab_size, start)
    except OSError as error:
        raise CorpusError(f"{source.shown}: cannot be read: {error.strerror or error}") from None


def _documents(file: BinaryIO, source: Input, field: str, vocab_size: int, start: Start) -> Iterator[Document]:
    if source.kind == TEXT:
        head, offset = file.read(len(codecs.BOM_UTF8)), start.offset
        if head == codecs.BOM_UTF8 and not offset:
            head, offset = b"", len(head)
        yield Document(offset, text=_text(file, source, head, offset))
    elif source.kind == JSON_LINES:
        yield from _json_lines(file, source, field, start)
    elif source.kind == LOG:
        for offset, line in _lines(file, source, start.offset):
            for match in _LOG_LINE.finditer(line):
                ids = _plain_ids(match[1], vocab_size)
                if ids is None:
                    ids = _checked_ids(match[1], source, offset + match.start(1), vocab_size)
                yield Document(offset, ids=ids)
    else:
        yield from _id_runs(file, source, vocab_size, start.offset)


def _text(file: BinaryIO, source: Input, head: bytes, offset: int) -> Iterator[str]:
    """Decoded pieces of `head`, which is at byte `offset`, and the rest. A zero byte means that this is no text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while True:
        data, head = head + file.read(PIECE_BYTES), b""
        zero = data.find(b"\0")
        if zero >= 0:
            raise CorpusError(f"{source.shown}: a zero byte at byte {offset + zero}: a binary file, not text")
        pending = len(decoder.getstate()[0])
        try:
            piece = decoder.decode(data, not data)
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{source.shown}: not UTF-8 text at byte {offset - pending + error.start}; convert it first"
            ) from None
        offset += len(data)
        if piece:
            yield piece
        if not data:
            return


def _lines(file: BinaryIO, source: Input, offset: int) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) from byte `offset` on; the end of a line belongs to it."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise CorpusError(f"{source.shown}: the line at byte {offset} is longer than {MAX_LINE_BYTES} bytes")
        yield offset, line
        offset += len(line)


def _json_lines(file: BinaryIO, source: Input, field: str, start: Start) -> Iterator[Document]:
    for number, (offset, line) in enumerate(_lines(file, source, start.offset), start.line):
        if not line.strip():
            continue
        where = f"{source.shown}: line {number} at byte {offset}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where} is not JSON: {error}") from None
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise CorpusError(f"{where}: expected an object with text in {field!r} (--field chooses another)")
        yield Document(offset, text=iter((text,)), line=number)


def _id_runs(file: BinaryIO, source: Input, vocab_size: int, begin: int) -> Iterator[Document]:
    """Runs between negative numbers, as in the seed's corpus file. begin: byte at which the file is."""
    run: list[NDArray[np.int32]] = []
    start = begin
    for offset, text in _whole_fields(file, begin):
        at = 0
        for separator in (*_SEPARATOR.finditer(text), None):
            part = text[at:] if separator is None else text[at : separator.start()]
            ids = _plain_ids(part, vocab_size)
            if ids is None:
                ids = _checked_ids(part, source, offset + at, vocab_size)
            if len(ids) and not run:
                start = offset + at + len(part) - len(part.lstrip())
            if len(ids):
                run.append(ids)
            if separator is not None:
                if run:
                    yield Document(start, ids=np.concatenate(run))
                run, at = [], separator.end()
    if run:
        yield Document(start, ids=np.concatenate(run))


def _plain_ids(text: bytes, vocab_size: int) -> NDArray[np.int32] | None:
    """The ids of text that is digits and white space only; None if it has to be looked at field by field."""
    if text.translate(None, b"0123456789 \t\n\r\v\f"):
        return None
    spaces = np.flatnonzero(np.frombuffer(text, np.uint8) <= ord(" "))
    if len(spaces) == len(text):
        return np.empty(0, np.int32)
    if np.diff(spaces, prepend=-1, append=len(text)).max() > 19:  # more than 18 digits
        return None
    ids = np.fromstring(text, np.int64, sep=" ")
    return ids.astype(np.int32) if ids.max() < vocab_size else None


def _checked_ids(text: bytes, source: Input, offset: int, vocab_size: int) -> NDArray[np.int32]:
    """The same, or CorpusError with the byte of what is no id. offset: of the text."""
    ids: list[int] = []
    for match in re.finditer(rb"[^ \t\n\r\v\f]+", text):
        field, at = match.group(), offset + match.start()
        if not re.fullmatch(rb"[+-]?[0-9]{1,18}", field):
            shown = ascii(field[:24].decode("utf-8", "replace"))
            raise CorpusError(f"{source.shown}: {shown} at byte {at}: expected a token id or a negative separator")
        _check_ids([int(field)], source, at, vocab_size)
        ids.append(int(field))
    return np.array(ids, np.int32)


def _whole_fields(file: BinaryIO, offset: int) -> Iterator[tuple[int, bytes]]:
    """(byte offset, text) pieces that end behind a whole field; a field cut by a read is put together again."""
    rest = b""
    while True:
        data = file.read(PIECE_BYTES)
        text = rest + data
        whole = len(text) if not data else max(text.rfind(space) for space in b" \t\n\r\v\f") + 1
        yield offset, text[:whole]
        offset += whole
        rest = text[whole:]
        if not data:
            return
        if len(rest) > PIECE_BYTES:  # no id is that long
            yield offset, rest
            return


def _check_ids(ids: Sequence[int], source: Input, offset: int, vocab_size: int) -> None:
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise CorpusError(
            f"{source.shown}: id {highest} at byte {offset} is outside the vocabulary of {vocab_size} ids; "
            "was it frozen with another model?"
        )
