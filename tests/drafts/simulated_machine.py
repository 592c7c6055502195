"""A decode loop on a machine that exists only as a cost function: emitted ids and simulated seconds, no clock."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coli.drafts.gated import TreeSources

# (rows of a forward, forwards so far) -> seconds
Machine = Callable[[int, int], float]


@dataclass(frozen=True)
class Outcome:
    emitted: list[int]
    seconds: float
    forwards: int


def linear(per_row: float, plain: float = 0.01) -> Machine:
    """A plain forward, and `per_row` of one for each further row."""
    return lambda rows, at: plain * (1 + per_row * (rows - 1))


def noisy(machine: Machine, seed: int, spread: float = 0.3) -> Machine:
    """The same with hiccups: log-normal noise, and one forward in 200 takes ten times as long."""
    rng = random.Random(seed)
    return lambda rows, at: machine(rows, at) * rng.lognormvariate(0, spread) * (10 if rng.random() < 0.005 else 1)


def preparing(machine: Machine, plain_forwards: float = 1.5) -> Machine:
    """The same where the first forward of each row count takes longer."""
    seen: set[int] = set()

    def seconds(rows: int, at: int) -> float:
        first = rows not in seen
        seen.add(rows)
        return machine(rows, at) + first * plain_forwards * machine(1, at)

    return seconds


def simulate(
    drafter: TreeSources, prompt: Sequence[int], truth: Sequence[int], max_tokens: int, machine: Machine
) -> Outcome:
    """Answer with truth[len(prompt):][:max_tokens] as the engine would, at the machine's speed."""
    context = list(prompt)
    drafter.begin(prompt)
    seconds, forwards = 0.0, 0
    emitted = [truth[len(context)]]
    while True:
        context += emitted
        drafter.commit(emitted)
        left = max_tokens - (len(context) - len(prompt))
        if left == 0:
            return Outcome(context[len(prompt) :], seconds, forwards)
        room = min(64, left) - 1
        draft = drafter.propose(room) if room else None
        node, kept, judged, emitted = -1, [], 0, []
        while True:
            emitted.append(truth[len(context) + len(emitted)])
            below = [] if draft is None else [i for i, parent in enumerate(draft.parents) if parent == node]
            judged += bool(below)
            right = [i for i in below if draft is not None and draft.token_ids[i] == emitted[-1]]
            if not right:
                break
            node = right[0]
            kept.append(node)
        rows = 1 if draft is None else 1 + len(draft)
        cost = machine(rows, forwards)
        seconds, forwards = seconds + cost, forwards + 1
        if draft is not None:
            assert len(draft) <= room
            drafter.judged(draft, kept, judged)
        drafter.measured(rows, len(emitted), cost)
