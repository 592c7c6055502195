"""The live n-gram source: proposes what followed the longest suffix of this context earlier in the same context.

Suffixes of 32 down to 2 ids, the most recent occurrence first. A copy may run into the present and then continues
with what it just proposed, so a loop of any period is drafted to full depth. No guard: the gate decides.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from coli.drafts.base import MAX_DRAFT_TOKENS, Counters, Draft

SHORTEST_MATCH = 2
LONGEST_MATCH = 32
_NODE_SHIFT = 32


class SuffixTrie:
    """All suffixes of a growing id sequence, read backwards from their ends, as a path-compressed trie.

    One `add` costs at most 32 comparisons and two nodes (about 250 bytes), however repetitive the sequence is.
    A node stands for the `_depth` ids before and including `_last_end`, its most recent occurrence.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._children: dict[int, int] = {}  # node << 32 | next id to the left -> node
        self._depth = array("i", [0])
        self._last_end = array("q", [-1])

    def add(self, token_id: int) -> None:
        """Append an id. The position before it now has a successor and becomes a place to copy from."""
        self.ids.append(token_id)
        if len(self.ids) > 1:
            self._insert(len(self.ids) - 2)

    def _insert(self, end: int) -> None:
        ids, depths, last_end = self.ids, self._depth, self._last_end
        node, depth = 0, 0
        while depth < LONGEST_MATCH and depth <= end:
            edge = node << _NODE_SHIFT | ids[end - depth]
            child = self._children.get(edge)
            if child is None:
                self._children[edge] = self._new_node(min(LONGEST_MATCH, end + 1), end)
                return
            bottom = depths[child]
            other = last_end[child]
            depth += 1
            while depth < bottom and depth <= end and ids[other - depth] == ids[end - depth]:
                depth += 1
            if depth < bottom:
                child = self._split(edge, child, depth, ids[other - depth])
            last_end[child] = end
            node = child

    def _split(self, edge: int, below: int, depth: int, left_id: int) -> int:
        middle = self._new_node(depth, self._last_end[below])
        self._children[edge] = middle
        self._children[middle << _NODE_SHIFT | left_id] = below
        return middle

    def _new_node(self, depth: int, end: int) -> int:
        self._depth.append(depth)
        self._last_end.append(end)
        return len(self._depth) - 1

    def longest_match(self, context: Sequence[int]) -> tuple[int, int]:
        """(position behind the match, match length) of the longest suffix of `context`, most recent first.

        Matches end before the newest id; length 0 if not even the last id of `context` occurred before.
        """
        ids, depths = self.ids, self._depth
        longest = min(LONGEST_MATCH, len(context))
        node, depth, end = 0, 0, -1
        while depth < longest:
            child = self._children.get(node << _NODE_SHIFT | context[-1 - depth])
            if child is None:
                break
            bottom = depths[child]
            end = self._last_end[child]
            depth += 1
            while depth < bottom and depth < longest and ids[end - depth] == context[-1 - depth]:
                depth += 1
            if depth < bottom:
                break
            node = child
        return end + 1, depth


class NgramSource:
    """Copies up to `depth` ids from an earlier place of the live context."""

    name = "ngram"

    def __init__(self, *, depth: int = MAX_DRAFT_TOKENS) -> None:
        if not 1 <= depth <= MAX_DRAFT_TOKENS:
            raise ValueError(f"depth {depth}, expected 1..{MAX_DRAFT_TOKENS}")
        self.counters = Counters()
        self._depth = depth
        self._trie = SuffixTrie()

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """A prompt that continues the context so far (a chat turn) only adds its new ids; any other starts afresh."""
        known = len(self._trie.ids)
        if known > len(prompt_ids) or list(prompt_ids[:known]) != self._trie.ids:
            self._trie = SuffixTrie()
            known = 0
        self.commit(prompt_ids[known:])

    def commit(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._trie.add(token_id)

    def propose(self, limit: int, extension: Sequence[int] = ()) -> Draft | None:
        limit = min(limit, self._depth)
        ids = self._trie.ids
        context = [*ids[-LONGEST_MATCH:], *extension] if extension else ids[-LONGEST_MATCH:]
        position, match_length = self._trie.longest_match(context)
        if match_length < SHORTEST_MATCH or limit <= 0:
            return None
        # a copy that reaches the present goes on through the extension and then through itself
        copied = [*ids[position : position + limit]]
        if len(copied) < limit:
            source = [*copied, *extension]
            while len(source) < limit:
                source.append(source[len(source) - (len(copied) + len(extension))])
            copied = source[:limit]
        self.counters.proposed += len(copied)
        return Draft.chain(copied, self.name, match_length)

    def judged(self, judged: int, accepted: int) -> None:
        self.counters.judged += judged
        self.counters.accepted += accepted

    def report_lines(self) -> list[str]:
        counters = self.counters
        if not counters.proposed:
            return []
        return [f"ngram drafts: {counters.percent}% acceptance ({counters.accepted}/{counters.proposed} proposed)"]
