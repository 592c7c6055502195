"""`--accept rejection`: the rule of speculative sampling (Leviathan et al. 2023), for drafts that are drawn or chosen.

A draft x drawn from q is accepted with probability min(1, p(x) / q(x)), else the token comes from the positive part of
p - q; a chosen draft is one drawn from a law that has nothing else in it. p is the target's law behind penalties,
temperature and filters. The law of the answer is the target's; its bytes depend on the drafts, unlike those of
`coli.engine.verify`. Siblings are judged one after the other, each against what the ones before it left of p.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coli.engine.sampling import COLDEST, Sampler, not_numbers
from coli.engine.verify import Verdict
from coli.kernels import noise

Law = tuple[NDArray[np.int64], NDArray[np.float64]]
Drafted = tuple[int, Law | None]  # a drafted id and what it was drawn from; None: it was chosen

JUDGE_IDS = 1 << 33  # noise of ids from here on judges drafts: no vocabulary reaches them


class Proposal(Protocol):
    """A draft tree: ids with parent indices, -1 for the root; `laws` the ids were drawn from, empty where they were
    chosen."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def parents(self) -> tuple[int, ...]: ...

    @property
    def laws(self) -> tuple[Law, ...]: ...


def acceptance(p: NDArray[np.float64], token_id: int, law: Law | None) -> float:
    """Probability of accepting the draft, where the target's law is p (V,)."""
    if law is None:
        return float(p[token_id])
    ids, chances = law
    q = float(chances[ids == token_id][0])
    return min(1.0, float(p[token_id]) / q)


def residual(p: NDArray[np.float64], token_id: int, law: Law | None) -> NDArray[np.float64]:
    """The law (V,) of what is emitted when the draft was rejected: the positive part of p - q, of sum 1."""
    rest = p.copy()
    if law is None:
        rest[token_id] = 0.0
    else:
        ids, chances = law
        rest[ids] = np.maximum(rest[ids] - chances, 0.0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p  # p = q up to rounding, and a rejection rounding's too


class RejectionSampler(Sampler):
    """Samples like Sampler where nothing was drafted, and judges what was."""

    def judge(self, logits: NDArray[np.float32], position: int, drafts: Sequence[Drafted]) -> int:
        """The token at `position`: the first draft that is accepted, else one of what is left of the target's law."""
        p = self.law(logits, position)
        if p is None:
            return self.sample(logits, position)
        uniforms = self._uniforms(position, len(drafts))
        for (token_id, law), uniform in zip(drafts, uniforms, strict=True):
            if uniform < acceptance(p, token_id, law):
                return token_id
            p = residual(p, token_id, law)
        ids = np.flatnonzero(p)
        return int(ids[np.argmax(np.log(p[ids]) + noise.gumbel(self._seed, position, ids))])

    def law(self, logits: NDArray[np.float32], position: int) -> NDArray[np.float64] | None:
        """The target's law (V,) float64 behind penalties, temperature and filters; None: one token has all of it."""
        settings = self._settings
        if settings.temperature == 0.0:
            return None
        scaled = self._penalized(logits) / np.float32(max(settings.temperature, COLDEST))
        p = np.zeros(len(scaled), np.float64)
        if self._narrows:
            ids, chances, bad = noise.select_candidates(scaled, settings.top_k, settings.top_p, settings.min_p)
            if bad or not len(ids):
                raise not_numbers(position)
            p[ids] = chances
        else:
            peak = np.max(scaled)
            if np.isnan(peak):
                raise not_numbers(position)
            if np.isinf(peak):
                return None
            p = np.exp(scaled.astype(np.float64) - np.float64(peak))
        law: NDArray[np.float64] = p / p.sum()
        return law

    def _uniforms(self, position: int, count: int) -> NDArray[np.float64]:
        words = noise.words(self._seed, position, np.arange(JUDGE_IDS, JUDGE_IDS + count, dtype=np.int64))
        uniforms: NDArray[np.float64] = (words.astype(np.float64) + 0.5) / 2.0**32
        return uniforms


def verify_by_rejection(
    logits: NDArray[np.float32],
    proposal: Proposal,
    judge: Callable[[NDArray[np.float32], Sequence[Drafted]], int],
    commit: Callable[[int], bool],
) -> Verdict:
    """Walk the draft tree as `verify` does; `judge` decides among a row's drafts (empty at a leaf)."""
    children: list[dict[int, int]] = [{} for _ in range(len(proposal.token_ids) + 1)]
    for i, (token_id, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
        children[parent + 1].setdefault(token_id, i + 1)
    row, kept, sampled, judged = 0, [0], [], 0
    while True:
        drafts = [
            (token_id, proposal.laws[child - 1] if proposal.laws else None) for token_id, child in children[row].items()
        ]
        token_id = judge(logits[row], drafts)
        sampled.append(token_id)
        judged += len(drafts) > 0
        going_on = commit(token_id)
        child = children[row].get(token_id)
        if child is None or not going_on:
            return Verdict(tuple(sampled), tuple(kept), judged)
        row = child
        kept.append(row)
