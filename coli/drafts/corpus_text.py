"""Reads the seed's corpus file: token ids as text, separated by white space, negative numbers between spans.

Every id is checked against the vocabulary before anything drafts from it. A file that cannot be opened or holds
nothing is no error (the first run of a pipeline has none yet): one notice, no corpus.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from coli.drafts.base import Notice
from coli.errors import CorpusError
from coli.impostors import open_input

SEPARATOR = -1
MAX_TEXT_BYTES = 256 * 1024 * 1024  # some 40 million ids, about 2 GB of index; more belongs in `coli corpus build`
_CHUNK_BYTES = 4 * 1024 * 1024
_FIELD_BYTES = b"0123456789+- \t\n\r\v\f"
_SPACE = b" \t\n\r\v\f"


def load_corpus_text(path: Path, vocab_size: int, notice: Notice) -> NDArray[np.int32] | None:
    """Ids of the file, negative numbers as SEPARATOR; None (after one notice) if it is absent, unreadable or empty.

    Raises CorpusError naming file, field number and byte offset for text that is no integer, for an id outside the
    vocabulary, and for a directory or a file beyond MAX_TEXT_BYTES.
    """
    if os.path.isdir(path):
        raise CorpusError(f"{path}: is a directory, expected a file of token ids (or one made by `coli corpus build`)")
    pieces: list[NDArray[np.int32]] = []
    try:
        with open_input(path, MAX_TEXT_BYTES + 1) as file:
            fields_before = 0
            for offset, text in _chunks(file, path):
                ids = _parse(text, path, offset, fields_before, vocab_size)
                fields_before += len(ids)
                pieces.append(ids)
    except OSError as error:
        notice(f"corpus drafts: {path}: {error.strerror or error}, source off")
        return None
    ids = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    if not (ids >= 0).any():
        notice(f"corpus drafts: {path}: no token ids in it yet, source off")
        return None
    return ids


def _chunks(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """(byte offset, text) pieces that end behind a whole field; the file may be a pipe."""
    offset = 0
    rest = b""
    while True:
        data = file.read(_CHUNK_BYTES)
        if offset + len(rest) + len(data) > MAX_TEXT_BYTES:
            raise CorpusError(
                f"{path}: more than {MAX_TEXT_BYTES} bytes of text; make an index of it with `coli corpus build`"
            )
        text = rest + data
        if not data:
            if text:
                yield offset, text
            return
        end = max(text.rfind(space) for space in _SPACE) + 1
        if not end and len(text) > _CHUNK_BYTES:
            end = len(text)  # one endless field: no id, the parser says so
        if end:
            yield offset, text[:end]
        offset += end
        rest = text[end:]


def _parse(text: bytes, path: Path, offset: int, fields_before: int, vocab_size: int) -> NDArray[np.int32]:
    fields = text.split()
    try:
        if text.translate(None, _FIELD_BYTES):
            raise ValueError
        ids = np.fromiter(map(int, fields), np.int64, len(fields))
    except (ValueError, OverflowError):
        ids = None
    if ids is None or (len(ids) and int(ids.max()) >= vocab_size):
        raise _first_bad_field(text, path, offset, fields_before, vocab_size)
    return np.maximum(ids, SEPARATOR).astype(np.int32)


def _first_bad_field(text: bytes, path: Path, offset: int, fields_before: int, vocab_size: int) -> CorpusError:
    for number, match in enumerate(re.finditer(rb"[^ \t\n\r\v\f]+", text), fields_before + 1):
        field = match.group()
        where = f"{path}: field {number} at byte {offset + match.start()}"
        shown = ascii(field[:24].decode("utf-8", "replace")) + ("..." if len(field) > 24 else "")
        integer = re.fullmatch(rb"([+-]?)0*([0-9]+)", field)
        too_long = integer is not None and len(integer[2]) > 18
        if integer is None or (too_long and integer[1] == b"-"):
            return CorpusError(
                f"{where} is {shown}, expected a token id or a negative separator: a corpus holds ids alone "
                "(README's sed line cuts them out of a log; `coli corpus build` takes logs and text)"
            )
        if too_long or (integer[1] != b"-" and int(integer[2]) >= vocab_size):
            return CorpusError(
                f"{where} is {shown}, outside the vocabulary of {vocab_size} ids; was it frozen with another model?"
            )
    raise AssertionError("no bad field")
