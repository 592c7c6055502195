"""Longest repeated suffixes of a sequence of ids that grows: where did the newest ids stand before, and what followed?

All suffixes of the sequence, read backwards from their ends, as a path-compressed trie: a node stands for the `depth`
ids before and including `end`, its most recent occurrence. An id costs at most 32 comparisons and two nodes, however
repetitive the sequence is. Nothing here reaches a logit: what is found is only a guess.
"""

from collections.abc import Sequence

import numpy as np

from coli.kernels.ops import load_i64, store_i64
from coli.kernels.runtime import Stage, address, arguments, device

LONGEST_MATCH = 32
MAX_COPIED = 63
_FEWEST_IDS = 512

# words of the state: 0 ids, 1 ends that have been inserted, 2 node depths, 3 node ends, 4 number of nodes, then of the
# hash table 5 edges (node << 32 | next id to the left, -1 free), 6 nodes below them, 7 number of slots less one


@device
def _word(state, i):
    return load_i64(state + 8 * i)


@device
def _at(state, array, i):
    return load_i64(load_i64(state + 8 * array) + 8 * i)


@device
def _put(state, array, i, value):
    store_i64(load_i64(state + 8 * array) + 8 * i, value)


@device
def _slot(state, edge):
    """Where an edge is in the table, or would be."""
    mask = _word(state, 7)
    slot = (edge * 0x1E3779B97F4A7C15 >> 24) & mask
    while True:
        found = _at(state, 5, slot)
        if found == edge or found < 0:
            return slot
        slot = (slot + 1) & mask


@device
def _join(state, edge, node):
    slot = _slot(state, edge)
    _put(state, 5, slot, edge)
    _put(state, 6, slot, node)


@device
def _new_node(state, depth, end):
    node = _word(state, 4)
    _put(state, 2, node, depth)
    _put(state, 3, node, end)
    store_i64(state + 32, node + 1)
    return node


@device
def _insert(state, end):
    node, depth = 0, 0
    while depth < 32 and depth <= end:
        edge = node << 32 | _at(state, 0, end - depth)
        slot = _slot(state, edge)
        if _at(state, 5, slot) != edge:
            _join(state, edge, _new_node(state, min(32, end + 1), end))
            return
        child = _at(state, 6, slot)
        bottom, other = _at(state, 2, child), _at(state, 3, child)
        depth += 1
        while depth < bottom and depth <= end and _at(state, 0, other - depth) == _at(state, 0, end - depth):
            depth += 1
        if depth < bottom:  # the paths part inside the edge
            middle = _new_node(state, depth, other)
            _put(state, 6, slot, middle)
            _join(state, middle << 32 | _at(state, 0, other - depth), child)
            child = middle
        _put(state, 3, child, end)
        node = child


@device
def _behind(state, n, extension, extended, depth):
    """Id number `depth` from the end of the ids with the extension behind them."""
    if depth < extended:
        return load_i64(extension + 8 * (extended - 1 - depth))
    return _at(state, 0, n - 1 - (depth - extended))


def _continue(args, part, parts):
    """args: state, number of ids, extension i64, its length, limit, ids i64 (limit), out (match length, ids copied)."""
    state, n, extension, extended = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
    limit, ids, out = load_i64(args + 32), load_i64(args + 40), load_i64(args + 48)
    # the newest id has no successor yet: it is no place to copy from
    for end in range(_word(state, 1), n - 1):
        _insert(state, end)
    store_i64(state + 8, max(n - 1, 0))
    longest = min(32, n + extended)
    node, depth, end = 0, 0, -1
    while depth < longest:
        edge = node << 32 | _behind(state, n, extension, extended, depth)
        slot = _slot(state, edge)
        if _at(state, 5, slot) != edge:
            break
        child = _at(state, 6, slot)
        bottom, end = _at(state, 2, child), _at(state, 3, child)
        depth += 1
        while (
            depth < bottom
            and depth < longest
            and _at(state, 0, end - depth) == _behind(state, n, extension, extended, depth)
        ):
            depth += 1
        if depth < bottom:
            break
        node = child
    count = limit if depth > 0 else 0
    first = n - (end + 1)  # ids that are there to copy; a copy goes on through the extension and then through itself
    for i in range(count):
        if i < first:
            token = _at(state, 0, end + 1 + i)
        elif i < first + extended:
            token = load_i64(extension + 8 * (i - first))
        else:
            token = load_i64(ids + 8 * (i - first - extended))
        store_i64(ids + 8 * i, token)
    store_i64(out, depth)
    store_i64(out + 8, count)


CONTINUE = Stage(_continue)


# ------------------------------------------------------------------ entries
class Suffixes:
    """A sequence of ids (not negative, below 2**31) and its trie, which is brought up to date when it is asked. One
    thread at a time; about 110 bytes an id."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        _ = CONTINUE.address  # loaded now, not while a token is waited for
        self._copied, self._out = np.empty(MAX_COPIED, np.int64), np.empty(2, np.int64)
        self._extension = np.empty(MAX_COPIED, np.int64)
        self._capacity = 0
        self._make_room(_FEWEST_IDS)

    def continuation(self, extension: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """(match length, ids): of the longest suffix of ids + extension, at most LONGEST_MATCH, that occurs in ids
        before their newest one, and the `limit` ids behind its most recent occurrence; 0 and none if not even the last
        id occurs there. A copy that reaches the present goes on through the extension and then through itself. The
        extension has at most MAX_COPIED ids."""
        assert 0 <= limit <= MAX_COPIED
        assert len(extension) <= MAX_COPIED
        ids, count = self.ids, len(self.ids)
        if count > self._capacity:
            self._make_room(2 * count)
        written = self._written
        if written < count:
            self._buffer[written:count] = ids[written:]
            self._written = count
        extended = len(extension)
        if extended:
            self._extension[:extended] = extension
        block = self._block
        block[1], block[3], block[4] = count, extended, limit
        CONTINUE.run(block)
        length, copied = self._out.tolist()
        return length, self._copied[:copied].tolist()

    @property
    def num_nodes(self) -> int:
        """Of the trie as far as it has been brought."""
        return int(self._state[4])

    def _make_room(self, capacity: int) -> None:
        """New tables, which are filled from the front by the next search."""
        slots = 1 << (4 * capacity - 1).bit_length()
        self._buffer = np.empty(capacity, np.int64)
        self._tables = (
            np.zeros(2 * capacity + 2, np.int64), np.zeros(2 * capacity + 2, np.int64),
            np.full(slots, -1, np.int64), np.empty(slots, np.int64),
        )  # fmt: skip
        depths, ends, edges, below = self._tables
        ends[0] = -1
        self._state = arguments(
            address(self._buffer), 0, address(depths), address(ends), 1, address(edges), address(below), slots - 1
        )
        self._block = arguments(
            address(self._state), 0, address(self._extension), 0, 0, address(self._copied), address(self._out)
        )
        self._capacity, self._written = capacity, 0
