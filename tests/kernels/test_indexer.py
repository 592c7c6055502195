"""The indexer against its slow twin, with ==: which positions a row attends, in both cache types."""

import naive
import numpy as np
import pytest

from coli.kernels import indexer

CAP = 256


def chosen(q, w, cache, prefix, path, length, topk, threads):
    rows, heads = w.shape
    dim = q.shape[1] // heads
    slots, counts = np.full((rows, min(topk, CAP)), -1, np.int64), np.zeros(rows, np.int64)
    scratch = np.full(indexer.working_bytes(heads, dim, CAP, threads), 255, np.uint8)
    addresses = np.full(rows, cache.ctypes.data, np.int64)
    is_f16 = cache.dtype == np.uint16
    indexer.select(q, dim, w, addresses, prefix, path, length, topk, slots, counts, CAP, is_f16, threads, scratch)
    return [list(slots[s, : counts[s]]) for s in range(rows)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_f16", [False, True])
@pytest.mark.parametrize("topk", [1, 7, 33, 200])
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (18, 24)])
def test_a_row_attends_the_positions_the_twin_chooses(
    heads: int, dim: int, topk: int, is_f16: bool, threads: int
) -> None:
    rng = np.random.default_rng(topk)
    numbers = np.zeros((CAP, -(-dim // 16) * 16), np.float16 if is_f16 else np.float32)
    numbers[:, :dim] = rng.standard_normal((CAP, dim))
    numbers[10:20] = numbers[10]  # equal scores
    cache = numbers.view(np.uint16) if is_f16 else numbers
    prefix, length = np.array([1, 16, 33, 140]), np.array([0, 3, 1, 2])  # beyond a span of positions
    path = rng.integers(180, CAP, (4, 3))
    q = rng.standard_normal((4, heads * dim)).astype(np.float32)
    w = rng.standard_normal((4, heads)).astype(np.float32)
    found = chosen(q, w, cache, prefix, path, length, topk, threads)
    for s in range(4):
        seen = [*range(prefix[s]), *path[s, : length[s]]]
        keys = numbers[seen][:, :dim].astype(np.float32)
        assert found[s] == [seen[t] for t in naive.choose(q[s].reshape(heads, dim), keys, w[s], topk)], s


def test_equal_scores_go_to_the_lower_position_and_minus_zero_equals_zero() -> None:
    cache = np.zeros((CAP, 16), np.float32)
    cache[:40, 0] = -1.0  # relu: all scores are 0, whatever the sign of the head's weight
    q, w = np.ones((2, 16), np.float32), np.array([[1.0], [-1.0]], np.float32)
    none = np.zeros(2, np.int64)
    assert chosen(q, w, cache, none + 40, none[:, None], none, 5, 1) == [[0, 1, 2, 3, 4]] * 2


def test_layer_norm_takes_mean_and_variance_of_its_columns_only() -> None:
    x = np.random.default_rng(1).standard_normal((3, 40)).astype(np.float32)
    before, weight, bias = x.copy(), np.linspace(1, 2, 24, dtype=np.float32), np.linspace(-1, 1, 24, dtype=np.float32)
    indexer.layer_norm(x, 8, weight, bias, 24, 1e-6)
    part = before[:, 8:32].astype(np.float64)
    want = (part - part.mean(1, keepdims=True)) / np.sqrt(part.var(1, keepdims=True) + 1e-6) * weight + bias
    assert np.abs(x[:, 8:32] - want).max() < 1e-5
    assert np.array_equal(x[:, :8], before[:, :8])
    assert np.array_equal(x[:, 32:], before[:, 32:])
