"""Which positions latent attention reads: the lightning indexer of DeepSeek-V3.2 and GLM-5.

Cache of one layer and sequence: one key per position, (cap, width), float32 or fp16 (uint16), width = index_head_dim
padded with zeros to 16. For one row, over the positions t it may attend:
    dot[t,h]  one fma chain over the width                                (float32)
    score[t]  one fma chain over heads ascending of w[h] * max(dot[t,h] * scale, 0), from 0
    chosen    the `topk` largest scores, equal ones by the lower position; all positions where there are no more
as slots in position order. NaN counts as larger than everything. Threads take rows.
"""

import numpy as np

from coli.kernels.latent import SPAN, padded, widen_rows
from coli.kernels.loops import OUTER, call_outer
from coli.kernels.ops import (
    bits_f32,
    fma_f32,
    load_f32,
    load_f64,
    load_i64,
    sqrt_f32,
    store_f32,
    store_i64,
)
from coli.kernels.runtime import Stage, address, arguments, device, unpacker

unpack2, unpack5, unpack7, unpack9 = (unpacker(n) for n in (2, 5, 7, 9))

BUCKETS = 256


def _layer_norm(args, part, parts):
    """args: x, stride, rows, dim, weight, bias, eps."""
    x, stride, rows, dim = unpack2(args, 0) + unpack2(args, 2)
    weight, bias = unpack2(args, 4)
    eps = load_f64(args + 48)
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        row, total, square = x + 4 * s * stride, 0.0, 0.0
        for d in range(dim):
            total += np.float64(load_f32(row + 4 * d))
        mean = total / np.float64(dim)
        for d in range(dim):
            off = np.float64(load_f32(row + 4 * d)) - mean
            square += off * off
        inv = np.float32(1) / sqrt_f32(np.float32(square / np.float64(dim) + eps))
        for d in range(dim):
            off = np.float32(np.float64(load_f32(row + 4 * d)) - mean)
            store_f32(row + 4 * d, fma_f32(off * inv, load_f32(weight + 4 * d), load_f32(bias + 4 * d)))


LAYER_NORM = Stage(_layer_norm)


@device
def _order(score):
    """An integer in 0 .. 2**32-1 that orders as the float does, -0 as 0, NaN above all."""
    if score != score:
        return np.int64(0xFFFFFFFF)
    bits = np.int64(bits_f32(score + np.float32(0)))
    return bits + 0x80000000 if bits >= 0 else -1 - bits


@device
def _threshold(scores, count, topk, buckets):
    """(the order of the topk-th largest score, how many of those equal to it are taken)."""
    prefix, left = np.int64(0), topk
    for shift in (24, 16, 8, 0):
        for b in range(BUCKETS):
            store_i64(buckets + 8 * b, 0)
        for t in range(count):
            order = _order(load_f32(scores + 4 * t))
            if order >> (shift + 8) == prefix:
                at = buckets + 8 * ((order >> shift) & 255)
                store_i64(at, load_i64(at) + 1)
        b = BUCKETS - 1
        while load_i64(buckets + 8 * b) < left:
            left -= load_i64(buckets + 8 * b)
            b -= 1
        prefix = (prefix << 8) | b
    return prefix, left


@device
def _weighed(at, scale, factor, total):
    """The chain of a position's score over heads goes on by the dot product at `at`."""
    dot = load_f32(at) * scale
    return fma_f32(factor, np.float32(0) if dot < np.float32(0) else dot, total)


def _select(args, part, parts):
    """args: 0 q, q stride, w, w stride, address (S), 5 prefix_len, paths, path stride, path_len, 9 rows, heads, dim,
    width, half, 14 topk, slots, slots stride, counts, scratch, room, OUTER, 21 scale, w scale."""
    q, q_stride, w, w_stride, addresses = unpack5(args, 0)
    prefixes, paths, path_stride, lengths, rows = unpack5(args, 5)
    heads, dim, width, half = unpack2(args, 10) + unpack2(args, 12)
    topk, slots, slots_stride, counts, scratch, room, outer = unpack7(args, 14)
    scale, w_scale = np.float32(load_f64(args + 168)), np.float32(load_f64(args + 176))
    lanes = (heads + 15) // 16 * 16
    turned = scratch + room * part  # (width, lanes) f32
    span = turned + 4 * width * lanes  # (SPAN, width) f32
    block = span + 4 * SPAN * width  # (SPAN, lanes) f32
    factors = block + 4 * SPAN * lanes  # (lanes,) f32
    buckets = factors + 4 * lanes  # (BUCKETS,) i64
    scores = buckets + 8 * BUCKETS  # (positions, and up to 3 more) f32
    zero = np.float32(0)
    for s in range(part, rows, max(1, parts)):
        prefix, path, keys = load_i64(prefixes + 8 * s), paths + 8 * s * path_stride, load_i64(addresses + 8 * s)
        stop, out = prefix + load_i64(lengths + 8 * s), slots + 8 * s * slots_stride
        threshold, equal = np.int64(-1), np.int64(0)
        if stop > topk:
            for h in range(lanes):
                for d in range(width):
                    value = load_f32(q + 4 * (s * q_stride + h * dim + d)) if h < heads and d < dim else zero
                    store_f32(turned + 4 * (d * lanes + h), value)
                if h < heads:
                    store_f32(factors + 4 * h, load_f32(w + 4 * (s * w_stride + h)) * w_scale)
            for t in range(0, stop, SPAN):
                n = min(SPAN, stop - t)
                widen_rows(keys, np.int64(0), prefix, path, t, n, width, half, span)
                call_outer(outer, 0, n, lanes >> 4, span, 4 * width, turned, 4 * lanes, 64, width, block, 4 * lanes, 64,
                           1, 0)  # fmt: skip
                for i in range(0, n, 4):  # four chains side by side; those behind n are not kept
                    first, second, third, fourth = zero, zero, zero, zero
                    for h in range(heads):
                        at, factor = block + 4 * (i * lanes + h), load_f32(factors + 4 * h)
                        first = _weighed(at, scale, factor, first)
                        second = _weighed(at + 4 * lanes, scale, factor, second)
                        third = _weighed(at + 8 * lanes, scale, factor, third)
                        fourth = _weighed(at + 12 * lanes, scale, factor, fourth)
                    store_f32(scores + 4 * (t + i), first)
                    store_f32(scores + 4 * (t + i) + 4, second)
                    store_f32(scores + 4 * (t + i) + 8, third)
                    store_f32(scores + 4 * (t + i) + 12, fourth)
            threshold, equal = _threshold(scores, stop, topk, buckets)
        count = 0
        for t in range(stop):
            if stop > topk:
                order = _order(load_f32(scores + 4 * t))
                if order < threshold or (order == threshold and equal == 0):
                    continue
                if order == threshold:
                    equal -= 1
            store_i64(out + 8 * count, t if t < prefix else load_i64(path + 8 * (t - prefix)))
            count += 1
        store_i64(counts + 8 * s, count)


SELECT = Stage(_select)


# ------------------------------------------------------------------ entries
def layer_norm(
    x: np.ndarray, column: int, weight: np.ndarray, bias: np.ndarray, dim: int, eps: float, threads: int = 1
) -> None:
    """In place, x[:, column : column + dim] of each row: (x - mean) / sqrt(variance + eps) * weight + bias."""
    assert weight.dtype == bias.dtype == np.float32
    assert min(len(weight), len(bias)) >= dim
    block = arguments(
        address(x) + 4 * column, x.strides[0] // 4, len(x), dim, address(weight), address(bias), float(eps)
    )
    LAYER_NORM.run(block, threads)


def working_bytes(heads: int, dim: int, positions: int, threads: int) -> int:
    """Bytes of `scratch` that `select` needs for rows of up to `positions` positions."""
    return 64 + threads * _thread_bytes(heads, dim, positions)


def _thread_bytes(heads: int, dim: int, positions: int) -> int:
    width, lanes = padded(dim), padded(heads)
    floats = width * lanes + SPAN * (width + lanes) + lanes + 2 * BUCKETS + positions + 3
    return -(-4 * floats // 64) * 64


def select(
    q: np.ndarray,
    dim: int,
    w: np.ndarray,
    addresses: np.ndarray,
    prefix_len: np.ndarray,
    path: np.ndarray,
    path_len: np.ndarray,
    topk: int,
    slots: np.ndarray,
    counts: np.ndarray,
    cap: int,
    is_f16: bool,
    threads: int,
    scratch: np.ndarray,
) -> None:
    """q (S, >= H*dim), w (S, H) of the H heads, caches at addresses[s] -> slots (S, >= min(topk, cap)),
    counts (S,), both int64.

    prefix_len, path, path_len as in `latent.attention`; scale is dim**-0.5, w is scaled by H**-0.5. scratch uint8:
    `working_bytes` for `cap` positions."""
    rows, heads = w.shape
    assert q.dtype == w.dtype == np.float32
    for array in (addresses, prefix_len, path, path_len, slots, counts):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    assert slots.shape[1] >= min(topk, cap)
    room = _thread_bytes(heads, dim, cap)
    assert scratch.nbytes >= threads * room + 64
    block = arguments(
        address(q), q.strides[0] // 4, address(w), w.strides[0] // 4, address(addresses), address(prefix_len),
        address(path), path.shape[1], address(path_len), rows, heads, dim, padded(dim), int(is_f16), topk,
        address(slots), slots.shape[1], address(counts), (address(scratch) + 63) // 64 * 64, room, OUTER.address,
        dim**-0.5, heads**-0.5,
    )  # fmt: skip
    SELECT.run(block, threads)
