"""What a draft is, what every draft source can do, and the guards that silence a source that guesses badly.

A source only proposes: the target's own sample decides, so nothing in this package can change a byte of output.
Sources know token ids and nothing else (no model, no store). The engine's thread calls them, one call at a time,
in this order per step: `commit` (ids just emitted), `propose`, and `judged` once the forward has decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_DRAFT_TOKENS = 63  # one forward has 64 rows, the first is the newest committed id
MAX_SPAN_TOKENS = 48  # the seed's cap for one grammar or corpus proposal
ROOT = -1  # parent of a draft token that follows the newest committed id

_CHAINS = tuple(tuple(range(-1, length - 1)) for length in range(MAX_DRAFT_TOKENS + 1))  # parents of chains

Notice = Callable[[str], None]
Law = tuple[NDArray[np.int64], NDArray[np.float64]]  # ids (m,) and their probabilities (m,), sum 1


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed ids behind the newest committed id, as a tree whose parents come before their children.

    token_ids: the guesses; parents[i]: index in token_ids of the id before token i, or ROOT.
    source: name of the source, match_length: ids of context the guess rests on (a feature for the gate).
    laws: of a draft that was drawn at random, what each token was drawn from; none for one that was chosen.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    source: str
    match_length: int = 0
    laws: tuple[Law, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.parents):
            raise ValueError(f"draft of {self.source}: {len(self.token_ids)} ids but {len(self.parents)} parents")
        if not self.token_ids:
            raise ValueError(f"draft of {self.source}: empty; a source with nothing to propose returns None")
        if len(self.parents) <= MAX_DRAFT_TOKENS and self.parents is _CHAINS[len(self.parents)]:
            return  # made by `chain`: every token drafted comes by here
        for index, parent in enumerate(self.parents):
            if not ROOT <= parent < index:
                raise ValueError(f"draft of {self.source}: token {index} has parent {parent}, expected -1..{index - 1}")

    @classmethod
    def chain(cls, token_ids: Sequence[int], source: str, match_length: int = 0, laws: Sequence[Law] = ()) -> Draft:
        """A draft without branches."""
        return cls(tuple(token_ids), _chain_parents(len(token_ids)), source, match_length, tuple(laws))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == _chain_parents(len(self.token_ids))

    def trimmed(self, limit: int, vocab_size: int | None = None) -> Draft | None:
        """The first `limit` tokens, without ids outside the vocabulary and what hangs on them; None if none is left.

        Parents precede children, so a prefix is a tree again. An id outside the vocabulary could never be accepted
        and has no embedding row.
        """
        ids = self.token_ids
        if len(ids) <= limit and (vocab_size is None or (min(ids) >= 0 and max(ids) < vocab_size)):
            return self
        kept: dict[int, int] = {ROOT: ROOT}
        token_ids: list[int] = []
        parents: list[int] = []
        laws: list[Law] = []
        for index, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if len(token_ids) >= limit:
                break
            if parent not in kept or token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
                continue
            kept[index] = len(token_ids)
            token_ids.append(token_id)
            parents.append(kept[parent])
            laws += self.laws[index : index + 1]
        if not token_ids:
            return None
        return Draft(tuple(token_ids), tuple(parents), self.source, self.match_length, tuple(laws))


def _chain_parents(length: int) -> tuple[int, ...]:
    return _CHAINS[length] if length <= MAX_DRAFT_TOKENS else tuple(range(-1, length - 1))


@dataclass(slots=True)
class Counters:
    """Everything counted in draft tokens, since the source was made.

    proposed: what the source came up with (corpus and mtp: before trimming to the remaining allowance, as the seed
    counts them; grammar: after). judged: what the target got to compare, so the accepted ones and the first
    rejected one. accepted: what the target agreed to and was emitted. details: what one source alone has to say,
    JSON-ready.
    """

    proposed: int = 0
    judged: int = 0
    accepted: int = 0
    details: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def report(self) -> dict[str, Any]:
        """JSON-ready: the counts, and the details."""
        counts = {"proposed": self.proposed, "judged": self.judged, "accepted": self.accepted}
        return {**counts, **self.details}

    @property
    def percent(self) -> int:
        """Accepted of proposed in whole percent, rounded; 0 if nothing was proposed."""
        return round(100 * self.accepted / self.proposed) if self.proposed else 0


class DraftSource(Protocol):
    """One maker of drafts. `begin` forgets the context of an earlier request, never the counters or the guard."""

    name: str
    counters: Counters

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """A new request: the context is exactly `prompt_ids`."""

    def propose(self, limit: int, extension: Sequence[int] = ()) -> Draft | None:
        """A draft of at most `limit` ids behind context + `extension`, or None. Does not change the context."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """These ids were emitted; the context grows by them."""

    def judged(self, judged: int, accepted: int) -> None:
        """A forward compared `judged` draft tokens of this source with the target; `accepted` of them were emitted."""

    def report_lines(self) -> list[str]:
        """Lines for the end report; empty if nothing was proposed."""


class Guard(Protocol):
    """Decides whether a source may be asked. `allows` is called once per asking, `commit` with each emission."""

    def allows(self, counters: Counters) -> bool: ...

    def commit(self, num_tokens: int) -> None: ...

    def report_lines(self) -> list[str]: ...


class NoGuard:
    """For `--gate always` and for sources whose depth the gate alone decides."""

    def allows(self, counters: Counters) -> bool:
        return True

    def commit(self, num_tokens: int) -> None:
        pass

    def report_lines(self) -> list[str]:
        return []


class PermanentGuard:
    """The seed's grammar guard: from `window` proposed tokens on, below `percent` accepted, off for good."""

    def __init__(self, label: str, notice: Notice, *, window: int = 32, percent: int = 50) -> None:
        self._label = label
        self._notice = notice
        self._window = window
        self._percent = percent
        self._off_line: str | None = None

    def allows(self, counters: Counters) -> bool:
        if self._off_line is not None:
            return False
        if counters.proposed < self._window or counters.accepted * 100 >= counters.proposed * self._percent:
            return True
        self._off_line = (
            f"{self._label}: {counters.percent}% acceptance ({counters.accepted}/{counters.proposed}) "
            f"is below {self._percent}%, source switched off"
        )
        self._notice(self._off_line)
        return False

    def commit(self, num_tokens: int) -> None:
        pass

    def report_lines(self) -> list[str]:
        return [] if self._off_line is None else [self._off_line]


class _PauseClock:
    """Silence measured in emitted tokens, announced when it begins and when it ends."""

    def __init__(self, label: str, notice: Notice, percent: int, pause_tokens: int) -> None:
        self._label = label
        self._notice = notice
        self._percent = percent
        self._pause_tokens = pause_tokens
        self._remaining: int | None = None
        self.num_pauses = 0
        self.num_rearms = 0

    def is_silent(self) -> bool:
        return self._remaining is not None and self._remaining > 0

    def rearms(self) -> bool:
        """True once, at the first asking after a pause."""
        if self._remaining is None or self._remaining > 0:
            return False
        self._remaining = None
        self.num_rearms += 1
        self._notice(f"{self._label}: re-armed after {self._pause_tokens} tokens")
        return True

    def pause(self, judged: int, accepted: int) -> None:
        self._remaining = self._pause_tokens
        self.num_pauses += 1
        self._notice(
            f"{self._label}: {round(100 * accepted / judged)}% acceptance ({accepted}/{judged}) "
            f"is below {self._percent}%, paused for {self._pause_tokens} tokens"
        )

    def commit(self, num_tokens: int) -> None:
        if self._remaining is not None:
            self._remaining -= num_tokens

    def report_lines(self) -> list[str]:
        if not self.num_pauses:
            return []
        return [f"{self._label}: guard below {self._percent}% paused {self.num_pauses}x, re-armed {self.num_rearms}x"]


class PausingGuard:
    """The seed's corpus guard: judges the proposals since the last re-arm, pauses, re-arms with a clean slate.

    From `window` proposed tokens on, below `percent` accepted, the source is silent until `pause_tokens` ids have
    been emitted; the step that pauses already drafts nothing, the first asking after the pause may draft again.
    """

    def __init__(
        self, label: str, notice: Notice, *, window: int = 24, percent: int = 50, pause_tokens: int = 256
    ) -> None:
        self._clock = _PauseClock(label, notice, percent, pause_tokens)
        self._window = window
        self._percent = percent
        self._base = Counters()

    def allows(self, counters: Counters) -> bool:
        if self._clock.is_silent():
            return False
        if self._clock.rearms():
            self._base = replace(counters)
        proposed = counters.proposed - self._base.proposed
        accepted = counters.accepted - self._base.accepted
        if proposed < self._window or accepted * 100 >= proposed * self._percent:
            return True
        self._clock.pause(proposed, accepted)
        return False

    def commit(self, num_tokens: int) -> None:
        self._clock.commit(num_tokens)

    def report_lines(self) -> list[str]:
        return self._clock.report_lines()


class SlidingGuard:
    """A true sliding window over the last judged tokens; pauses like PausingGuard and re-arms empty.

    Whole steps leave the window: it holds the fewest recent ones with at least `window` judged tokens.
    """

    def __init__(
        self, label: str, notice: Notice, *, window: int = 32, percent: int = 50, pause_tokens: int = 256
    ) -> None:
        self._clock = _PauseClock(label, notice, percent, pause_tokens)
        self._window = window
        self._percent = percent
        self._recent: deque[tuple[int, int]] = deque()  # judged, accepted per step
        self._judged = 0
        self._accepted = 0
        self._seen = Counters()

    def allows(self, counters: Counters) -> bool:
        if self._clock.is_silent():
            return False
        self._clock.rearms()
        self._slide(counters.judged - self._seen.judged, counters.accepted - self._seen.accepted)
        self._seen = replace(counters)
        if self._judged < self._window or self._accepted * 100 >= self._judged * self._percent:
            return True
        self._clock.pause(self._judged, self._accepted)
        self._recent.clear()
        self._judged = self._accepted = 0
        return False

    def _slide(self, judged: int, accepted: int) -> None:
        if judged:
            self._recent.append((judged, accepted))
            self._judged += judged
            self._accepted += accepted
        while self._recent and self._judged - self._recent[0][0] >= self._window:
            old_judged, old_accepted = self._recent.popleft()
            self._judged -= old_judged
            self._accepted -= old_accepted

    def commit(self, num_tokens: int) -> None:
        self._clock.commit(num_tokens)

    def report_lines(self) -> list[str]:
        return self._clock.report_lines()
