"""Latent attention against its slow twin, with ==: chains, trees, chosen slots, both cache types, any thread count."""

import naive
import numpy as np
import pytest

from coli.kernels import latent

CAP = 256


def run(query, cache, prefix, path, length, threads, chosen=None):
    rows, heads, width = query.shape
    rank = width - 16
    out = np.full((rows, heads, rank), np.nan, np.float32)
    scratch = np.full(latent.working_bytes(heads, rank, 16, CAP, threads), 255, np.uint8)
    addresses = np.full(rows, cache.ctypes.data, np.int64)
    latent.attention(
        query, out, addresses, prefix, path, length, 0.17, CAP, cache.dtype == np.uint16, threads, scratch, chosen
    )
    return out


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("is_f16", [False, True])
@pytest.mark.parametrize(("heads", "rank"), [(1, 16), (5, 32), (20, 48), (70, 16)])
def test_every_row_is_what_the_twin_computes(heads: int, rank: int, is_f16: bool, threads: int) -> None:
    rng = np.random.default_rng(heads)
    rows, width = 4, rank + 16
    numbers = rng.standard_normal((CAP, width)).astype(np.float16 if is_f16 else np.float32)
    cache = numbers.view(np.uint16) if is_f16 else numbers
    query = rng.standard_normal((rows, heads, width)).astype(np.float32)
    prefix, length = np.array([1, 16, 33, 140]), np.array([0, 3, 1, 2])  # beyond a span of positions
    path = rng.integers(180, CAP, (rows, 3))
    found = run(query, cache, prefix, path, length, threads)
    for s in range(rows):
        slots = [*range(prefix[s]), *path[s, : length[s]]]
        for h in range(heads):
            twin = naive.latent_attention(query[s, h], numbers[slots].astype(np.float32), rank, 0.17)
            assert np.array_equal(found[s, h], twin), (s, h)


def test_chosen_slots_are_attended_in_their_order_and_nothing_else() -> None:
    rng = np.random.default_rng(3)
    cache = rng.standard_normal((CAP, 48)).astype(np.float32)
    query = rng.standard_normal((2, 3, 48)).astype(np.float32)
    slots, counts = rng.permutation(CAP)[:80].reshape(2, 40).astype(np.int64), np.array([40, 7])
    none = np.zeros(2, np.int64)
    found = run(query, cache, none + 100, none[:, None], none, 2, (slots, counts))
    for s in range(2):
        for h in range(3):
            assert np.array_equal(
                found[s, h], naive.latent_attention(query[s, h], cache[slots[s, : counts[s]]], 32, 0.17)
            )
