"""The frozen corpus: proposes what followed the longest suffix of the live context in ids of earlier runs.

The seed's rules (lengths 8 down to 3, most recent first, never across a separator) on an index instead of a scan.
Proposals are counted before they are trimmed, as the seed counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coli.drafts.base import MAX_SPAN_TOKENS, Counters, Draft, Guard, NoGuard, Notice, PausingGuard
from coli.drafts.corpus_text import load_corpus_text
from coli.drafts.frozen_index import LONGEST_MATCH, FrozenIndex

LABEL = "corpus drafts"


class CorpusSource:
    """Draws spans of up to `depth` ids from one frozen corpus."""

    name = "corpus"

    def __init__(self, index: FrozenIndex, *, depth: int = 8, guard: Guard | None = None) -> None:
        if not 1 <= depth <= MAX_SPAN_TOKENS:
            raise ValueError(f"depth {depth}, expected 1..{MAX_SPAN_TOKENS}")
        self.counters = Counters()
        self._index = index
        self._depth = depth
        self._guard = guard if guard is not None else NoGuard()
        self._tail: list[int] = []

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        vocab_size: int,
        notice: Notice,
        depth: int = 8,
        min_acceptance: int = 50,
        guarded: bool = True,
    ) -> CorpusSource | None:
        """Load the seed's text file; says in one line what was loaded. None (after a notice) if there is nothing in it.

        min_acceptance: percent below which the guard pauses the source; guarded=False leaves that to the gate.
        Raises CorpusError for a malformed or foreign file.
        """
        ids = load_corpus_text(path, vocab_size, notice)
        if ids is None:
            return None
        index = FrozenIndex(ids)
        notice(f"{LABEL}: {index.num_ids} frozen ids from {path}, depth {depth}")
        return cls(index, depth=depth, guard=PausingGuard(LABEL, notice, percent=min_acceptance) if guarded else None)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._tail = list(prompt_ids[-LONGEST_MATCH:])

    def commit(self, token_ids: Sequence[int]) -> None:
        self._guard.commit(len(token_ids))
        self._tail = [*self._tail, *token_ids][-LONGEST_MATCH:]

    def propose(self, limit: int, extension: Sequence[int] = ()) -> Draft | None:
        if not self._guard.allows(self.counters):
            return None
        match = self._index.longest_match([*self._tail, *extension])
        if match is None:
            return None
        position, match_length = match
        token_ids = self._index.following(position, self._depth)
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
