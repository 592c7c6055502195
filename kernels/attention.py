"""Grouped-query attention over cached keys and values, and the writes to that cache.

Cache of one layer and sequence, float32 or fp16 (uint16): K (heads K, cap/16, D, 16), 16 positions per block, lane =
slot % 16; V (K, cap, D). A row attends the slots 0 .. prefix_len-1 and then its path slots (its own included), in
position order; a window W keeps its last W positions. Nothing is masked: a row runs exactly these operations:
    score[t]  one fma chain over d ascending, then times scale           (float32)
    p[t]      expf(score[t] - max), summed in 16 lanes by position % 16, fixed tree
    out[d]    one fma chain over positions ascending of p[t] * V[t, d], times 1 / sum
Several rows and heads share a pass over K and V; that decides only which chains run side by side, so bits do not depend
on slots, other rows, tiling or threads. Threads take (block of rows, kv head) units.
"""

import numpy as np

from coli.kernels.outer import OUTER, call_outer
from coli.kernels.runtime import Stage, address, arguments, device
from coli.kernels.simd import (
    bits_f32,
    f32_from_half,
    fadd,
    fmax,
    fmul,
    fsub,
    half_from_f32,
    hmax_f32,
    hsum_f32,
    keep_lanes,
    load_f32,
    load_f32x16,
    load_f64,
    load_h16,
    load_i64,
    load_part,
    load_u16,
    splat_f32,
    store_f32,
    store_f32x16,
    store_i64,
    store_part,
    store_u16,
)
from coli.kernels.transcendental import expf_x16

V_SPAN = 64  # positions of V per pass over the heads of a unit
QUERIES = 24  # (row, head) pairs that share a pass, at most, unless one row has more


# ------------------------------------------------------------------ cache writes
def _kv_append(args, part, parts):
    """args: k, k stride, v, v stride, k_addr (S), v_addr (S), slots (S), rows, K, D, cap, half, bad (parts)."""
    k, k_stride, v, v_stride = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
    k_addr, v_addr, slots, rows = load_i64(args + 32), load_i64(args + 40), load_i64(args + 48), load_i64(args + 56)
    heads, dim, cap, half = load_i64(args + 64), load_i64(args + 72), load_i64(args + 80), load_i64(args + 88)
    bad = 0
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        slot = load_i64(slots + 8 * s)
        for h in range(heads):
            k_at = load_i64(k_addr + 8 * s)
            v_at = load_i64(v_addr + 8 * s)
            k_first = h * cap * dim + (slot // 16) * dim * 16 + slot % 16
            v_first = (h * cap + slot) * dim
            for d in range(dim):
                x = load_f32(k + 4 * (s * k_stride + h * dim + d))
                y = load_f32(v + 4 * (s * v_stride + h * dim + d))
                if half:
                    kh, vh = half_from_f32(x), half_from_f32(y)
                    store_u16(k_at + 2 * (k_first + 16 * d), kh)
                    store_u16(v_at + 2 * (v_first + d), vh)
                    bad += (np.int64(kh) & 0x7C00) == 0x7C00
                    bad += (np.int64(vh) & 0x7C00) == 0x7C00
                else:
                    store_f32(k_at + 4 * (k_first + 16 * d), x)
                    store_f32(v_at + 4 * (v_first + d), y)
                    bad += (np.int64(bits_f32(x)) & 0x7F800000) == 0x7F800000
                    bad += (np.int64(bits_f32(y)) & 0x7F800000) == 0x7F800000
    store_i64(load_i64(args + 96) + 8 * part, bad)


KV_APPEND = Stage(_kv_append)


@device
def _copy_element(target, source, half):
    if half:
        store_u16(target, load_u16(source))
    else:
        store_f32(target, load_f32(source))


def _copy_slots(args, part, parts):
    """args: k address, v address, source slots, target slots, n, K, D, cap, half."""
    k, v, source, target = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
    n, heads, dim = load_i64(args + 32), load_i64(args + 40), load_i64(args + 48)
    cap, half = load_i64(args + 56), load_i64(args + 64)
    size = 2 if half else 4
    for h in range(heads * part // parts, heads * (part + 1) // parts):
        for i in range(n):
            a, b = load_i64(source + 8 * i), load_i64(target + 8 * i)
            ka = k + size * (h * cap * dim + (a // 16) * dim * 16 + a % 16)
            kb = k + size * (h * cap * dim + (b // 16) * dim * 16 + b % 16)
            va, vb = v + size * (h * cap + a) * dim, v + size * (h * cap + b) * dim
            for d in range(dim):
                _copy_element(kb + size * 16 * d, ka + size * 16 * d, half)
                _copy_element(vb + size * d, va + size * d, half)


COPY_SLOTS = Stage(_copy_slots)


# ------------------------------------------------------------------ attention
@device
def _softmax_row(scores, base, first, stop, scale):
    """Scores of positions first .. stop-1 (score of position t at scores + 4*(t - base), base a multiple of 16) become
    exp(score*scale - max); returns 1 / sum. The other lanes of the end blocks become 0."""
    low = np.float32(-np.inf)
    factor, top = splat_f32(scale), splat_f32(low)
    for t in range(first // 16 * 16, stop, 16):
        at = scores + 4 * (t - base)
        z = fmul(load_f32x16(at), factor)
        if t < first or t + 16 > stop:
            z = keep_lanes(z, first - t, stop - t, low)
        store_f32x16(at, z)
        top = fmax(z, top)
    peak, total = splat_f32(hmax_f32(top)), splat_f32(np.float32(0))
    for t in range(first // 16 * 16, stop, 16):
        at = scores + 4 * (t - base)
        p = expf_x16(fsub(load_f32x16(at), peak))
        store_f32x16(at, p)
        total = fadd(total, p)
    return np.float32(1) / hsum_f32(total)


@device
def _add_values(outer, p, p_row, queries, v, slot, count, dim, half, acc, acc_row, span):
    """acc[i, d] chains go on over `count` positions whose V rows lie from slot on; p[i] at p + i*p_row."""
    size = 2 if half else 4
    chunks = (dim + 15) // 16
    for done in range(0, count, 64):
        n = min(64, count - done)
        rows = v + size * (slot + done) * dim
        if dim % 16 != 0 or (half and queries > 12):
            # whole chunks of 16 in float32, once for all queries
            for t in range(n):
                for d in range(0, dim, 16):
                    if half:
                        if d + 16 <= dim:
                            store_f32x16(span + 4 * (t * chunks * 16 + d), load_h16(rows + 2 * (t * dim + d)))
                        else:
                            for e in range(d, dim):
                                value = f32_from_half(load_u16(rows + 2 * (t * dim + e)))
                                store_f32(span + 4 * (t * chunks * 16 + e), value)
                    else:
                        store_part(
                            span + 4 * (t * chunks * 16 + d), load_part(rows + 4 * (t * dim + d), dim - d), dim - d
                        )
            call_outer(outer, 0, queries, chunks, p + 4 * done, p_row, span, chunks * 64, 64, n, acc, acc_row, 64, 0)
        else:
            call_outer(
                outer, half, queries, chunks, p + 4 * done, p_row, rows, size * dim, size * 16, n, acc, acc_row, 64, 0
            )


@device
def _gather_keys(k, prefix, path, first, stop, dim, half, block):
    """K of the positions first .. stop-1 (at most 16, first a multiple of 16) as a float32 block (D, 16)."""
    for t in range(first, stop):
        slot = t if t < prefix else load_i64(path + 8 * (t - prefix))
        size = 2 if half else 4
        at = k + size * ((slot // 16) * dim * 16 + slot % 16)
        for d in range(dim):
            value = f32_from_half(load_u16(at + 32 * d)) if half else load_f32(at + 64 * d)
            store_f32(block + 4 * (16 * d + t - first), value)


@device
def _unit(args, first_row, rows, kv_head, scratch):
    """Rows first_row .. +rows-1 (one sequence) with one kv head."""
    q, q_stride, out, out_stride = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
    prefixes, lengths = load_i64(args + 48) + 8 * first_row, load_i64(args + 72) + 8 * first_row
    paths, path_stride = load_i64(args + 56), load_i64(args + 64)
    window, scale = load_i64(args + 80), np.float32(load_f64(args + 88))
    heads, kv_heads, dim, cap, half = (
        load_i64(args + 96), load_i64(args + 104), load_i64(args + 112), load_i64(args + 120), load_i64(args + 128)
    )  # fmt: skip
    outer, size = load_i64(args + 168), 2 if half else 4
    group = heads // kv_heads
    k = load_i64(load_i64(args + 32) + 8 * first_row) + size * kv_head * cap * dim
    v = load_i64(load_i64(args + 40) + 8 * first_row) + size * kv_head * cap * dim
    queries, padded = rows * group, (dim + 15) // 16 * 16

    # the extent of the scores, and what all rows share: blocks of K up to `direct`, V rows shared .. shared_stop
    base, limit, direct, shared, shared_stop = cap, 0, cap, 0, cap
    for r in range(rows):
        prefix, length = load_i64(prefixes + 8 * r), load_i64(lengths + 8 * r)
        stop = prefix + length
        first = max(0, stop - window) if window > 0 else 0
        base, limit = min(base, first // 16 * 16), max(limit, stop)
        if length > 0:
            direct = min(direct, prefix // 16 * 16)
        shared, shared_stop = max(shared, first), min(shared_stop, prefix)
    direct = max(base, min(direct, (limit + 15) // 16 * 16))
    row_bytes = 4 * ((limit - base + 15) // 16 * 16)
    block = scratch  # (D, 16) f32
    span = block + 64 * dim  # (64, padded) f32
    q_copy = span + 4 * 64 * padded  # (queries, D)
    acc = q_copy + 4 * queries * dim  # (queries, padded)
    scores = acc + 4 * queries * padded  # (queries, positions)

    for r in range(rows):
        source = q + 4 * ((first_row + r) * q_stride + kv_head * group * dim)
        for i in range(0, group * dim, 16):
            store_part(q_copy + 4 * (r * group * dim + i), load_part(source + 4 * i, group * dim - i), group * dim - i)
    for i in range(0, queries * padded, 16):
        store_f32x16(acc + 4 * i, splat_f32(np.float32(0)))

    # scores
    if half and queries > 12:
        for t in range(base, direct, 16):
            source = k + 2 * t * dim
            for d in range(dim):
                store_f32x16(block + 64 * d, load_h16(source + 32 * d))
            call_outer(
                outer, 0, queries, 1, q_copy, 4 * dim, block, 64, 0, dim, scores + 4 * (t - base), row_bytes, 64, 1
            )
    elif base < direct:
        call_outer(
            outer, half, queries, (direct - base) // 16, q_copy, 4 * dim, k + size * base * dim, size * 16,
            size * 16 * dim, dim, scores, row_bytes, 64, 1,
        )  # fmt: skip
    for r in range(rows):
        prefix, length = load_i64(prefixes + 8 * r), load_i64(lengths + 8 * r)
        stop = prefix + length
        first = max(0, stop - window) if window > 0 else 0
        path = paths + 8 * (first_row + r) * path_stride
        q_row, score_row = q_copy + 4 * r * group * dim, scores + r * group * row_bytes
        for t in range(max(direct, first // 16 * 16), stop, 16):
            if t + 16 <= prefix or length == 0:
                call_outer(outer, half, group, 1, q_row, 4 * dim, k + size * t * dim, size * 16, 0, dim,
                      score_row + 4 * (t - base), row_bytes, 64, 1)  # fmt: skip
            else:
                _gather_keys(k, prefix, path, t, min(stop, t + 16), dim, half, block)
                call_outer(
                    outer, 0, group, 1, q_row, 4 * dim, block, 64, 0, dim, score_row + 4 * (t - base), row_bytes, 64, 1
                )

    # softmax, then V: what only some rows see before the shared stretch, the stretch, and what comes after it
    if shared >= shared_stop:
        shared, shared_stop = 0, 0
    for r in range(rows):
        stop = load_i64(prefixes + 8 * r) + load_i64(lengths + 8 * r)
        first = max(0, stop - window) if window > 0 else 0
        for g in range(group):
            i = r * group + g
            inv = _softmax_row(scores + i * row_bytes, base, first, stop, scale)
            store_f32(q_copy + 4 * i * dim, inv)  # the copy of q has served
        if first < shared:
            before = scores + r * group * row_bytes + 4 * (first - base)
            _add_values(outer, before, row_bytes, group, v, first, shared - first,
                        dim, half, acc + 4 * r * group * padded, 4 * padded, span)  # fmt: skip
    if shared < shared_stop:
        _add_values(outer, scores + 4 * (shared - base), row_bytes, queries, v, shared, shared_stop - shared,
                    dim, half, acc, 4 * padded, span)  # fmt: skip
    for r in range(rows):
        prefix, length = load_i64(prefixes + 8 * r), load_i64(lengths + 8 * r)
        stop = prefix + length
        first = max(0, stop - window) if window > 0 else 0
        row_scores, row_acc = scores + r * group * row_bytes, acc + 4 * r * group * padded
        after = max(first, shared_stop)
        if after < prefix:
            _add_values(outer, row_scores + 4 * (after - base), row_bytes, group, v, after, prefix - after,
                        dim, half, row_acc, 4 * padded, span)  # fmt: skip
        for t in range(max(first, prefix), stop):
            slot = load_i64(paths + 8 * ((first_row + r) * path_stride + t - prefix))
            _add_values(outer, row_scores + 4 * (t - base), row_bytes, group, v, slot, 1,
                        dim, half, row_acc, 4 * padded, span)  # fmt: skip
        for g in range(group):
            i = r * group + g
            inv = splat_f32(load_f32(q_copy + 4 * i * dim))
            target = out + 4 * ((first_row + r) * out_stride + (kv_head * group + g) * dim)
            for d in range(0, dim, 16):
                store_part(target + 4 * d, fmul(load_f32x16(acc + 4 * (i * padded + d)), inv), dim - d)


def _attention(args, part, parts):
    """args: q, q stride, out, out stride, k_addr, v_addr, prefix_len, paths, path stride, path_len, window, scale,
    N, K, D, cap, half, scratch, scratch bytes per part, rows, rows per unit, address of
    OUTER."""
    k_addr, v_addr, kv_heads = load_i64(args + 32), load_i64(args + 40), load_i64(args + 104)
    scratch = load_i64(args + 136) + load_i64(args + 144) * part
    rows, per_unit = load_i64(args + 152), load_i64(args + 160)
    unit, s = 0, 0
    while s < rows:
        n = 1
        while (
            n < per_unit
            and s + n < rows
            and load_i64(k_addr + 8 * (s + n)) == load_i64(k_addr + 8 * s)
            and load_i64(v_addr + 8 * (s + n)) == load_i64(v_addr + 8 * s)
        ):
            n += 1
        for h in range(kv_heads):
            if unit % parts == part:
                _unit(args, s, n, h, scratch)
            unit += 1
        s += n


ATTENTION = Stage(_attention)


# ------------------------------------------------------------------ entries
def kv_append(
    k: np.ndarray,
    k_column: int,
    v: np.ndarray,
    v_column: int,
    k_addr: np.ndarray,
    v_addr: np.ndarray,
    slots: np.ndarray,
    kv_heads: int,
    head_dim: int,
    cap: int,
    is_f16: bool,
    threads: int = 1,
) -> int:
    """Write row s of k[:, k_column:] and v[:, v_column:] (heads of D) to slot slots[s] of the cache at k_addr[s],
    v_addr[s] (int64 (S,)), rounded to the cache type. Returns how many stored values are inf or NaN (fp16 overflow)."""
    assert k.dtype == v.dtype == np.float32
    assert slots.dtype == k_addr.dtype == v_addr.dtype == np.int64
    bad = np.zeros(threads, np.int64)
    block = arguments(
        address(k) + 4 * k_column, k.strides[0] // 4, address(v) + 4 * v_column, v.strides[0] // 4, address(k_addr),
        address(v_addr), address(slots), len(slots), kv_heads, head_dim, cap, int(is_f16), address(bad),
    )  # fmt: skip
    KV_APPEND.run(block, threads)
    return int(bad.sum())


def copy_slots(
    k_address: int,
    v_address: int,
    source: np.ndarray,
    target: np.ndarray,
    kv_heads: int,
    head_dim: int,
    cap: int,
    is_f16: bool,
) -> None:
    """Move K and V of the slots source[i] to target[i] in order, bit for bit, in one layer of one sequence."""
    assert source.dtype == target.dtype == np.int64
    assert len(source) == len(target)
    block = arguments(
        k_address, v_address, address(source), address(target), len(source), kv_heads, head_dim, cap, int(is_f16)
    )
    COPY_SLOTS.run(block)


def scratch_bytes(rows_per_unit: int, heads: int, kv_heads: int, head_dim: int, positions: int) -> int:
    """Working memory of one thread for rows that attend up to `positions` positions."""
    queries, padded = rows_per_unit * heads // kv_heads, -(-head_dim // 16) * 16
    floats = 16 * head_dim + 64 * padded + queries * (head_dim + padded + -(-positions // 16) * 16 + 16)
    return -(-4 * floats // 64) * 64


def attention(
    q: np.ndarray,
    out: np.ndarray,
    k_addr: np.ndarray,
    v_addr: np.ndarray,
    prefix_len: np.ndarray,
    path: np.ndarray,
    path_len: np.ndarray,
    window: int,
    scale: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cap: int,
    is_f16: bool,
    threads: int = 1,
) -> None:
    """out (S, >= N*D) f32 = attention of q (S, >= N*D) f32 over the caches at k_addr[s], v_addr[s] (int64 (S,)).

    prefix_len, path_len int64 (S,); path int64 (S, P) slots. prefix_len + path_len >= 1. window 0 is none."""
    rows = len(prefix_len)
    for array in (k_addr, v_addr, prefix_len, path_len, path):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
        assert len(array) == rows
    assert q.dtype == out.dtype == np.float32
    assert cap % 16 == 0
    if rows == 0:
        return
    positions = prefix_len + path_len
    most = int(positions.max())
    assert most <= cap
    assert int(positions.min()) >= 1
    per_unit = max(1, min(rows, QUERIES * kv_heads // heads))
    room = scratch_bytes(per_unit, heads, kv_heads, head_dim, most)
    scratch = np.empty(threads * room + 64, np.uint8)
    block = arguments(
        address(q), q.strides[0] // 4, address(out), out.strides[0] // 4, address(k_addr), address(v_addr),
        address(prefix_len), address(path), path.shape[1], address(path_len), window, float(scale), heads, kv_heads,
        head_dim, cap, int(is_f16), (address(scratch) + 63) // 64 * 64, room, rows, per_unit,
        OUTER.address,
    )  # fmt: skip
    ATTENTION.run(block, threads)
