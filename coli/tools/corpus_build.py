"""`coli corpus` and `coli graph` build and add: from files to an index.

Both commands write the same kind of file; they differ in what they are usually fed and in their defaults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coli.drafts.index_file import DEPTH, IndexHeader
from coli.drafts.ngram_index import NgramIndex
from coli.errors import ColiError, CorpusError, OptionError
from coli.tools.corpus_encoding import Encoder
from coli.tools.corpus_inputs import Input, find_inputs
from coli.tools.corpus_shards import (
    Progress,
    Reading,
    Tokens,
    joined,
    no_progress,
    remove_work_folder,
    tokenize,
    work_folder,
)
from coli.tools.index_facts import check_content
from coli.tools.index_writer import IndexOptions, write_index
from coli.tools.output_file import checked_target


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
    inputs, target = _checked(names, options.kind, target)
    tokens = _tokenize(inputs, target, encoder, vocab_size, options, progress)
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
    inputs, target = _checked(names, options.kind, target)
    index = NgramIndex.open(target, vocab_size=vocab_size, tokenizer=encoder.fingerprint)
    check_content(index)  # everything in it is written anew, damage too
    old = _tokens_of(index)
    new = _tokenize(inputs, target, encoder, vocab_size, options, progress)
    header = index.header
    index_options = IndexOptions(vocab_size, header.tokenizer, header.max_order, header.span_files, header.prune)
    return _written(target, joined([old, new]), index_options, progress)


def _checked(names: Sequence[str], kind: str | None, target: Path) -> tuple[list[Input], Path]:
    """The inputs, none of which is the target, and where that is."""
    checked_target(target, names)
    inputs = find_inputs(names, kind)
    return inputs, checked_target(target, [source.path for source in inputs])


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
    inputs: Sequence[Input],
    target: Path,
    encoder: Encoder,
    vocab_size: int,
    options: BuildOptions,
    progress: Progress,
) -> Tokens:
    reading = Reading(encoder, vocab_size, options.field, options.piece_chars, options.banned)
    try:
        tokens = tokenize(inputs, target, reading, progress)
    except ColiError:
        with contextlib.suppress(OSError):  # it stays where there are shards to go on from
            work_folder(target).rmdir()
        raise
    if not (tokens.ids >= 0).any():
        remove_work_folder(target)
        named = ", ".join(source.shown for source in inputs[:5]) + (" …" if len(inputs) > 5 else "")
        raise CorpusError(f"{named}: empty: no text and no ids to index")
    return tokens


def _tokens_of(index: NgramIndex) -> Tokens:
    """What was indexed, in the form new inputs come in."""
    ids = index.ids(DEPTH)
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
