"""What the target really emitted at each place of a grammar: counts of next tokens per site, and per site and last id.

A grammar knows bytes; which tokens spell them, which spacing and which alternative a model prefers, only the model
shows. Bounded: the sites longest unseen go first, and old counts fade. END stands for the end of the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

END = -1
MAX_SITES = 8192
MAX_TOKENS = 12  # remembered at one site
PRIOR_WEIGHT = 2.0
SOFT_PRIOR = 0.25
FORCED_PRIOR = 0.8
FADE_AT = 32  # observations after which all counts are halved


@dataclass(slots=True)
class _Site:
    total: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    favourite: int = END  # seen most often, of equals the latest


class Habits:
    """Counts by site alone, and by site with the last and the last two ids."""

    def __init__(self) -> None:
        self._sites: dict[tuple[int, ...], _Site] = {}

    def observe(self, site: int, context: Sequence[int], token_id: int) -> None:
        """The target emitted `token_id` (or ended) at this site, behind `context` (the last ids, at least two)."""
        self._count((site,), token_id)
        self._count((site, context[-1]), token_id)
        self._count((site, context[-1], context[-2]), token_id)

    def _count(self, key: tuple[int, ...], token_id: int) -> None:
        sites = self._sites
        entry = sites.pop(key, None)
        if entry is None:
            entry = _Site()
            if len(sites) >= MAX_SITES:
                del sites[next(iter(sites))]
        sites[key] = entry  # the latest is last
        counts = entry.counts
        if entry.total >= FADE_AT or (token_id not in counts and len(counts) >= MAX_TOKENS):
            entry.counts = counts = {seen: count >> 1 for seen, count in counts.items() if count > 1}
            entry.total >>= 1
        counts[token_id] = count = counts.get(token_id, 0) + 1
        entry.total += 1
        if count >= counts.get(entry.favourite, 0):
            entry.favourite = token_id

    def favourite(self, site: int, context: Sequence[int], *, forced: bool) -> tuple[int, float] | None:
        """(token id or END, estimated probability) of what the target is most likely to do here; None if never seen.

        forced: the grammar leaves one byte only, so that a first guess of how the target spells it is a good one.
        Each context corrects the estimate of the shorter one, which counts as much as PRIOR_WEIGHT observations.
        """
        sites = self._sites
        levels = [
            entry
            for key in ((site,), (site, context[-1]), (site, context[-1], context[-2]))
            if (entry := sites.get(key)) is not None
        ]
        best: tuple[int, float] | None = None
        for token_id in {entry.favourite for entry in levels}:
            probability = FORCED_PRIOR if forced else SOFT_PRIOR
            for entry in levels:
                hits = entry.counts.get(token_id, 0)
                probability = (hits + PRIOR_WEIGHT * probability) / (entry.total + PRIOR_WEIGHT)
            if best is None or probability > best[1]:
                best = token_id, probability
        return best
