"""Proposals of several sources as one tree: equal tokens below one node merge, each node knows who proposed it.

Nodes are added parents first and carry the estimated probability of the path to them. Where there is one proposal and
it is a chain, as at most steps, `DraftChain` does the same in a fraction of the time. Pure; one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush

from coli.drafts.base import ROOT, Draft
from coli.drafts.merge import compared_and_accepted

# (source index, match length, depth of the token in the proposal) -> P(accepted | its parent was)
Estimate = Callable[[int, int, int], float]
Owner = tuple[int, int, int]  # source index, match length, depth
# A row costs at least a hundredth of a plain forward (costs.NEAREST_SLOPE): a node less likely than that never pays
LEAST_CHANCE = 0.01


class DraftChain:
    """One proposal without branches: node i is its token i."""

    def __init__(self, draft: Draft, source: int) -> None:
        self._draft, self._source = draft, source

    def __len__(self) -> int:
        return len(self._draft.token_ids)

    def owners_of(self, node: int) -> Sequence[Owner]:
        """Who proposed a node, and as what."""
        return ((self._source, self._draft.match_length, node),)

    def best_first(
        self, most: int, estimate: Estimate, *, one_path: bool = False, least: float = 0.0
    ) -> tuple[Sequence[int], list[float]]:
        """As DraftTrie's."""
        source, match_length = self._source, self._draft.match_length
        chance, chances = 1.0, []
        for depth in range(min(most, len(self._draft.token_ids))):
            chance *= estimate(source, match_length, depth)
            if chance < least:
                break
            chances.append(chance)
        return range(len(chances)), chances

    def draft(self, order: Sequence[int], name: str) -> Draft:
        """The draft of the first len(order) nodes."""
        if len(order) == len(self._draft.token_ids):
            return self._draft
        return Draft.chain(self._draft.token_ids[: len(order)], name, self._draft.match_length)

    def outcomes(self, token_ids: Sequence[int]) -> Iterator[tuple[Owner, bool]]:
        """As DraftTrie's."""
        source, match_length = self._source, self._draft.match_length
        for depth, (drafted, emitted) in enumerate(zip(self._draft.token_ids, token_ids, strict=False)):
            yield (source, match_length, depth), drafted == emitted
            if drafted != emitted:
                return

    def fared(
        self, order: Sequence[int], parents: Sequence[int], kept: Sequence[int], judged: int
    ) -> Mapping[int, tuple[int, int]]:
        """As DraftTrie's."""
        return {self._source: (judged, len(kept))} if judged else {}


class DraftTrie:
    """Node i has token_ids[i], parents[i] (ROOT or a lower number) and owners[i]."""

    def __init__(self, vocab_size: int) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.owners: list[list[Owner]] = []
        self._children: dict[tuple[int, int], int] = {}  # parent, token -> node
        self._below: dict[int, list[int]] = {}
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self.token_ids)

    def child(self, node: int, token_id: int) -> int | None:
        """The node of `token_id` below `node`."""
        return self._children.get((node, token_id))

    def children(self, node: int) -> Sequence[int]:
        """Nodes below `node`, in the order they were first proposed."""
        return self._below.get(node, ())

    def owners_of(self, node: int) -> Sequence[Owner]:
        """Who proposed a node, and as what."""
        return self.owners[node]

    def add(self, draft: Draft, source: int, below: int = ROOT, depth: int = 0) -> int:
        """Merge a source's proposal in below node `below`; returns the node of its last token.

        Ids outside the vocabulary are left out with all that hangs on them. depth: of the proposal's first token.
        """
        nodes: dict[int, int] = {ROOT: below}
        depths: dict[int, int] = {ROOT: depth - 1}
        last = below
        for index, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            if parent not in nodes or not 0 <= token_id < self._vocab_size:
                continue
            above = nodes[parent]
            node = self._children.get((above, token_id))
            if node is None:
                node = len(self.token_ids)
                self.token_ids.append(token_id)
                self.parents.append(above)
                self.owners.append([])
                self._children[above, token_id] = node
                self._below.setdefault(above, []).append(node)
            depths[index] = depths[parent] + 1
            if all(owner != source for owner, _, _ in self.owners[node]):
                self.owners[node].append((source, draft.match_length, depths[index]))
            nodes[index] = last = node
        return last

    def best_first(
        self, most: int, estimate: Estimate, *, one_path: bool = False, least: float = 0.0
    ) -> tuple[Sequence[int], list[float]]:
        """Up to `most` nodes, likeliest path first, and the probability of each node's path, as long as it is `least`.

        A parent always comes before its children. Among siblings the likeliest takes its share first and the next one
        what is left of it, so that those below one node sum to at most 1. one_path: never two siblings.
        """
        order: list[int] = []
        chances: list[float] = []
        heap: list[tuple[float, int]] = []
        self._open(ROOT, 1.0, estimate, heap, one_path)
        while heap and len(order) < most and -heap[0][0] >= least:
            negative, node = heappop(heap)
            order.append(node)
            chances.append(-negative)
            self._open(node, -negative, estimate, heap, one_path)
        return order, chances

    def _open(
        self, node: int, chance: float, estimate: Estimate, heap: list[tuple[float, int]], one_path: bool
    ) -> None:
        below = self._below.get(node)
        if below is None:
            return
        if len(below) == 1:
            heappush(heap, (-chance * self._likely(below[0], estimate), below[0]))
            return
        shares = sorted((-self._likely(child, estimate), child) for child in below)
        left = chance
        for negative, child in shares[:1] if one_path else shares:
            heappush(heap, (left * negative, child))
            left *= 1 + negative

    def _likely(self, node: int, estimate: Estimate) -> float:
        owners = self.owners[node]
        return estimate(*owners[0]) if len(owners) == 1 else max([estimate(*owner) for owner in owners])

    def draft(self, order: Sequence[int], name: str) -> Draft:
        """The draft of the nodes in `order` (parents before children)."""
        place = {ROOT: ROOT}
        for index, node in enumerate(order):
            place[node] = index
        return Draft(
            tuple(self.token_ids[node] for node in order),
            tuple(place[self.parents[node]] for node in order),
            name,
        )

    def outcomes(self, token_ids: Sequence[int]) -> Iterator[tuple[Owner, bool]]:
        """Walk what was emitted through the tree: each node on the way says who below it was right and who was not."""
        node = ROOT
        for token_id in token_ids:
            below = self.children(node)
            if not below:
                return
            right = self.child(node, token_id)
            for child in below:
                for owner in self.owners[child]:
                    yield owner, child == right
            if right is None:
                return
            node = right

    def fared(
        self, order: Sequence[int], parents: Sequence[int], kept: Sequence[int], judged: int
    ) -> Mapping[int, tuple[int, int]]:
        """Per source on how many places the target compared something of it, and how much of it was right.

        order: nodes that were drafted, parents: of the draft. kept, judged: as TreeSources.judged has them.
        """
        owners = [[owner for owner, _, _ in self.owners[node]] for node in order]
        return compared_and_accepted(parents, owners, kept, judged)
