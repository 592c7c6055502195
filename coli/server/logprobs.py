"""Log probabilities of what was sampled, kept while it is sampled. Used by the worker, on the engine's thread."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli.engine.sampling import Sampler


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One emitted id, its log probability under the unchanged logits, and the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class KeepingSampler(Sampler):
    """Keeps the log probabilities of what it samples, when they are wanted."""

    wanted: int | None = None

    def sample(self, logits: NDArray[np.float32], position: int) -> int:
        token_id = super().sample(logits, position)
        if self.wanted is not None:
            self.kept.append(_logprob(logits, token_id, self.wanted))
        return token_id

    def keep(self, wanted: int | None) -> None:
        self.wanted = wanted
        self.kept: list[TokenLogprob] = []


def _logprob(logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprob:
    """Log probabilities under softmax(logits (V,)), in float64: for reading, nothing is sampled from them."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= math.log(float(np.exp(row).sum()))
    order = np.lexsort((np.arange(len(row)), -row))[:count] if count else ()
    return TokenLogprob(token_id, float(row[token_id]), tuple((int(i), float(row[i])) for i in order))
