"""Rows of floats as int16 with one scale each, for the exact integer products of outer16.py.

By norm (both sides of a dot product): int = round(x * NORM / |x|), |x| the L2 norm, so that no partial sum of the
products of two such rows leaves 2**30 (Cauchy-Schwarz), whatever their length. By peak (values, which weights mix):
int = round(x * PEAK / max|x|). Weights of a block: int = round(w * WEIGHT / largest of 16 sums by lane), so that
their sum times PEAK stays below 2**31. Ties go to even; a row of zeros has scale 0; NaN and inf give a scale that is
NaN or inf, and integers of no meaning. Jitted parts of stages; widths are multiples of 16, padded with zeros.
"""

import numpy as np

from coli.kernels.ops import (
    abs_bits,
    f32_bits,
    fadd,
    float_bits,
    fma,
    fmul,
    hmax_i32,
    hsum_f32,
    imax,
    load_f32x16,
    load_h16,
    pair_i16,
    splat_f32,
    sqrt_f32,
    store_i32x16,
    store_u16x16,
)
from coli.kernels.runtime import device

NORM = 32760.0  # a norm is off by at most 1e-5 of itself: no element leaves int16
PEAK = 8190.0  # half a step is a quarter of half a step of float16 there
WEIGHT = 16380.0  # 16 * WEIGHT * PEAK < 2**31
TINY = 1e-30  # what is smaller counts as zero: its reciprocal might not be finite
MAGIC = 12582912.0  # 1.5 * 2**23: a float32 near it holds an integer in its lowest bits


@device
def load_row(x, i, half):
    """Elements i .. i+15 of a row of float16 or float32."""
    if half:
        return load_h16(x + 2 * i)
    return load_f32x16(x + 4 * i)


@device
def round_row(x, n, factor, half, out):
    """out int16 (n,) = round(x * factor), rounded once."""
    times, magic = splat_f32(factor), splat_f32(np.float32(MAGIC))
    for i in range(0, n, 16):
        store_u16x16(out + 2 * i, float_bits(fma(load_row(x, i, half), times, magic)))


@device
def round_pairs(x, x_factor, y, y_factor, n, half, out, step):
    """Two rows side by side as a panel has them: lanes i .. i+15 of both go to out + i / 16 * step, as 16 pairs."""
    a, b, magic = splat_f32(x_factor), splat_f32(y_factor), splat_f32(np.float32(MAGIC))
    for i in range(0, n, 16):
        low, high = fma(load_row(x, i, half), a, magic), fma(load_row(y, i, half), b, magic)
        store_i32x16(out + (i >> 4) * step, pair_i16(float_bits(low), float_bits(high)))


@device
def norm_of(x, n, half):
    """(largest magnitude, power, L2 norm of x * power) of a row. power is one of two that makes the squares near 1, so
    that none overflows (those of float16 cannot: 1); they run in 16 lanes by index % 16 and end in a fixed tree."""
    bits, squares = abs_bits(splat_f32(np.float32(0))), splat_f32(np.float32(0))
    for i in range(0, n, 16):
        y = load_row(x, i, half)
        bits = imax(bits, abs_bits(y))
        if half:
            squares = fma(y, y, squares)
    most, power = hmax_i32(bits), np.float32(1)
    if not half:
        power = f32_bits(np.int32((254 - min(np.int64(most) >> 23, 253)) << 23))
        times = splat_f32(power)
        for i in range(0, n, 16):
            y = fmul(load_row(x, i, half), times)
            squares = fma(y, y, squares)
    return f32_bits(most), power, sqrt_f32(hsum_f32(squares))


@device
def by_norm(x, n, half):
    """(factor, scale) of a row: int = round(x * factor), x = about int * scale."""
    largest, power, norm = norm_of(x, n, half)
    if largest < np.float32(TINY):
        return np.float32(0), np.float32(0)
    return np.float32(NORM) / norm * power, norm / np.float32(NORM) / power


@device
def by_peak(x, n, half):
    """(factor, scale) of a row by its largest magnitude."""
    bits = abs_bits(splat_f32(np.float32(0)))
    for i in range(0, n, 16):
        bits = imax(bits, abs_bits(load_row(x, i, half)))
    top = f32_bits(hmax_i32(bits))
    if top < np.float32(TINY):
        return np.float32(0), np.float32(0)
    return np.float32(PEAK) / top, top / np.float32(PEAK)


@device
def round_weights(p, scales, n, out):
    """out int16 (n,) from w = p * scales, none below 0, f32 (n,) both, n <= 128; returns the scale of w."""
    sums = splat_f32(np.float32(0))
    for i in range(0, n, 16):
        sums = fadd(sums, fmul(load_f32x16(p + 4 * i), load_f32x16(scales + 4 * i)))
    top = f32_bits(hmax_i32(abs_bits(sums)))
    factor = np.float32(0)
    if top > np.float32(TINY):
        factor = np.float32(WEIGHT) / top
    times, magic = splat_f32(factor), splat_f32(np.float32(MAGIC))
    for i in range(0, n, 16):
        w = fmul(load_f32x16(p + 4 * i), load_f32x16(scales + 4 * i))
        store_u16x16(out + 2 * i, float_bits(fma(w, times, magic)))
    return top / np.float32(WEIGHT)
