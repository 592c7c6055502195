"""Slow twin of the n-gram index: counts in dictionaries, laws and mixtures written out as semantics 8 says them."""

import math
from collections import Counter
from collections.abc import Sequence

KEPT = 256


def count_successors(documents: Sequence[Sequence[int]], max_order: int) -> dict[tuple[int, ...], Counter[int]]:
    """context of 1..max_order ids -> how often each id followed it, inside one document."""
    counts: dict[tuple[int, ...], Counter[int]] = {}
    for document in documents:
        for end in range(1, len(document)):
            for order in range(1, min(max_order, end) + 1):
                counts.setdefault(tuple(document[end - order : end]), Counter())[document[end]] += 1
    return counts


def runs(tokens: Sequence[int]) -> list[list[int]]:
    """Ids between separators."""
    found: list[list[int]] = [[]]
    for token_id in tokens:
        if token_id < 0:
            found.append([])
        else:
            found[-1].append(token_id)
    return [run for run in found if run]


def mixture(
    counts: dict[tuple[int, ...], Counter[int]],
    context: Sequence[int],
    max_order: int,
    mix: str,
    order_bias: float = 1.0,
    mix_temperature: float = 1.0,
    reliability_weight: float = 1.0,
    entropy_penalty: float = 0.5,
) -> dict[int, float]:
    """The law behind `context`: id -> probability; empty if not even its last id is known."""
    matched: list[tuple[int, Counter[int]]] = []
    for order in range(1, min(max_order, len(context)) + 1):
        found = counts.get(tuple(context[-order:]))
        if found is None:
            break  # a longer context that is known ends in a shorter one that is
        matched.append((order, found))
    if not matched:
        return {}
    weights = []
    rest = 1.0
    for order, found in reversed(matched):
        total = sum(found.values())
        entropy = -sum(count / total * math.log(count / total) for count in found.values())
        if mix == "attentive":
            score = order_bias * order + reliability_weight * math.log(1 + min(total, 16)) - entropy_penalty * entropy
            weights.append(math.exp(score / mix_temperature))
        elif mix == "single":
            weights.append(1.0 if found is matched[-1][1] else 0.0)
        else:
            weights.append(rest * total / (total + len(found)))
            rest *= len(found) / (total + len(found))
    scale = sum(weights)
    law: dict[int, float] = {}
    for weight, (_, found) in zip(weights, reversed(matched), strict=True):
        total = sum(found.values())
        kept = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:KEPT]
        for token_id, count in kept:
            law[token_id] = law.get(token_id, 0.0) + weight / scale * count / total
    mass = sum(law.values())
    return {token_id: chance / mass for token_id, chance in law.items() if chance > 0}


def greedy_draft(
    counts: dict[tuple[int, ...], Counter[int]], context: Sequence[int], k: int, max_order: int, mix: str
) -> list[tuple[int, float]]:
    """Up to k (id, probability), each the likeliest behind all before it."""
    drafted: list[tuple[int, float]] = []
    growing = list(context)
    while len(drafted) < k:
        law = mixture(counts, growing, max_order, mix)
        if not law:
            break
        best = min(law, key=lambda token_id: (-law[token_id], token_id))
        drafted.append((best, law[best]))
        growing.append(best)
    return drafted
