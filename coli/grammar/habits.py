"""What the target really emitted at each place of a grammar: counts of next tokens per site, by the last ids before it.

A grammar knows bytes; which tokens spell them, which spacing and which alternative a model prefers, only the model
shows. Bounded: places seen a few times only are forgotten first, and old counts fade. END stands for the end of the
response.
"""

from __future__ import annotations

from collections.abc import Sequence

END = -1
MAX_SITES = 16_384
MAX_TOKENS = 12  # remembered at one site
FADE_AT = 32  # observations after which all counts of a site are halved
KEEP_FROM = 4  # observations from which on a site survives when room is made
PRIOR_WEIGHT = 2.0
SOFT_PRIOR = 0.25
FORCED_PRIOR = 0.8


class _Site:
    """How often each token followed; favourite: the most frequent, of equals the latest."""

    __slots__ = ("counts", "favourite", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.total = 0
        self.favourite = END

    def add(self, token_id: int) -> None:
        counts = self.counts
        count = counts.get(token_id, 0)
        if self.total >= FADE_AT or (not count and len(counts) >= MAX_TOKENS):
            self.counts = counts = {seen: number >> 1 for seen, number in counts.items() if number > 1}
            self.total = sum(counts.values())
            count >>= 1
        counts[token_id] = count + 1
        self.total += 1
        if count + 1 >= counts.get(self.favourite, 0):
            self.favourite = token_id


class Habits:
    """Counts by site alone, and by site with the last and the last two ids."""

    def __init__(self) -> None:
        self._sites: dict[tuple[int, ...], _Site] = {}

    def __len__(self) -> int:
        return len(self._sites)

    def observe(self, site: int, context: Sequence[int], token_id: int) -> None:
        """The target emitted `token_id` (or ended) at this site, behind `context` (the last ids, at least two)."""
        sites = self._sites
        last = context[-1]
        for key in ((site,), (site, last), (site, last, context[-2])):
            entry = sites.get(key)
            if entry is None:
                if len(sites) >= MAX_SITES:
                    self._make_room()
                    sites = self._sites
                entry = sites[key] = _Site()
            entry.add(token_id)

    def _make_room(self) -> None:
        kept = {key: entry for key, entry in self._sites.items() if entry.total >= KEEP_FROM}
        self._sites = kept if len(kept) <= MAX_SITES // 2 else {}

    def favourite(self, site: int, context: Sequence[int], *, forced: bool) -> tuple[int, float] | None:
        """(token id or END, estimated probability) of what the target is most likely to do here; None if never seen.

        forced: the grammar leaves one byte only, so that a first guess of how the target spells it is a good one.
        Each context corrects the estimate of the shorter one, which counts as much as PRIOR_WEIGHT observations.
        """
        sites = self._sites
        last = context[-1]
        levels = [
            entry
            for entry in (sites.get((site,)), sites.get((site, last)), sites.get((site, last, context[-2])))
            if entry is not None
        ]
        best: tuple[int, float] | None = None
        for index, level in enumerate(levels):
            token_id = level.favourite
            if index and token_id == levels[index - 1].favourite:
                continue
            probability = FORCED_PRIOR if forced else SOFT_PRIOR
            for entry in levels:
                hits = entry.counts.get(token_id, 0)
                probability = (hits + PRIOR_WEIGHT * probability) / (entry.total + PRIOR_WEIGHT)
            if best is None or probability > best[1]:
                best = token_id, probability
        return best
