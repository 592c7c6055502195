"""The MTP source: drafts what the model's own extra layer guesses, one token after the other.

The only source whose drafts cost real time: it is told what further tokens are worth and stops asking its predictor
where they are not. Knows ids only; the predictor is bound to the sequence of the response that is running.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from coli.drafts.base import MAX_DRAFT_TOKENS, Counters, Draft, Guard, NoGuard

LABEL = "mtp drafts"
LONGEST_EXTENSION = 8  # ids of other sources it goes on behind: each costs as much as a guess
ASKED_EVERY = 16  # steps between two guesses that are not expected to pay, so that it is known when they would
KEPT = 7 / 8  # weight of what guesses have cost so far when another one is measured


class Predictor(Protocol):
    """Guesses from the hidden states of one sequence (coli.model.mtp)."""

    def predict(self, newest_id: int, extension: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` ids that may follow the newest committed one and `extension`."""
        ...


class Worth(Protocol):
    """What guesses are worth (coli.drafts.opening)."""

    def depth(self, limit: int, behind: int, seconds: float) -> int:
        """How many guesses behind `behind` other drafts pay when each takes `seconds`."""
        ...


class MtpSource:
    """Drafts up to `depth` ids, fewer where `worth` says so."""

    name = "mtp"

    def __init__(
        self,
        *,
        depth: int,
        worth: Worth | None = None,
        guard: Guard | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counters = Counters()
        self.predictor: Predictor | None = None  # bound when the response's sequence is known
        self.seconds = 0.0  # spent guessing
        self.guesses = 0
        self._depth = min(depth, MAX_DRAFT_TOKENS)
        self._worth = worth
        self._guard = guard if guard is not None else NoGuard()
        self._clock = clock
        self._newest: int | None = None
        self._each = 0.0  # seconds of one guess, lately
        self._since_asked = ASKED_EVERY

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._newest = prompt_ids[-1] if prompt_ids else None

    def commit(self, token_ids: Sequence[int]) -> None:
        self._guard.commit(len(token_ids))
        if token_ids:
            self._newest = token_ids[-1]

    def propose(self, limit: int, extension: Sequence[int] = ()) -> Draft | None:
        if self.predictor is None or self._newest is None or len(extension) > LONGEST_EXTENSION:
            return None
        limit = self._limit(min(limit, self._depth), len(extension))
        if limit <= 0 or not self._guard.allows(self.counters):
            return None
        began = self._clock()
        token_ids = self.predictor.predict(self._newest, extension, limit)
        self._measured(self._clock() - began, len(extension) + len(token_ids))
        if not token_ids:
            return None
        self.guesses += len(token_ids)
        self.counters.proposed += len(token_ids)
        return Draft.chain(token_ids, self.name)

    def judged(self, judged: int, accepted: int) -> None:
        self.counters.judged += judged
        self.counters.accepted += accepted

    def report_lines(self) -> list[str]:
        counters = self.counters
        if not self.guesses:
            return self._guard.report_lines()
        share = f"{counters.percent}% acceptance ({counters.accepted}/{counters.proposed})"
        cost = f"{self.guesses} guesses of {1000 * self.seconds / self.guesses:.2f} ms"
        return [f"{LABEL}: {share}, {cost}", *self._guard.report_lines()]

    def _limit(self, limit: int, behind: int) -> int:
        """What pays of `limit`; now and then one guess that may not, where nothing else is drafted."""
        if self._worth is None or limit <= 0:
            return limit
        self._since_asked += not behind
        depth = self._worth.depth(limit, behind, self._each)
        if depth == 0 and not behind and self._since_asked >= ASKED_EVERY:
            depth = 1
        if depth:
            self._since_asked = 0
        return depth

    def _measured(self, seconds: float, guesses: int) -> None:
        """Rows of committed ids that were behind are part of the price."""
        self.seconds += seconds
        if guesses:
            each = seconds / guesses
            self._each = each if not self._each else KEPT * self._each + (1 - KEPT) * min(each, 4 * self._each)
