"""Grouped-query attention over cached keys and values, and the writes to that cache.

Cache of one layer and sequence, float32 or fp16 (uint16): K (heads K, cap/16, D, 16), 16 positions per block, lane =
slot % 16; V (K, cap, D). A row attends the slots 0 .. prefix_len-1 and then its path slots (its own included), in
position order; a window W keeps its last W positions. Nothing is masked: a row runs exactly these operations:
    score[t]  one fma chain over d ascending, then times scale           (float32)
    p[t]      expf(score[t] - max), summed in 16 lanes by position % 16, fixed tree; a sink joins max and sum, last
    out[d]    one fma chain over positions ascending of p[t] * V[t, d], times 1 / sum
Several rows and heads share a pass over K and V; that decides only which chains run side by side, so bits do not depend
on slots, other rows, tiling or threads. Threads take (block of rows, kv head) units.
"""

import numpy as np

from coli.kernels.loops import OUTER, call_outer
from coli.kernels.ops import (
    bits_f32,
    expf,
    expf_x16,
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
from coli.kernels.runtime import Routine, Stage, address, arguments, caller, device, unpacker

unpack2, unpack4, unpack5, unpack9, unpack11, unpack12 = (unpacker(n) for n in (2, 4, 5, 9, 11, 12))

K_AHEAD = 8192  # bytes by which keys are prefetched; values are prefetched one span ahead
V_SPAN = 16384  # bytes of V per pass over the heads of a unit: half of the first-level cache
QUERIES = 24  # (row, head) pairs that share a pass, at most, unless one row has more: their scores stay in the L2 cache


# ------------------------------------------------------------------ cache writes
def _kv_append(args, part, parts):
    """args: k, k stride, v, v stride, k_addr (S), v_addr (S), slots (S), rows, K, D, cap, half, bad (parts), a sum."""
    k, k_stride, v, v_stride, k_addr, v_addr, slots, rows, heads, dim, cap, half = unpack12(args, 0)
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
    at = load_i64(args + 96) + 8 * part
    store_i64(at, load_i64(at) + bad)


KV_APPEND = Stage(_kv_append)


@device
def _copy_element(target, source, half):
    if half:
        store_u16(target, load_u16(source))
    else:
        store_f32(target, load_f32(source))


def _copy_slots(args, part, parts):
    """args: k address, v address, source slots, target slots, n, K, D, cap, half."""
    k, v, source, target, n, heads, dim, cap, half = unpack9(args, 0)
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


def _slide(args, part, parts):
    """args: k_addr (S), v_addr (S), row, moves (blocks, 2): first and count, block, K, D, cap, half."""
    k, v, row, moves, block, heads, dim, cap, half = unpack9(args, 0)
    first, count = unpack2(moves + 16 * block, 0)
    if count == 0:
        return
    size = 2 if half else 4
    k, v = load_i64(k + 8 * row), load_i64(v + 8 * row)
    for h in range(heads * part // parts, heads * (part + 1) // parts):
        base, ahead = size * h * cap * dim, size * first * dim  # a block of keys is as long as 16 values
        for i in range(0, size * count * dim, 8):  # upwards: source and target overlap
            store_i64(k + base + i, load_i64(k + base + ahead + i))
            store_i64(v + base + i, load_i64(v + base + ahead + i))


SLIDE = Stage(_slide)


# ------------------------------------------------------------------ attention
@device
def softmax_row(scores, base, first, stop, scale, sink):
    """Scores of positions first .. stop-1 (score of position t at scores + 4*(t - base), base a multiple of 16) become
    exp(score*scale - max); returns 1 / sum. The other lanes of the end blocks become 0. `sink` is one more score, whose
    exp counts in the sum; -inf: none."""
    low = np.float32(-np.inf)
    factor, top = splat_f32(scale), splat_f32(low)
    for t in range(first // 16 * 16, stop, 16):
        at = scores + 4 * (t - base)
        z = fmul(load_f32x16(at), factor)
        if t < first or t + 16 > stop:
            z = keep_lanes(z, first - t, stop - t, low)
        store_f32x16(at, z)
        top = fmax(z, top)
    most = max(hmax_f32(top), sink)
    peak, total = splat_f32(most), splat_f32(np.float32(0))
    for t in range(first // 16 * 16, stop, 16):
        at = scores + 4 * (t - base)
        p = expf_x16(fsub(load_f32x16(at), peak))
        store_f32x16(at, p)
        total = fadd(total, p)
    if sink > low:
        return np.float32(1) / (hsum_f32(total) + expf(sink - most))
    return np.float32(1) / hsum_f32(total)


def _add_values(outer, p, p_row, queries, v, count, dim, half, acc, acc_row, span):
    """acc[i, d] chains go on over `count` positions whose V rows start at v; p[i] at p + i*p_row."""
    size, chunks = 4 - 2 * half, (dim + 15) // 16
    widen = dim % 16 != 0  # then copy to whole chunks of 16 in float32
    most = max(8, min(64, V_SPAN // (64 * chunks if widen else size * dim)))
    for done in range(0, count, most):
        n = min(most, count - done)
        rows, source, step, block, ahead = v + size * dim * done, half, size * dim, size * 16, size * dim * n
        if widen:
            for t in range(n):
                for d in range(0, dim, 16):
                    at, target = rows + size * (t * dim + d), span + 4 * (t * chunks * 16 + d)
                    if half == 0:
                        store_part(target, load_part(at, dim - d), dim - d)
                    elif d + 16 <= dim:
                        store_f32x16(target, load_h16(at))
                    else:
                        for e in range(dim - d):
                            store_f32(target + 4 * e, f32_from_half(load_u16(at + 2 * e)))
            rows, source, step, block, ahead = span, 0, chunks * 64, 64, 0
        call_outer(
            outer, source, queries, chunks, p + 4 * done, p_row, rows, step, block, n, acc, acc_row, 64, 0, ahead
        )


ADD_VALUES = Routine(_add_values, 11)
add_values = caller(11)


@device
def _gather_keys(k, prefix, path, first, stop, dim, half, block):
    """K of the positions first .. stop-1 (at most 16, first a multiple of 16) as a float32 block (D, 16)."""
    for t in range(first, stop):
        slot = t if t < prefix else load_i64(path + 8 * (t - prefix))
        at = k + (4 - 2 * half) * ((slot >> 4) * dim * 16 + (slot & 15))
        for d in range(dim):
            value = f32_from_half(load_u16(at + 32 * d)) if half else load_f32(at + 64 * d)
            store_f32(block + 4 * (16 * d + t - first), value)


def _unit(args, first_row, rows, first_head, group, scratch):
    """Rows first_row .. +rows-1 (one sequence) with the query heads first_head .. +group-1 of one kv head."""
    q, q_stride, out, out_stride, k, v, prefixes, paths, path_stride, lengths, window = unpack11(args, 0)
    scale = np.float32(load_f64(args + 88))
    heads, kv_heads, dim, cap, half = unpack5(args, 12)
    outer, add = unpack2(args, 21)
    sinks = load_i64(args + 200)
    size, kv_head = 4 - 2 * half, first_head // (heads // kv_heads)
    k = load_i64(k + 8 * first_row) + size * kv_head * cap * dim
    v = load_i64(v + 8 * first_row) + size * kv_head * cap * dim
    queries, padded = rows * group, (dim + 15) // 16 * 16

    table = scratch  # (rows, 5) i64: first position, prefix, stop, end of the K blocks it reads in place, path
    block = table + 64 * rows  # (D, 16) f32
    span = block + 64 * dim  # (64, padded) f32
    q_copy = span + 256 * padded  # (queries, D) f32
    acc = q_copy + 4 * queries * dim  # (queries, padded) f32
    scores = acc + 4 * queries * padded  # (queries, positions) f32
    acc_row, q_row = 4 * padded, 4 * dim

    # the extent of the scores, and what all rows share: blocks of K before `direct`, rows of V shared .. shared_stop
    base, limit, direct, shared, shared_stop = cap, 0, cap, 0, cap
    for r in range(rows):
        prefix, length = load_i64(prefixes + 8 * (first_row + r)), load_i64(lengths + 8 * (first_row + r))
        stop, solid = prefix + length, cap if length == 0 else prefix & -16
        first = max(0, stop - window) if window > 0 else 0
        row = table + 40 * r
        store_i64(row, first)
        store_i64(row + 8, prefix)
        store_i64(row + 16, stop)
        store_i64(row + 24, solid)
        store_i64(row + 32, paths + 8 * (first_row + r) * path_stride)
        base, limit, direct = min(base, first & -16), max(limit, stop), min(direct, solid)
        shared, shared_stop = max(shared, first), min(shared_stop, prefix)
    if shared >= shared_stop:
        shared, shared_stop = 0, 0
    direct = max(base, min(direct, (limit + 15) & -16))
    score_row = 4 * ((limit - base + 15) & -16) + 64  # not a power of two: rows would meet in one cache set

    for r in range(rows):
        source = q + 4 * ((first_row + r) * q_stride + first_head * dim)
        for i in range(0, group * dim, 16):
            store_part(q_copy + 4 * (r * group * dim + i), load_part(source + 4 * i, group * dim - i), group * dim - i)
    for i in range(0, queries * padded, 16):
        store_f32x16(acc + 4 * i, splat_f32(np.float32(0)))

    # scores: blocks that all rows read in place, then the rest row by row
    if base < direct:
        call_outer(outer, half, queries, (direct - base) >> 4, q_copy, q_row, k + size * base * dim, size * 16,
                   size * 16 * dim, dim, scores, score_row, 64, 1, K_AHEAD)  # fmt: skip
    for r in range(rows):
        first, prefix, stop, solid, path = unpack5(table + 40 * r, 0)
        for t in range(max(direct, first & -16), stop, 16):
            source, width = k + size * t * dim, half
            if t >= solid:
                _gather_keys(k, prefix, path, t, min(stop, t + 16), dim, half, block)
                source, width = block, 0
            call_outer(outer, width, group, 1, q_copy + r * group * q_row, q_row, source, (4 - 2 * width) * 16, 0, dim,
                       scores + r * group * score_row + 4 * (t - base), score_row, 64, 1, K_AHEAD)  # fmt: skip

    # softmax, then V: what a row sees before the stretch that all share, the stretch, and what comes after it
    for r in range(rows):
        first, prefix, stop, solid, path = unpack5(table + 40 * r, 0)
        for i in range(r * group, r * group + group):
            sink = np.float32(-np.inf)
            if sinks != 0:
                sink = load_f32(sinks + 4 * (first_head + i % group))
            inv = softmax_row(scores + i * score_row, base, first, stop, scale, sink)
            store_f32(q_copy + i * q_row, inv)  # the copy of q has served
        if first < shared:
            add_values(add, outer, scores + r * group * score_row + 4 * (first - base), score_row, group,
                       v + size * dim * first, shared - first, dim, half, acc + r * group * acc_row, acc_row,
                       span)  # fmt: skip
    if shared < shared_stop:
        add_values(add, outer, scores + 4 * (shared - base), score_row, queries, v + size * dim * shared,
                   shared_stop - shared, dim, half, acc, acc_row, span)  # fmt: skip
    for r in range(rows):
        first, prefix, stop, solid, path = unpack5(table + 40 * r, 0)
        t = max(first, shared_stop)
        while t < stop:
            slot, count = t, prefix - t
            if t >= prefix:
                slot, count = load_i64(path + 8 * (t - prefix)), 1
            add_values(add, outer, scores + r * group * score_row + 4 * (t - base), score_row, group,
                       v + size * dim * slot, count, dim, half, acc + r * group * acc_row, acc_row, span)  # fmt: skip
            t += count
        for i in range(group):
            inv = splat_f32(load_f32(q_copy + (r * group + i) * q_row))
            target = out + 4 * ((first_row + r) * out_stride + (first_head + i) * dim)
            for d in range(0, dim, 16):
                x = load_f32x16(acc + (r * group + i) * acc_row + 4 * d)
                store_part(target + 4 * d, fmul(x, inv), dim - d)


UNIT = Routine(_unit, 6)
call_unit = caller(6)


def _attention(args, part, parts):
    """args: 0 q, q stride, out, out stride, 4 k_addr, v_addr, 6 prefix_len, paths, path stride, path_len, 10 window,
    scale, 12 N, K, D, cap, half, 17 scratch, scratch bytes per part, 19 rows, rows per unit, 21 addresses of OUTER,
    ADD_VALUES and UNIT, 24 query heads per unit, sinks."""
    k_addr, v_addr = unpack2(args, 4)
    heads = load_i64(args + 96)
    scratch, room, rows, per_unit = unpack4(args, 17)
    unit_address, group = unpack2(args, 23)
    unit, s = 0, 0
    while s < rows:
        k, v, n = load_i64(k_addr + 8 * s), load_i64(v_addr + 8 * s), 1
        while (
            n < per_unit
            and s + n < rows
            and load_i64(k_addr + 8 * (s + n)) == k
            and load_i64(v_addr + 8 * (s + n)) == v
        ):
            n += 1
        for h in range(0, heads, max(1, group)):
            if unit % parts == part:
                call_unit(unit_address, args, s, n, h, group, scratch + room * part)
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
    bad: np.ndarray | None = None,
) -> int:
    """Write row s of k[:, k_column:] and v[:, v_column:] (heads of D) to slot slots[s] of the cache at k_addr[s],
    v_addr[s] (int64 (S,)), rounded to the cache type. Returns how many stored values are inf or NaN (fp16 overflow);
    `bad` int64 (threads,) has the counts added where the caller wants to look later (a recorded call)."""
    assert k.dtype == v.dtype == np.float32
    assert slots.dtype == k_addr.dtype == v_addr.dtype == np.int64
    bad = np.zeros(threads, np.int64) if bad is None else bad
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


def slide(
    k_addr: np.ndarray,
    v_addr: np.ndarray,
    row: int,
    moves: np.ndarray,
    block: int,
    kv_heads: int,
    head_dim: int,
    cap: int,
    is_f16: bool,
    threads: int = 1,
) -> None:
    """In the cache at k_addr[row], v_addr[row], take moves[block] = (first, count) rows to slot 0, bit for bit.

    moves int64 (blocks, 2), first and count multiples of 16; count 0 does nothing. For caches that keep a window."""
    assert moves.dtype == k_addr.dtype == v_addr.dtype == np.int64
    assert moves.flags.c_contiguous
    block_of = arguments(
        address(k_addr), address(v_addr), row, address(moves), block, kv_heads, head_dim, cap, int(is_f16)
    )
    SLIDE.run(block_of, threads)


def working_bytes(rows: int, heads: int, kv_heads: int, head_dim: int, positions: int, threads: int) -> int:
    """Bytes of `scratch` that `attention` needs for rows that attend up to `positions` positions."""
    return 64 + threads * _thread_bytes(_rows_per_unit(rows, heads, kv_heads), heads, kv_heads, head_dim, positions)


def _rows_per_unit(rows: int, heads: int, kv_heads: int) -> int:
    most = max(1, QUERIES * kv_heads // heads)
    units = -(-rows // most)
    return -(-rows // units) if units else 1


def _heads_per_unit(units: int, group: int, threads: int) -> int:
    """The heads of a kv head share its keys and values; they are split where whole kv heads leave threads idle."""
    for parts in range(1, group + 1):
        if group % parts == 0 and (units * parts % threads == 0 or units * parts >= 4 * threads):
            return group // parts
    return 1


def _thread_bytes(rows_per_unit: int, heads: int, kv_heads: int, head_dim: int, positions: int) -> int:
    queries, padded = rows_per_unit * heads // kv_heads, -(-head_dim // 16) * 16
    floats = (
        16 * rows_per_unit + 16 * head_dim + 64 * padded + queries * (head_dim + padded + -(-positions // 16) * 16 + 16)
    )
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
    most_positions: int | None = None,
    scratch: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> None:
    """out (S, >= N*D) f32 = attention of q (S, >= N*D) f32 over the caches at k_addr[s], v_addr[s] (int64 (S,)).

    prefix_len, path_len int64 (S,); path int64 (S, P) slots. prefix_len + path_len >= 1. window 0 is none.
    most_positions bounds prefix_len + path_len of every row (default: what it is now; a recorded call needs it);
    sinks f32 (N,): one more score of each head, of which the softmax gives nothing to a value.
    scratch uint8 of at least `working_bytes` is the working memory (default: allocated here)."""
    rows = len(prefix_len)
    for array in (k_addr, v_addr, prefix_len, path_len, path):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
        assert len(array) == rows
    assert q.dtype == out.dtype == np.float32
    assert cap % 16 == 0
    assert sinks is None or (sinks.dtype == np.float32 and sinks.shape == (heads,))
    if rows == 0:
        return
    positions = prefix_len + path_len
    most = int(positions.max()) if most_positions is None else most_positions
    assert most <= cap
    assert int(positions.min()) >= 1
    per_unit = _rows_per_unit(rows, heads, kv_heads)
    room = _thread_bytes(per_unit, heads, kv_heads, head_dim, most)
    if scratch is None:
        scratch = np.empty(threads * room + 64, np.uint8)
    assert scratch.nbytes >= threads * room + 64
    block = arguments(
        address(q), q.strides[0] // 4, address(out), out.strides[0] // 4, address(k_addr), address(v_addr),
        address(prefix_len), address(path), path.shape[1], address(path_len), window, float(scale), heads, kv_heads,
        head_dim, cap, int(is_f16), (address(scratch) + 63) // 64 * 64, room, rows, per_unit,
        OUTER.address, ADD_VALUES.address, UNIT.address,
        _heads_per_unit(-(-rows // per_unit) * kv_heads, heads // kv_heads, threads),
        0 if sinks is None else address(sinks),
    )  # fmt: skip
    ATTENTION.run(block, threads)
