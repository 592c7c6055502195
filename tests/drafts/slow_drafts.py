"""Slow twins of the draft sources: semantics 3 and 4 as loops over plain lists, nothing indexed, nothing shared."""

from collections.abc import Sequence
from dataclasses import dataclass, field


def corpus_lookup(corpus: Sequence[int], context: Sequence[int], depth: int) -> tuple[list[int], int]:
    """(proposal, match length) by a backward scan for each suffix length, 8 down to 3; ([], 0) if nothing matches."""
    for n in range(8, 2, -1):
        if n > len(context):
            continue
        suffix = list(context[-n:])
        for start in range(len(corpus) - n - 1, -1, -1):
            if list(corpus[start : start + n]) != suffix:
                continue  # a separator is negative and equals no context id
            proposal: list[int] = []
            for token_id in corpus[start + n : start + n + depth]:
                if token_id < 0:
                    break
                proposal.append(token_id)
            if proposal:
                return proposal, n
    return [], 0


def ngram_lookup(committed: Sequence[int], extension: Sequence[int], limit: int) -> tuple[list[int], int]:
    """(proposal, match length): longest suffix 32..2 that ended before the newest committed id, most recent first."""
    context = [*committed, *extension]
    for n in range(32, 1, -1):
        if n > len(context):
            continue
        suffix = context[-n:]
        for end in range(len(committed) - 2, n - 2, -1):
            if list(committed[end - n + 1 : end + 1]) == suffix:
                growing = list(context)
                for i in range(limit):
                    growing.append(growing[end + 1 + i])
                return growing[len(context) :], n
    return [], 0


@dataclass
class SlowCorpus:
    """The corpus source with the seed's guard, one flat piece of state per sentence of semantics 3."""

    corpus: Sequence[int]
    depth: int
    min_acceptance: int = 50
    name: str = "corpus"
    context: list[int] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0
    base_proposed: int = 0
    base_accepted: int = 0
    pause_left: int | None = None
    events: list[str] = field(default_factory=list)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.context = list(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self.context.extend(token_ids)
        if self.pause_left is not None:
            self.pause_left -= len(token_ids)

    def ask(self, room: int) -> list[int]:
        """At most `room` ids; counted before they are trimmed."""
        if self.pause_left is not None:
            if self.pause_left > 0:
                return []
            self.pause_left = None
            self.base_proposed, self.base_accepted = self.proposed, self.accepted
            self.events.append("re-armed")
        proposed, accepted = self.proposed - self.base_proposed, self.accepted - self.base_accepted
        if proposed >= 24 and accepted * 100 < proposed * self.min_acceptance:
            self.pause_left = 256
            self.events.append("paused")
            return []
        proposal, _ = corpus_lookup(self.corpus, self.context, self.depth)
        self.proposed += len(proposal)
        return proposal[:room]

    def judged(self, accepted: int) -> None:
        self.accepted += accepted


@dataclass
class SlowNgram:
    """The n-gram source; proposals are counted after trimming."""

    depth: int
    name: str = "ngram"
    context: list[int] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self.context = list(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self.context.extend(token_ids)

    def ask(self, room: int) -> list[int]:
        """At most `room` ids; counted after they are trimmed."""
        proposal, _ = ngram_lookup(self.context, (), min(room, self.depth))
        self.proposed += len(proposal)
        return proposal

    def judged(self, accepted: int) -> None:
        self.accepted += accepted
