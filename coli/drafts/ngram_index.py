"""An n-gram index that is open: longest suffixes for the corpus source, laws of all orders for the graph source.

Checks that the index belongs to this model. Holds the mapping and the searches' scratch memory; one thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.drafts.frozen_index import LONGEST_MATCH, SHORTEST_MATCH
from coli.drafts.index_file import DEPTH, TOKEN_BYTES, IndexHeader, Source, open_index, unpacked_ids
from coli.errors import CorpusError
from coli.kernels.match import ATTENTIVE, SINGLE_ORDER, WITTEN_BELL, IndexArrays

MIXES = {"attentive": ATTENTIVE, "single": SINGLE_ORDER, "witten-bell": WITTEN_BELL}


@dataclass(frozen=True, slots=True)
class Mixing:
    """How the orders are weighed: semantics 8. mix is a key of MIXES; the other knobs serve `attentive`."""

    mix: str = "attentive"
    order_bias: float = 1.0
    mix_temperature: float = 1.0
    reliability_weight: float = 1.0
    entropy_penalty: float = 0.5

    @property
    def arguments(self) -> tuple[int, float, float, float, float]:
        """As the kernel takes them."""
        knobs = self.order_bias, self.mix_temperature, self.reliability_weight, self.entropy_penalty
        return (MIXES[self.mix], *knobs)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an id came from: the source, the document's first byte in it, ids between that and the id."""

    source: Source
    document_offset: int
    document_ids: NDArray[np.int32]


class NgramIndex:
    """Read access to one index."""

    def __init__(self, path: Path) -> None:
        """Map the file at `path`; CorpusError if it is no index."""
        self.path = path
        self.header, self._arrays = open_index(path)
        arrays = self._arrays
        self._search = IndexArrays(
            *(arrays[name] for name in ("tokens", "positions", "directory", "first", "heavy.keys", "heavy.latest")),
            *(arrays[name] for name in ("heavy.types", "heavy.entropy", "heavy.first", "heavy.ids", "heavy.counts")),
        )
        self.num_ids = self.header.num_ids
        self.mapped_bytes = path.stat().st_size

    @classmethod
    def open(cls, path: Path, *, vocab_size: int, tokenizer: str) -> NgramIndex:
        """Open the index of a model: its ids must be made by the tokenizer with this fingerprint."""
        index = cls(path)
        if index.header.tokenizer != tokenizer:
            raise CorpusError(
                f"{path}: made with another tokenizer ({index.header.tokenizer[:12]}, the model's is "
                f"{tokenizer[:12]}); build it again for this model"
            )
        if index.header.vocab_size > vocab_size:
            raise CorpusError(
                f"{path}: made for {index.header.vocab_size} ids, the model has {vocab_size}; build it again"
            )
        return index

    def continuation(self, context: Sequence[int], limit: int) -> tuple[list[int], int] | None:
        """Up to `limit` ids behind the longest suffix of 8..3 ids, most recent first, and that suffix's length."""
        length, ids = self._search.continuation(context, LONGEST_MATCH, limit)
        return (ids, length) if length >= SHORTEST_MATCH else None

    def draft(self, context: Sequence[int], k: int, mixing: Mixing, max_order: int | None = None) -> _Drafted:
        """Up to k ids behind `context`, each the likeliest of its mixture: (ids, probabilities, matched orders)."""
        order = min(max_order or DEPTH, self.header.max_order)
        return self._search.draft(context, k, order, *mixing.arguments)

    def law(self, context: Sequence[int], mixing: Mixing, max_order: int | None = None) -> _Law:
        """The mixture behind `context`: ids int64 (m,) and probabilities float64 (m,) of sum 1; empty if unknown."""
        order = min(max_order or DEPTH, self.header.max_order)
        return self._search.law(context, order, *mixing.arguments)

    def longest_order(self, context: Sequence[int], max_order: int | None = None) -> int:
        """Length of the longest suffix of `context` that drafts can rest on."""
        ranges, _ = self._search.search(context, min(max_order or DEPTH, self.header.max_order))
        return len(ranges)

    def count(self, context: Sequence[int]) -> int:
        """How often `context` (1..DEPTH ids) is followed by an id of its document."""
        ranges, _ = self._search.search(context, min(len(context), DEPTH))
        if len(ranges) < len(context):
            return 0
        return int(ranges[-1, 1] - ranges[-1, 0])

    def successors(self, context: Sequence[int]) -> dict[int, int]:
        """id -> how often it follows `context` (1..DEPTH ids), all of them, lowest id first."""
        return dict(zip(*(part.tolist() for part in self._successors(context)), strict=True))

    def _successors(self, context: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        return np.unique(self.ids_at(self.positions(context)), return_counts=True)

    def ids(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """Tokens start .. stop-1 (default: all of them), -1 between documents."""
        return unpacked_ids(self._arrays["tokens"][TOKEN_BYTES * start : None if stop is None else TOKEN_BYTES * stop])

    def ids_at(self, positions: NDArray[Any]) -> NDArray[np.int32]:
        """The tokens at `positions`."""
        return unpacked_ids(self._arrays["tokens"].reshape(-1, TOKEN_BYTES)[positions].ravel())

    def positions(self, context: Sequence[int]) -> NDArray[np.uint32]:
        """All positions behind `context` (1..DEPTH ids), in the order of the index."""
        ranges, _ = self._search.search(context, min(len(context), DEPTH))
        low, high = ranges[-1].tolist() if len(context) and len(ranges) == len(context) else (0, 0)
        found: NDArray[np.uint32] = self._arrays["positions"][low:high]
        return found

    def place(self, position: int) -> Place:
        """Which document the id at `position` belongs to."""
        starts = self._arrays["documents.start"]
        document = int(np.searchsorted(starts, position, side="right")) - 1
        start = int(starts[document])
        return Place(
            self.sources[int(self._arrays["documents.source"][document])],
            int(self._arrays["documents.offset"][document]),
            self.ids(start, position),
        )

    @property
    def sources(self) -> list[Source]:
        """The files (and streams) the index was made of. Raises CorpusError where they are damaged."""
        try:
            found = json.loads(self._arrays["sources"].tobytes())
            pairs = [(name, kind) for name, kind in found]
            if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
                raise TypeError
        except (ValueError, TypeError, RecursionError):
            raise CorpusError(
                f"{self.path}: sources: expected a JSON list of names and kinds, found something else; build it again"
            ) from None
        return [Source(name, kind) for name, kind in pairs]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of each array."""
        return {name: array.nbytes for name, array in self._arrays.items()}

    def array(self, name: str) -> NDArray[Any]:
        """One of the file's arrays, for `add` and `view`."""
        return self._arrays[name]


_Drafted = tuple[list[int], list[float], list[int]]
_Law = tuple[NDArray[np.int64], NDArray[np.float64]]

__all__ = ["DEPTH", "IndexHeader", "Mixing", "NgramIndex", "Place"]
