"""All draft sources as one tree per forward, cut to what the gate says is worth it.

Every source is asked, the others go on from the end of the first one's chain, equal tokens merge. What is emitted
teaches the acceptance of every proposal, drafted or not, so a declined source costs no forward to be judged.
The engine calls it as it calls MergedSources, which is the seed's order instead.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from coli.drafts.acceptance import Acceptance
from coli.drafts.base import MAX_DRAFT_TOKENS, ROOT, Counters, Draft, DraftSource
from coli.drafts.gate import Gate, SharedForward, gate_lines
from coli.drafts.merge import DraftLog, DraftTree, compared_and_accepted, counter_lines, in_order
from coli.drafts.trie import DraftTrie

ENDS_LIKELY = 0.3  # probability of a chain's end from which it is worth asking what comes behind
DRAFTING_SHARE = 0.01  # of the forwards' time for asking sources; beyond it they are asked every ASKED_EVERY steps only
ASKED_EVERY = 8


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
        self.expert_bytes = expert_bytes
        self._acceptance = acceptance if acceptance is not None else Acceptance()
        self._vocab_size = vocab_size
        self._clock = clock
        self._trie: DraftTrie | None = None  # of the last proposals, until what was emitted has judged them
        self._order: list[int] = []
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
            self.gate.begin()
        self._trie = None

    def commit(self, token_ids: Sequence[int]) -> None:
        began = self._clock()
        self._learn(token_ids)
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
        gate, acceptance, sources = self._gate_now(), self._acceptance, self.sources
        self._order = []
        if gate is not None and self._too_dear():
            gate.choose(())
            return None
        most = limit if gate is None else gate.depth_limit(limit)
        trie, proposed = self._gathered(most)
        if not len(trie):
            if gate is not None:
                gate.choose(())
            return None
        self._trie = trie

        def estimate(source: int, match_length: int, depth: int) -> float:
            return acceptance.probability(sources[source].name, match_length, depth)

        if gate is None:
            order, _ = trie.best_first(limit, estimate)
        else:
            order, chances = trie.best_first(most, estimate, one_path=gate.costs.streams)
            order = order[: gate.choose(chances)]
        self._order = order
        self._count(trie, proposed)
        if not order:
            return None
        return trie.draft(order, sources[trie.owners[order[0]][0][0]].name)

    def _gate_now(self) -> Gate | None:
        return None if self.gate is None else self.gate.among(self._responses)

    def _gathered(self, most: int) -> tuple[DraftTrie, list[int]]:
        """What the sources say as one tree, and per source how many tokens it proposed before."""
        trie = DraftTrie(self._vocab_size)
        before = [source.counters.proposed for source in self.sources]
        first: tuple[int, Draft, int] | None = None
        for index, source in enumerate(self.sources):
            draft = source.propose(most)
            if draft is None:
                continue
            draft = draft.trimmed(most, self._vocab_size)
            if draft is None:
                continue
            end = trie.add(draft, index)
            if first is None and draft.is_chain and len(draft) < most:
                first = index, draft, end
        if first is not None and len(self.sources) > 1:
            self._go_on(trie, most, *first)
        return trie, before

    def _go_on(self, trie: DraftTrie, most: int, owner: int, draft: Draft, end: int) -> None:
        """Ask the other sources what follows the chain, and what follows the first answer, and so on.

        Only as long as the end is likely to be reached and more could pay. So a forced span, a guessed value and the
        next forced span come into one forward.
        """
        chain: tuple[int, ...] = ()
        chance = 1.0
        while True:
            for depth in range(len(draft)):
                name = self.sources[owner].name
                chance *= self._acceptance.probability(name, draft.match_length, len(chain) + depth)
                if chance < ENDS_LIKELY:
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

    def _count(self, trie: DraftTrie, before: Sequence[int]) -> None:
        """Sources count what they say; here `proposed` is what was drafted of it, the rest is declined."""
        drafted = [0] * len(self.sources)
        for node in self._order:
            for owner, _, _ in trie.owners[node]:
                drafted[owner] += 1
        for index, source in enumerate(self.sources):
            said = source.counters.proposed - before[index]
            source.counters.proposed = before[index] + drafted[index]
            if said > drafted[index]:
                self._declined[source.name] += said - drafted[index]

    def _too_dear(self) -> bool:
        """Whether asking has taken more than its share of the time: then most steps do without."""
        if self._steps < 4 * ASKED_EVERY or self._steps % ASKED_EVERY == 0:
            return False
        gate = self._gate_now()
        assert gate is not None
        return self._drafting_s > DRAFTING_SHARE * self._forward_s + max(gate.seconds_gained, 0.0)

    def source_of(self, index: int) -> str:
        """Who proposed token `index` of the last proposal; of several the first in authority."""
        assert self._trie is not None
        return self.sources[min(owner for owner, _, _ in self._trie.owners[self._order[index]])].name

    def judged(self, proposal: DraftTree, kept: Sequence[int], judged: int) -> None:
        """Tell each source how its part of the last proposal fared."""
        trie = self._trie
        if trie is None:
            return
        owners = [[owner for owner, _, _ in trie.owners[node]] for node in self._order]
        for index, (compared, accepted) in compared_and_accepted(proposal.parents, owners, kept, judged).items():
            self.sources[index].judged(compared, accepted)

    def measured(self, rows: int, committed: int, seconds: float) -> None:
        """The forward behind the last proposal: its rows, the ids it gave and its seconds."""
        self._forward_s += seconds
        self._log.measured(rows, committed)
        if self.gate is not None:
            self.gate.measured(rows, committed, seconds, self.expert_bytes() - self._bytes_before)

    def measured_together(self, rows: int, committed: int, forward: SharedForward) -> None:
        """The same for a forward shared with others, of which `rows` and `committed` were this response's."""
        self._forward_s += forward.seconds / forward.responses
        self._log.measured(rows, committed)
        if self.gate is not None:
            gate = self.gate.among(forward.responses)
            gate.measured_shared(forward, self.expert_bytes() - self._bytes_before)

    def _learn(self, token_ids: Sequence[int]) -> None:
        """Walk what was emitted through the last proposals: each node on the way judges its children."""
        trie, self._trie = self._trie, None
        if trie is None:
            return
        node, sources, acceptance = ROOT, self.sources, self._acceptance
        for token_id in token_ids:
            below = trie.children(node)
            if not below:
                return
            right = trie.child(node, token_id)
            for child in below:
                for owner, match_length, depth in trie.owners[child]:
                    acceptance.add(sources[owner].name, match_length, depth, child == right)
            if right is None:
                return
            node = right

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
        return found if self.gate is None else {**found, **self.gate.report()}

    def report_lines(self) -> list[str]:
        """The sources' own lines, the counters, and what the gate did."""
        lines = [line for source in self.sources for line in source.report_lines()]
        lines += counter_lines(self.counters)
        return lines if self.gate is None else [*lines, *gate_lines(self.report)]
