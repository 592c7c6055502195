"""`coli graph calibrate`: which knobs draft best on text the graph has not seen.

The held-out text stands in for the target: a draft is right as far as it equals what follows. Pure and deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coli.drafts.index_file import DEPTH
from coli.drafts.ngram_index import MIXES, Mixing, NgramIndex
from coli.errors import CorpusError

GRID = {
    "order_bias": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0),
    "mix_temperature": (0.25, 0.5, 1.0, 2.0),
    "reliability_weight": (0.0, 0.5, 1.0, 2.0),
    "entropy_penalty": (0.0, 0.25, 0.5, 1.0, 2.0),
}
PLACES = 2000
Progress = Callable[[str, int, int], None]
Text = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Score:
    """How a mixing does on held-out text. length: accepted ids per draft (undrafted places count 0); first: share of
    places whose first drafted id is right; drafted: share of places with any draft.
    """

    mixing: Mixing
    length: float
    first: float
    drafted: float


def score(index: NgramIndex, text: Text, places: Sequence[int], mixing: Mixing, k: int) -> Score:
    """Draft up to k ids at each of `places` (indices in `text`, negative ids between documents)."""
    accepted = first = drafted = 0
    ids = np.asarray(text, np.int32)
    for place in places:
        context = _inside(ids[max(0, place - DEPTH) : place].tolist())
        token_ids, _, _ = index.draft(context, k, mixing)
        right = 0
        for guess, actual in zip(token_ids, ids[place : place + k].tolist(), strict=False):
            if guess != actual:
                break
            right += 1
        accepted += right
        first += right > 0
        drafted += bool(token_ids)
    total = max(len(places), 1)
    return Score(mixing, accepted / total, first / total, drafted / total)


def calibrate(
    index: NgramIndex, text: Text, k: int, progress: Progress = lambda what, done, total: None
) -> list[Score]:
    """Scores of the default mixings and of the best `attentive` knobs found, the best first.

    Knobs are improved one at a time over GRID until none improves. Raises CorpusError if the text is too short.
    """
    places = places_in(text)
    if not places:
        raise CorpusError("the held-out text is too short: no place with ids before and behind it")
    defaults = [score(index, text, places, Mixing(mix), k) for mix in MIXES]
    best = next(entry for entry in defaults if entry.mixing.mix == "attentive")
    done, total = 0, 2 * sum(len(values) for values in GRID.values())
    improved = True
    while improved:
        improved = False
        for knob, values in GRID.items():
            for value in values:
                progress("calibrating", min(done, total), total)
                done += 1
                mixing = replace(best.mixing, **{knob: value})  # type: ignore[arg-type]
                if mixing == best.mixing:
                    continue
                candidate = score(index, text, places, mixing, k)
                if candidate.length > best.length:
                    best, improved = candidate, True
    scores = defaults if best in defaults else [best, *defaults]
    return sorted(scores, key=lambda entry: -entry.length)


def places_in(text: Text, limit: int = PLACES) -> list[int]:
    """Evenly spread indices with an id at them and before them."""
    inside = np.asarray(text, np.int32) >= 0
    usable = np.flatnonzero(inside[1:] & inside[:-1]) + 1
    step = max(1, len(usable) // limit)
    places: list[int] = usable[::step][:limit].tolist()
    return places


def _inside(context: Sequence[int]) -> list[int]:
    """The ids behind the last separator."""
    inside: list[int] = []
    for token_id in context:
        inside = [] if token_id < 0 else [*inside, token_id]
    return inside
