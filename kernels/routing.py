"""Which experts a row takes, and with what weights.

Scores are a float32 softmax (max, own exp, sum in 16 lanes by expert % 16) or a sigmoid of the router logits. Picks go
best first, ties to the lowest id; the result is then sorted by ascending expert id, the order in which outputs are
summed.
Sparsemixer (phimoe, arXiv 2409.12136): each pick is the best logit m of those left, weighted by its softmax over those
left with (m - logit) / max(|logit|, m) <= 2 jitter.
"""

import numpy as np

from coli.kernels.ops import (
    expf,
    expf_x16,
    fadd,
    fmax,
    fmul,
    fsub,
    hmax_f32,
    hsum_f32,
    keep_lanes,
    load_f32,
    load_f64,
    load_i64,
    load_part,
    sigmoid_x16,
    splat_f32,
    store_f32,
    store_i64,
    store_part,
)
from coli.kernels.runtime import Stage, address, arguments, device, unpacker

unpack2, unpack10 = unpacker(2), unpacker(10)

SOFTMAX, SIGMOID, SPARSEMIXER = 0, 1, 2
GROUPS_NONE, GROUPS_MAX, GROUPS_TOP2 = 0, 1, 2


@device
def _scores(logits, experts, scoring, scores):
    """Softmax or sigmoid of `experts` logits; returns whether one of them is NaN."""
    low = np.float32(-np.inf)
    top, bad = splat_f32(low), False
    for i in range(experts):
        v = load_f32(logits + 4 * i)
        bad = bad or v != v
    for i in range(0, experts, 16):
        top = fmax(keep_lanes(load_part(logits + 4 * i, experts - i), 0, experts - i, low), top)
    peak = splat_f32(hmax_f32(top))
    total = splat_f32(np.float32(0))
    for i in range(0, experts, 16):
        v = load_part(logits + 4 * i, experts - i)
        if scoring == 0:
            v = expf_x16(fsub(v, peak))
            total = fadd(total, keep_lanes(v, 0, experts - i, np.float32(0)))
        else:
            v = sigmoid_x16(v)
        store_part(scores + 4 * i, v, experts - i)
    if scoring == 0:
        inv = splat_f32(np.float32(1) / hsum_f32(total))
        for i in range(0, experts, 16):
            store_part(scores + 4 * i, fmul(load_part(scores + 4 * i, experts - i), inv), experts - i)
    return bad


@device
def _keep_groups(ranks, experts, n_group, topk_group, mode):
    """Put -inf on the ranks of all groups but the topk_group best."""
    size = experts // n_group
    for _ in range(n_group - topk_group):
        worst, worst_value = -1, np.float32(0)
        for group in range(n_group):
            first, second = np.float32(-np.inf), np.float32(-np.inf)
            for i in range(group * size, group * size + size):
                v = load_f32(ranks + 4 * i)
                if v > first:
                    first, second = v, first
                elif v > second:
                    second = v
            value = first if mode == 1 else first + second
            # among equals the highest group goes first, so that the lowest stays
            if first > np.float32(-np.inf) and (worst < 0 or value <= worst_value):
                worst, worst_value = group, value
        if worst >= 0:
            for i in range(worst * size, worst * size + size):
                store_f32(ranks + 4 * i, np.float32(-np.inf))


@device
def _sparse_mix(logits, experts, active, jitter, ids, weights):
    """Picks and weights of one row, in pick order; returns whether a logit is NaN."""
    bad = False
    for i in range(experts):
        v = load_f32(logits + 4 * i)
        bad = bad or v != v
    for a in range(active):
        best, most = -1, np.float32(-np.inf)
        for i in range(experts):
            v = load_f32(logits + 4 * i)
            if (v > most or best < 0) and not _taken(ids, a, i):
                best, most = i, v if v == v else np.float32(-np.inf)
        total = np.float32(0)
        for i in range(experts):
            v = load_f32(logits + 4 * i)
            if _taken(ids, a, i):
                continue
            if not (most - v) / max(abs(v), most) > np.float32(2) * jitter:
                total += expf(v - most)
        store_i64(ids + 8 * a, best)
        store_f32(weights + 4 * a, np.float32(1) / total)
    return bad


@device
def _taken(ids, count, expert):
    taken = False
    for j in range(count):
        taken = taken or load_i64(ids + 8 * j) == expert
    return taken


@device
def _best(ranks, scores, experts, active, bias, n_group, topk_group, mode, row_ids, row_weights):
    """Picks and scores of one row, in pick order; returns the sum of the scores."""
    for i in range(experts):
        rank = load_f32(scores + 4 * i)
        if bias != 0:
            rank += load_f32(bias + 4 * i)
        store_f32(ranks + 4 * i, rank)
    if mode != 0 and n_group > 1:
        _keep_groups(ranks, experts, n_group, topk_group, mode)
    total = np.float32(0)
    for a in range(active):
        best, best_rank = -1, np.float32(-np.inf)
        for i in range(experts):
            rank = load_f32(ranks + 4 * i)
            # an expert already taken is skipped, so that NaN and -inf still give distinct ids
            if (rank > best_rank or best < 0) and not _taken(row_ids, a, i):
                best, best_rank = i, rank if rank == rank else np.float32(-np.inf)
        store_i64(row_ids + 8 * a, best)
        w = load_f32(scores + 4 * best)
        store_f32(row_weights + 4 * a, w)
        total += w
    return total


def _route(args, part, parts):
    """args: logits, rows, E, stride, A, scoring, bias, n_group, topk_group, group mode, norm, factor, ids, weights,
    scratch (parts, 2, E16) f32, bad (parts) i64, jitter."""
    logits, rows, experts, stride, active, scoring, bias, n_group, topk_group, mode = unpack10(args, 0)
    norm, factor = load_i64(args + 80), np.float32(load_f64(args + 88))
    jitter = np.float32(load_f64(args + 128))
    ids, weights = unpack2(args, 12)
    padded = (experts + 15) // 16 * 16
    scores = load_i64(args + 112) + 8 * padded * part
    ranks = scores + 4 * padded
    bad = 0
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        total = np.float32(0)
        row_ids, row_weights = ids + 8 * s * active, weights + 4 * s * active
        if scoring == 2:
            bad += _sparse_mix(logits + 4 * s * stride, experts, active, jitter, row_ids, row_weights)
        else:
            bad += _scores(logits + 4 * s * stride, experts, scoring, scores)
            total = _best(ranks, scores, experts, active, bias, n_group, topk_group, mode, row_ids, row_weights)
        for a in range(1, active):  # insertion sort by id
            expert, w, j = load_i64(row_ids + 8 * a), load_f32(row_weights + 4 * a), a
            while j > 0 and load_i64(row_ids + 8 * j - 8) > expert:
                store_i64(row_ids + 8 * j, load_i64(row_ids + 8 * j - 8))
                store_f32(row_weights + 4 * j, load_f32(row_weights + 4 * j - 4))
                j -= 1
            store_i64(row_ids + 8 * j, expert)
            store_f32(row_weights + 4 * j, w)
        for a in range(active):
            w = load_f32(row_weights + 4 * a)
            if norm != 0:
                w = w / (total + np.float32(1e-20) if scoring == 1 else total)
            store_f32(row_weights + 4 * a, w * factor)
    store_i64(load_i64(args + 120) + 8 * part, bad)


ROUTE = Stage(_route)


def route(
    router_logits: np.ndarray,
    active: int,
    scoring: int,
    bias: np.ndarray | None,
    n_group: int,
    topk_group: int,
    group_mode: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    expert_ids: np.ndarray,
    weights: np.ndarray,
    threads: int = 1,
    bad: np.ndarray | None = None,
    jitter: float = 0.0,
) -> int:
    """router_logits (S, E) f32 -> expert_ids int64 (S, A) ascending, weights f32 (S, A); returns rows with a NaN logit.

    scoring     SOFTMAX, SIGMOID, or SPARSEMIXER with its jitter, which knows no bias, groups or norm
    bias        (E,) f32 or None: added for the choice, never for the weights
    group_mode  GROUPS_NONE, GROUPS_MAX (a group counts its best) or GROUPS_TOP2 (the sum of its two best)
    bad         int64 (threads,): takes the counts where the caller wants to look later (a recorded call)
    The sum of norm_topk_prob runs in pick order. A NaN logit gives valid distinct ids and NaN weights (softmax)."""
    rows, experts = router_logits.shape
    assert router_logits.dtype == np.float32
    assert router_logits.strides[1] == 4
    assert 1 <= active <= experts
    assert expert_ids.dtype == np.int64
    assert expert_ids.shape == (rows, active)
    assert expert_ids.flags.c_contiguous
    assert weights.dtype == np.float32
    assert weights.shape == (rows, active)
    assert weights.flags.c_contiguous
    assert bias is None or (bias.dtype == np.float32 and bias.shape == (experts,))
    scratch = np.zeros((threads, 2, -(-experts // 16) * 16), np.float32)
    bad = np.zeros(threads, np.int64) if bad is None else bad
    block = arguments(
        address(router_logits), rows, experts, router_logits.strides[0] // 4, active, scoring,
        0 if bias is None else address(bias), n_group, topk_group, group_mode, int(norm_topk_prob),
        float(routed_scaling_factor), address(expert_ids), address(weights), address(scratch), address(bad),
        float(jitter),
    )  # fmt: skip
    ROUTE.run(block, threads)
    return int(bad.sum())
