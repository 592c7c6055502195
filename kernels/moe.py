"""Summing expert outputs: per row by ascending expert id, one fma per expert from zero, then one addition to the row.

`combine` sums all experts of a row at once; `accumulate` adds one expert's rows to running sums (prefill walks the
union in id order). Both give the same bits.
"""

import numpy as np

from coli.kernels.ops import fadd, fma, load_f32, load_i64, load_part, splat_f32, store_part
from coli.kernels.runtime import Stage, address, arguments, unpacker

unpack8, unpack9 = unpacker(8), unpacker(9)


def _combine(args, part, parts):
    """args: x, rows, H, stride, A, index (S, A), weights (S, A), down, down stride."""
    x, rows, width, stride, active, index, weights, down, down_stride = unpack9(args, 0)
    blocks = (width + 15) // 16
    for unit in range(rows * blocks * part // parts, rows * blocks * (part + 1) // parts):
        s, i = unit // blocks, unit % blocks * 16
        total = splat_f32(np.float32(0))
        for a in range(active):
            w = splat_f32(load_f32(weights + 4 * (s * active + a)))
            row = load_i64(index + 8 * (s * active + a))
            total = fma(w, load_part(down + 4 * (row * down_stride + i), width - i), total)
        at = x + 4 * (s * stride + i)
        store_part(at, fadd(load_part(at, width - i), total), width - i)


COMBINE = Stage(_combine)


def _accumulate(args, part, parts):
    """args: sums, stride, H, row_ids, weights, n, down, down stride."""
    sums, stride, width, row_ids, weights, n, down, down_stride = unpack8(args, 0)
    for j in range(n * part // parts, n * (part + 1) // parts):
        w = splat_f32(load_f32(weights + 4 * j))
        target = sums + 4 * stride * load_i64(row_ids + 8 * j)
        for i in range(0, width, 16):
            total = load_part(target + 4 * i, width - i)
            total = fma(w, load_part(down + 4 * (j * down_stride + i), width - i), total)
            store_part(target + 4 * i, total, width - i)


ACCUMULATE = Stage(_accumulate)


def combine(x: np.ndarray, down: np.ndarray, index: np.ndarray, weights: np.ndarray, threads: int = 1) -> None:
    """x[s] += sum over a ascending of weights[s, a] * down[index[s, a]].

    x (S, H) f32, down (R, >= H) f32 rows of expert outputs, index int64 (S, A) rows of down, weights f32 (S, A)."""
    rows, width = x.shape
    assert index.dtype == np.int64
    assert index.flags.c_contiguous
    assert weights.flags.c_contiguous
    assert index.shape == weights.shape
    assert weights.dtype == np.float32
    assert down.shape[1] >= width
    block = arguments(
        address(x), rows, width, x.strides[0] // 4, index.shape[1], address(index), address(weights),
        address(down), down.strides[0] // 4,
    )  # fmt: skip
    COMBINE.run(block, threads)


def accumulate(sums: np.ndarray, row_ids: np.ndarray, weights: np.ndarray, down: np.ndarray, threads: int = 1) -> None:
    """sums[row_ids[j]] = fma(weights[j], down[j], sums[row_ids[j]]) for one expert; row_ids int64 (n,) distinct."""
    assert row_ids.dtype == np.int64
    assert weights.dtype == np.float32
    assert len(row_ids) == len(weights)
    assert row_ids.flags.c_contiguous
    assert weights.flags.c_contiguous
    assert down.shape[1] >= sums.shape[1]
    block = arguments(
        address(sums), sums.strides[0] // 4, sums.shape[1], address(row_ids), address(weights), len(row_ids),
        address(down), down.strides[0] // 4,
    )  # fmt: skip
    ACCUMULATE.run(block, threads)
