"""What a decode forward costs by its number of rows, in plain forwards: measured, discounted, filled in between.

Costs are kept as ratios to a plain forward (one row), so that a busy machine or a growing context moves all of them
together. Pure arithmetic on what it is told; it reads no clock and no file.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

MAX_ROWS = 64
PRIOR_SLOPE = 0.5  # plain forwards per further row until two row counts are known (the seed's)
NEAREST_SLOPE, STEEPEST_SLOPE = 0.01, 1.0  # a row never costs more than a forward of its own
MOST_SAMPLES = 24.0  # weight the past can have against the next sample
REMEMBERED = 2.0  # weight of what an earlier run has measured
STREAMING_SHARE = 0.02  # of the experts a plain forward uses, read on average: from there on they stream
PRIOR_SAMPLES = 0.5  # of two rows, that the prior slope counts as
SHRUNK_BY = 3.0  # samples by which a row count is drawn to the line all of them share
DOUBT, CERTAIN_FROM = 0.4, 13  # relative error of a sample, for the lower bound; samples that leave no doubt
# Of what a row count never measured is thought to cost more than the next smaller measured one; where that is a plain
# forward, only the prior has thought it
UNKNOWN_DOUBT, PRIOR_DOUBT = 0.6, 0.8
OUTLIER = 3.0  # a sample beyond this many times the estimate counts as just that


@dataclass(slots=True)
class Cost:
    """Of one row count. ratio: plain forwards; expert_bytes read per forward; weight in samples (discounted);
    samples: how many this process took.
    """

    ratio: float
    expert_bytes: float
    weight: float
    samples: int = 0


class RowCosts:
    """Costs of 1..MAX_ROWS rows. Seconds of a plain forward are kept apart and never remembered."""

    def __init__(self, cycle_bytes: int = 0) -> None:
        """cycle_bytes: of the experts one row uses, by which it is told whether experts stream."""
        self.plain_seconds = 0.0  # 0: not measured yet
        self.cycle_bytes = cycle_bytes
        self._plain_weight = 0.0
        self._known: dict[int, Cost] = {}
        self._rows: list[int] = []
        self._curve: list[float] | None = None
        self._lowest: dict[int, float] = {}  # what `lowest` found since the curve was drawn
        self._drift = 0.0  # how far the known ratios have moved since the curve was drawn

    def add(self, rows: int, seconds: float, expert_bytes: int, weight: float = 1.0) -> None:
        """One more forward of `rows` rows; before the first plain one only plain ones can be used.

        weight: of a sample of a row count not measured before, if it is a doubtful one.
        """
        if rows == 1:
            self._add_plain(seconds)
            ratio = 1.0
        elif not self.plain_seconds:
            return
        else:
            ratio = seconds / self.plain_seconds
        known = self._known.get(rows)
        if known is None:
            self._known[rows] = Cost(ratio, expert_bytes, weight, 1)
            self._rows = sorted(self._known)
            self._curve = None
            return
        past = min(known.weight, MOST_SAMPLES - 1)
        # what was only remembered may be another machine's, or somebody's joke: the first sample counts as it is
        most = OUTLIER * known.ratio if known.samples else math.inf
        step = (min(ratio, most) - known.ratio) / (past + 1)
        known.ratio += step
        known.expert_bytes += (expert_bytes - known.expert_bytes) / (past + 1)
        known.weight = past + 1
        known.samples += 1
        self._drift += abs(step)
        if self._drift > 0.02 or (rows > 1 and past < CERTAIN_FROM):
            self._curve = None

    def _add_plain(self, seconds: float) -> None:
        weight = min(self._plain_weight, MOST_SAMPLES - 1)
        if weight >= 2:
            seconds = min(seconds, OUTLIER * self.plain_seconds)
        self.plain_seconds += (seconds - self.plain_seconds) / (weight + 1)
        self._plain_weight = weight + 1

    def remember(self, rows: int, ratio: float, expert_bytes: float) -> None:
        """A cost an earlier run has measured; a few samples of this run outweigh it."""
        self._known[rows] = Cost(1.0 if rows == 1 else max(ratio, 1.0), expert_bytes, REMEMBERED)
        self._rows = sorted(self._known)
        self._curve = None

    def ratio(self, rows: int) -> float:
        """Plain forwards that one of `rows` rows costs, measured or estimated; never less than fewer rows cost."""
        return (self._curve or self._redrawn())[rows]

    def _redrawn(self) -> list[float]:
        self._curve, self._drift = self._drawn(), 0.0
        self._lowest.clear()
        return self._curve

    def is_known(self, rows: int) -> bool:
        """Whether this very row count has been measured."""
        return rows in self._known

    @property
    def most_rows(self) -> int:
        """The largest row count measured; 0: none."""
        return self._rows[-1] if self._rows else 0

    def lowest(self, rows: int) -> float:
        """The least `rows` rows may well cost, the less was measured the lower; not below a smaller measured count."""
        drawn = self.ratio(rows)
        if (found := self._lowest.get(rows)) is None:
            found = self._lowest[rows] = self._least(rows, drawn)
        return found

    def _least(self, rows: int, drawn: float) -> float:
        at = bisect_left(self._rows, rows)
        floor, known = self.ratio(self._rows[at - 1] if at else 1), self._known.get(rows)
        if known is None:
            return floor + (drawn - floor) * (1 - (UNKNOWN_DOUBT if self.most_rows > 1 else PRIOR_DOUBT))
        doubt = DOUBT / math.sqrt(SHRUNK_BY + known.weight) - DOUBT / math.sqrt(SHRUNK_BY + CERTAIN_FROM)
        return max(floor, min(drawn * (1 - max(doubt, 0.0)), known.ratio if doubt > 0 else drawn))

    def highest(self, rows: int) -> float:
        """The most they may cost: a measured ratio as it is, beyond it a plain forward for each further row."""
        if rows in self._known:
            return self.ratio(rows)
        at = bisect_left(self._rows, rows)
        below = self._rows[at - 1] if at else 1
        return self.ratio(below) + STEEPEST_SLOPE * (rows - below)

    def expert_bytes(self, rows: int) -> float:
        """Expert bytes a forward of `rows` rows reads; 0 where nothing was measured."""
        known = self._known.get(rows)
        return known.expert_bytes if known else 0.0

    @property
    def streams(self) -> bool:
        """Whether a plain forward usually has to read experts."""
        return self.expert_bytes(1) > STREAMING_SHARE * self.cycle_bytes

    def table(self) -> list[dict[str, float | int]]:
        """Per measured row count: ratio, seconds, expert bytes and how many samples this process took."""
        return [
            {
                "rows": rows,
                "plain_forwards": round(self.ratio(rows), 4),
                "seconds": round(self.ratio(rows) * self.plain_seconds, 6),
                "expert_bytes": round(self._known[rows].expert_bytes),
                "samples": self._known[rows].samples,
            }
            for rows in self._rows
        ]

    def measured(self) -> dict[int, tuple[float, float]]:
        """rows -> (ratio, expert bytes) of what this process has measured, for the next run."""
        return {rows: (cost.ratio, cost.expert_bytes) for rows, cost in self._known.items() if cost.samples}

    def _drawn(self) -> list[float]:
        """Ratios of 0..MAX_ROWS rows: rising through what is known, straight between and beyond.

        All row counts share one line through the plain forward; each is drawn to it by SHRUNK_BY samples, so that one
        lucky sample of some row count does not make it the best.
        """
        above = [(rows, self._known[rows].ratio, self._known[rows].weight) for rows in self._rows if rows > 1]
        weights = PRIOR_SAMPLES + sum(weight * (rows - 1) ** 2 for rows, _, weight in above)
        slope = PRIOR_SAMPLES * PRIOR_SLOPE + sum(weight * (rows - 1) * (ratio - 1) for rows, ratio, weight in above)
        slope = min(max(slope / weights, NEAREST_SLOPE), STEEPEST_SLOPE)
        points = [(1, 1.0, MOST_SAMPLES)]
        for rows, ratio, weight in above:
            line = 1 + slope * (rows - 1)
            points.append((rows, (weight * ratio + SHRUNK_BY * line) / (weight + SHRUNK_BY), weight + SHRUNK_BY))
        points = _rising(points)
        curve = [1.0, 1.0]
        for (left, low, _), (right, high, _) in pairwise(points):
            curve += [low + (high - low) * (rows - left) / (right - left) for rows in range(left + 1, right + 1)]
        last, at_last, _ = points[-1]
        if above:  # beyond the largest it goes on as steeply as it rose there: more rows do not become cheaper
            (before, at_before, _), (_, measured, _) = points[-2], above[-1]
            slope = min(max(slope, (measured - at_before) / (last - before)), STEEPEST_SLOPE)
        return curve + [at_last + slope * (rows - last) for rows in range(last + 1, MAX_ROWS + 1)]


def _rising(points: list[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """Isotonic fit of (rows, ratio, weight): neighbours that fall are given their mean (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many points
    for _, ratio, weight in points:
        mean, count = ratio, 1
        while pools and pools[-1][0] > mean:
            above, more, size = pools.pop()
            mean = (mean * weight + above * more) / (weight + more)
            weight, count = weight + more, count + size
        pools.append((mean, weight, count))
    fitted = [mean for mean, _, count in pools for _ in range(count)]
    base = fitted[0]  # the plain forward is 1 by definition
    return [(rows, max(1.0, ratio / base), weight) for (rows, _, weight), ratio in zip(points, fitted, strict=True)]
