"""Rows as int16 and their products: exact integers, whatever the number of rows side by side."""

import naive
import numpy as np
import pytest

from coli.kernels.fixed import by_norm, by_peak, round_pairs, round_row, round_weights
from coli.kernels.loops import MORE, OUTER16, SCORES, SUMS
from coli.kernels.ops import load_i64, store_f32
from coli.kernels.runtime import Stage, address, arguments


def _rows(args, part, parts):
    """args: x, n, half, out (4, n), scales (2)."""
    x, n, half = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    out, scales = load_i64(args + 24), load_i64(args + 32)
    norm_factor, norm_scale = by_norm(x, n, half)
    peak_factor, peak_scale = by_peak(x, n, half)
    round_row(x, n, norm_factor, half, out)
    round_row(x, n, peak_factor, half, out + 2 * n)
    round_pairs(x, norm_factor, x, peak_factor, n, half, out + 4 * n, 64)
    store_f32(scales, norm_scale)
    store_f32(scales + 4, peak_scale)


def _weights(args, part, parts):
    """args: p, scales, n, out, scale."""
    scale = round_weights(load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24))
    store_f32(load_i64(args + 32), scale)


ROWS, WEIGHTS = Stage(_rows), Stage(_weights)


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out, scales = np.empty((4, len(x)), np.int16), np.empty(2, np.float32)
    ROWS.run(arguments(address(x), len(x), int(x.dtype == np.float16), address(out), address(scales)))
    return out, scales


@pytest.mark.parametrize("size", [0, 1e-32, 1e-29, 1e-3, 1, 1e5, 1e30, 1e38])
def test_rows_equal_the_slow_twin(size):
    for width in (16, 80, 576):
        x = np.clip(np.random.default_rng(width).standard_normal(width), -3, 3).astype(np.float32) * np.float32(size)
        out, scales = rounded(x)
        for integers, scale, twin in zip(out, scales, (naive.by_norm(x), naive.by_peak(x)), strict=False):
            assert np.array_equal(integers, twin[0])
            assert scale == twin[1]
        assert np.array_equal(out[2:].reshape(-1, 16, 2).transpose(2, 0, 1).reshape(2, -1), out[:2])


def test_a_float16_row_is_that_row_in_float32():
    x = np.random.default_rng(0).standard_normal(96).astype(np.float16)
    assert all(np.array_equal(*pair) for pair in zip(rounded(x), rounded(x.astype(np.float32)), strict=True))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_a_scale_that_is_not(poison):
    x = np.ones(32, np.float32)
    x[7] = poison
    assert not np.isfinite(rounded(x)[1]).any()


def test_a_lone_outlier_stays_in_range():
    x = np.zeros(48, np.float32)
    x[17] = -65504
    assert rounded(x)[0][:2, 17].tolist() == [-32760, -8190]


def test_weights_equal_the_slow_twin_and_bound_their_sum():
    rng = np.random.default_rng(3)
    for n, spread in ((64, 0), (64, 1), (32, 30), (128, 0)):
        p, scales = np.exp(-spread * rng.random(n)).astype(np.float32), rng.random(n).astype(np.float32)
        for weights in (p, np.ones(n, np.float32), np.zeros(n, np.float32)):
            out, scale = np.empty(n, np.int16), np.empty(1, np.float32)
            WEIGHTS.run(arguments(address(weights), address(scales), n, address(out), address(scale)))
            integers, expected = naive.round_weights(weights * scales)
            assert np.array_equal(out, integers)
            assert scale[0] == expected
            assert 8190 * integers.sum() < 2**31


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 11, 13, 24])
def test_products_are_exact_and_scaled_once(rows):
    rng, pairs, blocks = np.random.default_rng(rows), 12, 3
    a = rng.integers(-5000, 5000, (rows, 2 * pairs)).astype(np.int16)
    b = rng.integers(-5000, 5000, (blocks, pairs, 16, 2)).astype(np.int16)
    b[0], a[:, 5] = 32767, -32768  # largest products
    a[:, 0] = 32767
    a_scale, b_scale = rng.random(rows).astype(np.float32), rng.random((blocks, 16)).astype(np.float32)
    dot = np.einsum("ilp,jlnp->ijn", a.reshape(rows, pairs, 2).astype(np.int64), b.astype(np.int64))
    for mode in (SCORES, SUMS, MORE):
        c = rng.standard_normal((rows, blocks, 16)).astype(np.float32)
        scale, number = a_scale[:, None, None], dot.astype(np.float32)
        if mode != SUMS:
            scale = scale * b_scale
        want = number * scale if mode == SCORES else naive.fma(number, scale, c)
        OUTER16.call(
            mode, rows, blocks, address(a), a.strides[0], address(b), b.strides[0], pairs, address(c), c.strides[0], 64,
            address(a_scale), 0 if mode == SUMS else address(b_scale),
        )  # fmt: skip
        assert np.array_equal(c, want)
