"""Attention over compressed rows (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434, absorbed form).

One row of `width` = R + P numbers per position serves all heads: the normed latent (R = kv_lora_rank) and the rotated
key part (P = qk_rope_head_dim), each padded with zeros to 16. Cache of one layer and sequence: (cap, width), float32 or
fp16 (uint16), row = slot. A query of a head is its share of the latent (q_nope times the head's key matrix) beside its
rotated part; what comes out is a mixture of latents, which the head's value matrix turns into values. Nothing is
masked; a row attends the positions t of its list, ascending, and runs exactly these operations whatever else is there:
    score[t]  one fma chain over the width, then times scale             (float32)
    p[t]      expf(score[t] - max), summed in 16 lanes by t % 16, fixed tree
    out[d]    one fma chain over positions ascending of p[t] * latent[t, d], times 1 / sum
Its list is the slots 0 .. prefix_len-1 and then its path, or where an indexer chose, the slots chosen (indexer.py).
Threads take (row, block of heads) units. That is float32 caches; over fp16 ones latent16.py computes the same sums of
integers.
"""

import numpy as np

from coli.kernels import latent16
from coli.kernels.attention import softmax_row
from coli.kernels.latent16 import MOST_HEADS, attended, heads_of
from coli.kernels.loops import OUTER, call_outer
from coli.kernels.ops import (
    bits_f32,
    fmul,
    half_from_f32,
    load_f32,
    load_f32x16,
    load_f64,
    load_h16,
    load_i64,
    load_part,
    splat_f32,
    store_f32,
    store_f32x16,
    store_i64,
    store_part,
    store_u16,
)
from coli.kernels.runtime import Stage, address, arguments, device, unpacker

unpack2, unpack4, unpack5, unpack8, unpack10 = (unpacker(n) for n in (2, 4, 5, 8, 10))

SPAN = 128  # positions widened to float32 at a time


def padded(width: int) -> int:
    """Numbers one part of a cached row takes: whole vectors of 16."""
    return -(-width // 16) * 16


# ------------------------------------------------------------------ cache writes
@device
def _append_one(target, x, half):
    """Round and store; returns 1 for inf or NaN."""
    if half:
        h = half_from_f32(x)
        store_u16(target, h)
        return np.int64((np.int64(h) & 0x7C00) == 0x7C00)
    store_f32(target, x)
    return np.int64((np.int64(bits_f32(x)) & 0x7F800000) == 0x7F800000)


def _append_rows(args, part, parts):
    """args: x, stride, first width, second width, address (S), slots (S), rows, half, bad (parts)."""
    x, stride, first, second, addresses, slots, rows, half = unpack8(args, 0)
    start = (first + 15) // 16 * 16
    width = start + (second + 15) // 16 * 16
    bad, size, zero = 0, 4 - 2 * half, np.float32(0)
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        target = load_i64(addresses + 8 * s) + size * width * load_i64(slots + 8 * s)
        source = x + 4 * s * stride
        for d in range(start):
            bad += _append_one(target + size * d, load_f32(source + 4 * d) if d < first else zero, half)
        for d in range(width - start):
            value = load_f32(source + 4 * (first + d)) if d < second else zero
            bad += _append_one(target + size * (start + d), value, half)
    store_i64(load_i64(args + 64) + 8 * part, bad)


APPEND_ROWS = Stage(_append_rows)


# ------------------------------------------------------------------ heads of a row
def _split_query(args, part, parts):
    """args: q, stride, rows, N, nope, rope, parts of nope, stride, query, width."""
    q, stride, rows, heads, nope, rope, target, target_stride, query, width = unpack10(args, 0)
    start = width - (rope + 15) // 16 * 16
    zero = splat_f32(np.float32(0))
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        for h in range(heads):
            source = q + 4 * (s * stride + h * (nope + rope))
            at = target + 4 * (s * heads + h) * target_stride
            for d in range(0, nope, 16):
                store_part(at + 4 * d, load_part(source + 4 * d, nope - d), nope - d)
            at = query + 4 * ((s * heads + h) * width + start)
            for d in range(0, rope, 16):
                store_f32x16(at + 4 * d, zero)
                store_part(at + 4 * d, load_part(source + 4 * (nope + d), rope - d), rope - d)


SPLIT_QUERY = Stage(_split_query)


def _join_heads(args, part, parts):
    """args: x, rows, heads, width of a head in x, dims kept, out, out stride."""
    x, rows, heads, width, dim = unpack5(args, 0)
    out, stride = unpack2(args, 5)
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        for h in range(heads):
            source, target = x + 4 * (s * heads + h) * width, out + 4 * (s * stride + h * dim)
            for d in range(0, dim, 16):
                store_part(target + 4 * d, load_part(source + 4 * d, dim - d), dim - d)


JOIN_HEADS = Stage(_join_heads)


# ------------------------------------------------------------------ attention
@device
def widen_rows(cache, slots, prefix, path, first, count, width, half, span):
    """Rows of the positions first .. first+count-1 as float32 (count, width) at span; `slots`: their list, or 0."""
    for i in range(count):
        t = first + i
        slot = t
        if slots != 0:
            slot = load_i64(slots + 8 * t)
        elif t >= prefix:
            slot = load_i64(path + 8 * (t - prefix))
        source, target = cache + (4 - 2 * half) * slot * width, span + 4 * i * width
        for d in range(0, width, 16):
            if half:
                store_f32x16(target + 4 * d, load_h16(source + 2 * d))
            else:
                store_f32x16(target + 4 * d, load_f32x16(source + 4 * d))


def _latent_attention(args, part, parts):
    """args: 0 query, out, address (S), prefix_len, paths, path stride, path_len, 7 N, R, width, 10 scratch, its bytes
    per part, rows, heads per unit, 14 OUTER, slots, stride, counts (0: none), 18 scale."""
    query, out, addresses, prefixes, paths, path_stride, lengths, heads, rank, width = unpack10(args, 0)
    scratch, room, rows, group = unpack4(args, 10)
    outer, chosen, chosen_stride, counts = unpack4(args, 14)
    scale = np.float32(load_f64(args + 144))
    most = (group + 15) // 16 * 16
    turned = scratch + room * part  # (width, lanes) f32: the queries, a head per lane
    span = turned + 4 * width * most  # (SPAN, width) f32
    block = span + 4 * SPAN * width  # (SPAN, lanes) f32
    acc = block + 4 * SPAN * most  # (heads, R) f32
    scores = acc + 4 * group * rank  # (heads, positions) f32
    for unit in range(part, rows * ((heads + group - 1) // group), max(1, parts)):
        s, first_head, count, lanes = heads_of(unit, heads, group)
        cache, prefix = load_i64(addresses + 8 * s), load_i64(prefixes + 8 * s)
        path = paths + 8 * s * path_stride
        slots, stop = attended(s, prefix, lengths, chosen, chosen_stride, counts)
        score_row = 4 * ((stop + 15) & -16) + 64
        for h in range(lanes):
            at = query + 4 * (s * heads + first_head + h) * width
            for d in range(width):
                store_f32(turned + 4 * (d * lanes + h), load_f32(at + 4 * d) if h < count else np.float32(0))
        for t in range(0, stop, SPAN):
            n = min(SPAN, stop - t)
            widen_rows(cache, slots, prefix, path, t, n, width, 0, span)
            call_outer(outer, 0, n, lanes >> 4, span, 4 * width, turned, 4 * lanes, 64, width, block, 4 * lanes, 64, 1,
                       0)  # fmt: skip
            for h in range(count):
                at = scores + h * score_row + 4 * t
                for i in range(n):
                    store_f32(at + 4 * i, load_f32(block + 4 * (i * lanes + h)))
        for i in range(0, count * rank, 16):
            store_f32x16(acc + 4 * i, splat_f32(np.float32(0)))
        for h in range(count):  # the place of the queries has served
            store_f32(turned + 4 * h, softmax_row(scores + h * score_row, 0, 0, stop, scale, np.float32(-np.inf)))
        for t in range(0, stop, SPAN):
            n = min(SPAN, stop - t)
            widen_rows(cache, slots, prefix, path, t, n, width, 0, span)
            call_outer(outer, 0, count, rank >> 4, scores + 4 * t, score_row, span, 4 * width, 64, n, acc, 4 * rank, 64,
                       0, 0)  # fmt: skip
        for h in range(count):
            inv = splat_f32(load_f32(turned + 4 * h))
            target = out + 4 * (s * heads + first_head + h) * rank
            for d in range(0, rank, 16):
                store_f32x16(target + 4 * d, fmul(load_f32x16(acc + 4 * (h * rank + d)), inv))


LATENT_ATTENTION = Stage(_latent_attention)


# ------------------------------------------------------------------ entries
def append_rows(
    x: np.ndarray,
    column: int,
    first: int,
    second: int,
    addresses: np.ndarray,
    slots: np.ndarray,
    is_f16: bool,
    threads: int,
    bad: np.ndarray,
) -> None:
    """Row s of x[:, column:]: `first` and `second` numbers, each padded to 16, go to slot slots[s] of the cache at
    addresses[s] (int64 (S,)), rounded to its type; bad int64 (threads,) gets the counts of inf and NaN."""
    assert slots.dtype == addresses.dtype == np.int64
    block = arguments(
        address(x) + 4 * column, _stride(x), first, second, address(addresses), address(slots), len(slots),
        int(is_f16), address(bad),
    )  # fmt: skip
    APPEND_ROWS.run(block, threads)


def split_query(
    q: np.ndarray, heads: int, nope: int, rope: int, parts: np.ndarray, query: np.ndarray, threads: int = 1
) -> None:
    """q (S, >= N*(nope+rope)), each head its plain and its rotated part -> parts (S*N, nope), and the rotated part at
    the end of each head's place in query (S, N, width), padded to 16."""
    rows, found, width = query.shape
    assert found == heads
    assert query.flags.c_contiguous
    assert len(parts) == rows * heads
    block = arguments(
        address(q), _stride(q), rows, heads, nope, rope, address(parts), _stride(parts), address(query), width
    )
    SPLIT_QUERY.run(block, threads)


def join_heads(x: np.ndarray, dim: int, out: np.ndarray, threads: int = 1) -> None:
    """The first `dim` numbers of each head of x (S, N, width) side by side: out (S, >= N*dim)."""
    assert x.flags.c_contiguous
    JOIN_HEADS.run(arguments(address(x), *x.shape, dim, address(out), _stride(out)), threads)


def working_bytes(rows: int, heads: int, kv_lora_rank: int, qk_rope_head_dim: int, positions: int, threads: int) -> int:
    """Bytes of `scratch` that `attention` needs for rows that attend up to `positions` positions, whatever the type."""
    rank = padded(kv_lora_rank)
    width = rank + padded(qk_rope_head_dim)
    return max(
        64 + threads * _thread_bytes(heads, rank, width, positions),
        latent16.working_bytes(rows, heads, rank, width, positions, threads),
    )


def _thread_bytes(heads: int, rank: int, width: int, positions: int) -> int:
    group = min(heads, MOST_HEADS)
    lanes = padded(group)
    floats = width * lanes + SPAN * (width + lanes) + group * (rank + padded(positions) + 16)
    return -(-4 * floats // 64) * 64


def attention(
    query: np.ndarray,
    out: np.ndarray,
    addresses: np.ndarray,
    prefix_len: np.ndarray,
    path: np.ndarray,
    path_len: np.ndarray,
    scale: float,
    cap: int,
    is_f16: bool,
    threads: int,
    scratch: np.ndarray,
    chosen: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """out (S, N, R) f32 = attention of query (S, N, width) f32 over the caches at addresses[s] (int64 (S,)).

    R and width are multiples of 16. prefix_len, path_len int64 (S,); path int64 (S, P) slots. chosen: slots int64
    (S, C) in position order and how many (S,), instead of those. scratch uint8: `working_bytes` for `cap` positions."""
    rows, heads, width = query.shape
    rank = out.shape[2]
    assert out.shape[:2] == (rows, heads)
    assert query.flags.c_contiguous
    assert out.flags.c_contiguous
    assert rank % 16 == width % 16 == 0
    for array in (addresses, prefix_len, path, path_len):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    lists = address(addresses), address(prefix_len), address(path), path.shape[1], address(path_len)
    slots = (0, 0, 0) if chosen is None else (address(chosen[0]), chosen[0].shape[1], address(chosen[1]))
    most = min(heads, MOST_HEADS)
    group = most if rows * -(-heads // most) >= threads else max(1, min(most, -(-heads // threads)))
    if is_f16:
        latent16.attention(query, out, lists, slots, group, scale, cap, threads, scratch)
        return
    room = _thread_bytes(heads, rank, width, cap)
    assert scratch.nbytes >= threads * room + 64
    block = arguments(
        address(query), address(out), *lists, heads, rank, width, (address(scratch) + 63) // 64 * 64, room, rows,
        group, OUTER.address, *slots, float(scale),
    )  # fmt: skip
    LATENT_ATTENTION.run(block, threads)


def _stride(x: np.ndarray) -> int:
    assert x.dtype == np.float32
    assert x.strides[1] == 4
    return x.strides[0] // 4
