"""Longest-suffix search in a frozen sequence of ids: which position continues the live context?

In memory, for the seed's text file. Knows ids and separators only; built once, then read by one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHORTEST_MATCH = 3
LONGEST_MATCH = 8
_ID_BITS = 21  # three ids make one non-negative int64
MAX_VOCAB_SIZE = 1 << _ID_BITS


@dataclass(frozen=True, slots=True)
class _Order:
    """All n-grams of one length. keys: (nodes,) int64 ascending; last_end: (nodes,) position of the most recent
    occurrence's last id; repeated: (nodes,) bool, whether there are several occurrences.

    Views, not arrays: a search reads single values, which an array wraps into objects of its own.
    """

    keys: memoryview
    last_end: memoryview
    repeated: memoryview

    def find(self, key: int) -> int | None:
        keys = self.keys
        node = bisect_left(keys, key)
        return node if node < len(keys) and keys[node] == key else None


class FrozenIndex:
    """n-grams of 3..8 ids as a trie that grows to the left, so that one walk finds the longest suffix.

    An occurrence counts only if an id follows it within its span. That does not depend on the length of the match, so
    the deepest node reached is the longest suffix, and the last occurrence stored there the most recent one. Below a
    node with a single occurrence nothing is stored: the ids themselves are compared.
    """

    mapped_bytes = 0

    def __init__(self, ids: NDArray[np.int32]) -> None:
        """ids: (n,) token ids below MAX_VOCAB_SIZE, negative between spans."""
        if len(ids) and int(ids.max()) >= MAX_VOCAB_SIZE:
            raise ValueError(f"id {int(ids.max())} is beyond {MAX_VOCAB_SIZE}")
        self._ids = np.ascontiguousarray(ids).data
        self.num_ids = int(np.count_nonzero(ids >= 0))
        self._orders = _build(ids)

    def longest_match(self, context: Sequence[int]) -> tuple[int, int] | None:
        """(position behind the match, match length) for the longest suffix of `context`, most recent first."""
        if len(context) < SHORTEST_MATCH or not self._orders:
            return None
        if max(context[-SHORTEST_MATCH:]) >= MAX_VOCAB_SIZE:
            return None
        node = self._orders[0].find(_pack3(*context[-SHORTEST_MATCH:]))
        if node is None:
            return None
        length = SHORTEST_MATCH
        order = self._orders[0]
        longest = min(LONGEST_MATCH, len(context))
        while length < longest and order.repeated[node]:
            deeper = self._orders[length - SHORTEST_MATCH + 1]
            left_id = context[-length - 1]
            child = deeper.find(node << _ID_BITS | left_id) if left_id < MAX_VOCAB_SIZE else None
            if child is None:
                break
            order, node, length = deeper, child, length + 1
        end = order.last_end[node]
        if not order.repeated[node]:
            while length < longest and end >= length and self._ids[end - length] == context[-length - 1]:
                length += 1
        return end + 1, length

    def continuation(self, context: Sequence[int], limit: int) -> tuple[list[int], int] | None:
        """Up to `limit` ids behind the longest match, and its length."""
        match = self.longest_match(context)
        return None if match is None else (self.following(match[0], limit), match[1])

    def following(self, position: int, limit: int) -> list[int]:
        """Up to `limit` ids from `position` on, to the end of the span."""
        ids: list[int] = self._ids[position : position + limit].tolist()
        for index, token_id in enumerate(ids):
            if token_id < 0:
                return ids[:index]
        return ids


def _pack3(first: int, second: int, third: int) -> int:
    return first << 2 * _ID_BITS | second << _ID_BITS | third


def _build(ids: NDArray[np.int32]) -> list[_Order]:
    orders: list[_Order] = []
    if len(ids) <= SHORTEST_MATCH:
        return orders
    inside = ids >= 0
    complete = inside[:-3] & inside[1:-2] & inside[2:-1] & inside[3:]
    ends = np.flatnonzero(complete).astype(np.int32) + np.int32(SHORTEST_MATCH - 1)
    wide = ids.astype(np.int64)
    keys = wide[ends - 2] << 2 * _ID_BITS | wide[ends - 1] << _ID_BITS | wide[ends]
    for length in range(SHORTEST_MATCH, LONGEST_MATCH + 1):
        by_key = np.argsort(keys)
        keys, ends = keys[by_key], ends[by_key]
        first = np.ones(len(keys), np.bool_)
        first[1:] = keys[1:] != keys[:-1]
        starts = np.flatnonzero(first)
        counts = np.diff(starts, append=len(keys))
        last_end = np.maximum.reduceat(ends, starts) if len(starts) else ends
        orders.append(_Order(keys[starts].data, last_end.data, (counts > 1).data))
        # only repeated n-grams need a longer key
        node = np.repeat(np.arange(len(starts), dtype=np.int64), counts)
        longer = np.repeat(counts > 1, counts) & (ends >= length)
        node, ends = node[longer], ends[longer]
        left = wide[ends - length]
        keys, ends = (node << _ID_BITS | left)[left >= 0], ends[left >= 0]
    return orders
