"""All draft sources as one tree per forward, cut to what the gate says is worth it.

Every source that is due is asked, the others go on from the end of the first one's chain, equal tokens merge. What is
emitted teaches the acceptance of every proposal, drafted or not, so a declined source costs no forward to be judged.
The engine calls it as it calls MergedSources, which is the seed's order instead.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from coli.drafts.acceptance import Acceptance
from coli.drafts.base import MAX_DRAFT_TOKENS, Counters, Draft, DraftSource
from coli.drafts.gate import Gate, Served, SharedForward, gate_lines
from coli.drafts.merge import DraftLog, DraftTree, counter_lines, in_order
from coli.drafts.spacing import Spacing
from coli.drafts.trie import LEAST_CHANCE, DraftChain, DraftTrie

ENDS_LIKELY = 0.3  # probability of a chain's end from which it is worth asking what comes behind
SPACED_FROM = 0.0025  # of the forwards' time for drafting; less is not worth missing a beginning for
DRAFTING_SHARE = 0.01  # of the forwards' time for asking sources; beyond it they are asked every ASKED_EVERY steps only
ASKED_EVERY = 8
SEARCHING = ("corpus", "ngram", "graph")  # sources that have to search to find that they have nothing to say

Found = DraftChain | DraftTrie  # what the sources say at one step


class TreeSources:
    """Merged proposals, best first. Without a gate all of them are drafted (`--gate always`)."""

    def __init__(
        self,
        sources: Sequence[DraftSource],
        *,
        vocab_size: int,
        gate: Gate | None = None,
        acceptance: Acceptance | None = None,
        expert_bytes: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """expert_bytes: read so far; clock: seconds, for the share of time that drafting takes."""
        self.sources = in_order(sources)
        self.gate = gate
        self._served = Served()
        self.expert_bytes = expert_bytes
        self._acceptance = acceptance if acceptance is not None else Acceptance()
        self._vocab_size = vocab_size
        self._clock = clock
        self._names = [source.name for source in self.sources]
        self._found: Found | None = None  # the last proposals, until what was emitted has judged them
        self._order: Sequence[int] = ()
        self._counted = [source.counters.proposed for source in self.sources]  # at the last count
        self._drafted: Sequence[int] = ()  # tokens of the last draft by source
        self._spacings = [Spacing() for _ in self.sources]
        self._due = 0  # ids from which any source is
        self._emitted = 0
        self._drafting_s = self._forward_s = 0.0
        self._steps = 0
        self._responses = 1  # that share the next forward
        self._bytes_before = 0
        self._declined: Counter[str] = Counter()
        self._log = DraftLog()

    def begin(self, prompt_ids: Sequence[int]) -> None:
        for source in self.sources:
            source.begin(prompt_ids)
        if self.gate is not None:
            self._served = self.gate.begin()
        self._found = None

    def commit(self, token_ids: Sequence[int]) -> None:
        began = self._clock()
        self._emitted += len(token_ids)
        if self._found is not None:
            self._learn(self._found, token_ids)
            self._found = None
        for source in self.sources:
            source.commit(token_ids)
        self._drafting_s += self._clock() - began

    def alongside(self, responses: int) -> None:
        """The next forward is shared by so many responses, this one included."""
        self._responses = responses

    def propose(self, limit: int) -> Draft | None:
        """The likeliest draft tokens, as many as pay, at most `limit`; None for a plain forward."""
        self._bytes_before = self.expert_bytes()
        limit = min(limit, MAX_DRAFT_TOKENS)
        if not self.sources or limit <= 0:
            return None
        self._steps += 1
        began = self._clock()
        draft = self._proposed(limit)
        self._drafting_s += self._clock() - began
        return draft

    def _proposed(self, limit: int) -> Draft | None:
        gate = self._gate_now()
        self._order = ()
        found: Found | None = None
        spaced = gate is not None and self._drafting_s > SPACED_FROM * self._forward_s
        if gate is None or not ((spaced and self._emitted < self._due) or self._too_dear(gate)):
            most = limit if gate is None else gate.depth_limit(limit)
            found = self._gathered(most, spaced)
        if found is None:
            if gate is not None:
                gate.choose(())
            return None
        self._found = found
        if gate is None:
            order, _ = found.best_first(limit, self._estimate)
        else:
            order, chances = found.best_first(most, self._estimate, one_path=gate.costs.streams, least=LEAST_CHANCE)
            order = order[: gate.choose(chances)]
        self._order = order
        self._count(found)
        return found.draft(order, self._names[found.owners_of(order[0])[0][0]]) if order else None

    def _estimate(self, source: int, match_length: int, depth: int) -> float:
        return self._acceptance.probability(self._names[source], match_length, depth)

    def _gate_now(self) -> Gate | None:
        return None if self.gate is None else self.gate.serving(self._served, self._responses)

    def _gathered(self, most: int, spaced: bool) -> Found | None:
        """What the sources say, where they are `spaced` those that are due."""
        said: list[tuple[int, Draft]] = []
        emitted = self._emitted
        for index, source in enumerate(self.sources):
            if spaced and emitted < self._spacings[index].due:
                continue
            draft = source.propose(most)
            draft = None if draft is None else draft.trimmed(most, self._vocab_size)
            if draft is not None:
                said.append((index, draft))
            elif source.name in SEARCHING:
                self._fruitless(index)
        if not said:
            return None
        goes_on = len(self.sources) > 1
        if len(said) == 1 and said[0][1].is_chain:
            index, draft = said[0]
            goes_on = goes_on and len(draft) < most and self._likely_end(index, draft, 0, 1.0) > 0
            if not goes_on:
                return DraftChain(draft, index)
        trie = DraftTrie(self._vocab_size)
        first: tuple[int, Draft, int] | None = None
        for index, draft in said:
            end = trie.add(draft, index)
            if first is None and draft.is_chain and len(draft) < most:
                first = index, draft, end
        if first is not None and goes_on:
            self._go_on(trie, most, *first)
        return trie

    def _likely_end(self, owner: int, draft: Draft, start: int, chance: float) -> float:
        """Probability of the end of a chain from depth `start` on, reached with `chance`; 0 if below ENDS_LIKELY."""
        for depth in range(start, start + len(draft)):
            chance *= self._estimate(owner, draft.match_length, depth)
            if chance < ENDS_LIKELY:
                return 0.0
        return chance

    def _go_on(self, trie: DraftTrie, most: int, owner: int, draft: Draft, end: int) -> None:
        """Ask the other sources what follows the chain, and what follows the first answer, and so on.

        Only as long as the end is likely to be reached and more could pay. So a forced span, a guessed value and the
        next forced span come into one forward.
        """
        chain: tuple[int, ...] = ()
        chance = 1.0
        while True:
            chance = self._likely_end(owner, draft, len(chain), chance)
            if not chance:
                return
            chain += draft.token_ids
            following: tuple[int, Draft, int] | None = None
            for index, source in enumerate(self.sources):
                if index == owner or len(chain) >= most:
                    continue  # the owner has just said that it knows nothing further
                more = source.propose(most - len(chain), chain)
                more = None if more is None else more.trimmed(most - len(chain), self._vocab_size)
                if more is None:
                    continue
                last = trie.add(more, index, end, len(chain))
                if following is None and more.is_chain:
                    following = index, more, last
            if following is None:
                return
            owner, draft, end = following

    def _count(self, found: Found) -> None:
        """Sources count what they say; here `proposed` is what was drafted of it, the rest is declined."""
        drafted = [0] * len(self.sources)
        for node in self._order:
            for owner, _, _ in found.owners_of(node):
                drafted[owner] += 1
        self._drafted = drafted
        for index, source in enumerate(self.sources):
            said = source.counters.proposed - self._counted[index]
            if not said:
                continue
            source.counters.proposed = self._counted[index] = self._counted[index] + drafted[index]
            if said > drafted[index]:
                self._declined[source.name] += said - drafted[index]

    def _too_dear(self, gate: Gate) -> bool:
        """Whether asking has taken more than its share of the time: then most steps do without."""
        if self._steps < 4 * ASKED_EVERY or self._steps % ASKED_EVERY == 0:
            return False
        return self._drafting_s > DRAFTING_SHARE * self._forward_s + max(gate.seconds_gained, 0.0)

    def source_of(self, index: int) -> str:
        """Who proposed token `index` of the last proposal; of several the first in authority."""
        assert self._found is not None
        return self._names[min(owner for owner, _, _ in self._found.owners_of(self._order[index]))]

    def judged(self, proposal: DraftTree, kept: Sequence[int], judged: int) -> None:
        """Tell each source how its part of the last proposal fared."""
        if self._found is not None:
            fared = self._found.fared(self._order, proposal.parents, kept, judged)
            for index, (compared, accepted) in fared.items():
                self.sources[index].judged(compared, accepted)

    def measured(self, rows: int, committed: int, seconds: float) -> None:
        """The forward behind the last proposal: its rows, the ids it gave and its seconds."""
        self._forward_s += seconds
        self._log.measured(rows, committed)
        if self.gate is not None:
            gate = self.gate.serving(self._served)
            gate.measured(rows, committed, seconds, self.expert_bytes() - self._bytes_before)

    def measured_together(self, rows: int, committed: int, forward: SharedForward) -> None:
        """The same for a forward shared with others, of which `rows` and `committed` were this response's."""
        self._forward_s += forward.seconds / forward.responses
        self._log.measured(rows, committed)
        if self.gate is not None:
            gate = self.gate.serving(self._served, forward.responses)
            gate.measured_shared(forward, self.expert_bytes() - self._bytes_before)

    def _learn(self, found: Found, token_ids: Sequence[int]) -> None:
        """What was emitted judges the last proposals, and decides when their sources are asked again."""
        names, acceptance = self._names, self._acceptance
        beginnings: dict[int, bool] = {}  # of sources that proposed a next id: whether it was right
        for (owner, match_length, depth), right in found.outcomes(token_ids):
            acceptance.add(names[owner], match_length, depth, right)
            if depth == 0:
                beginnings[owner] = right or beginnings.get(owner, False)
        gate = self._gate_now()
        if gate is None:
            return
        if True in beginnings.values():
            gate.proved()
        for owner, right in beginnings.items():
            if right:
                self._spacings[owner].fruitful()
                self._due = 0
            elif not self._drafted[owner]:
                self._fruitless(owner)

    def _fruitless(self, source: int) -> None:
        self._spacings[source].fruitless(self._emitted)
        self._due = min(spacing.due for spacing in self._spacings)

    @property
    def counters(self) -> dict[str, Counters]:
        """Per source name, for the report; `proposed` counts drafted tokens."""
        return {source.name: source.counters for source in self.sources}

    @property
    def report(self) -> dict[str, Any]:
        """JSON-ready: what was drafted, how deep it was right, what the gate decided."""
        found = {
            **self._log.report,
            "drafting_s": round(self._drafting_s, 6),
            "declined": dict(self._declined),
            "acceptance": self._acceptance.table(),
        }
        return found if self.gate is None else {**found, **self.gate.serving(self._served).report()}

    def report_lines(self) -> list[str]:
        """The sources' own lines, the counters, and what the gate did."""
        lines = [line for source in self.sources for line in source.report_lines()]
        lines += counter_lines(self.counters)
        return lines if self.gate is None else [*lines, *gate_lines(self.report)]
