"""Which experts to pin from a usage history: by order of the user, or by ourselves when it is shown to pay.

By ourselves only if what one half of the history recommends covers clearly more of the other half than chance would,
and only memory that the LRU can spare. Pure arithmetic.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coli.errors import OptionError
from coli.store.policy import OVERLAP
from coli.store.pools import cycle_bytes
from coli.store.usage import UsageHistory, read_history

LEAST_SELECTIONS = 5_000
FULL_SELECTIONS = 200_000
LEAST_BYTES = 500_000_000
# The LRU keeps this many token cycles whatever is pinned.
_LRU_CYCLES = 1.5
_STANDARD_ERRORS = 3.0


@dataclass(frozen=True, slots=True)
class PinChoice:
    """Keys to pin, and why so many."""

    keys: tuple[int, ...]
    nbytes: int
    reason: str


def pinned_experts(
    history: UsageHistory,
    record_bytes: Mapping[int, int],
    num_experts_per_tok: int,
    capacity_bytes: int,
    *,
    pin: str | Path = "auto",
    pin_bytes: float | None = None,
    autopin: bool = True,
) -> PinChoice:
    """What the settings ask for: nothing, the most used of a named file, or what pays.

    Args:
        history: this model's own.
        capacity_bytes: memory for experts, pins included.
        pin: "off", "auto" (from `history`), or a file of this engine or another; it may be of another model.
        pin_bytes: bytes to pin, math.inf for all that fits; None: half the capacity of a named file, else what pays.

    Raises:
        OptionError: the named file is no history, or has other dimensions.
    """
    if pin == "off":
        return PinChoice((), 0, "no pins: off")
    named = pin != "auto"
    if named:
        path = Path(pin)
        if not path.exists():
            raise OptionError(f"--pin: expected auto, off or a usage history, found {pin}")
        history = read_history(path, history.fingerprint, history.num_layers, history.num_experts, any_model=True)
        pin_bytes = capacity_bytes / 2 if pin_bytes is None else pin_bytes
    if pin_bytes is None:
        if not autopin:
            return PinChoice((), 0, "no pins: automatic pins are off")
        return choose_pins(history, record_bytes, num_experts_per_tok, capacity_bytes)
    # Reads have to pass through something, whatever the user asks for.
    most = capacity_bytes - OVERLAP * sum(set(record_bytes.values()))
    keys, taken = most_used(history.counts, record_bytes, min(pin_bytes, most))
    return PinChoice(keys, taken, f"pinned {len(keys)} experts as asked" + (f", from {pin}" if named else ""))


def most_used(
    counts: NDArray[np.float64], record_bytes: Mapping[int, int], budget_bytes: float
) -> tuple[tuple[int, ...], int]:
    """Keys by use per byte, counts (L, E), as many as `budget_bytes` hold, and their bytes; unused ones never."""
    num_experts = counts.shape[1]
    layers = sorted(record_bytes)
    value = np.zeros_like(counts)
    for layer_idx in layers:
        value[layer_idx] = counts[layer_idx] / record_bytes[layer_idx]
    keys, taken = [], 0
    for key in np.argsort(-value, axis=None, kind="stable").tolist():
        size = record_bytes.get(key // num_experts, 0)
        if value.flat[key] <= 0 or taken + size > budget_bytes:
            break
        keys.append(key)
        taken += size
    return tuple(sorted(keys)), taken


def choose_pins(
    history: UsageHistory, record_bytes: Mapping[int, int], num_experts_per_tok: int, capacity_bytes: int
) -> PinChoice:
    """The pins that pay by the history's own evidence; none is the usual answer of a young one."""
    everything = sum(record_bytes.values()) * history.num_experts
    selections = history.selections
    if everything <= capacity_bytes:
        return PinChoice((), 0, "no pins: every expert fits")
    if selections < LEAST_SELECTIONS:
        return PinChoice((), 0, f"no pins: {selections:.0f} selections seen, {LEAST_SELECTIONS} are needed")
    cycle = cycle_bytes(record_bytes, num_experts_per_tok)
    share = 0.5 * capacity_bytes * min(1.0, selections / FULL_SELECTIONS)
    budget = min(share, capacity_bytes - _LRU_CYCLES * cycle)
    if budget < LEAST_BYTES:
        return PinChoice((), 0, "no pins: the memory is better used as cache")
    covered, chance, error = held_out_coverage(history, record_bytes, num_experts_per_tok, budget)
    if not covered > chance + _STANDARD_ERRORS * error:
        return PinChoice((), 0, f"no pins: they would cover {covered:.0%} of held-out use, chance {chance:.0%}")
    keys, taken = most_used(history.counts, record_bytes, budget)
    return PinChoice(keys, taken, f"pinned {len(keys)} experts: {covered:.0%} of held-out use, chance {chance:.0%}")


def held_out_coverage(
    history: UsageHistory, record_bytes: Mapping[int, int], num_experts_per_tok: int, budget_bytes: float
) -> tuple[float, float, float]:
    """How much of one half's use the other half's pins cover: mean of both ways, what chance would give, its error.

    The error counts all selections of a token as one observation: they are anything but independent.
    """
    covered, tokens = [], []
    chance = 0.0
    for learnt, judged in (history.halves, history.halves[::-1]):
        keys, _ = most_used(learnt, record_bytes, budget_bytes)
        total = float(judged.sum())
        if not keys or not total:
            return 0.0, 0.0, math.inf
        covered.append(float(judged.flat[list(keys)].sum()) / total)
        tokens.append(total / (num_experts_per_tok * len(record_bytes)))
        chance += len(keys) / (history.num_experts * len(record_bytes)) / 2
    return sum(covered) / 2, chance, math.sqrt(chance * (1 - chance) / max(1.0, min(tokens)))
