"""Activations for the matmul: quantize to int8 per row in groups of 32, and pack the rows an expert needs.

Per group: scale = max|x| / 127, q = round half to even of x * (127 / max|x|), in [-127, 127]; groups below 1e-30 are 0.
A group that holds NaN or inf gets scale NaN, so that it reaches every output instead of passing silently.
Packed block of n rows (all but f32): rows are cut into ceil(n/16) blocks of nearly equal size m; a block is one stream
of records, one per group: m x 32 int8, m x f32 scale, m x i32 correction (-zero * sum of the group; zero 8 or 128).
For mxfp4 the zero is 12 and the scale is halved, exactly: its weights are multiplied as twice their values.
Packed f32: plain rows of groups * 32 float32. Columns beyond the end of a row read as 0.
"""

import numpy as np

from coli.kernels.ops import (
    abs_bits,
    f32_bits,
    fmul,
    hmax_i32,
    hsum_i32,
    iadd,
    imax,
    load_f32,
    load_i32,
    load_i64,
    load_part,
    rint_i32,
    splat_f32,
    store_f32,
    store_f32x16,
    store_i8x16,
    store_i32,
    store_i64,
)
from coli.kernels.runtime import Stage, address, arguments, device, unpacker

unpack7, unpack8 = unpacker(7), unpacker(8)

GROUP = 32
RECORD = 40  # bytes of one row and group in a packed block


def x_stride(kind: int, groups: int) -> int:
    """Bytes of one packed row."""
    return groups * (RECORD if kind else GROUP * 4)


def x_bytes(kind: int, rows: int, groups: int) -> int:
    """Bytes of a packed block of `rows` rows, rounded up to 64."""
    return -(-rows * x_stride(kind, groups) // 64) * 64


@device
def _quantize_group(x, n, q):
    """One group of n <= 32 values at x to 32 int8 at q; returns (scale, sum of q)."""
    a, b = load_part(x, n), load_part(x + 64, n - 16)
    top = hmax_i32(imax(abs_bits(a), abs_bits(b)))  # as integers NaN > inf > finite
    if top >= 0x7F800000:
        store_i64(q, 0)
        store_i64(q + 8, 0)
        store_i64(q + 16, 0)
        store_i64(q + 24, 0)
        return np.float32(np.nan), np.int32(0)
    amax = f32_bits(top)
    inv = np.float32(127.0) / amax if amax > np.float32(1e-30) else np.float32(0.0)
    ia, ib = rint_i32(fmul(a, splat_f32(inv))), rint_i32(fmul(b, splat_f32(inv)))
    store_i8x16(q, ia)
    store_i8x16(q + 16, ib)
    return amax / np.float32(127.0), hsum_i32(iadd(ia, ib))


def _quantize_rows(args, part, parts):
    """args: x, rows, cols, stride, q, scale, total."""
    x, rows, cols, stride, q, scale, total = unpack7(args, 0)
    groups = (cols + 31) // 32
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        for g in range(groups):
            i = s * groups + g
            value, sums = _quantize_group(x + 4 * (s * stride + 32 * g), cols - 32 * g, q + 32 * i)
            store_f32(scale + 4 * i, value)
            store_i32(total + 4 * i, sums)


QUANTIZE_ROWS = Stage(_quantize_rows)


@device
def _place(i, n):
    """Row i of n: (first row of its block, rows of the block, its place there). The first n % blocks hold one more."""
    blocks = max(1, (n + 15) // 16)
    base, extra = n // blocks, n % blocks
    b = i // (base + 1) if i < extra * (base + 1) else extra + (i - extra * (base + 1)) // max(base, 1)
    t0 = b * base + min(b, extra)
    return t0, base + 1 if b < extra else base, i - t0


@device
def _zero(kind):
    """What is taken off the unsigned weights of a kind, and the factor of the scale."""
    if kind == 3:
        return np.int32(12), np.float32(0.5)
    return (np.int32(128), np.float32(1)) if kind == 1 else (np.int32(8), np.float32(1))


def _pack_rows(args, part, parts):
    """args: x, cols, stride, row_ids, blocks (B, 4): first index in row_ids, rows, kind, byte offset, B, buffer."""
    x, cols, stride, row_ids, table, count, buffer = unpack7(args, 0)
    groups = (cols + 31) // 32
    total = 0
    for j in range(count):
        total += load_i64(table + 32 * j + 8)
    first, stop = total * part // parts, total * (part + 1) // parts
    done = 0
    for j in range(count):
        ids, n = row_ids + 8 * load_i64(table + 32 * j), load_i64(table + 32 * j + 8)
        kind, out = load_i64(table + 32 * j + 16), buffer + load_i64(table + 32 * j + 24)
        for i in range(max(first - done, 0), min(stop - done, n)):
            row = x + 4 * stride * load_i64(ids + 8 * i)
            if kind == 0:
                for g in range(2 * groups):
                    store_f32x16(out + 64 * (i * groups * 2 + g), load_part(row + 64 * g, cols - 16 * g))
            else:
                t0, m, s = _place(i, n)
                zero, part_of_scale = _zero(kind)
                for g in range(groups):
                    record = out + (t0 * groups + g * m) * 40
                    value, sums = _quantize_group(row + 128 * g, cols - 32 * g, record + 32 * s)
                    store_f32(record + 32 * m + 4 * s, value * part_of_scale)
                    store_i32(record + 36 * m + 4 * s, -zero * sums)
        done += n


PACK_ROWS = Stage(_pack_rows)


def _pack_quantized(args, part, parts):
    """args: q, scale, total, groups, row_ids, blocks (B, 4), B, buffer."""
    q, scale, sums, groups, row_ids, table, count, buffer = unpack8(args, 0)
    total = 0
    for j in range(count):
        total += load_i64(table + 32 * j + 8)
    first, stop = total * part // parts, total * (part + 1) // parts
    done = 0
    for j in range(count):
        ids, n = row_ids + 8 * load_i64(table + 32 * j), load_i64(table + 32 * j + 8)
        zero, part_of_scale = _zero(load_i64(table + 32 * j + 16))
        out = buffer + load_i64(table + 32 * j + 24)
        for i in range(max(first - done, 0), min(stop - done, n)):
            t0, m, s = _place(i, n)
            source = load_i64(ids + 8 * i) * groups
            for g in range(groups):
                record = out + (t0 * groups + g * m) * 40
                for k in range(4):
                    store_i64(record + 32 * s + 8 * k, load_i64(q + 32 * (source + g) + 8 * k))
                store_f32(record + 32 * m + 4 * s, load_f32(scale + 4 * (source + g)) * part_of_scale)
                store_i32(record + 36 * m + 4 * s, -zero * load_i32(sums + 4 * (source + g)))
        done += n


PACK_QUANTIZED = Stage(_pack_quantized)


# ------------------------------------------------------------------ entries
def quantize_rows(x: np.ndarray, q: np.ndarray, scale: np.ndarray, total: np.ndarray, threads: int = 1) -> None:
    """x (S, cols) f32 rows -> q int8 (S, groups*32), scale f32 (S, groups), total int32 (S, groups) = sum of q."""
    rows, cols = x.shape
    groups = -(-cols // GROUP)
    assert q.shape == (rows, groups * GROUP)
    assert q.dtype == np.int8
    assert q.flags.c_contiguous
    assert scale.shape == total.shape == (rows, groups)
    assert scale.dtype == np.float32
    assert total.dtype == np.int32
    block = arguments(address(x), rows, cols, _stride(x), address(q), address(scale), address(total))
    QUANTIZE_ROWS.run(block, threads)


def pack_rows(
    x: np.ndarray, row_ids: np.ndarray, kind: int, buffer: np.ndarray, offset: int = 0, threads: int = 1
) -> None:
    """Quantize the rows `row_ids` of x (S, cols) f32 and pack them as one block at buffer[offset:]."""
    pack_blocks(x, row_ids, np.array([[0, len(row_ids), kind, offset]], np.int64), buffer, threads)


def pack_blocks(x: np.ndarray, row_ids: np.ndarray, blocks: np.ndarray, buffer: np.ndarray, threads: int = 1) -> None:
    """The same for many blocks in one launch: blocks int64 (B, 4) of first index in row_ids, rows, kind, offset."""
    assert row_ids.dtype == np.int64
    assert row_ids.flags.c_contiguous
    assert blocks.dtype == np.int64
    assert blocks.shape[1:] == (4,)
    assert blocks.flags.c_contiguous
    block = arguments(
        address(x), x.shape[1], _stride(x), address(row_ids), address(blocks), len(blocks), address(buffer)
    )
    PACK_ROWS.run(block, threads)


def pack_quantized(
    q: np.ndarray,
    scale: np.ndarray,
    total: np.ndarray,
    row_ids: np.ndarray,
    blocks: np.ndarray,
    buffer: np.ndarray,
    threads: int = 1,
) -> None:
    """Pack rows that `quantize_rows` has quantized (all kinds but f32); blocks as in `pack_blocks`."""
    assert row_ids.dtype == np.int64
    assert row_ids.flags.c_contiguous
    assert blocks.dtype == np.int64
    assert blocks.shape[1:] == (4,)
    assert blocks.flags.c_contiguous
    block = arguments(
        address(q), address(scale), address(total), scale.shape[1],
        address(row_ids), address(blocks), len(blocks), address(buffer),
    )  # fmt: skip
    PACK_QUANTIZED.run(block, threads)


def _stride(x: np.ndarray) -> int:
    assert x.dtype == np.float32
    assert x.strides[1] == 4
    assert x.strides[0] % 4 == 0
    return x.strides[0] // 4


def aligned(size: int, dtype: object = np.uint8) -> np.ndarray:
    """An uninitialized 1-d array that starts on a cache line (numpy's own start 16 bytes into a page, so that every
    64-byte load would touch two lines)."""
    nbytes = size * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    skip = -address(raw) % 64
    return raw[skip : skip + nbytes].view(dtype)
