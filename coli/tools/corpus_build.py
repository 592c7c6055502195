"""`coli corpus` and `coli graph` build, add and info: from files to an index, and what an index holds.

Both commands write the same kind of file; they differ in what they are usually fed and in their defaults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coli.drafts.index_file import ARRAYS, DEPTH, HEADER_BYTES, IndexHeader
from coli.drafts.ngram_index import NgramIndex
from coli.errors import ColiError, CorpusError, OptionError
from coli.tools.corpus_encoding import Encoder
from coli.tools.corpus_inputs import find_inputs
from coli.tools.corpus_shards import Progress, Tokens, joined, no_progress, remove_work_folder, tokenize, work_folder
from coli.tools.index_writer import IndexOptions, write_index


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """kind: read all inputs as text, jsonl, ids or log (None: by name and content); field: of a JSON line; max_order,
    span_files, prune: see IndexOptions; piece_chars: text encoded at a time; banned: ids that are never drafted.
    """

    kind: str | None = None
    field: str = "text"
    max_order: int = 5
    span_files: bool = False
    prune: int = 0
    piece_chars: int | None = None
    banned: frozenset[int] = frozenset()


def build_index(
    names: Sequence[str],
    target: Path,
    encoder: Encoder,
    vocab_size: int,
    options: BuildOptions,
    progress: Progress = no_progress,
) -> IndexHeader:
    """Index the files, folders, globs and `-` in `names` for the model with this tokenizer and vocabulary.

    An interrupted build goes on where it was when called again. Raises OptionError, CorpusError or WriteError.
    """
    if not 1 <= options.max_order <= DEPTH:
        raise OptionError(f"--max-order {options.max_order}: expected 1..{DEPTH}")
    if options.prune < 0:
        raise OptionError(f"--prune {options.prune}: expected a count of 0 or more")
    check_target(target, names)
    tokens = _tokenize(names, target, encoder, vocab_size, options, progress)
    index_options = IndexOptions(
        vocab_size, encoder.fingerprint, options.max_order, options.span_files, max(options.prune, 0)
    )
    return _written(target, tokens, index_options, progress)


def add_to_index(
    names: Sequence[str],
    target: Path,
    encoder: Encoder,
    vocab_size: int,
    options: BuildOptions,
    progress: Progress = no_progress,
) -> IndexHeader:
    """Add inputs to an index: the result is the same file as one build of everything. Order, span_files and prune are
    the index's own.
    """
    index = NgramIndex.open(target, vocab_size=vocab_size, tokenizer=encoder.fingerprint)
    check_digest(index)  # everything in it is written anew, damage too
    old = _tokens_of(index)
    new = _tokenize(names, target, encoder, vocab_size, options, progress)
    header = index.header
    index_options = IndexOptions(vocab_size, header.tokenizer, header.max_order, header.span_files, header.prune)
    return _written(target, joined([old, new]), index_options, progress)


def _written(target: Path, tokens: Tokens, options: IndexOptions, progress: Progress) -> IndexHeader:
    """Write the index; the shards are of use to another run only when writing itself failed."""
    try:
        header = write_index(target, tokens, options, progress)
    except CorpusError:
        remove_work_folder(target)
        raise
    remove_work_folder(target)
    return header


def _tokenize(
    names: Sequence[str],
    target: Path,
    encoder: Encoder,
    vocab_size: int,
    options: BuildOptions,
    progress: Progress,
) -> Tokens:
    try:
        tokens = tokenize(
            find_inputs(names, options.kind),
            target,
            encoder,
            vocab_size=vocab_size,
            field=options.field,
            piece_chars=options.piece_chars,
            banned=options.banned,
            progress=progress,
        )
    except ColiError:
        with contextlib.suppress(OSError):  # it stays where there are shards to go on from
            work_folder(target).rmdir()
        raise
    if not (tokens.ids >= 0).any():
        remove_work_folder(target)
        raise CorpusError(f"{', '.join(names)}: empty: no text and no ids to index")
    return tokens


def check_target(target: Path, names: Sequence[str]) -> None:
    """Raise OptionError for an output that is a folder, a pipe or a device, one of the inputs, or in no folder."""
    if target.is_dir():
        raise OptionError(f"{target}: is a folder, expected the name of the file to write")
    if target.exists():
        if not target.is_file():
            raise OptionError(f"{target}: is a pipe or a device, expected the name of the file to write")
        if any(os.path.isfile(name) and target.samefile(name) for name in names):
            raise OptionError(f"{target}: is an input too; choose another file for -o")
    if not target.parent.is_dir():
        raise OptionError(f"{target}: its folder does not exist")


def _tokens_of(index: NgramIndex) -> Tokens:
    """What was indexed, in the form new inputs come in."""
    ids = index.array("tokens")[DEPTH:]
    starts = index.array("documents.start") - DEPTH
    ends = np.append(starts[1:], len(ids))
    if not index.header.span_files:
        used = int(np.flatnonzero(ids >= 0)[-1]) + 2  # the last document's separator; what follows is padding
        laid_out = np.append(ids, np.int32(-1))[:used]
    else:
        ends[-1] = int(np.flatnonzero(ids >= 0)[-1]) + 1
        laid_out = np.insert(ids[: ends[-1]], ends, np.int32(-1))
        starts = starts + np.arange(len(starts))
    documents = list(
        zip(
            starts.tolist(),
            index.array("documents.source").tolist(),
            index.array("documents.offset").tolist(),
            strict=True,
        )
    )
    return Tokens(np.array(laid_out, np.int32), documents, index.sources)


def index_facts(index: NgramIndex) -> dict[str, Any]:
    """What `info --json` prints."""
    header = index.header
    sizes = index.nbytes
    return {
        "path": str(index.path),
        **{name: value for name, value in dataclasses.asdict(header).items() if name != "contexts"},
        "contexts": dict(enumerate(header.contexts, 1)),
        "heavy_contexts": len(index.array("heavy.keys")),
        "sources": len(index.sources),
        "bytes": HEADER_BYTES + sum(sizes.values()),
        "bytes_per_id": (HEADER_BYTES + sum(sizes.values())) / max(header.num_ids, 1),
    }


def check_digest(index: NgramIndex) -> None:
    """Read the whole file once; CorpusError if it is not what was written."""
    digest = hashlib.sha256()
    for name in ARRAYS:
        digest.update(index.array(name).data)
    if digest.hexdigest() != index.header.digest:
        raise CorpusError(f"{index.path}: damaged: its content does not have the digest in its header; build it again")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is drafted: a successor of a context, how often it followed, and where it did last."""

    token_id: int
    count: int
    source: str
    offset: int


def why(index: NgramIndex, context: Sequence[int], encoder: Encoder, limit: int = 5) -> tuple[int, int, list[Reason]]:
    """(order of the longest suffix of `context` that is known, its occurrences, its most frequent successors).

    The offset is the byte in the source at which the successor begins (of a text; of its line in a file of lines).
    """
    for order in range(min(len(context), DEPTH), 0, -1):
        suffix = list(context[-order:])
        if index.count(suffix):
            break
    else:
        return 0, 0, []
    positions = np.sort(index.positions(suffix))
    following = index.array("tokens")[positions]
    successors = index.successors(suffix)
    best = sorted(successors, key=lambda token_id: (-successors[token_id], token_id))[:limit]
    reasons = []
    for token_id in best:
        place = index.place(int(positions[following == token_id][-1]))
        # bytes of a document are the bytes of its ids; in a JSON line only the line is known
        inside = sum(len(encoder.token_bytes(before)) for before in place.document_ids if before >= 0)
        offset = place.document_offset + (0 if place.source.endswith(".jsonl") else inside)
        reasons.append(Reason(token_id, successors[token_id], place.source, offset))
    return order, len(positions), reasons
