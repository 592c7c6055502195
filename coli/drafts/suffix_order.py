"""Sorts every position of an id sequence by the ids before it, read backwards, and sums up the frequent contexts.

In this order the occurrences of any context, of any length up to `depth`, are neighbours: one array serves all orders.
Pure numpy, block by block, so that memory is bounded by the tokens and one block. Used when an index is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_POSITIONS = 1 << 22
HEAVY_COUNT = 256  # a context seen this often gets its successors summed up
KEPT_SUCCESSORS = 256  # of a heavy context, most frequent first
_KEY_BITS = 63


@dataclass(frozen=True, slots=True)
class SortedBlock:
    """Neighbours in the order. positions: (m,) uint32 index of the id that follows the context; length: (m,) uint8 ids
    of the context in its document; shared: (m,) uint8 ids equal to those of the position before (0 for the first).
    Both at most `depth`.
    """

    positions: NDArray[np.uint32]
    length: NDArray[np.uint8]
    shared: NDArray[np.uint8]

    def num_contexts(self, order: int) -> int:
        """Distinct contexts of `order` ids."""
        return int(np.count_nonzero((self.shared < order) & (self.length >= order)))


@dataclass(frozen=True, slots=True)
class HeavyContexts:
    """Contexts with at least HEAVY_COUNT occurrences, in order of `keys`.

    keys: (h,) int64 start << 4 | order, where the context's range starts in the sorted positions;
    latest: (h,) uint32 highest position; types: (h,) uint32 distinct successors; entropy: (h,) float32 nats;
    first: (h + 1,) int64 range of each context in ids (int32) and counts (uint32), most frequent successor first,
    lowest id first among equals, at most KEPT_SUCCESSORS of them.
    """

    keys: NDArray[np.int64]
    latest: NDArray[np.uint32]
    types: NDArray[np.uint32]
    entropy: NDArray[np.float32]
    first: NDArray[np.int64]
    ids: NDArray[np.int32]
    counts: NDArray[np.uint32]


def sorted_blocks(
    tokens: NDArray[np.int32],
    vocab_size: int,
    depth: int,
    prune: int = 0,
    block_positions: int = BLOCK_POSITIONS,
) -> Iterator[SortedBlock]:
    """All positions that follow at least one id of their document, sorted by up to `depth` ids before them.

    tokens: (n,) ids, negative between documents, the first `depth` of them negative. Equal contexts keep the order of
    their positions. A block holds whole ranges of last ids, so no context is cut. prune: leave out positions whose id
    follows the one before it fewer times than this.
    """
    if len(tokens) <= depth:
        return
    last, following = tokens[:-1], tokens[1:]
    inside = (last >= 0) & (following >= 0)
    ends = np.cumsum(np.bincount(last[inside], minlength=vocab_size))
    del inside
    bits = max(1, vocab_size.bit_length())
    low = 0
    while low < vocab_size:
        before = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + block_positions, side="right")))
        if ends[high - 1] > before:
            chosen = (last >= low) & (last < high) & (following >= 0)
            positions = np.flatnonzero(chosen) + 1
            if prune > 1:
                positions = _pruned(tokens, positions, prune, bits)
            if len(positions):
                yield _block(tokens, _sort(tokens, positions, depth, bits), depth)
        low = high


def _pruned(tokens: NDArray[np.int32], positions: NDArray[np.int64], prune: int, bits: int) -> NDArray[np.int64]:
    pairs = tokens[positions - 1].astype(np.int64) << bits | tokens[positions]
    _, pair, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    kept: NDArray[np.int64] = positions[counts[pair] >= prune]
    return kept


def _sort(tokens: NDArray[np.int32], positions: NDArray[np.int64], depth: int, bits: int) -> NDArray[np.int64]:
    done = min(_KEY_BITS // bits, depth)
    keys = _packed(tokens, positions, 1, done, bits)
    by_key = np.argsort(keys)
    positions, keys = positions[by_key], keys[by_key]
    starts = _run_starts(keys)
    while True:
        # only runs of equal contexts are sorted on: by run number, then by further ids, at last by position
        tied = np.flatnonzero(~starts | ~np.append(starts[1:], True))
        if not len(tied):
            return positions
        run = np.cumsum(starts[tied]) - 1
        if done == depth:
            positions[tied] = np.sort(run << 32 | positions[tied]) & 0xFFFFFFFF
            return positions
        width = min((_KEY_BITS - int(run[-1]).bit_length()) // bits, depth - done)
        keys = run << (width * bits) | _packed(tokens, positions[tied], done + 1, width, bits)
        by_key = np.argsort(keys)
        positions[tied] = positions[tied[by_key]]
        starts[tied] = _run_starts(keys[by_key])
        done += width


def _packed(
    tokens: NDArray[np.int32], positions: NDArray[np.int64], distance: int, width: int, bits: int
) -> NDArray[np.int64]:
    """`width` ids backwards from `distance` before each position, as one integer; a separator sorts first."""
    keys = np.zeros(len(positions), np.int64)
    for step in range(distance, distance + width):
        keys <<= bits
        keys |= np.maximum(tokens[np.maximum(positions - step, 0)], -1) + 1
    return keys


def _run_starts(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    starts = np.ones(len(keys), np.bool_)
    starts[1:] = keys[1:] != keys[:-1]
    return starts


def _block(tokens: NDArray[np.int32], positions: NDArray[np.int64], depth: int) -> SortedBlock:
    shared = np.zeros(len(positions), np.uint8)
    length = np.zeros(len(positions), np.uint8)
    equal = np.ones(len(positions) - 1, np.bool_)
    inside = np.ones(len(positions), np.bool_)
    for step in range(1, depth + 1):
        ids = tokens[np.maximum(positions - step, 0)]
        inside &= ids >= 0
        length += inside
        equal &= (ids[1:] == ids[:-1]) & inside[1:]
        shared[1:] += equal
    return SortedBlock(positions.astype(np.uint32), length, shared)


def distinct_contexts(tokens: NDArray[np.int32], positions: NDArray[np.uint32], max_order: int) -> list[int]:
    """Distinct contexts of orders 1..max_order, counted in `positions`, which are in this module's order."""
    counts = [0] * max_order
    for start in range(0, len(positions), BLOCK_POSITIONS):
        begin = max(start - 1, 0)  # the first of a block is compared with the last of the one before
        block = _block(tokens, positions[begin : start + BLOCK_POSITIONS].astype(np.int64), max_order)
        if begin < start:
            block = SortedBlock(block.positions[1:], block.length[1:], block.shared[1:])
        for order in range(1, max_order + 1):
            counts[order - 1] += block.num_contexts(order)
    return counts


def heavy_contexts(
    tokens: NDArray[np.int32], block: SortedBlock, offset: int, max_order: int, vocab_size: int
) -> HeavyContexts:
    """Sum up the heavy contexts of orders 1..max_order of one block that begins at `offset` in the whole order."""
    per_order = [_heavy(tokens, block, offset, order, vocab_size) for order in range(1, max_order + 1)]
    return merged_heavy(per_order)


def merged_heavy(parts: list[HeavyContexts]) -> HeavyContexts:
    """All contexts of `parts`, in order of their keys."""
    keys = np.concatenate([part.keys for part in parts])
    by_key = np.argsort(keys)
    sizes = np.concatenate([np.diff(part.first) for part in parts])
    begins = np.cumsum(sizes) - sizes
    first = np.zeros(len(keys) + 1, np.int64)
    np.cumsum(sizes[by_key], out=first[1:])
    # entry e of the result belongs to the context that starts at `first`, and comes from that context's old place
    source = np.arange(int(first[-1])) + np.repeat(begins[by_key] - first[:-1], sizes[by_key])
    return HeavyContexts(
        keys[by_key],
        np.concatenate([part.latest for part in parts])[by_key],
        np.concatenate([part.types for part in parts])[by_key],
        np.concatenate([part.entropy for part in parts])[by_key],
        first,
        np.concatenate([part.ids for part in parts])[source],
        np.concatenate([part.counts for part in parts])[source],
    )


def _heavy(tokens: NDArray[np.int32], block: SortedBlock, offset: int, order: int, vocab_size: int) -> HeavyContexts:
    starts = np.flatnonzero(block.shared < order)
    sizes = np.diff(starts, append=len(block.shared))
    starts, sizes = starts[sizes >= HEAVY_COUNT], sizes[sizes >= HEAVY_COUNT]
    num_contexts = len(starts)
    run = np.repeat(np.arange(num_contexts, dtype=np.int64), sizes)
    inside = np.arange(len(run)) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    positions = block.positions[inside]
    bits = max(1, vocab_size.bit_length())
    edges = np.sort(run << bits | tokens[positions])
    edge_starts = np.flatnonzero(_run_starts(edges))
    counts = np.diff(edge_starts, append=len(edges))
    context, ids = edges[edge_starts] >> bits, edges[edge_starts] & ((1 << bits) - 1)
    types = np.bincount(context, minlength=num_contexts)
    spread = np.bincount(context, counts * np.log(counts), minlength=num_contexts)
    ranked = np.argsort(context << 32 | (0xFFFFFFFF - counts), kind="stable")
    rank = np.arange(len(ranked)) - np.repeat(np.cumsum(types) - types, types)
    kept = ranked[rank < KEPT_SUCCESSORS]
    first = np.zeros(num_contexts + 1, np.int64)
    np.cumsum(np.minimum(types, KEPT_SUCCESSORS), out=first[1:])
    latest = np.maximum.reduceat(positions, np.cumsum(sizes) - sizes) if num_contexts else positions
    return HeavyContexts(
        (starts + offset) << 4 | order,
        latest,
        types.astype(np.uint32),
        (np.log(np.maximum(sizes, 1)) - spread / np.maximum(sizes, 1)).astype(np.float32),
        first,
        ids[kept].astype(np.int32),
        counts[kept].astype(np.uint32),
    )
