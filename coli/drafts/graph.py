"""The graph source: drafts from n-grams of all orders of the user's own text, mixed per token (semantics 8).

`greedy` proposes the likeliest id of the mixture; `sampling` draws from it with the target's own noise, so that a draft
that agrees with the target in law also agrees in the draw. No guard: the gate decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coli.drafts.base import MAX_DRAFT_TOKENS, Counters, Draft, Guard, Law, NoGuard
from coli.drafts.index_file import DEPTH
from coli.drafts.ngram_index import MIXES, Mixing, NgramIndex

LABEL = "graph drafts"
STRATEGIES = ("greedy", "sampling")

# (position, ids int64 (m,)) -> Gumbel noise float64 (m,): what the target adds to its own logits there
Noise = Callable[[int, NDArray[np.int64]], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """k: ids drafted per forward; strategy: greedy or sampling; mixing: how orders are weighed; max_order: longest
    context used (None: the index's).
    """

    k: int = 5
    strategy: str = "greedy"
    mixing: Mixing = field(default_factory=Mixing)
    max_order: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_DRAFT_TOKENS:
            raise ValueError(f"k {self.k}, expected 1..{MAX_DRAFT_TOKENS}")
        if self.strategy not in STRATEGIES or self.mixing.mix not in MIXES:
            raise ValueError(f"{self.strategy}, {self.mixing.mix}: expected one of {STRATEGIES} and of {tuple(MIXES)}")


class Knobs(Protocol):
    """coli.options.GraphKnobs, as far as the source reads it."""

    @property
    def k(self) -> int: ...
    @property
    def order(self) -> int | None: ...
    @property
    def strategy(self) -> str: ...
    @property
    def mix(self) -> str: ...
    @property
    def order_bias(self) -> float: ...
    @property
    def mix_temperature(self) -> float: ...
    @property
    def reliability_weight(self) -> float: ...
    @property
    def entropy_penalty(self) -> float: ...


def graph_options(knobs: Knobs) -> GraphOptions:
    """GraphOptions from settings."""
    mixing = Mixing(knobs.mix, knobs.order_bias, knobs.mix_temperature, knobs.reliability_weight, knobs.entropy_penalty)
    return GraphOptions(knobs.k, knobs.strategy, mixing, knobs.order)


class GraphSource:
    """Drafts up to k ids behind the live context."""

    name = "graph"

    def __init__(
        self, index: NgramIndex, options: GraphOptions, *, noise: Noise | None = None, guard: Guard | None = None
    ) -> None:
        """noise: needed by the strategy `sampling`."""
        if options.strategy == "sampling" and noise is None:
            raise ValueError("sampling needs the target's noise")
        self.counters = Counters()
        self.judged_at = [0] * options.k  # per position of a draft: how often it was compared, and accepted
        self.accepted_at = [0] * options.k
        self.laws: list[Law] = []  # of the last proposal's ids; empty for greedy drafts
        self._orders: dict[int, int] = {}  # longest order known -> ids drafted
        self._said = 0  # ids proposed; the merger lowers counters.proposed to what was drafted of them
        self._chance = 0.0  # sum of what the mixture gave the drafted ids
        self._index = index
        self._options = options
        self._noise = noise
        self._guard = guard if guard is not None else NoGuard()
        self._tail: list[int] = []
        self._length = 0
        self.counters.details.update(
            strategy=options.strategy, mix=options.mixing.mix, judged_at=self.judged_at, accepted_at=self.accepted_at
        )

    def begin(self, prompt_ids: Sequence[int]) -> None:
        self._tail = list(prompt_ids[-DEPTH:])
        self._length = len(prompt_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._guard.commit(len(token_ids))
        self._tail = [*self._tail, *token_ids][-DEPTH:]
        self._length += len(token_ids)

    def propose(self, limit: int, extension: Sequence[int] = ()) -> Draft | None:
        self.laws = []
        k = min(limit, self._options.k)
        if k <= 0 or not self._guard.allows(self.counters):
            return None
        context = [*self._tail, *extension]
        if self._options.strategy == "greedy":
            token_ids, chances, orders = self._index.draft(context, k, self._options.mixing, self._options.max_order)
        else:
            token_ids, chances, orders = self._sampled(context, k, self._length + len(extension))
        if not token_ids:
            return None
        self._count(chances, orders)
        return Draft.chain(token_ids, self.name, orders[0], self.laws)

    def _count(self, chances: Sequence[float], orders: Sequence[int]) -> None:
        counters = self.counters
        counters.proposed += len(orders)
        self._said += len(orders)
        self._chance += sum(chances)
        for order in orders:
            self._orders[order] = self._orders.get(order, 0) + 1
        counters.details["orders"] = {str(order): self._orders[order] for order in sorted(self._orders)}
        counters.details["mean_probability"] = round(self._chance / self._said, 6)

    def _sampled(self, context: list[int], k: int, position: int) -> tuple[list[int], list[float], list[int]]:
        """k ids drawn one after the other, their probabilities and the longest orders known."""
        assert self._noise is not None
        start, probabilities, orders = len(context), list[float](), list[int]()
        while len(context) - start < k:
            ids, chances = self._index.law(context, self._options.mixing, self._options.max_order)
            if not len(ids):
                break
            orders.append(self._index.longest_order(context, self._options.max_order))
            best = int(np.argmax(np.log(chances) + self._noise(position + len(context) - start, ids)))
            context.append(int(ids[best]))
            probabilities.append(float(chances[best]))
            self.laws.append((ids, chances))
        return context[start:], probabilities, orders

    def judged(self, judged: int, accepted: int) -> None:
        self.counters.judged += judged
        self.counters.accepted += accepted
        for position in range(min(judged, self._options.k)):
            self.judged_at[position] += 1
            self.accepted_at[position] += position < accepted

    def report_lines(self) -> list[str]:
        counters = self.counters
        if not counters.proposed:
            return self._guard.report_lines()
        first = f"{self.accepted_at[0]}/{self.judged_at[0]}"
        percent = 100 * self.accepted_at[0] / max(self.judged_at[0], 1)
        return [
            f"{LABEL}: {counters.percent}% acceptance ({counters.accepted}/{counters.proposed} proposed from "
            f"{self._index.num_ids} ids), position 0 acceptance: {first} ({percent:.2f}%)",
            *self._guard.report_lines(),
        ]
