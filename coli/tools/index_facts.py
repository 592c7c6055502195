"""What an index holds: its sizes, whether it is what was written, and why something is drafted from it.

For `info`, and for every command that follows numbers of an index to places in it. Read only.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.drafts.index_file import DEPTH, HEADER_BYTES
from coli.drafts.ngram_index import NgramIndex
from coli.drafts.suffix_order import distinct_contexts
from coli.errors import CorpusError
from coli.impostors import open_regular
from coli.tools.corpus_encoding import Encoder
from coli.tools.corpus_inputs import TEXT

_BLOCK_BYTES = 1 << 20


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


def check_content(index: NgramIndex, *, recount: bool = False) -> None:
    """Read the whole file once; CorpusError if it is not what was written, or does not hold what it says.

    Afterwards every number in it may be followed. recount: also count the contexts of all orders.
    """
    try:
        with open_regular(index.path) as file:
            file.seek(HEADER_BYTES)
            hashed = hashlib.sha256()
            while data := file.read(_BLOCK_BYTES):
                hashed.update(data)
    except OSError as error:
        raise CorpusError(f"{index.path}: cannot be read: {error.strerror or error}") from None
    if hashed.hexdigest() != index.header.digest:
        raise CorpusError(f"{index.path}: damaged: its content does not have the digest in its header; build it again")
    for what in _contradictions(index):
        raise CorpusError(f"{index.path}: contradicts itself: {what}; build it again")
    if recount:
        header = index.header
        found = tuple(distinct_contexts(index.ids(), index.array("positions"), header.max_order))
        if found != header.contexts:
            raise CorpusError(
                f"{index.path}: header: contexts {list(header.contexts)}, found {list(found)}; build it again"
            )


def _contradictions(index: NgramIndex) -> Iterator[str]:
    """A whole file can still be a wrong one: what would lead outside its arrays, and counts that are not theirs."""
    header, tokens, positions = index.header, index.ids(), index.array("positions")
    first, heavy_first, starts = (index.array(name) for name in ("first", "heavy.first", "documents.start"))
    if (tokens[:DEPTH] != -1).any() or int(tokens.min()) < -1 or int(tokens.max()) >= header.vocab_size:
        yield f"tokens: expected {DEPTH} separators and ids below {header.vocab_size}"
    if int(positions.min()) <= DEPTH or int(positions.max()) >= len(tokens):
        yield f"positions: expected {DEPTH + 1}..{len(tokens) - 1}"
    kept = len(index.array("heavy.ids"))
    for name, ranges, end in (("first", first, len(positions)), ("heavy.first", heavy_first, kept)):
        if int(ranges[0]) != 0 or int(ranges[-1]) != end or (ranges[1:] < ranges[:-1]).any():
            yield f"{name}: expected ranges that rise from 0 to {end}"
    if int(starts[0]) != DEPTH or int(starts[-1]) >= len(tokens) or (starts[1:] < starts[:-1]).any():
        yield f"documents.start: expected places that rise from {DEPTH} to {len(tokens) - 1} at most"
    source = index.array("documents.source")
    if int(source.min()) < 0 or int(source.max()) >= len(index.sources):
        yield f"documents.source: expected 0..{len(index.sources) - 1}"
    found = int(np.count_nonzero(tokens >= 0))
    if found != header.num_ids:
        yield f"header: num_ids {header.num_ids}, found {found}"
    found = int(np.count_nonzero(first[1:] > first[:-1]))
    if found != header.contexts[0]:
        yield f"header: contexts of order 1 {header.contexts[0]}, found {found}"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is drafted: a successor of a context, how often it followed, and where it did last.

    offset: byte of the source at which the successor begins if `exact` (a text), else the line or run of ids it is in.
    """

    token_id: int
    count: int
    source: str
    offset: int
    exact: bool


def why(index: NgramIndex, context: Sequence[int], encoder: Encoder, limit: int = 5) -> tuple[int, int, list[Reason]]:
    """(order of the longest suffix of `context` that is known, its occurrences, its most frequent successors)."""
    for order in range(min(len(context), DEPTH), 0, -1):
        suffix = list(context[-order:])
        if index.count(suffix):
            break
    else:
        return 0, 0, []
    positions = np.sort(index.positions(suffix))
    following = index.ids_at(positions)
    successors = index.successors(suffix)
    best = sorted(successors, key=lambda token_id: (-successors[token_id], token_id))[:limit]
    reasons = []
    for token_id in best:
        place = index.place(int(positions[following == token_id][-1]))
        exact = place.source.kind == TEXT
        offset = place.document_offset + (_num_bytes(place.document_ids, encoder) if exact else 0)
        reasons.append(Reason(token_id, successors[token_id], place.source.name, offset, exact))
    return order, len(positions), reasons


def _num_bytes(ids: NDArray[np.int32], encoder: Encoder) -> int:
    """Bytes of the text that `ids`, the first of a document, were made of."""
    known, counts = np.unique(ids, return_counts=True)
    pairs = zip(known.tolist(), counts.tolist(), strict=True)
    total = sum(count * len(encoder.token_bytes(token_id)) for token_id, count in pairs)
    # some tokenizers put a space before the first word
    added = sum(len(encoder.token_bytes(token_id)) for token_id in encoder.encode("a")) - 1
    return max(total - added, 0) if total else 0
