"""From logits to one token: penalties, temperature, top-k, top-p, min-p, noise, in this order.

The noise is a function of (seed, absolute position, token id) alone: a token does not depend on how many rows, drafts
or retries led to it. Ties go to the lowest id. Owns the token counts penalties need; called by the engine.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coli.errors import NumericError
from coli.kernels import noise

COLDEST = 1e-30  # a lower temperature could carry a logit out of float32; the best token has won long before


class Settings(Protocol):
    """coli.options.SamplerOptions, as far as sampling reads it."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repeat_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...


class Sampler:
    """One response's sampler. `begin` names the tokens it starts from, `commit` each token that was emitted.

    repeat_penalty looks at prompt and answer (a positive logit is divided by it, a negative one multiplied, as in
    CTRL, Keskar et al. 2019); presence_penalty and frequency_penalty look at the answer alone (subtracted once, and
    once per occurrence, as in the OpenAI API).
    """

    def __init__(self, settings: Settings, seed: int, vocab_size: int) -> None:
        self._settings = settings
        self._seed = seed
        self._penalizes_seen = settings.repeat_penalty != 1.0
        self._penalizes_generated = settings.presence_penalty != 0.0 or settings.frequency_penalty != 0.0
        self._seen = np.zeros(vocab_size, np.bool_)
        self._generated = np.zeros(vocab_size, np.int64)
        self._narrows = settings.top_k > 0 or settings.top_p < 1.0 or settings.min_p > 0.0

    def begin(self, earlier_ids: Sequence[int], prompt_ids: Sequence[int]) -> None:
        """A new response behind `earlier_ids` + `prompt_ids`."""
        self._seen[:] = False
        self._generated[:] = 0
        self._seen[list(earlier_ids)] = True
        self._seen[list(prompt_ids)] = True

    def commit(self, token_id: int) -> None:
        self._seen[token_id] = True
        self._generated[token_id] += 1

    def sample(self, logits: NDArray[np.float32], position: int) -> int:
        """The token at `position`, from logits (V,) float32. Raises NumericError on NaN."""
        settings = self._settings
        row = self._penalized(logits)
        if settings.temperature == 0.0:
            return self._best(row, None, position, None)
        scaled = row / np.float32(max(settings.temperature, COLDEST))
        if not self._narrows:
            return self._best(scaled, self._seed, position, None)
        ids, _, bad = noise.select_candidates(scaled, settings.top_k, settings.top_p, settings.min_p)
        if bad:
            raise not_numbers(position)
        return self._best(scaled, self._seed, position, ids)

    def _best(
        self, row: NDArray[np.float32], seed: int | None, position: int, candidates: NDArray[np.int64] | None
    ) -> int:
        token_id, bad = noise.gumbel_argmax(np.ascontiguousarray(row), seed, position, candidates)
        if bad or token_id is None:
            raise not_numbers(position)
        return token_id

    def _penalized(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if not (self._penalizes_seen or self._penalizes_generated):
            return logits
        settings, row = self._settings, logits.copy()
        if self._penalizes_seen:
            factor = np.float32(settings.repeat_penalty)
            seen = row[self._seen]
            row[self._seen] = np.where(seen > 0, seen / factor, seen * factor)
        if self._penalizes_generated:
            used = np.flatnonzero(self._generated)
            counts = self._generated[used].astype(np.float32)
            row[used] -= np.float32(settings.presence_penalty) + np.float32(settings.frequency_penalty) * counts
        return row


def not_numbers(position: int) -> NumericError:
    """What to raise for logits with NaN in them."""
    return NumericError(
        f"the logits of position {position} are not numbers: the weights are damaged, convert the model again"
    )
