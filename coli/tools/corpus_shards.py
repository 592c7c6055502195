"""Token ids of the inputs, shard by shard, in a work folder beside the output: a killed build goes on where it was.

A shard covers whole inputs; it counts once its description has been renamed into place, and only while its inputs are
unchanged. The folder is removed when the index is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli.errors import WriteError
from coli.tools.corpus_encoding import Encoder, encoded
from coli.tools.corpus_inputs import STDIN, Document, Input, documents, find_inputs

SHARD_BYTES = 8 << 20  # of input
Progress = Callable[[str, int, int], None]  # what is being done, done, in all


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of some inputs. ids: (n,) int32, -1 behind each document; documents: (start in ids, source, byte offset);
    sources: names.
    """

    ids: NDArray[np.int32]
    documents: list[tuple[int, int, int]]
    sources: list[str]


def no_progress(what: str, done: int, total: int) -> None:
    """For callers that show none."""


def work_folder(target: Path) -> Path:
    """Where a build of `target` keeps its shards."""
    return target.with_name(target.name + ".partial")


def tokenize(
    inputs: Sequence[Input],
    target: Path,
    encoder: Encoder,
    *,
    vocab_size: int,
    field: str = "text",
    piece_chars: int | None = None,
    banned: frozenset[int] = frozenset(),
    progress: Progress = no_progress,
) -> Tokens:
    """Encode all inputs, reusing the shards an interrupted build of `target` left.

    banned: ids that become separators (special tokens, which are never drafted).
    Raises CorpusError for what cannot be read as text or ids, WriteError when the disk is full.
    """
    folder = work_folder(target)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from None
    options = [encoder.fingerprint, str(vocab_size), field, *map(str, sorted(banned))]
    shards = _cut(inputs)
    total = sum(source.size for source in inputs)
    done = 0
    parts: list[Tokens] = []
    for number, members in enumerate(shards):
        progress("reading", done, total)
        key = hashlib.sha256(json.dumps([options, [asdict(member) for member in members]]).encode()).hexdigest()
        part = _stored(folder, number, key)
        if part is None:
            part = _encode(members, encoder, vocab_size, field, piece_chars, banned)
            if all(member.path != STDIN for member in members):
                _store(folder, number, key, part)
        parts.append(part)
        done += sum(member.size for member in members)
    progress("reading", total, total)
    return joined(parts)


def read_tokens(names: Sequence[str], kind: str | None, encoder: Encoder, vocab_size: int) -> Tokens:
    """Encode inputs without keeping anything."""
    return _encode(find_inputs(names, kind), encoder, vocab_size, "text", None, frozenset())


def joined(parts: Sequence[Tokens]) -> Tokens:
    """All parts behind one another."""
    documents: list[tuple[int, int, int]] = []
    sources: list[str] = []
    at = 0
    for part in parts:
        documents += [(start + at, source + len(sources), offset) for start, source, offset in part.documents]
        sources += part.sources
        at += len(part.ids)
    return Tokens(np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]), documents, sources)


def remove_work_folder(target: Path) -> None:
    """The build of `target` is complete."""
    shutil.rmtree(work_folder(target), ignore_errors=True)


def write_error(path: Path, error: OSError) -> WriteError:
    """The error for a failed write to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteError(f"{path}: disk full; free some space and give the same command again: it goes on from here")
    return WriteError(f"{path}: cannot be written: {error.strerror or error}")


def _cut(inputs: Sequence[Input]) -> list[list[Input]]:
    """Runs of whole inputs of about SHARD_BYTES; a stream is a shard of its own."""
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
    members: Sequence[Input],
    encoder: Encoder,
    vocab_size: int,
    field: str,
    piece_chars: int | None,
    banned: frozenset[int],
) -> Tokens:
    runs: list[NDArray[np.int32]] = []
    starts: list[tuple[int, int, int]] = []
    at = 0
    for number, member in enumerate(members):
        for document in documents(member, field=field, vocab_size=vocab_size):
            ids = _ids(document, encoder, piece_chars)
            if not len(ids):
                continue
            if banned:
                ids = np.where(np.isin(ids, list(banned)), np.int32(-1), ids)
            starts.append((at, number, document.offset))
            runs += [ids, np.array([-1], np.int32)]
            at += len(ids) + 1
    return Tokens(
        np.concatenate([np.empty(0, np.int32), *runs]), starts, [_source_name(member.path) for member in members]
    )


def _ids(document: Document, encoder: Encoder, piece_chars: int | None) -> NDArray[np.int32]:
    if document.ids is not None:
        return np.array(document.ids, np.int32)
    pieces = document.text if document.text is not None else iter(())
    cut = encoded(pieces, encoder) if piece_chars is None else encoded(pieces, encoder, piece_chars)
    return np.concatenate([np.empty(0, np.int32), *(np.array(ids, np.int32) for ids in cut)])


def _source_name(path: str) -> str:
    return "(standard input)" if path == STDIN else path


def _stored(folder: Path, number: int, key: str) -> Tokens | None:
    """A shard that an earlier run finished, if it was made of the same inputs with the same options."""
    try:
        notes = json.loads((folder / f"{number:06}.json").read_bytes())
        if notes["key"] != key:
            return None
        ids = np.fromfile(folder / f"{number:06}.ids", np.int32)
        if len(ids) != notes["num_ids"]:
            return None
        return Tokens(ids, [tuple(entry) for entry in notes["documents"]], notes["sources"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(folder: Path, number: int, key: str, part: Tokens) -> None:
    path = folder / f"{number:06}.ids"
    notes = {"key": key, "num_ids": len(part.ids), "documents": part.documents, "sources": part.sources}
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
