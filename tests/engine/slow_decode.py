"""Slow twin of sampling and of the decode loop: one position at a time, Python floats, no drafts, no cache, no rows.

`law` is the documented chain (penalties, temperature, top-k, top-p, min-p) in float64, on its own; `sequence_law`
multiplies it out over every sequence a tiny vocabulary can make.
"""

import math
from collections.abc import Collection, Sequence
from typing import Protocol

import naive
import numpy as np
from numpy.typing import NDArray

from coli.options import SamplerOptions

Law = dict[int, float]


class Target(Protocol):
    """FakeModel, or anything else that gives the logits behind a path."""

    def logits(self, path: Sequence[int]) -> NDArray[np.float32]: ...


def law(
    logits: Sequence[float], settings: SamplerOptions, prompt: Sequence[int] = (), answer: Sequence[int] = ()
) -> Law:
    """Probability of each id that can come next, summing to 1."""
    x = [float(value) for value in logits]
    for token_id in {*prompt, *answer}:
        x[token_id] *= settings.repeat_penalty if x[token_id] < 0 else 1 / settings.repeat_penalty
    for token_id in answer:
        x[token_id] -= settings.frequency_penalty
    for token_id in set(answer):
        x[token_id] -= settings.presence_penalty
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if settings.temperature == 0:
        return {ranked[0]: 1.0}
    if settings.top_k:
        ranked = ranked[: settings.top_k]
    weight = [math.exp((x[i] - x[ranked[0]]) / settings.temperature) for i in ranked]
    chance = [w / math.fsum(weight) for w in weight]
    kept = 1
    while kept < len(ranked) and math.fsum(chance[:kept]) < settings.top_p:
        kept += 1
    kept = sum(p >= settings.min_p * chance[0] for p in chance[:kept])
    mass = math.fsum(chance[:kept])
    return {token_id: p / mass for token_id, p in zip(ranked[:kept], chance[:kept], strict=True)}


def gumbel(seed: int, position: int, token_id: int) -> float:
    """The documented noise of (seed, position, id)."""
    word = naive.philox(seed, token_id // 4, position)[token_id % 4]
    return -math.log(-math.log((word + 0.5) / 2**32))


def slow_decode(
    target: Target,
    prompt: Sequence[int],
    settings: SamplerOptions,
    seed: int,
    max_tokens: int,
    *,
    end_ids: Collection[int] = (),
    context: int = 10_000,
) -> tuple[list[int], str]:
    """(ids, finish reason) of one response."""
    answer: list[int] = []
    while len(answer) < max_tokens and len(prompt) + len(answer) < context:
        path = [*prompt, *answer]
        chances = law(target.logits(path).tolist(), settings, prompt, answer)
        noisy = {i: math.log(p) + gumbel(seed, len(path), i) for i, p in chances.items()}
        token_id = min(noisy, key=lambda i: (-noisy[i], i))
        if token_id in end_ids:
            return answer, "stop"
        answer.append(token_id)
    return answer, "length"


def sequence_law(
    target: Target, prompt: Sequence[int], settings: SamplerOptions, length: int, end_ids: Collection[int] = ()
) -> dict[tuple[int, ...], float]:
    """Probability of every answer of up to `length` ids."""
    result: dict[tuple[int, ...], float] = {}

    def grow(answer: tuple[int, ...], chance: float) -> None:
        if len(answer) == length:
            result[answer] = chance
            return
        for token_id, p in law(target.logits([*prompt, *answer]).tolist(), settings, prompt, answer).items():
            if token_id in end_ids:
                result[answer] = result.get(answer, 0.0) + chance * p
            else:
                grow((*answer, token_id), chance * p)

    grow((), 1.0)
    return result


def chi_square_excess(counts: dict[object, int], expected: dict[object, float]) -> float:
    """Chi-square of observed counts against probabilities, divided by its 1e-5 quantile: above 1 the law is refuted.

    Outcomes expected fewer than 5 times share a class; an outcome the law excludes makes it infinite.
    """
    total = sum(counts.values())
    if any(expected.get(outcome, 0.0) == 0.0 for outcome in counts):
        return math.inf
    rare = [outcome for outcome, p in expected.items() if p * total < 5]
    classes = [[outcome] for outcome in expected if outcome not in rare] + ([rare] if rare else [])
    chi = 0.0
    for members in classes:
        want = total * math.fsum(expected[outcome] for outcome in members)
        chi += (sum(counts.get(outcome, 0) for outcome in members) - want) ** 2 / want
    k = len(classes) - 1
    if k == 0:
        return 0.0
    # Wilson and Hilferty's cube root; 4.265 is the normal quantile of 1e-5
    return chi / (k * (1 - 2 / (9 * k) + 4.265 * math.sqrt(2 / (9 * k))) ** 3)
