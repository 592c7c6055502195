"""The frozen corpus: proposes what followed the longest suffix of the live context in ids of earlier runs.

The seed's rules (lengths 8 down to 3, most recent first, never across a separator) on an index instead of a scan.
Proposals are counted before they are trimmed, as the seed counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from coli.drafts.base import MAX_SPAN_TOKENS, Counters, Draft, Guard, NoGuard, Notice
from coli.drafts.corpus_text import load_corpus_text
from coli.drafts.frozen_index import LONGEST_MATCH, FrozenIndex
from coli.drafts.index_file import looks_like_an_index

LABEL = "corpus drafts"


class SpanIndex(Protocol):
    """Frozen ids that can be searched: FrozenIndex in memory, NgramIndex mapped (`mapped_bytes`)."""

    num_ids: int
    mapped_bytes: int

    def continuation(self, context: Sequence[int], limit: int) -> tuple[list[int], int] | None:
        """Up to `limit` ids behind the last occurrence of the longest suffix of `context`, 8 down to 3 ids, to the end
        of its span, and the length of that suffix.
        """


def open_corpus(path: Path, vocab_size: int, fingerprint: Callable[[], str], notice: Notice) -> SpanIndex | None:
    """The seed's text file, or an index made by `coli corpus build`.

    fingerprint: of the model's tokenizer, asked for only if the file names one. None (after one notice) if the file is
    absent, unreadable or empty; CorpusError if it is malformed or belongs to another model.
    """
    if looks_like_an_index(path):
        from coli.drafts.ngram_index import NgramIndex  # numba: only when it is needed

        return NgramIndex.open(path, vocab_size=vocab_size, tokenizer=fingerprint())
    ids = load_corpus_text(path, vocab_size, notice)
    return None if ids is None else FrozenIndex(ids)


class CorpusSource:
    """Draws spans of up to `depth` ids from one frozen corpus."""

    name = "corpus"

    def __init__(self, index: SpanIndex, *, depth: int = 8, guard: Guard | None = None) -> None:
        if not 1 <= depth <= MAX_SPAN_TOKENS:
            raise ValueError(f"depth {depth}, expected 1..{MAX_SPAN_TOKENS}")
        self.counters = Counters()
        self._index = index
        self._depth = depth
        self._guard = guard if guard is not None else NoGuard()
        self._tail: list[int] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._tail = list(prompt_ids[-LONGEST_MATCH:])

    def commit(self, token_ids: Sequence[int]) -> None:
        self._guard.commit(len(token_ids))
        self._tail = [*self._tail, *token_ids][-LONGEST_MATCH:]

    def propose(self, limit: int, extension: Sequence[int] = ()) -> Draft | None:
        if not self._guard.allows(self.counters):
            return None
        found = self._index.continuation([*self._tail, *extension] if extension else self._tail, self._depth)
        if found is None:
            return None
        token_ids, match_length = found
        self.counters.proposed += len(token_ids)
        if limit <= 0:
            return None
        return Draft.chain(token_ids[:limit], self.name, match_length)

    def judged(self, judged: int, accepted: int) -> None:
        self.counters.judged += judged
        self.counters.accepted += accepted

    def report_lines(self) -> list[str]:
        counters = self.counters
        if not counters.proposed:
            return self._guard.report_lines()
        line = (
            f"{LABEL}: {counters.percent}% acceptance "
            f"({counters.accepted}/{counters.proposed} proposed from {self._index.num_ids} frozen ids)"
        )
        return [line, *self._guard.report_lines()]
