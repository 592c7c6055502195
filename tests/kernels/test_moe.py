"""Expert outputs are summed by ascending id, at once or one expert at a time, to the same bits."""

import naive
import numpy as np

from coli.kernels import elementwise, moe


def data(rows: int = 7, active: int = 4, width: int = 70):
    rng = np.random.default_rng(2)
    x, down = (rng.standard_normal((n, width)).astype(np.float32) for n in (rows, rows * active))
    weights = rng.random((rows, active)).astype(np.float32)
    index = rng.permutation(rows * active).reshape(rows, active)
    return x, down, index, weights


def test_combine_equals_the_slow_twin():
    x, down, index, weights = data()
    expected = [naive.combine(x[s], down[index[s]], weights[s]) for s in range(len(x))]
    for threads in (1, 2):
        out = x.copy()
        moe.combine(out, down, index, weights, threads)
        assert np.array_equal(out, expected)


def test_accumulating_expert_by_expert_gives_the_bits_of_combine():
    x, down, index, weights = data()
    at_once, sums = x.copy(), np.zeros_like(x)
    moe.combine(at_once, down, index, weights)
    for a in range(index.shape[1]):
        rows = np.random.default_rng(a).permutation(len(x))
        moe.accumulate(sums, rows, weights[rows, a], np.ascontiguousarray(down[index[rows, a]]), 2)
    elementwise.add(x, sums)
    assert np.array_equal(x, at_once)
