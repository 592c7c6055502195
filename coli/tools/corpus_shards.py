"""Token ids of the inputs, shard by shard, in a work folder beside the output: a killed build goes on where it was.

A shard covers whole inputs, or a stretch of a large one; it counts once its description has been renamed into place,
and only while its inputs are unchanged. The folder is removed when the index is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli.drafts.index_file import Source
from coli.tools.corpus_encoding import PIECE_CHARS, Encoder, encoded
from coli.tools.corpus_inputs import BEGINNING, STDIN, TEXT, Document, Input, Start, documents, find_inputs
from coli.tools.output_file import write_error

SHARD_BYTES = 8 << 20  # of input
_SHARD_FILE = re.compile(r"\d{6,}\.(ids|json|tmp)")
Progress = Callable[[str, int, int], None]  # what is being done, done, in all


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of some inputs. ids: (n,) int32, -1 behind each document; documents: (start in ids, source, byte offset);
    goes_on: the first source is the last one of the part before (whose last document may go on, too).
    """

    ids: NDArray[np.int32]
    documents: list[tuple[int, int, int]]
    sources: list[Source]
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """How inputs become ids. field: of a JSON line; piece_chars: text encoded at a time; banned: ids that become
    separators (special tokens, which are never drafted).
    """

    encoder: Encoder
    vocab_size: int
    field: str = "text"
    piece_chars: int | None = None
    banned: frozenset[int] = frozenset()


def no_progress(what: str, done: int, total: int) -> None:
    """For callers that show none."""


def work_folder(target: Path) -> Path:
    """Where a build of `target` keeps its shards."""
    return target.with_name(target.name + ".partial")


def tokenize(inputs: Sequence[Input], target: Path, reading: Reading, progress: Progress = no_progress) -> Tokens:
    """Encode all inputs, reusing the shards an interrupted build of `target` left.

    Raises CorpusError for what cannot be read as text or ids, WriteError when the disk is full.
    """
    folder = work_folder(target)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from None
    named = [reading.encoder.fingerprint, str(reading.vocab_size), reading.field, *map(str, sorted(reading.banned))]
    total = sum(source.size for source in inputs)
    done = 0
    parts: list[Tokens] = []
    for members in _cut(inputs):
        start: Start | None = BEGINNING
        kept = members[0].path != STDIN  # what came through a pipe does not come twice
        while start is not None:
            progress("reading", done + start.offset, total)
            described = [named, [asdict(member) for member in members], asdict(start)]
            key = hashlib.sha256(json.dumps(described).encode()).hexdigest()
            stored = _stored(folder, len(parts), key)
            part, following = stored or _encode(members, start, reading, SHARD_BYTES if kept else None)
            if stored is None and kept:
                _store(folder, len(parts), key, part, following)
            parts.append(part)
            start = following
        done += sum(member.size for member in members)
    progress("reading", total, total)
    return joined(parts)


def read_tokens(names: Sequence[str], kind: str | None, encoder: Encoder, vocab_size: int) -> Tokens:
    """Encode inputs without keeping anything."""
    return _encode(find_inputs(names, kind), BEGINNING, Reading(encoder, vocab_size), None)[0]


def joined(parts: Sequence[Tokens]) -> Tokens:
    """All parts behind one another."""
    documents: list[tuple[int, int, int]] = []
    sources: list[Source] = []
    at = 0
    for part in parts:
        before = len(sources) - part.goes_on
        documents += [(start + at, source + before, offset) for start, source, offset in part.documents]
        sources += part.sources[part.goes_on :]
        at += len(part.ids)
    return Tokens(np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]), documents, sources)


def remove_work_folder(target: Path) -> None:
    """The build of `target` is complete. What else somebody keeps in a folder of that name stays."""
    folder = work_folder(target)
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _SHARD_FILE.fullmatch(path.name):
                path.unlink()
        folder.rmdir()


def _cut(inputs: Sequence[Input]) -> list[list[Input]]:
    """Runs of whole inputs of about SHARD_BYTES; a stream, and an input that is larger, stay alone."""
    shards: list[list[Input]] = []
    size = 0
    for source in inputs:
        alone = source.path == STDIN
        if not shards or alone or size + source.size > SHARD_BYTES or shards[-1][-1].path == STDIN:
            shards.append([])
            size = 0
        shards[-1].append(source)
        size += source.size
    return shards


def _encode(
    members: Sequence[Input], start: Start, reading: Reading, most_bytes: int | None
) -> tuple[Tokens, Start | None]:
    """Ids of the inputs from `start` in the first one on, and where to go on: an input that is alone may be left after
    `most_bytes` of it, before a document or inside a text.
    """
    runs: list[NDArray[np.int32]] = []
    starts: list[tuple[int, int, int]] = []
    sources = [Source("(standard input)" if m.path == STDIN else m.path, m.kind) for m in members]
    end = None if most_bytes is None or len(members) > 1 else start.offset + most_bytes
    at, following = 0, None
    for number, member in enumerate(members):
        with contextlib.closing(
            documents(member, field=reading.field, vocab_size=reading.vocab_size, start=start)
        ) as found:
            for document in found:
                if end is not None and document.offset >= end:
                    following = Start(document.offset, document.line)
                    break
                goes_on, begins = start.inside, at
                for ids, stop in _pieces(document, reading):
                    runs.append(ids)
                    at += len(ids)
                    if end is not None and member.kind == TEXT and stop >= end and at > begins:
                        following = Start(stop, inside=True)
                        break
                if at > begins and not goes_on:
                    starts.append((begins, number, document.offset))
                if following is None and (at > begins or goes_on):
                    runs.append(np.array([-1], np.int32))
                    at += 1
    ids = np.concatenate([np.empty(0, np.int32), *runs])
    return Tokens(ids, starts, sources, start.offset > 0), following


def _pieces(document: Document, reading: Reading) -> Iterator[tuple[NDArray[np.int32], int]]:
    """(ids, byte behind them) of a document, piece by piece."""
    if document.ids is not None:
        yield _without(document.ids, reading.banned), document.offset
        return
    stop = document.offset
    text = document.text if document.text is not None else iter(())
    for ids, num_bytes in encoded(text, reading.encoder, reading.piece_chars or PIECE_CHARS):
        stop += num_bytes
        yield _without(np.array(ids, np.int32), reading.banned), stop


def _without(ids: NDArray[np.int32], banned: frozenset[int]) -> NDArray[np.int32]:
    return np.where(np.isin(ids, list(banned)), np.int32(-1), ids) if banned else ids


def _stored(folder: Path, number: int, key: str) -> tuple[Tokens, Start | None] | None:
    """A shard that an earlier run finished and where the next begins, if it was made of the same inputs in the same
    way.
    """
    try:
        notes = json.loads((folder / f"{number:06}.json").read_bytes())
        if notes["key"] != key:
            return None
        ids = np.fromfile(folder / f"{number:06}.ids", np.int32)
        if len(ids) != notes["num_ids"]:
            return None
        documents, sources = [tuple(entry) for entry in notes["documents"]], [Source(*s) for s in notes["sources"]]
        following = None if notes["following"] is None else Start(**notes["following"])
        return Tokens(ids, documents, sources, notes["goes_on"]), following
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(folder: Path, number: int, key: str, part: Tokens, following: Start | None) -> None:
    path = folder / f"{number:06}.ids"
    notes = {
        "key": key,
        "num_ids": len(part.ids),
        "documents": part.documents,
        "sources": part.sources,
        "goes_on": part.goes_on,
        "following": None if following is None else asdict(following),
    }
    temporary = folder / f"{number:06}.tmp"
    try:
        with path.open("wb") as file:
            file.write(part.ids.tobytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.write_text(json.dumps(notes))
        temporary.replace(folder / f"{number:06}.json")
    except OSError as error:
        raise write_error(path, error) from None
