"""Weights: float32 to q4 or q8 groups of 32, and the packed layouts of matmul.py.

q4   w = (nibble - 8) * scale. Of a fixed list of starting scales, each gives integers, these the least-squares scale
     (rounded to fp16), this again integers; the smallest weighted squared error wins, the first of equals.
     A weight's error counts by m + w**2, m the mean of w**2 in its group, and where the importance i of its column is
     known by i * sqrt(m + w**2): large weights carry more than their share (docs/quality.md).
q8   w = q * scale, scale = max|w| / 127 in fp16, q = round half to even of w / scale, in [-127, 127].
All sums run in 16 lanes and a fixed tree, in float32: the same bytes on every machine.
"""

import numpy as np

from coli.kernels.matmul import KIND_F32, KIND_Q4, KIND_Q8, TWICE, WEIGHT_BYTES
from coli.kernels.ops import (
    abs_bits,
    bits_f32,
    f32_bits,
    f32_from_half,
    fma,
    fmax,
    fmin,
    fmul,
    fsqrt,
    half_from_f32,
    hmax_i32,
    hsum_f32,
    iadd,
    imax,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    rint,
    rint_i32,
    splat_f32,
    splat_i32,
    store_f32,
    store_i8x16,
    store_i32,
    store_i64,
    store_u16,
)
from coli.kernels.runtime import Stage, address, arguments, device, unpacker

unpack7, unpack8, unpack9 = unpacker(7), unpacker(8), unpacker(9)

ROWS, GROUP = 16, 32
REPORT = ("weights that are NaN or inf", "groups whose scale overflows float16", "groups whose scale vanishes")
# Starting points: the largest weight lands on this integer. Chosen by measured error (docs/experiments.md).
STARTS = np.array([-8.0, -7.4, -8.6, -6.8, -9.3, -7.7, -8.3, -7.1, 7.0, 7.5, 6.5, 8.0, -9.9, -6.2], np.float32)


@device
def _finite_scale(scale, counts):
    """Round to fp16; an overflow is clamped to the largest finite value and counted."""
    half = half_from_f32(scale)
    if (np.int64(half) & 0x7C00) == 0x7C00:
        store_i64(counts + 8, load_i64(counts + 8) + 1)
        half = np.uint16((np.int64(half) & 0x8000) | 0x7BFF)
    return half


@device
def _q4_group(w, importance, starts, count, counts, nibbles):
    """32 weights at w -> 32 bytes of 0..15 at nibbles; returns the fp16 scale."""
    a, b = load_f32x16(w), load_f32x16(w + 64)
    top = hmax_i32(imax(abs_bits(a), abs_bits(b)))
    if top == 0 or top >= 0x7F800000:
        if top != 0:
            store_i64(counts, load_i64(counts) + 1)
        store_i8x16(nibbles, splat_i32(np.int32(8)))
        store_i8x16(nibbles + 16, splat_i32(np.int32(8)))
        return np.uint16(0)
    # by the power of two that brings the largest to 1..2: squares of any float32 would leave its range
    exponent = min(max(top & np.int32(0x7F800000), np.int32(0x00800000)), np.int32(0x7E800000))
    shrink = splat_f32(f32_bits(np.int32(0x7F000000) - exponent))
    sa, sb = fmul(a, shrink), fmul(b, shrink)
    mean = splat_f32(hsum_f32(fma(sa, sa, fmul(sb, sb))) / np.float32(GROUP))
    ia, ib = fma(sa, sa, mean), fma(sb, sb, mean)
    if importance != 0:
        ia, ib = fmul(load_f32x16(importance), fsqrt(ia)), fmul(load_f32x16(importance + 64), fsqrt(ib))
    peak = f32_bits(top)
    for i in range(32):  # the sign of the first largest weight
        v = load_f32(w + 4 * i)
        if (bits_f32(v) & 0x7FFFFFFF) == top:
            peak = v
            break
    low, high = splat_f32(np.float32(-8)), splat_f32(np.float32(7))
    wa, wb = fmul(ia, a), fmul(ib, b)
    best_error, best = np.float32(np.inf), np.uint16(0)
    for i in range(count):
        # clamped before use: a subnormal peak would make the inverse infinite
        inv = splat_f32(min(max(load_f32(starts + 4 * i) / peak, np.float32(-1e38)), np.float32(1e38)))
        qa = fmin(fmax(rint(fmul(a, inv)), low), high)
        qb = fmin(fmax(rint(fmul(b, inv)), low), high)
        cross = hsum_f32(fma(wa, qa, fmul(wb, qb)))
        square = hsum_f32(fma(fmul(ia, qa), qa, fmul(fmul(ib, qb), qb)))
        if square > np.float32(0):
            half = half_from_f32(cross / square)
            scale = f32_from_half(half)
            if scale != np.float32(0) and (np.int64(half) & 0x7C00) != 0x7C00:
                inv2 = splat_f32(np.float32(1) / scale)
                step = splat_f32(-scale)
                qa = fmin(fmax(rint(fmul(a, inv2)), low), high)
                qb = fmin(fmax(rint(fmul(b, inv2)), low), high)
                ea, eb = fma(qa, step, a), fma(qb, step, b)
                error = hsum_f32(fma(fmul(ia, ea), ea, fmul(fmul(ib, eb), eb)))
                if error < best_error:
                    best_error, best = error, half
    if best == 0:  # every scale rounds to zero, overflows, or all importance is zero
        best = _finite_scale(peak / np.float32(-8), counts)
        if best & np.uint16(0x7FFF) == 0:
            store_i64(counts + 16, load_i64(counts + 16) + 1)
    scale = f32_from_half(best)
    inv = splat_f32(np.float32(1) / scale if scale != np.float32(0) else np.float32(0))
    eight = splat_i32(np.int32(8))
    store_i8x16(nibbles, iadd(rint_i32(fmin(fmax(fmul(a, inv), low), high)), eight))
    store_i8x16(nibbles + 16, iadd(rint_i32(fmin(fmax(fmul(b, inv), low), high)), eight))
    return best


@device
def _q8_group(w, counts, q):
    """32 weights at w -> 32 int8 at q; returns the fp16 scale."""
    a, b = load_f32x16(w), load_f32x16(w + 64)
    top = hmax_i32(imax(abs_bits(a), abs_bits(b)))
    half = np.uint16(0)
    if top >= 0x7F800000:
        store_i64(counts, load_i64(counts) + 1)
    elif top > 0:
        half = _finite_scale(f32_bits(top) / np.float32(127), counts)
        if half == 0:
            store_i64(counts + 16, load_i64(counts + 16) + 1)
    scale = f32_from_half(half)
    inv = splat_f32(np.float32(1) / scale if scale != np.float32(0) else np.float32(0))
    low, high = splat_f32(np.float32(-127)), splat_f32(np.float32(127))
    if half == 0:
        a, b = splat_f32(np.float32(0)), splat_f32(np.float32(0))
    store_i8x16(q, rint_i32(fmin(fmax(fmul(a, inv), low), high)))
    store_i8x16(q + 16, rint_i32(fmin(fmax(fmul(b, inv), low), high)))
    return half


def _quantize(args, part, parts):
    """args: kind, w, rows, groups, importance, starts, count, q, scales, counts (parts, 3)."""
    kind, w, rows, groups, importance, starts, count = unpack7(args, 0)
    q, scales, counts = load_i64(args + 56), load_i64(args + 64), load_i64(args + 72) + 24 * part
    for i in range(rows * part // parts * groups, rows * (part + 1) // parts * groups):
        if kind == 1:
            half = _q8_group(w + 128 * i, counts, q + 32 * i)
        else:
            column = importance + 128 * (i % groups) if importance != 0 else 0
            half = _q4_group(w + 128 * i, column, starts, count, counts, q + 32 * i)
        store_u16(scales + 2 * i, half)


QUANTIZE = Stage(_quantize)


def _pack(args, part, parts):
    """args: kind, values, scales, rows, columns, groups, packed, packed scales."""
    kind, values, scales, rows, cols, groups, packed, packed_scales = unpack8(args, 0)
    tiles = (rows + 15) // 16
    for t in range(tiles * part // parts, tiles * (part + 1) // parts):
        for r in range(16):
            row = 16 * t + r
            inside = row < rows
            if kind == 0:
                for k in range(32 * groups):
                    value = load_f32(values + 4 * (row * cols + k)) if inside and k < cols else np.float32(0)
                    store_f32(packed + 4 * ((t * groups * 32 + k) * 16 + r), value)
                continue
            for g in range(groups):
                source = values + (row * groups + g) * 32
                if kind == 1:
                    for j in range(8):
                        word = load_i32(source + 4 * j) if inside else np.int32(0)
                        store_i32(packed + (t * groups + g) * 512 + 64 * j + 4 * r, word ^ np.int32(-0x7F7F7F80))
                else:
                    for j in range(4):
                        low = load_i32(source + 8 * j) if inside else np.int32(0x08080808)
                        high = load_i32(source + 8 * j + 4) if inside else np.int32(0x08080808)
                        store_i32(packed + (t * groups + g) * 256 + 64 * j + 4 * r, low | high << np.int32(4))
                scale = load_u16(scales + 2 * (row * groups + g)) if inside else np.uint16(0)
                store_u16(packed_scales + 2 * ((t * groups + g) * 16 + r), scale)


PACK = Stage(_pack)


def _embed_rows(args, part, parts):
    """args: kind, weights, scales, ids, n, groups, cols, out, stride."""
    kind, weights, scales, ids, n, groups, cols, out, stride = unpack9(args, 0)
    for s in range(n * part // parts, n * (part + 1) // parts):
        row = load_i64(ids + 8 * s)
        tile, r = row // 16, row % 16
        for k in range(cols):
            g, i = tile * groups + k // 32, k % 32
            if kind == 0:
                value = load_f32(weights + 4 * ((tile * groups * 32 + k) * 16 + r))
            elif kind == 1:
                byte = load_u8(weights + 512 * g + 64 * (i // 4) + 4 * r + i % 4)
                value = np.float32(np.int64(byte) - 128) * f32_from_half(load_u16(scales + 32 * g + 2 * r))
            else:
                byte = np.int64(load_u8(weights + 256 * g + 64 * (i // 8) + 4 * r + i % 4))
                nibble = byte >> 4 if i % 8 >= 4 else byte & 15
                value = np.float32(nibble - 8) * f32_from_half(load_u16(scales + 32 * g + 2 * r))
            store_f32(out + 4 * (s * stride + k), value)


EMBED_ROWS = Stage(_embed_rows)


# ------------------------------------------------------------------ entries
def quantize_q4(
    w: np.ndarray, importance: np.ndarray | None = None, report: np.ndarray | None = None, threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """w (R, C) f32 -> nibbles uint8 (R, Cp), scales float16 (R, Cp/32); C is padded to 32 with zeros.

    importance  (C,) f32 >= 0, how much each column matters, or None
    report      int64 (3,): counts of REPORT are added (NaN or inf groups become 0, scales are clamped to fp16)"""
    return _run_quantize(KIND_Q4, w, importance, report, threads)


def quantize_q8(w: np.ndarray, report: np.ndarray | None = None, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """w (R, C) f32 -> int8 (R, Cp), scales float16 (R, Cp/32); the rest as quantize_q4."""
    return _run_quantize(KIND_Q8, w, None, report, threads)


def _run_quantize(
    kind: int, w: np.ndarray, importance: np.ndarray | None, report: np.ndarray | None, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    w = _pad_columns(np.ascontiguousarray(w, np.float32))
    rows, cols = w.shape
    groups = cols // GROUP
    if importance is not None:
        importance = _pad_columns(np.ascontiguousarray(importance, np.float32)[None])
        assert importance.shape == (1, cols)
    q = np.empty((rows, cols), np.uint8 if kind == KIND_Q4 else np.int8)
    scales = np.empty((rows, groups), np.float16)
    counts = np.zeros((threads, 3), np.int64)
    block = arguments(
        kind, address(w), rows, groups, 0 if importance is None else address(importance), address(STARTS), len(STARTS),
        address(q), address(scales), address(counts),
    )  # fmt: skip
    QUANTIZE.run(block, threads)
    if report is not None:
        report += counts.sum(axis=0)
    return q, scales


def _pad_columns(w: np.ndarray) -> np.ndarray:
    extra = -w.shape[1] % GROUP
    return np.pad(w, ((0, 0), (0, extra))) if extra else w


def pack_q4(nibbles: np.ndarray, scales: np.ndarray, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (R, Cp) of 0..15 and float16 (R, Cp/32) -> uint8 (tiles, groups, 256), float16 (tiles, groups, 16).
    Rows are padded to whole tiles with zero weights."""
    assert nibbles.dtype == np.uint8
    return _run_pack(KIND_Q4, nibbles, scales, threads)


def pack_q8(q: np.ndarray, scales: np.ndarray, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """int8 (R, Cp) and float16 (R, Cp/32) -> uint8 (tiles, groups, 512), float16 (tiles, groups, 16)."""
    assert q.dtype == np.int8
    return _run_pack(KIND_Q8, q, scales, threads)


def pack_f32(w: np.ndarray, threads: int = 1) -> np.ndarray:
    """f32 (R, C) -> f32 (tiles, Cp, 16), C padded to 32 with zeros."""
    w = np.ascontiguousarray(w, np.float32)
    rows, cols = w.shape
    groups = -(-cols // GROUP)
    packed = np.empty((-(-rows // ROWS), groups * GROUP, ROWS), np.float32)
    PACK.run(arguments(KIND_F32, address(w), 0, rows, cols, groups, address(packed), 0), threads)
    return packed


def _run_pack(kind: int, q: np.ndarray, scales: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
    q, scales = np.ascontiguousarray(q), np.ascontiguousarray(scales)
    rows, cols = q.shape
    groups = cols // GROUP
    assert cols % GROUP == 0
    assert scales.dtype == np.float16
    assert scales.shape == (rows, groups)
    tiles = -(-rows // ROWS)
    packed = np.empty((tiles, groups, WEIGHT_BYTES[kind]), np.uint8)
    packed_scales = np.empty((tiles, groups, ROWS), np.float16)
    block = arguments(kind, address(q), address(scales), rows, cols, groups, address(packed), address(packed_scales))
    PACK.run(block, threads)
    return packed, packed_scales


def pack_mxfp4(codes: np.ndarray, exponents: np.ndarray, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """E2M1 codes uint8 (R, Cp) of 0..15 and exponents uint8 (R, Cp/32) below 255 -> as pack_q4, exponents uint8
    (tiles, groups, 16). Rows are padded with zero weights; the padding of columns must be code 0."""
    rows, groups = exponents.shape
    assert codes.dtype == exponents.dtype == np.uint8
    packed, _ = _run_pack(KIND_Q4, codes, np.zeros((rows, groups), np.float16), threads)  # its padding, 8, is -0 here
    padded = np.zeros((-(-rows // ROWS) * ROWS, groups), np.uint8)
    padded[:rows] = exponents
    return packed, np.ascontiguousarray(padded.reshape(-1, ROWS, groups).transpose(0, 2, 1))


def unpack_q4(packed: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of pack_q4 (with the padding rows)."""
    tiles, groups, _ = packed.shape
    p = packed.reshape(tiles, groups, 4, ROWS, 4)
    q = np.stack([p & 15, p >> 4], axis=3)  # tile group chunk half row byte
    return q.transpose(0, 4, 1, 2, 3, 5).reshape(tiles * ROWS, groups * GROUP), _unpack_scales(scales)


def unpack_q8(packed: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of pack_q8 (with the padding rows)."""
    tiles, groups, _ = packed.shape
    u = packed.reshape(tiles, groups, 8, ROWS, 4).transpose(0, 3, 1, 2, 4).reshape(tiles * ROWS, groups * GROUP)
    return (u ^ np.uint8(0x80)).view(np.int8), _unpack_scales(scales)


def unpack_f32(packed: np.ndarray) -> np.ndarray:
    """The inverse of pack_f32 (with the padding rows and columns)."""
    tiles, cols, _ = packed.shape
    return np.ascontiguousarray(packed.transpose(0, 2, 1)).reshape(tiles * ROWS, cols)


def _unpack_scales(scales: np.ndarray) -> np.ndarray:
    tiles, groups, _ = scales.shape
    return np.ascontiguousarray(scales.transpose(0, 2, 1)).reshape(tiles * ROWS, groups)


def dequantize(kind: int, q: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 weights of unpacked q4 (nibbles) or q8."""
    assert kind != KIND_F32
    values = q.astype(np.float32) - (8 if kind == KIND_Q4 else 0)
    return values * np.repeat(scales.astype(np.float32), GROUP, axis=1)


def dequantize_mxfp4(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """float32 weights (R, Cp) of E2M1 codes and exponents (R, Cp/32)."""
    half = np.array(TWICE, np.float32) / 2
    scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return half[codes] * np.repeat(scales, GROUP, axis=1)


def embed_rows(
    kind: int, weights: int, scales: int, ids: np.ndarray, groups: int, out: np.ndarray, threads: int = 1
) -> None:
    """out[s] = row ids[s] of a packed matrix at the given addresses; out f32 (S, H), H <= groups*32."""
    assert ids.dtype == np.int64
    assert ids.flags.c_contiguous
    assert out.dtype == np.float32
    assert out.strides[1] == 4
    block = arguments(
        kind, weights, scales, address(ids), len(ids), groups, out.shape[1], address(out), out.strides[0] // 4
    )
    EMBED_ROWS.run(block, threads)
