"""All draft sources behind one door: who is asked, whose proposal is drafted, who hears what became of it.

The seed's form: sources are asked in order of authority and the first proposal wins; with `chain` the others may go on
from its end. coli.drafts.gated has the other, a tree of all proposals. The engine calls `begin`, then per step
`commit`, `propose`, `judged` if something was proposed, and `measured`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from coli.drafts.base import MAX_DRAFT_TOKENS, ROOT, Counters, Draft, DraftSource

AUTHORITY = ("grammar", "corpus", "mtp", "ngram", "graph")


class DraftTree(Protocol):
    """What the engine hands back to `judged`: the ids and parents it verified."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def parents(self) -> tuple[int, ...]: ...


class DraftLog:
    """How often forwards of how many rows were run, and how many drafted tokens those with drafts had accepted."""

    def __init__(self) -> None:
        self.rows: Counter[int] = Counter()
        self.accepted_depth: Counter[int] = Counter()

    def measured(self, rows: int, committed: int) -> None:
        """A forward of `rows` rows gave `committed` ids."""
        self.rows[rows] += 1
        if rows > 1:
            self.accepted_depth[committed - 1] += 1

    @property
    def report(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "rows": {str(rows): count for rows, count in sorted(self.rows.items())},
            "accepted_depth": {str(depth): count for depth, count in sorted(self.accepted_depth.items())},
        }


class MergedSources:
    """Sources in order of authority; unknown names come last, in the order given."""

    def __init__(self, sources: Sequence[DraftSource], *, vocab_size: int, chain: bool = False) -> None:
        """chain: let other sources extend a proposal from its end (False: the seed's first-wins)."""
        self.sources = in_order(sources)
        self._log = DraftLog()
        self._vocab_size = vocab_size
        self._chain = chain
        self._owners: list[DraftSource] = []  # per token of the last proposal

    def begin(self, prompt_ids: Sequence[int]) -> None:
        for source in self.sources:
            source.begin(prompt_ids)
        self._owners = []

    def commit(self, token_ids: Sequence[int]) -> None:
        for source in self.sources:
            source.commit(token_ids)

    def propose(self, limit: int) -> Draft | None:
        """At most `limit` draft tokens, all inside the vocabulary, or None."""
        limit = min(limit, MAX_DRAFT_TOKENS)
        self._owners = []
        for source in self.sources:
            draft = self._ask(source, limit, ())
            if draft is None:
                continue
            self._owners = [source] * len(draft)
            return self._extended(draft, limit) if self._chain else draft
        return None

    def _ask(self, source: DraftSource, limit: int, extension: Sequence[int]) -> Draft | None:
        draft = source.propose(limit, extension)
        return None if draft is None else draft.trimmed(limit, self._vocab_size)

    def _extended(self, draft: Draft, limit: int) -> Draft:
        """A chain goes on with whatever another source proposes behind its end, as long as there is room."""
        while draft.is_chain and len(draft) < limit:
            for source in self.sources:
                # the source that ended the span has just said that it knows nothing further
                if source is self._owners[-1]:
                    continue
                more = self._ask(source, limit - len(draft), draft.token_ids)
                if more is not None:
                    break
            else:
                return draft
            offset = len(draft)
            parents = (offset - 1 if parent == ROOT else parent + offset for parent in more.parents)
            draft = Draft(
                draft.token_ids + more.token_ids, (*draft.parents, *parents), draft.source, draft.match_length
            )
            self._owners += [source] * len(more)
        return draft

    def alongside(self, responses: int) -> None:
        """The next forward is shared by so many responses: nothing here depends on it."""

    def source_of(self, index: int) -> str:
        """Who proposed token `index` of the last proposal."""
        return self._owners[index].name

    def judged(self, proposal: DraftTree, kept: Sequence[int], judged: int) -> None:
        """Tell each source how its part of the last proposal fared.

        kept: indices of the accepted draft tokens, from the root on. judged: how many nodes of that path, the root
        included, had their children compared with the target.
        """
        owners = [(index,) for index in map(self.sources.index, self._owners)]
        for index, (compared, accepted) in compared_and_accepted(proposal.parents, owners, kept, judged).items():
            self.sources[index].judged(compared, accepted)

    def measured(self, rows: int, committed: int, seconds: float) -> None:
        """The forward behind the last proposal had `rows` rows and gave `committed` ids."""
        self._log.measured(rows, committed)

    def measured_together(self, rows: int, committed: int, forward: object) -> None:
        """The same for a forward that others shared."""
        self._log.measured(rows, committed)

    @property
    def report(self) -> dict[str, Any]:
        """What was drafted and how deep it was right, JSON-ready."""
        return self._log.report

    @property
    def counters(self) -> dict[str, Counters]:
        """Per source name, for the report."""
        return {source.name: source.counters for source in self.sources}

    def report_lines(self) -> list[str]:
        """The sources' own lines, then one line of counters for those that proposed anything."""
        lines = [line for source in self.sources for line in source.report_lines()]
        return [*lines, *counter_lines(self.counters)]


def in_order(sources: Sequence[DraftSource]) -> tuple[DraftSource, ...]:
    """By authority; unknown names last, in the order given."""
    return tuple(sorted(sources, key=_rank))


def compared_and_accepted(
    parents: Sequence[int], owners: Sequence[Sequence[int]], kept: Sequence[int], judged: int
) -> dict[int, tuple[int, int]]:
    """Per owner on how many nodes of the path the target compared something of it, and how much of it was right.

    owners: per draft token who proposed it. kept: the accepted ones, from the root on. judged: nodes of that path, the
    root included, whose children were compared.
    """
    path = [ROOT, *kept]
    here: dict[int, set[int]] = {node: set() for node in path[:judged]}
    for index, parent in enumerate(parents):
        if parent in here:
            here[parent].update(owners[index])
    found: dict[int, tuple[int, int]] = {}
    for node, right in zip(path[:judged], [*kept, None], strict=False):
        for owner in here[node]:
            compared, accepted = found.get(owner, (0, 0))
            found[owner] = compared + 1, accepted + (right is not None and owner in owners[right])
    return found


def counter_lines(counters: Mapping[str, Counters]) -> list[str]:
    """One line with the counters of the sources that proposed anything."""
    parts = [
        f"{name} {c.proposed} proposed, {c.judged} judged, {c.accepted} accepted"
        for name, c in counters.items()
        if c.proposed
    ]
    return [f"drafts: {'; '.join(parts)}"] if parts else []


def _rank(source: DraftSource) -> int:
    return AUTHORITY.index(source.name) if source.name in AUTHORITY else len(AUTHORITY)
