"""Attention over compressed rows in a float16 cache by exact integer dot products (the rest as latent.py has it).

Both parts of a cached row, the latent and the rotated one, become int16 by a scale each, and so do those of a query:
    scale     max(norm / 46000, largest / 32767): no sum of products of two parts leaves int32 (norms: fixed.py)
    score[t]  dot of the latents * (scale[t] * f), then fma(dot of the rotated parts, scale'[t] * f', that); f, f' are
              the query's scales times the softmax scale
    p[t]      expf(score[t] - max), summed in 16 lanes by t % 16, fixed tree
    w[t]      p[t] * scale[t]; those of 128 positions of the row's list (t // 128) become int16 by one factor F, as
              large as w and int32 allow: min(2.14e9 / (fma chain of w[t] * bound[t]), 32767 / max w)
    out[d]    fma chain over these blocks ascending of their sum of w * latent[d], times 1 / F; then times 1 / sum
Rows become int16 once for a forward, in scratch memory (RECORDS), where that has no room for a sequence in the units
that read it: the same numbers. Threads take (row, block of heads) units, in which positions are rows and heads lanes.
"""

import numpy as np

from coli.kernels.fixed import MAGIC, TINY, norm_of, round_row
from coli.kernels.loops import MORE, OUTER16, SCORES, SUMS, call_outer16
from coli.kernels.ops import (
    expf_x16,
    fadd,
    fdiv,
    float_bits,
    fma,
    fmax,
    fmin,
    fmul,
    fsub,
    interleave_i16,
    load_f32,
    load_f32x16,
    load_f64,
    load_i32,
    load_i64,
    pair_i16,
    prefetch,
    splat_f32,
    splat_i32,
    store_f32,
    store_f32x16,
    store_i32,
    store_i32x16,
    store_i64,
    store_u16x16,
    turn_i32,
)
from coli.kernels.runtime import Stage, address, arguments, device, unpacker

unpack2, unpack4, unpack5, unpack6, unpack9 = (unpacker(n) for n in (2, 4, 5, 6, 9))

BLOCK = 128  # positions whose weights share a factor
PANEL = 32 * BLOCK + 64  # bytes of 16 latents of a block: a multiple of 4096 apart, they would meet in one cache set
ROWS = 12  # positions of one call of the micro-kernel
MOST_HEADS = 64  # of a unit: bounds the scores kept
TABLE_ROWS = 4096  # rows the table of records has room for at least
LONGEST, LARGEST = np.float32(46000), np.float32(32767)  # 46000**2 < 2**31
MOST_SUM = np.float32(2.14e9)  # below 2**31 by more than rounding 128 weights can add


# ------------------------------------------------------------------ int16 rows
@device
def _to_int16(x, n, half, out):
    """A row part of n numbers to int16; returns its scale and a bound of what is there."""
    largest, power, norm = norm_of(x, n, half)
    factor, scale = LONGEST / norm * power, norm / LONGEST / power
    if largest / LARGEST > scale:  # not of a NaN
        factor, scale = LARGEST / largest, largest / LARGEST
    if largest < np.float32(TINY):
        factor, scale = np.float32(0), np.float32(0)
    round_row(x, n, factor, half, out)
    return scale, largest * factor + np.float32(0.5)


@device
def _record(row, rank, width, records, scales, room, i):
    """The float16 row as record i: int16 (width,) at records, and in the three lists of `room` float32 at scales the
    scales of both parts and the bound of the latent."""
    target = records + 2 * width * i
    scale, bound = _to_int16(row, rank, 1, target)
    rotated, _ = _to_int16(row + 2 * rank, width - rank, 1, target + 2 * rank)
    store_f32(scales + 4 * i, scale)
    store_f32(scales + 4 * (room + i), rotated)
    store_f32(scales + 4 * (2 * room + i), bound)


def _records(args, part, parts):
    """args: 0 address (S), prefix_len, paths, path stride, path_len, 5 slots, stride, counts (0: none), S, R, width,
    11 records, their scales, room for so many, 14 table (S, 2): becomes the number of the row's first record or -1, and
    whether those are the positions of its own list; else they are its sequence's slots."""
    addresses, prefixes, paths, path_stride, lengths = unpack5(args, 0)
    chosen, stride, counts, rows, rank, width = unpack6(args, 5)
    records, scales, room, table = unpack4(args, 11)
    s, used = 0, 0
    while s < rows:
        cache, stop, extent, read = load_i64(addresses + 8 * s), s, 0, 0
        while stop < rows and load_i64(addresses + 8 * stop) == cache:
            extent = max(extent, load_i64(prefixes + 8 * stop))
            for i in range(load_i64(lengths + 8 * stop)):
                extent = max(extent, 1 + load_i64(paths + 8 * (stop * path_stride + i)))
            read += extent if counts == 0 else load_i64(counts + 8 * stop)
            stop += 1
        listed, first = np.int64(read < extent), np.int64(-1)
        if used + min(read, extent) <= room:
            first, used = used, used + min(read, extent)
            if listed == 0:
                for slot in range(extent * part // parts, extent * (part + 1) // parts):
                    _record(cache + 2 * slot * width, rank, width, records, scales, room, first + slot)
        for i in range(s, stop):
            if part == 0:
                store_i64(table + 16 * i, first)
                store_i64(table + 16 * i + 8, listed)
            if first >= 0 and listed != 0:
                slots, count = chosen + 8 * i * stride, load_i64(counts + 8 * i)
                for t in range(count * part // parts, count * (part + 1) // parts):
                    row = cache + 2 * load_i64(slots + 8 * t) * width
                    _record(row, rank, width, records, scales, room, first + t)
                first += count
        s = stop


RECORDS = Stage(_records)


@device
def _gather(cache, records, scales, room, known, slots, prefix, path, t, count, rank, width, span, span_scales):
    """Records of the positions t .. t+count-1 side by side at span; they are among the others from `known` on unless
    that is negative. `slots`: the row's list, or 0."""
    for i in range(count):
        slot = t + i
        if slots != 0:
            slot = load_i64(slots + 8 * slot)
        elif slot >= prefix:
            slot = load_i64(path + 8 * (slot - prefix))
        if known < 0:
            _record(cache + 2 * slot * width, rank, width, span, span_scales, BLOCK, i)
            continue
        source, target = records + 2 * width * (known + slot), span + 2 * width * i
        for d in range(0, 2 * width - 63, 64):
            store_f32x16(target + d, load_f32x16(source + d))
        last = 2 * width - 64  # half of a step may be left
        store_f32x16(target + last, load_f32x16(source + last))
        for k in range(3):
            store_f32(span_scales + 4 * (BLOCK * k + i), load_f32(scales + 4 * (room * k + known + slot)))


# ------------------------------------------------------------------ a unit's parts
@device
def heads_of(unit, heads, group):
    """A unit's row, its first head, how many, and that padded to vectors of 16."""
    per_row = (heads + group - 1) // group
    first = unit % per_row * group
    count = min(group, heads - first)
    return unit // per_row, first, count, (count + 15) // 16 * 16


@device
def attended(s, prefix, lengths, chosen, stride, counts):
    """(address of the slots chosen for row s, or 0, how many positions it attends)."""
    if chosen != 0:
        return chosen + 8 * s * stride, load_i64(counts + 8 * s)
    return np.int64(0), prefix + load_i64(lengths + 8 * s)


@device
def _fetch(at, lines):
    """So many lines on their way to the second-level cache, few enough not to be waited for; returns where they end."""
    for i in range(lines):
        prefetch(at + 64 * i)
    return at + 64 * lines


@device
def _turn(row, pairs, target):
    """`pairs` pairs of int16 to every 64th byte: a lane of 16."""
    for d in range(pairs):
        store_i32(target + 64 * d, load_i32(row + 4 * d))


@device
def _turn_queries(query, count, lanes, rank, width, scale, row, turned, factors):
    """Queries (count, width) f32 -> int16, pairs of numbers with heads side by side, (lanes/16, R/2, 16, 2) and then
    the rotated parts likewise; factors (2, lanes) f32: the scales of both times the softmax scale. row: scratch."""
    rotated, rest = turned + 2 * rank * lanes, width - rank
    for h in range(lanes):
        first, second = np.float32(0), np.float32(0)
        for d in range(0, width, 16):
            store_u16x16(row + 2 * d, splat_i32(np.int32(0)))
        if h < count:
            first, _ = _to_int16(query + 4 * h * width, rank, 0, row)
            second, _ = _to_int16(query + 4 * (h * width + rank), rest, 0, row + 2 * rank)
        store_f32(factors + 4 * h, first * scale)
        store_f32(factors + 4 * (lanes + h), second * scale)
        _turn(row, rank >> 1, turned + (h >> 4) * 32 * rank + 4 * (h & 15))
        _turn(row + 2 * rank, rest >> 1, rotated + (h >> 4) * 32 * rest + 4 * (h & 15))


@device
def _raise_tops(scores, count, lanes, tops):
    """tops (lanes,) grow to the largest of scores (count, lanes)."""
    for j in range(0, 4 * lanes, 64):
        top = load_f32x16(tops + j)
        for i in range(count):
            top = fmax(load_f32x16(scores + 4 * i * lanes + j), top)
        store_f32x16(tops + j, top)


@device
def _weigh(scores, t, count, lanes, scales, room, tops, sums, factors, pairs, weights, inverses):
    """Scores (count, lanes) of the positions t and on -> weights (lanes, BLOCK) i16, 0 behind `count` up to the next
    multiple of 16, and what a weight of 1 stands for, inverses (lanes,) f32; sums (16, lanes) grow by p.
    factors (lanes,) f32, pairs (8, 16) i32: scratch. The scores and 15 positions more are overwritten."""
    padded, zero = (count + 15) & -16, splat_f32(np.float32(0))
    for j in range(0, 4 * lanes, 64):
        top, bound, most = load_f32x16(tops + j), zero, zero
        for i in range(count):
            at, total = scores + 4 * i * lanes + j, sums + 4 * ((t + i) & 15) * lanes + j
            p = expf_x16(fsub(load_f32x16(at), top))
            store_f32x16(total, fadd(load_f32x16(total), p))
            w = fmul(p, splat_f32(load_f32(scales + 4 * i)))
            store_f32x16(at, w)
            bound, most = fma(w, splat_f32(load_f32(scales + 4 * (2 * room + i))), bound), fmax(w, most)
        for i in range(count, padded):
            store_f32x16(scores + 4 * i * lanes + j, zero)
        # the last limit: where all weights are 0
        factor = fmin(fdiv(splat_f32(MOST_SUM), bound), fdiv(splat_f32(LARGEST), most))
        factor = fmin(factor, splat_f32(np.float32(1e30)))
        store_f32x16(factors + j, factor)
        store_f32x16(inverses + j, fdiv(splat_f32(np.float32(1)), factor))
    magic = splat_f32(np.float32(MAGIC))
    for i in range(0, padded, 16):
        for j in range(0, lanes, 16):
            factor = load_f32x16(factors + 4 * j)
            for k in range(8):
                at = scores + 4 * ((i + 2 * k) * lanes + j)
                low = float_bits(fma(load_f32x16(at), factor, magic))
                high = float_bits(fma(load_f32x16(at + 4 * lanes), factor, magic))
                store_i32x16(pairs + 64 * k, pair_i16(low, high))
            turn_i32(weights + 2 * (BLOCK * j + i), 2 * BLOCK, pairs)


@device
def _pair_latents(records, count, rank, width, mixed):
    """Latents (count, R) i16 -> (R/16, BLOCK/2 + 1, 16, 2): positions in pairs, an odd last one beside itself."""
    for i in range(0, count, 2):
        first, target = records + 2 * width * i, mixed + 32 * i
        second = first + 2 * width * min(1, count - 1 - i)
        for d in range(0, rank, 16):
            interleave_i16(target + PANEL * (d >> 4), first + 2 * d, second + 2 * d)


@device
def _score(outer, records, scales, room, count, lanes, rank, width, turned, factors, known, scores):
    """scores (count, lanes) f32 of records (count, width) i16; meanwhile those behind them are fetched if `known`."""
    ahead, lines = records + 2 * width * BLOCK, np.int64(0)
    if known:
        lines = 2 * width * BLOCK // (64 * (lanes >> 4) * ((BLOCK + ROWS - 1) // ROWS)) + 1
    for j in range(0, lanes, 16):
        for i in range(0, count, ROWS):
            ahead = _fetch(ahead, lines)
            call_outer16(outer, SCORES, min(ROWS, count - i), 1, records + 2 * width * i, 2 * width,
                         turned + 2 * rank * j, 0, rank >> 1, scores + 4 * (lanes * i + j), 4 * lanes, 0,
                         scales + 4 * i, factors + 4 * j)  # fmt: skip
    rest = width - rank
    call_outer16(outer, MORE, count, lanes >> 4, records + 2 * rank, 2 * width, turned + 2 * rank * lanes, 32 * rest,
                 rest >> 1, scores, 4 * lanes, 64, scales + 4 * room, factors + 4 * lanes)  # fmt: skip


@device
def _add_latents(outer, records, count, heads, lanes, rank, width, weights, inverses, mixed, known, scores, acc):
    """acc (R/16, heads, 16) f32 goes on by the weighed sums of a block of records; the rest as _score."""
    _pair_latents(records, count, rank, width, mixed)
    ahead, lines = records + 2 * width * BLOCK, np.int64(0)
    if known:
        lines = 2 * width * BLOCK // (64 * (rank >> 4)) + 1
    scores_ahead, score_lines = scores + 4 * lanes * BLOCK, 4 * lanes * BLOCK // (64 * (rank >> 4))
    for d in range(rank >> 4):
        ahead, scores_ahead = _fetch(ahead, lines), _fetch(scores_ahead, score_lines)
        call_outer16(outer, SUMS, heads, 1, weights, 2 * BLOCK, mixed + PANEL * d, 0, (count + 15 & -16) >> 1,
                     acc + 64 * heads * d, 64, 0, inverses, 0)  # fmt: skip


@device
def _means(acc, count, rank, sums, lanes, out):
    """acc (R/16, count, 16) over the sums of sums (16, lanes) -> out (count, R)."""
    for j in range(0, lanes, 16):
        half = 8
        while half > 0:  # the fixed tree
            for i in range(half):
                at = sums + 4 * (i * lanes + j)
                store_f32x16(at, fadd(load_f32x16(at), load_f32x16(at + 4 * half * lanes)))
            half >>= 1
    for h in range(count):
        inverse = splat_f32(np.float32(1) / load_f32(sums + 4 * h))
        for d in range(0, rank, 16):
            store_f32x16(out + 4 * (h * rank + d), fmul(load_f32x16(acc + 4 * d * count + 64 * h), inverse))


def _latent_units(args, part, parts):
    """args: 0 query, out, address (S), prefix_len, paths, path stride, path_len, N, R, 9 width, records, their scales,
    room, 13 table of records, scratch, its bytes per part, rows, heads per unit, 18 slots, stride, counts (0:
    none), OUTER16, 22 scale."""
    query, out, addresses, prefixes, paths, path_stride, lengths, heads, rank = unpack9(args, 0)
    width, records, scales, room = unpack4(args, 9)
    table, scratch, part_bytes, rows, group = unpack5(args, 13)
    chosen, chosen_stride, counts, outer = unpack4(args, 18)
    scale = np.float32(load_f64(args + 176))
    most = (group + 15) // 16 * 16
    turned = scratch + part_bytes * part  # (width, lanes) i16
    mixed = turned + 2 * width * most  # (R/16, BLOCK/2 + 1, 16, 2) i16
    weights = mixed + PANEL * (rank >> 4)  # (lanes, BLOCK) i16
    pairs = weights + 2 * BLOCK * most  # (8, 16) i32
    row_factors = pairs + 512  # (lanes,) f32
    factors = row_factors + 4 * most  # (2, lanes) f32
    tops = factors + 8 * most  # (lanes,) f32
    inverses = tops + 4 * most  # (lanes,) f32
    sums = inverses + 4 * most  # (16, lanes) f32
    span = sums + 64 * most  # (BLOCK, width) i16; a query before it is turned
    span_scales = span + 2 * BLOCK * width  # (3, BLOCK) f32
    acc = span_scales + 12 * BLOCK  # (R/16, heads, 16) f32
    scores = acc + 4 * rank * most  # (positions, and 15 more, lanes) f32
    for unit in range(part, rows * ((heads + group - 1) // group), max(1, parts)):
        s, first_head, count, lanes = heads_of(unit, heads, group)
        cache, prefix = load_i64(addresses + 8 * s), load_i64(prefixes + 8 * s)
        known, listed = unpack2(table + 16 * s, 0)
        path = paths + 8 * s * path_stride
        slots, stop = attended(s, prefix, lengths, chosen, chosen_stride, counts)
        at = 4 * (s * heads + first_head)
        _turn_queries(query + at * width, count, lanes, rank, width, scale, span, turned, factors)
        for j in range(0, lanes, 16):
            store_f32x16(tops + 4 * j, splat_f32(np.float32(-np.inf)))
        for i in range(0, count * rank, 16):
            store_f32x16(acc + 4 * i, splat_f32(np.float32(0)))
        for i in range(0, 16 * lanes, 16):
            store_f32x16(sums + 4 * i, splat_f32(np.float32(0)))
        for step in range(2):  # over all positions: scores, then latents
            for t in range(0, stop, BLOCK):
                n, here = min(BLOCK, stop - t), scores + 4 * t * lanes
                block, block_scales, block_room = span, span_scales, np.int64(BLOCK)
                in_place = known >= 0 and (listed != 0 or (slots == 0 and t + n <= prefix))
                if in_place:
                    block, block_scales, block_room = records + 2 * width * (known + t), scales + 4 * (known + t), room
                else:
                    _gather(cache, records, scales, room, known, slots, prefix, path, t, n, rank, width, span,
                            span_scales)  # fmt: skip
                if step == 0:
                    _score(outer, block, block_scales, block_room, n, lanes, rank, width, turned, factors, in_place,
                           here)  # fmt: skip
                    _raise_tops(here, n, lanes, tops)
                else:
                    _weigh(here, t, n, lanes, block_scales, block_room, tops, sums, row_factors, pairs, weights,
                           inverses)  # fmt: skip
                    _add_latents(outer, block, n, count, lanes, rank, width, weights, inverses, mixed, in_place, here,
                                 acc)  # fmt: skip
        _means(acc, count, rank, sums, lanes, out + at * rank)


LATENT_UNITS = Stage(_latent_units)


# ------------------------------------------------------------------ entry
def working_bytes(rows: int, heads: int, rank: int, width: int, positions: int, threads: int) -> int:
    """Bytes of `scratch` that `attention` needs: the same for up to TABLE_ROWS rows, so that forwards of ever more rows
    share one array."""
    table = 16 * max(rows, TABLE_ROWS)
    return 64 + positions * (2 * width + 12) + threads * _thread_bytes(heads, rank, width, positions) + 64 + table


def _thread_bytes(heads: int, rank: int, width: int, positions: int) -> int:
    lanes = -(-min(heads, MOST_HEADS) // 16) * 16
    of_lane = 2 * width + 2 * BLOCK + 20 + 64 + 4 * rank + 4 * (positions + 15)
    return lanes * of_lane + PANEL * (rank // 16) + 512 + BLOCK * (2 * width + 12)


def attention(
    query: np.ndarray,
    out: np.ndarray,
    lists: tuple[int, ...],
    chosen: tuple[int, int, int],
    group: int,
    scale: float,
    cap: int,
    threads: int,
    scratch: np.ndarray,
) -> None:
    """`latent.attention`, which has looked at the arguments, of float16 caches, with `group` heads to a unit.

    lists: addresses of the caches' addresses, of prefix_len and path, its columns, of path_len. chosen: addresses of
    slots, columns, of counts, or zeros."""
    rows, heads, width = query.shape
    rank = out.shape[2]
    part_bytes = _thread_bytes(heads, rank, width, cap)
    assert scratch.nbytes >= working_bytes(rows, heads, rank, width, cap, threads)
    units = (address(scratch) + 63) // 64 * 64
    records = units + threads * part_bytes
    scales = records + 2 * width * cap
    table = (scales + 12 * cap + 7) // 8 * 8
    RECORDS.run(arguments(*lists, *chosen, rows, rank, width, records, scales, cap, table), threads)
    block = arguments(
        address(query), address(out), *lists, heads, rank, width, records, scales, cap, table, units, part_bytes, rows,
        group, *chosen, OUTER16.address, float(scale),
    )  # fmt: skip
    LATENT_UNITS.run(block, threads)
