"""Sorts token ids into an n-gram index and writes it: front to back into a temporary file, renamed at the end.

The same ids and options give the same bytes. Peak memory is the ids plus one block of the sort.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from coli.drafts.index_file import (
    ARRAYS,
    DEPTH,
    DTYPES,
    HEADER_BYTES,
    MAX_TOKENS,
    SAMPLED,
    STRIDE,
    TOKEN_BYTES,
    IndexHeader,
    Source,
    header_bytes,
    packed_ids,
)
from coli.drafts.suffix_order import HeavyContexts, heavy_contexts, merged_heavy, sorted_blocks
from coli.errors import CorpusError
from coli.tools.corpus_shards import Progress, Tokens, no_progress
from coli.tools.output_file import whole_file


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """vocab_size, tokenizer (fingerprint): of the model; max_order: longest context drafted from; span_files: let
    n-grams cross documents; prune: leave out pairs of ids seen fewer times.
    """

    vocab_size: int
    tokenizer: str
    max_order: int = 5
    span_files: bool = False
    prune: int = 0


def write_index(target: Path, tokens: Tokens, options: IndexOptions, progress: Progress = no_progress) -> IndexHeader:
    """Write the index of `tokens` to `target`, which appears whole or not at all.

    Raises CorpusError when there are too many ids, or none that follow another; WriteError when the disk is full.
    """
    ids, documents = _laid_out(tokens, options.span_files)
    if len(ids) > MAX_TOKENS - 1:
        raise CorpusError(f"{target}: {len(ids)} ids are more than one index holds ({MAX_TOKENS}); make several")
    with whole_file(target) as file:
        return _write(file, target, ids, documents, tokens.sources, options, progress)


def _laid_out(tokens: Tokens, span_files: bool) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """(ids with DEPTH separators in front, documents (d, 3) of start, source, offset)."""
    documents = np.array(tokens.documents, np.int64).reshape(-1, 3)
    ids = tokens.ids
    if span_files and len(documents):
        # the separator behind each document goes; separators inside id files stay
        ends = np.append(documents[1:, 0], len(ids)) - 1
        ids = np.delete(ids, ends)
        documents[:, 0] -= np.arange(len(documents))
    documents[:, 0] += DEPTH
    return np.concatenate([np.full(DEPTH, -1, np.int32), ids]), documents


class _Writer:
    """Counts and digests what goes into the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.lengths: dict[str, int] = dict.fromkeys(ARRAYS, 0)

    def add(self, name: str, values: NDArray[Any]) -> None:
        data = np.ascontiguousarray(values, DTYPES[ARRAYS[name]])
        self._digest.update(data.data)
        self._file.write(data.data)
        self.lengths[name] += len(data)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


def _write(
    file: BinaryIO,
    target: Path,
    ids: NDArray[np.int32],
    documents: NDArray[np.int64],
    sources: list[Source],
    options: IndexOptions,
    progress: Progress,
) -> IndexHeader:
    file.write(bytes(HEADER_BYTES))
    writer = _Writer(file)
    counts = np.zeros(options.vocab_size, np.int64)
    contexts = [0] * options.max_order
    heavy: list[HeavyContexts] = []
    samples: list[NDArray[np.int32]] = []
    total = int(np.count_nonzero(ids >= 0))
    offset = 0
    for block in sorted_blocks(ids, options.vocab_size, DEPTH, options.prune):
        progress("sorting", offset, total)
        writer.add("positions", block.positions)
        counts += np.bincount(ids[block.positions - 1], minlength=options.vocab_size)
        for order in range(1, options.max_order + 1):
            contexts[order - 1] += block.num_contexts(order)
        samples.append(_sampled(ids, block.positions[-offset % STRIDE :: STRIDE]))
        heavy.append(heavy_contexts(ids, block, offset, options.max_order, options.vocab_size))
        offset += len(block.positions)
    if not offset:
        if options.prune > 1:
            raise CorpusError(
                f"--prune {options.prune}: no two ids follow one another that often, nothing would be left; "
                "choose a smaller number"
            )
        raise CorpusError(f"{target}: nothing to index: the inputs hold no two ids that follow one another")
    progress("writing", total, total)
    # what follows has 8-byte values
    padding = next(count for count in range(1, 9) if (4 * offset + TOKEN_BYTES * (len(ids) + count)) % 8 == 0)
    writer.add("tokens", packed_ids(ids))
    writer.add("tokens", packed_ids(np.full(padding, -1, np.int32)))
    writer.add("directory", np.concatenate(samples))
    writer.add("first", np.concatenate([[0], np.cumsum(counts)]))
    merged = merged_heavy(heavy)
    writer.add("heavy.keys", merged.keys)
    writer.add("heavy.first", merged.first)
    writer.add("documents.start", documents[:, 0])
    writer.add("documents.offset", documents[:, 2])
    writer.add("documents.source", documents[:, 1])
    writer.add("heavy.latest", merged.latest)
    writer.add("heavy.types", merged.types)
    writer.add("heavy.entropy", merged.entropy)
    writer.add("heavy.ids", merged.ids)
    writer.add("heavy.counts", merged.counts)
    writer.add("sources", np.frombuffer(json.dumps(sources).encode(), np.uint8))
    header = IndexHeader(
        vocab_size=options.vocab_size,
        tokenizer=options.tokenizer,
        max_order=options.max_order,
        span_files=options.span_files,
        prune=options.prune,
        num_ids=total,
        num_documents=len(documents),
        contexts=tuple(contexts),
        digest=writer.digest,
    )
    file.seek(0)
    file.write(header_bytes(header, writer.lengths))
    return header


def _sampled(ids: NDArray[np.int32], positions: NDArray[np.uint32]) -> NDArray[np.int32]:
    """The SAMPLED ids before each position, newest first, flat."""
    before = positions.astype(np.int64)[:, None] - np.arange(1, SAMPLED + 1)
    samples: NDArray[np.int32] = ids[before].ravel()
    return samples
