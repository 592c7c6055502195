"""Predicts, from a recorded id stream alone, what the decode loop of semantics 1 does with given draft sources.

The stream decides acceptance (a draft is right if the undrafted run emitted that id there), so no model is needed.
Compare `Prediction` with the real engine's counters; wrap the real drafter in `RecordingDrafter` for the steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coli.drafts.base import Counters
from coli.drafts.merge import DraftTree, MergedSources

MAX_ROWS = 64


class SlowSource(Protocol):
    """The slow twins in slow_drafts.py."""

    name: str
    proposed: int
    accepted: int

    def begin(self, prompt_ids: Sequence[int]) -> None: ...

    def commit(self, token_ids: Sequence[int]) -> None: ...

    def ask(self, room: int) -> list[int]: ...

    def judged(self, accepted: int) -> None: ...


@dataclass(frozen=True)
class Step:
    """One decode forward: who proposed what (after trimming) and how many of it were emitted."""

    source: str | None
    drafted: tuple[int, ...]
    accepted: int


@dataclass
class Prediction:
    """All decode forwards of one response; the prefill forward is not among them."""

    steps: list[Step] = field(default_factory=list)

    @property
    def forwards(self) -> int:
        return len(self.steps)


def predict(
    prompt_ids: Sequence[int],
    stream: Sequence[int],
    sources: Sequence[SlowSource],
    *,
    max_tokens: int,
    context: int | None = None,
    end_id: int | None = None,
    keep_last_row: bool = True,
) -> Prediction:
    """Walk the seed's loop over the recorded `stream` (emitted ids; `end_id` if an end id followed them).

    context: most ids of prompt and answer together. keep_last_row: the engine never drafts the last allowed id,
    since the bonus id of the same forward is that id anyway, and does not ask if that leaves no room; False is the
    seed's literal rule (trim to the remaining allowance). Ids and forwards are the same either way.
    """
    prediction = Prediction()
    allowance = max_tokens if context is None else min(max_tokens, context - len(prompt_ids))
    ahead = [*stream] if end_id is None else [*stream, end_id]
    emitted = 0
    for source in sources:
        source.begin(prompt_ids)

    def emit() -> bool:
        """The next id of the stream is emitted; False if it is the end id, which is not."""
        nonlocal emitted
        if end_id is not None and emitted == len(stream):
            return False
        fresh.append(stream[emitted])
        emitted += 1
        return True

    fresh: list[int] = []
    while emitted < allowance:
        if not emit():
            break
        for source in sources:
            source.commit(fresh)
        fresh.clear()
        left = allowance - emitted
        if left == 0:
            break
        room = min(left, MAX_ROWS) - 1 if keep_last_row else min(left, MAX_ROWS - 1)
        asked: SlowSource | None = None
        drafted: list[int] = []
        for source in sources if room else ():
            drafted = source.ask(room)
            if drafted:
                asked = source
                break
        accepted = 0
        ended = False
        while accepted < len(drafted) and emitted < allowance and drafted[accepted] == ahead[emitted]:
            if not emit():
                ended = True
                break
            accepted += 1
        if asked:
            asked.judged(accepted)
        prediction.steps.append(Step(asked.name if asked else None, tuple(drafted), accepted))
        if ended:
            break
    return prediction


class RecordingDrafter:
    """Stands between the engine and MergedSources and writes down every step that proposed something."""

    def __init__(self, sources: MergedSources) -> None:
        self._sources = sources
        self.steps: list[Step] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._sources.begin(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._sources.commit(token_ids)

    def propose(self, limit: int) -> DraftTree | None:
        draft = self._sources.propose(limit)
        self._source = draft.source if draft else None
        return draft

    def judged(self, proposal: DraftTree, kept: Sequence[int], judged: int) -> None:
        self.steps.append(Step(self._source, proposal.token_ids, len(kept)))
        self._sources.judged(proposal, kept, judged)

    def measured(self, rows: int, committed: int, seconds: float) -> None:
        self._sources.measured(rows, committed, seconds)

    @property
    def report(self) -> dict[str, Any]:
        return self._sources.report

    @property
    def counters(self) -> dict[str, Counters]:
        return self._sources.counters

    def report_lines(self) -> list[str]:
        return self._sources.report_lines()
