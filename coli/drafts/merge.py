"""All draft sources behind one door: who is asked, whose proposal is drafted, who hears what became of it.

First form: sources are asked in order of authority and the first proposal wins, as in the seed; with `chain` the
others may go on from its end. The engine calls `begin`, then per step `commit`, `propose`, `judged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from coli.drafts.base import MAX_DRAFT_TOKENS, ROOT, Counters, Draft, DraftSource

AUTHORITY = ("grammar", "corpus", "mtp", "ngram", "graph")


class DraftTree(Protocol):
    """What the engine hands back to `judged`: the ids and parents it verified."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def parents(self) -> tuple[int, ...]: ...


class MergedSources:
    """Sources in order of authority; unknown names come last, in the order given."""

    def __init__(self, sources: Sequence[DraftSource], *, vocab_size: int, chain: bool = False) -> None:
        """chain: let other sources extend a proposal from its end (False: the seed's first-wins)."""
        self.sources = tuple(sorted(sources, key=_rank))
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

    def judged(self, proposal: DraftTree, kept: Sequence[int], judged: int) -> None:
        """Tell each source how its part of the last proposal fared.

        kept: indices of the accepted draft tokens, from the root on. judged: how many nodes of that path, the root
        included, had their children compared with the target.
        """
        compared: dict[int, int] = {}
        accepted: dict[int, int] = {}
        path = [ROOT, *kept]
        for depth, node in enumerate(path[:judged]):
            siblings = [index for index, parent in enumerate(proposal.parents) if parent == node]
            for owner in {id(self._owners[index]) for index in siblings}:
                compared[owner] = compared.get(owner, 0) + 1
            if depth + 1 < len(path):
                owner = id(self._owners[path[depth + 1]])
                accepted[owner] = accepted.get(owner, 0) + 1
        for source in self.sources:
            if id(source) in compared:
                source.judged(compared[id(source)], accepted.get(id(source), 0))

    @property
    def counters(self) -> dict[str, Counters]:
        """Per source name, for the report."""
        return {source.name: source.counters for source in self.sources}

    def report_lines(self) -> list[str]:
        """The sources' own lines, then one line of counters for those that proposed anything."""
        lines = [line for source in self.sources for line in source.report_lines()]
        parts = [
            f"{name} {counters.proposed} proposed, {counters.judged} judged, {counters.accepted} accepted"
            for name, counters in self.counters.items()
            if counters.proposed
        ]
        return [*lines, f"drafts: {'; '.join(parts)}"] if parts else lines


def _rank(source: DraftSource) -> int:
    return AUTHORITY.index(source.name) if source.name in AUTHORITY else len(AUTHORITY)
