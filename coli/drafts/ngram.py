"""The live n-gram source: proposes what followed the longest suffix of this context earlier in the same context.

Suffixes of 32 down to 2 ids, the most recent occurrence first. A copy may run into the present and then continues
with what it just proposed, so a loop of any period is drafted to full depth. No guard: the gate decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from coli.drafts.base import MAX_DRAFT_TOKENS, Counters, Draft
from coli.kernels.suffix import Suffixes

SHORTEST_MATCH = 2


class NgramSource:
    """Copies up to `depth` ids from an earlier place of the live context."""

    name = "ngram"

    def __init__(self, *, depth: int = MAX_DRAFT_TOKENS) -> None:
        if not 1 <= depth <= MAX_DRAFT_TOKENS:
            raise ValueError(f"depth {depth}, expected 1..{MAX_DRAFT_TOKENS}")
        self.counters = Counters()
        self._depth = depth
        self._suffixes = Suffixes()

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """A prompt that continues the context so far (a chat turn) only adds its new ids; any other starts afresh."""
        known = len(self._suffixes.ids)
        if known > len(prompt_ids) or list(prompt_ids[:known]) != self._suffixes.ids:
            self._suffixes = Suffixes()
            known = 0
        self.commit(prompt_ids[known:])
        self._suffixes.continuation((), 0)  # a long prompt belongs to the time before the first token

    def commit(self, token_ids: Sequence[int]) -> None:
        self._suffixes.ids += token_ids  # searched when asked, so that a source that is not asked costs nothing

    def propose(self, limit: int, extension: Sequence[int] = ()) -> Draft | None:
        limit = min(limit, self._depth)
        if limit <= 0:
            return None
        match_length, copied = self._suffixes.continuation(extension, limit)
        if match_length < SHORTEST_MATCH:
            return None
        self.counters.proposed += len(copied)
        return Draft.chain(copied, self.name, match_length)

    def judged(self, judged: int, accepted: int) -> None:
        self.counters.judged += judged
        self.counters.accepted += accepted

    def report_lines(self) -> list[str]:
        counters = self.counters
        if not counters.proposed:
            return []
        return [f"ngram drafts: {counters.percent}% acceptance ({counters.accepted}/{counters.proposed} proposed)"]
