"""Proposals of several sources as one tree: equal tokens below one node merge, each node knows who proposed it.

Nodes are added parents first and carry the estimated probability of the path to them. Pure; one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from coli.drafts.base import ROOT, Draft

# (source index, match length, depth of the token in the proposal) -> P(accepted | its parent was)
Estimate = Callable[[int, int, int], float]
Owner = tuple[int, int, int]  # source index, match length, depth


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

    def best_first(self, most: int, estimate: Estimate, *, one_path: bool = False) -> tuple[list[int], list[float]]:
        """Up to `most` nodes, likeliest path first, and the probability of each node's path.

        A parent always comes before its children. Among siblings the likeliest takes its share first and the next one
        what is left of it, so that those below one node sum to at most 1. one_path: never two siblings.
        """
        order: list[int] = []
        chances: list[float] = []
        heap: list[tuple[float, int]] = []
        self._open(ROOT, 1.0, estimate, heap, one_path)
        while heap and len(order) < most:
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
