"""Draft sources that are wrong in every way a source can be wrong, for tests that the output never changes.

Each behaves as a DraftSource. `truth` is the full id stream of an undrafted run (prompt and answer), so that a
source can be right up to a chosen depth.
"""

import random
from collections.abc import Callable, Sequence

from coli.drafts.base import Counters, Draft


class ScriptedSource:
    """Proposes what `script(context, limit)` says, whether or not it keeps to the limit."""

    def __init__(self, name: str, script: Callable[[list[int], int], Draft | None]) -> None:
        self.name = name
        self.counters = Counters()
        self._script = script
        self._context: list[int] = []

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._context = list(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._context.extend(token_ids)

    def propose(self, limit: int, extension: Sequence[int] = ()) -> Draft | None:
        draft = self._script([*self._context, *extension], limit)
        if draft is not None:
            self.counters.proposed += len(draft)
        return draft

    def judged(self, judged: int, accepted: int) -> None:
        self.counters.judged += judged
        self.counters.accepted += accepted

    def report_lines(self) -> list[str]:
        return []


def perfect(truth: Sequence[int], depth: int = 63) -> ScriptedSource:
    """Always right, `depth` ids at a time."""

    def script(context: list[int], limit: int) -> Draft | None:
        ids = truth[len(context) : len(context) + depth]
        return Draft.chain(ids, "perfect") if ids else None

    return ScriptedSource("perfect", script)


def wrong_at_every_depth(truth: Sequence[int], vocab_size: int, depth: int = 12) -> ScriptedSource:
    """Right for 0, 1, 2 .. depth-1 ids in turn, then wrong, then right again behind the wrong one."""
    turn = 0

    def script(context: list[int], limit: int) -> Draft | None:
        nonlocal turn
        ids = list(truth[len(context) : len(context) + depth])
        if not ids:
            return None
        wrong = turn % len(ids)
        turn += 1
        ids[wrong] = (ids[wrong] + 1) % vocab_size
        return Draft.chain(ids, "wrong")

    return ScriptedSource("wrong", script)


def random_chains(seed: int, vocab_size: int) -> ScriptedSource:
    """Random ids, random lengths, sometimes nothing."""
    rng = random.Random(seed)

    def script(context: list[int], limit: int) -> Draft | None:
        length = rng.randrange(20)
        return Draft.chain([rng.randrange(vocab_size) for _ in range(length)], "random") if length else None

    return ScriptedSource("random", script)


def random_trees(seed: int, vocab_size: int, truth: Sequence[int] = ()) -> ScriptedSource:
    """Random tree shapes with equal siblings; with `truth` one branch in two follows it for a while."""
    rng = random.Random(seed)

    def script(context: list[int], limit: int) -> Draft | None:
        token_ids: list[int] = []
        parents: list[int] = []
        depths: dict[int, int] = {-1: 0}
        for index in range(rng.randrange(1, 40)):
            parent = rng.choice([-1, index - 1, rng.randrange(-1, index)]) if index else -1
            at = len(context) + depths[parent]
            right = at < len(truth) and rng.random() < 0.5
            token_ids.append(truth[at] if right else rng.randrange(vocab_size))
            parents.append(parent)
            depths[index] = depths[parent] + 1
        return Draft(tuple(token_ids), tuple(parents), "tree")

    return ScriptedSource("tree", script)


def duplicated(truth: Sequence[int]) -> ScriptedSource:
    """The next id many times: as equal siblings, each with the same right continuation."""

    def script(context: list[int], limit: int) -> Draft | None:
        ids = tuple(truth[len(context) : len(context) + 2])
        if len(ids) < 2:
            return None
        return Draft((ids[0], ids[0], ids[0], ids[1], ids[1], ids[1]), (-1, -1, -1, 0, 1, 2), "duplicated")

    return ScriptedSource("duplicated", script)


def repeats_newest() -> ScriptedSource:
    """The newest id over and over."""
    return ScriptedSource("repeats", lambda context, limit: Draft.chain([context[-1]] * 9, "repeats"))


def longer_than_the_limit(truth: Sequence[int], vocab_size: int) -> ScriptedSource:
    """300 ids whatever the limit is; right for 30 of them."""

    def script(context: list[int], limit: int) -> Draft | None:
        ids = [*truth[len(context) : len(context) + 30], *(i % vocab_size for i in range(270))]
        return Draft.chain(ids, "long")

    return ScriptedSource("long", script)


def outside_the_vocabulary(truth: Sequence[int], vocab_size: int) -> ScriptedSource:
    """One right id, then ids no embedding row exists for."""

    def script(context: list[int], limit: int) -> Draft | None:
        ids = [*truth[len(context) : len(context) + 1], vocab_size, 2**40, -1, 0]
        return Draft.chain(ids, "outside")

    return ScriptedSource("outside", script)


def always_ends(end_id: int, truth: Sequence[int]) -> ScriptedSource:
    """A right id, then an end id that the target may or may not choose, then more."""

    def script(context: list[int], limit: int) -> Draft | None:
        ids = [*truth[len(context) : len(context) + 1], end_id, 0, 0]
        return Draft.chain(ids, "ends")

    return ScriptedSource("ends", script)


def every_adversary(truth: Sequence[int], vocab_size: int, end_id: int = 0) -> list[ScriptedSource]:
    """One of each, freshly made."""
    return [
        perfect(truth),
        perfect(truth, depth=1),
        wrong_at_every_depth(truth, vocab_size),
        random_chains(1, vocab_size),
        random_trees(2, vocab_size),
        random_trees(3, vocab_size, truth),
        duplicated(truth),
        repeats_newest(),
        longer_than_the_limit(truth, vocab_size),
        outside_the_vocabulary(truth, vocab_size),
        always_ends(end_id, truth),
    ]
