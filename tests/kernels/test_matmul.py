"""Quantized and float32 matmul: equal to the slow twin, whatever the rows, order, threads or company in a launch."""

import naive
import numpy as np
import pytest

from coli.kernels import activations, matmul, quantize
from coli.kernels.matmul import KIND_F32, KIND_MXFP4, KIND_Q4, KIND_Q8
from coli.kernels.runtime import address

ROWS, COLS = 50, 144  # neither whole tiles nor whole groups
TILES, GROUPS = 4, 5
KINDS = pytest.mark.parametrize("kind", [KIND_F32, KIND_Q8, KIND_Q4, KIND_MXFP4], ids=["f32", "q8", "q4", "mxfp4"])


class Matrix:
    """A packed random matrix that holds the extreme integers, tiny scales and a bias."""

    def __init__(self, kind: int, rows: int = ROWS, cols: int = COLS, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.kind, self.rows, self.cols = kind, rows, cols
        self.tiles, self.groups = -(-rows // 16), -(-cols // 32)
        self.bias = rng.standard_normal(16 * self.tiles).astype(np.float32)
        padded = 32 * self.groups
        self.scales = np.zeros((0, 0), np.float16)
        if kind == KIND_F32:
            self.w = rng.standard_normal((rows, cols)).astype(np.float32)
            self.packed, self.packed_scales = quantize.pack_f32(self.w), self.scales
            return
        if kind == KIND_MXFP4:
            self.q = rng.integers(0, 16, (rows, padded)).astype(np.uint8)
            self.q[0], self.q[1] = 7, 15  # the largest, the smallest
            self.scales = rng.integers(115, 125, (rows, self.groups)).astype(np.uint8)
            self.scales[2, ::2], self.scales[3, 0], self.scales[4, 0] = 0, 1, 254  # 2**-127, a subnormal; 2**127
            self.packed, self.packed_scales = quantize.pack_mxfp4(self.q, self.scales)
            return
        low, high, dtype = (0, 16, np.uint8) if kind == KIND_Q4 else (-128, 128, np.int8)
        self.q = rng.integers(low, high, (rows, padded)).astype(dtype)
        self.q[0], self.q[1] = low, high - 1
        self.scales = (rng.standard_normal((rows, self.groups)) * 0.01).astype(np.float16)
        self.scales[2, ::2] = np.float16(3e-6)  # subnormal
        pack = quantize.pack_q4 if kind == KIND_Q4 else quantize.pack_q8
        self.packed, self.packed_scales = pack(self.q, self.scales)

    def job(self, rows: int, x: int = 0, out: int = 0, stride: int | None = None, bias: bool = True) -> list[int]:
        return [
            self.kind, address(self.packed), address(self.packed_scales), self.tiles, self.groups, rows, x, out,
            stride or 16 * self.tiles, address(self.bias) if bias else 0,
        ]  # fmt: skip

    def run(self, x: np.ndarray, row_ids: np.ndarray | None = None, threads: int = 1) -> np.ndarray:
        row_ids = np.arange(len(x)) if row_ids is None else row_ids
        buffer = activations.aligned(activations.x_bytes(self.kind, len(row_ids), self.groups))
        activations.pack_rows(x, row_ids, self.kind, buffer, 0, threads)
        out = np.full((len(row_ids), 16 * self.tiles), np.nan, np.float32)
        matmul.run_jobs(np.array([self.job(len(row_ids))], np.int64), buffer, out, threads)
        return out

    def naive(self, x: np.ndarray) -> np.ndarray:
        bias = self.bias[: self.rows]
        if self.kind == KIND_F32:
            return np.stack([naive.matmul_f32(self.w, row, bias) for row in x])
        if self.kind == KIND_MXFP4:
            values = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])[self.q]
            halves = np.ldexp(np.float32(1), self.scales.astype(np.int32) - 128)
            with np.errstate(over="ignore"):
                return np.stack([naive.matmul_quantized(values, halves, 0, row, bias) for row in x])
        zero = 8 if self.kind == KIND_Q4 else 0
        return np.stack([naive.matmul_quantized(self.q, self.scales, zero, row, bias) for row in x])


def inputs(rows: int, cols: int = COLS, seed: int = 1) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    x[1 % rows] = np.where(np.arange(cols) % 3 == 0, 3, -3)  # every quantized value is +-127
    x[2 % rows, :64] = 0
    return x


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.int32)


@KINDS
def test_equals_the_slow_twin(kind):
    matrix, x = Matrix(kind), inputs(5)
    assert np.array_equal(bits(matrix.run(x)[:, :ROWS]), bits(matrix.naive(x)))


@KINDS
def test_a_row_has_the_same_bits_in_every_batch(kind):
    matrix, x = Matrix(kind), inputs(64)
    single = np.concatenate([matrix.run(x[s : s + 1]) for s in range(64)])
    for rows in range(2, 65):
        assert np.array_equal(bits(matrix.run(x[:rows])), bits(single[:rows])), rows


@pytest.mark.parametrize("cols", [512, 1100])
def test_many_rows_of_a_long_product_equal_single_ones(cols):
    """Long enough to be cut: K in stretches, rows in spans."""
    matrix, x = Matrix(KIND_Q4, 32, cols), inputs(150, cols)
    single = np.concatenate([matrix.run(x[s : s + 1]) for s in range(150)])
    for rows in (17, 31, 32, 33, 49, 150):
        assert np.array_equal(bits(matrix.run(x[:rows], threads=2)), bits(single[:rows])), rows


@KINDS
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_threads_do_not_change_a_bit(kind, rows):
    matrix, x = Matrix(kind), inputs(rows)
    assert np.array_equal(bits(matrix.run(x, threads=1)), bits(matrix.run(x, threads=2)))


@KINDS
def test_rows_may_be_gathered_in_any_order(kind):
    matrix, x = Matrix(kind), inputs(40)
    order = np.random.default_rng(3).permutation(40)[:33]
    assert np.array_equal(bits(matrix.run(x, order)), bits(matrix.run(x)[order]))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_launch_of_many_jobs_equals_single_launches(threads):
    kinds = (KIND_Q4, KIND_Q8, KIND_F32, KIND_Q4)
    matrices = [
        Matrix(kind, rows, COLS, seed) for seed, (kind, rows) in enumerate(zip(kinds, (16, 90, 33, 3), strict=True))
    ]
    x, counts = inputs(20), (3, 0, 20, 1)
    blocks, jobs, x_at, out_at = [], [], 0, 0
    for matrix, count in zip(matrices, counts, strict=True):
        blocks.append([20 - count, count, matrix.kind, x_at])
        jobs.append(matrix.job(count, x_at, out_at))
        x_at += activations.x_bytes(matrix.kind, count, GROUPS)
        out_at += count * 16 * matrix.tiles
    buffer, out = activations.aligned(x_at), np.full(out_at, np.nan, np.float32)
    activations.pack_blocks(x, np.arange(20), np.array(blocks, np.int64), buffer, threads)
    matmul.run_jobs(np.array(jobs, np.int64), buffer, out, threads)
    parts = [
        m.run(x[20 - n :]).ravel() if n else np.zeros(0, np.float32) for m, n in zip(matrices, counts, strict=True)
    ]
    assert np.array_equal(bits(out), bits(np.concatenate(parts)))


def test_output_stride_leaves_other_columns_alone():
    matrix, x = Matrix(KIND_Q4), inputs(3)
    buffer = activations.aligned(activations.x_bytes(KIND_Q4, 3, GROUPS))
    activations.pack_rows(x, np.arange(3), KIND_Q4, buffer)
    out = np.full((3, 100), 7, np.float32)
    matmul.run_jobs(np.array([matrix.job(3, out=20, stride=100)], np.int64), buffer, out, 2)
    assert np.array_equal(out[:, 20:84], matrix.run(x))
    assert (out[:, :20] == 7).all()
    assert (out[:, 84:] == 7).all()


@KINDS
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_non_finite_input_reaches_every_output_of_its_row_only(kind, poison):
    matrix, x = Matrix(kind), inputs(4)
    clean = matrix.run(x)
    x[1, 70] = poison
    out = matrix.run(x)
    if kind != KIND_F32 or np.isnan(poison):
        assert np.isnan(out[1, :ROWS]).all()
    else:
        assert not np.isfinite(out[1, :ROWS]).any()
    assert np.array_equal(bits(out[[0, 2, 3]]), bits(clean[[0, 2, 3]]))


@KINDS
def test_rows_of_a_large_matrix_match_a_float64_product(kind):
    """K of several thousand: the error stays that of float32 sums."""
    matrix, x = Matrix(kind, 32, 4096), inputs(2, 4096)
    if kind == KIND_MXFP4:
        matrix.scales[4, 0] = 120
        matrix.packed, matrix.packed_scales = quantize.pack_mxfp4(matrix.q, matrix.scales)
        w = quantize.dequantize_mxfp4(matrix.q, matrix.scales)
    else:
        w = matrix.w if kind == KIND_F32 else quantize.dequantize(kind, matrix.q, matrix.scales)
    if kind == KIND_F32:
        exact = x
    else:
        groups = [naive.quantize_group(g) for row in x for g in row.reshape(-1, 32)]
        exact = np.array([q * float(scale) for q, scale in groups]).reshape(2, 4096)
    reference = exact.astype(np.float64) @ w.T.astype(np.float64) + matrix.bias
    assert np.abs(matrix.run(x) - reference).max() < 2e-6 * np.abs(reference).max()
