"""How likely the target is to agree with a drafted token: discounted counts by source, match length and depth.

Every proposal teaches, whether it was drafted or declined: the ids that are emitted say what would have become of it.
A finer count corrects the coarser one above it, which weighs as much as a few observations. Pure; one thread.
"""

from __future__ import annotations

DISCOUNT = 63 / 64  # weight of all earlier observations when one is added
PRIOR_WEIGHT = 4.0  # observations the coarser estimate counts as
OTHER_PRIOR = 0.4
# Before anything was seen. The seed's prior for lookups is 0.5; forced bytes and frozen spans have earned more.
PRIORS = {"grammar": 0.8, "corpus": 0.6, "mtp": 0.7, "ngram": 0.5, "graph": 0.4}
COPIES, SHORTEST_COPY = ("corpus", "ngram"), 2  # sources whose match length is one, and the ids it counts from
_MATCHES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 9, 9, 9, 9, 10)  # bucket by match length, longer ones last
_DEPTHS = (0, 1, 2, 3, 3, 4, 4, 4, 4, 5)  # bucket by depth, deeper ones last

_ALL = -1  # in a key: any match length, any depth

Cell = list[float]  # judged, accepted; both discounted
Levels = tuple[float, Cell, Cell, Cell]  # the source's prior, then its cells from the coarsest to the finest


def _prior(source: str, length: int) -> float:
    """Before anything was seen: a copy is the likelier to go on, the more ids agree already."""
    prior = PRIORS.get(source, OTHER_PRIOR)
    if source not in COPIES or length <= SHORTEST_COPY:
        return prior
    return 1 - (1 - prior) * 4 / (4 + length - SHORTEST_COPY)


class Acceptance:
    """Estimates P(accepted | everything above it was accepted)."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, int, int], Cell] = {}
        self._found: dict[tuple[str, int, int], Levels] = {}  # by source, match length and depth

    def add(self, source: str, match_length: int, depth: int, accepted: bool) -> None:
        """A token of `source` at `depth` (0: the next token), resting on `match_length` ids, was right or wrong."""
        key = source, match_length, depth
        _, *cells = self._found.get(key) or self._levels(key)
        for cell in cells:
            cell[0] = cell[0] * DISCOUNT + 1
            cell[1] = cell[1] * DISCOUNT + accepted

    def probability(self, source: str, match_length: int, depth: int) -> float:
        """In (0, 1)."""
        key = source, match_length, depth
        estimate, every, length, finest = self._found.get(key) or self._levels(key)
        # unrolled: every node of every proposal comes by here
        estimate = (every[1] + PRIOR_WEIGHT * estimate) / (every[0] + PRIOR_WEIGHT)
        estimate = (length[1] + PRIOR_WEIGHT * estimate) / (length[0] + PRIOR_WEIGHT)
        return (finest[1] + PRIOR_WEIGHT * estimate) / (finest[0] + PRIOR_WEIGHT)

    def _levels(self, key: tuple[str, int, int]) -> Levels:
        source, match_length, depth = key
        match = _MATCHES[match_length] if match_length < len(_MATCHES) else _MATCHES[-1]
        level = _DEPTHS[depth] if depth < len(_DEPTHS) else _DEPTHS[-1]
        every, length, finest = (
            self._cells.setdefault(cell, [0.0, 0.0])
            for cell in ((source, _ALL, _ALL), (source, match, _ALL), (source, match, level))
        )
        found = self._found[key] = _prior(source, match_length + depth), every, length, finest
        return found

    def table(self) -> dict[str, float]:
        """source -> estimate over all its lengths and depths, for the report."""
        return {
            source: round((cell[1] + PRIOR_WEIGHT * PRIORS.get(source, OTHER_PRIOR)) / (cell[0] + PRIOR_WEIGHT), 4)
            for (source, match, level), cell in self._cells.items()
            if (match, level) == (_ALL, _ALL) and cell[0]
        }
