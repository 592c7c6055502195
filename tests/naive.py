"""Slow twins of the kernels: plain loops in the order the contracts state, with an exact fused multiply-add.

They know nothing of tiles, blocks, threads or packing. float32 arithmetic is numpy's (each operation rounded once);
where a twin does the same float operations as its kernel, tests compare with ==.
"""

import numpy as np

f32 = np.float32


def fma(x, y, z):
    """x*y + z in float32, rounded once. The product is exact in float64; the sum is rounded to odd there, so that the
    second rounding to float32 is correct."""
    x, y, z = (np.asarray(v, np.float64) for v in (x, y, z))
    with np.errstate(invalid="ignore", over="ignore"):
        p = x * y
        s = p + z
        back = s - p
        error = (p - (s - back)) + (z - back)
        even = (s.view(np.int64) & 1) == 0 if s.shape else (np.int64(s.view(np.int64)) & 1) == 0
        toward = np.where(error > 0, np.inf, -np.inf)
        odd = np.where((error != 0) & even & np.isfinite(s), np.nextafter(s, toward), s)
        return odd.astype(f32)


def tree_sum(lanes):
    """16 float32 lanes: i with i+8, then +4, +2, +1."""
    lanes = np.array(lanes, f32)
    for half in (8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half : 2 * half]
    return lanes[0]


def lane_sum(values):
    """Sum of values in 16 lanes by index % 16."""
    lanes = np.zeros(16, f32)
    for i, value in enumerate(values):
        lanes[i % 16] += f32(value)
    return tree_sum(lanes)


def exp32(x):
    """2**n * polynomial(x - n ln 2), elementwise on float32."""
    x = np.asarray(x, f32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = np.where(x < f32(-104), f32(-104), np.where(x > f32(89), f32(89), x))
        shifted = fma(x, f32(1.4426950408889634), f32(12582912))
        n = shifted.view(np.int32) - np.int32(0x4B400000)
        turns = shifted - f32(12582912)
        r = fma(turns, f32(2.12194440e-4), fma(turns, f32(-0.693359375), x))
        y = np.full_like(r, f32(0.0013814539415761828))
        for c in (0.00836874544620514, 0.04166838899254799, 0.1666652113199234, 0.4999999403953552, 1.0, 1.0):
            y = fma(y, r, f32(c))
        half = n >> 1
        y = y * ((half + 127) << 23).view(f32)
        return y * ((n - half + 127) << 23).view(f32)


def silu(x):
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, f32) / (exp32(-np.asarray(x, f32)) + f32(1))


def sigmoid(x):
    with np.errstate(over="ignore"):
        return f32(1) / (exp32(-np.asarray(x, f32)) + f32(1))


def rms_norm(x, weight, eps):
    """One row."""
    lanes = np.zeros(16, f32)
    for i, value in enumerate(x):
        lanes[i % 16] = fma(value, value, lanes[i % 16])
    inv = f32(1) / np.sqrt(tree_sum(lanes) / f32(len(x)) + f32(eps))
    return (x * inv) * weight[: len(x)]


def quantize_group(x):
    """32 float32 -> (int8 values as int64, scale)."""
    if not np.isfinite(x).all():
        return np.zeros(32, np.int64), f32(np.nan)
    top = np.abs(x).max()
    inv = f32(127) / top if top > f32(1e-30) else f32(0)
    return np.rint(x * inv).astype(np.int64), top / f32(127)


def pad_groups(x):
    return np.concatenate([x, np.zeros(-len(x) % 32, f32)])


def matmul_quantized(q, scales, zero, x, bias=None):
    """q (R, Cp) integers, scales (R, Cp/32) fp16, x (cols,) f32 -> (R,)."""
    out = np.zeros(len(q), f32)
    x = pad_groups(x)
    for g in range(len(x) // 32):
        xq, xs = quantize_group(x[32 * g : 32 * g + 32])
        dot = ((q[:, 32 * g : 32 * g + 32].astype(np.int64) - zero) * xq).sum(axis=1)
        out = fma(dot.astype(f32), scales[:, g].astype(f32) * xs, out)
    return out if bias is None else out + bias


def matmul_f32(w, x, bias=None):
    """w (R, C), x (C,) -> (R,): one chain over k."""
    out = np.zeros(len(w), f32)
    for k in range(len(x)):
        out = fma(w[:, k], x[k], out)
    return out if bias is None else out + bias


def swiglu(gate, up):
    return silu(gate) * up


def clamped_swiglu(gate, up, limit):
    gate, up = np.minimum(gate, f32(limit)), np.clip(up, f32(-limit), f32(limit))
    return (up + f32(1)) * (gate * sigmoid(gate * f32(1.702)))


def rope(x, cosine, sine, interleaved):
    """One head's rotated part."""
    half, y = len(cosine), np.array(x, f32)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        y[a] = fma(x[a], cosine[i], -(x[b] * sine[i]))
        y[b] = fma(x[b], cosine[i], x[a] * sine[i])
    return y


def attention(q, keys, values, window, scale, sink=-np.inf):
    """q (D,), keys and values (T, D) of the positions a row may see, its own last -> (D,)."""
    T, D = keys.shape
    first = max(0, T - window) if window else 0
    score = np.zeros(T, f32)
    for d in range(D):
        score = fma(q[d], keys[:, d], score)
    score = (score * f32(scale))[first:]
    with np.errstate(invalid="ignore"):
        most = max(np.fmax.reduce(score), f32(sink))
        p = exp32(score - most)
    lanes = np.zeros(16, f32)
    for t, value in enumerate(p, first):
        lanes[t % 16] += value
    inv = f32(1) / (tree_sum(lanes) + exp32(f32(sink) - most))
    out = np.zeros(D, f32)
    for t, value in enumerate(p, first):
        out = fma(value, values[t], out)
    return out * inv


def abs_top(x):
    """The largest magnitude; NaN if there is one."""
    return f32(np.abs(x).max(initial=0))


def norm_of(x):
    """x (D,) f32 -> (largest magnitude, power, L2 norm of x * power)."""
    top = abs_top(x)
    power = np.int32((254 - min(int(top.view(np.int32)) >> 23, 253)) << 23).view(f32)
    lanes = np.zeros(16, f32)
    for values in (np.asarray(x, f32) * power).reshape(-1, 16):
        lanes = fma(values, values, lanes)
    return top, power, np.sqrt(tree_sum(lanes))


def by_norm(x):
    """x (D,) f32 -> (integers, scale) by its L2 norm."""
    top, power, norm = norm_of(x)
    if top < f32(1e-30):
        return np.zeros(len(x), np.int64), f32(0)
    return round_row(x, f32(32760) / norm * power), norm / f32(32760) / power


def by_peak(x):
    """x (D,) f32 -> (integers, scale) by its largest magnitude."""
    top = abs_top(x)
    if top < f32(1e-30):
        return np.zeros(len(x), np.int64), f32(0)
    return round_row(x, f32(8190) / top), top / f32(8190)


def round_row(x, factor):
    """x * factor to the nearest integers, ties to even; the product is exact in float64."""
    return np.rint(np.asarray(x, np.float64) * np.float64(factor)).astype(np.int64)


def round_weights(w):
    """w (n,) f32 >= 0 -> (integers, scale) by the largest of 16 sums by lane."""
    lanes = np.zeros(16, f32)
    for i, value in enumerate(w):
        lanes[i % 16] += value
    top = lanes.max()
    return round_row(w, f32(16380) / top if top > f32(1e-30) else 0), top / f32(16380)


def route(logits, active, scoring, bias, n_group, topk_group, mode, norm, factor):
    """One row -> (ids ascending, weights)."""
    experts = len(logits)
    if scoring == 0:
        p = exp32(logits - logits.max())
        scores = p * (f32(1) / lane_sum(p))
    else:
        scores = sigmoid(logits)
    ranks = scores + bias if bias is not None else scores.copy()
    if mode and n_group > 1:
        groups = ranks.reshape(n_group, -1)
        best = np.sort(groups, axis=1)[:, ::-1]
        value = best[:, 0] if mode == 1 else best[:, 0] + best[:, 1]
        order = sorted(range(n_group), key=lambda g: (-value[g], g))
        for g in order[topk_group:]:
            groups[g] = -np.inf
    picks = sorted(range(experts), key=lambda e: (-ranks[e], e))[:active]
    total = f32(0)
    for e in picks:
        total += scores[e]
    if scoring == 1:
        total += f32(1e-20)
    weights = {e: (scores[e] / total if norm else scores[e]) * f32(factor) for e in picks}
    ids = sorted(picks)
    return np.array(ids), np.array([weights[e] for e in ids], f32)


def sparse_mix(logits, active, jitter):
    """One row of phimoe's router -> (ids ascending, weights)."""
    picks = {}
    for _ in range(active):
        left = [e for e in range(len(logits)) if e not in picks]
        best = max(left, key=lambda e: (logits[e], -e))
        most, total = logits[best], f32(0)
        for e in left:
            if not (most - logits[e]) / max(abs(logits[e]), most) > f32(2) * f32(jitter):
                total += exp32(logits[e] - most)
        picks[best] = f32(1) / total
    ids = sorted(picks)
    return np.array(ids), np.array([picks[e] for e in ids], f32)


def layer_norm(x, weight, bias, eps):
    mean = lane_sum(x) / f32(len(x))
    off = x - mean
    lanes = np.zeros(16, f32)
    for i, value in enumerate(off):
        lanes[i % 16] = fma(value, value, lanes[i % 16])
    inv = f32(1) / np.sqrt(tree_sum(lanes) / f32(len(x)) + f32(eps))
    return fma(off * inv, weight, bias)


def combine(x, outputs, weights):
    """x (H,), outputs (A, H) by ascending expert id."""
    total = np.zeros(len(x), f32)
    for w, row in zip(weights, outputs, strict=True):
        total = fma(w, row, total)
    return x + total


def quantize_q4(w, starts, importance):
    """32 weights -> (nibbles, fp16 scale): the best of least-squares refinements from the given starting points.

    An error counts by m + w**2, with importance (32,) by importance * sqrt(m + w**2), m the mean of w**2."""
    if not w.any():
        return np.full(32, 8), np.float16(0)
    peak = w[np.argmax(np.abs(w))]
    small = np.ldexp(w, -int(np.frexp(peak)[1]) + 1).astype(f32)
    emphasis = fma(small, small, _pair_sum(small, small) / f32(32))
    importance = emphasis if importance is None else importance * np.sqrt(emphasis)
    best, scale = f32(np.inf), np.float16(0)
    for start in starts:
        q = np.clip(np.rint(w * (start / peak)), -8, 7).astype(f32)
        cross, square = _pair_sum(importance * w, q), _pair_sum(importance * q, q)
        if square <= 0:
            continue
        half = np.float16(cross / square)
        step = f32(half)
        if step == 0 or not np.isfinite(step):
            continue
        q = np.clip(np.rint(w * (f32(1) / step)), -8, 7).astype(f32)
        error = fma(q, -step, w)
        error = _pair_sum(importance * error, error)
        if error < best:
            best, scale = error, half
    q = np.clip(w * (f32(1) / f32(scale)), -8, 7)
    return np.rint(q).astype(np.int64) + 8, scale


def _pair_sum(x, y):
    """Sum of x*y over 32 values: the upper half's products, the lower half added by fma, then the tree."""
    return tree_sum(fma(x[:16], y[:16], x[16:] * y[16:]))


def philox(seed, block, position):
    """Philox4x32-10 with counter (block, position low, position high, 0): four words."""
    mask = 0xFFFFFFFF
    c = [block & mask, position & mask, position >> 32 & mask, 0]
    k = [seed & mask, seed >> 32]
    for _ in range(10):
        p, r = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(r >> 32) ^ c[1] ^ k[0], r & mask, (p >> 32) ^ c[3] ^ k[1], p & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def select(logits, top_k, top_p, min_p):
    """Ids left by top_k, top_p and min_p, best first, from a float64 softmax."""
    order = [i for i in sorted(range(len(logits)), key=lambda i: (-logits[i], i)) if logits[i] > -np.inf]
    if top_k:
        order = order[:top_k]
    p = np.exp(logits[order].astype(np.float64) - float(logits[order[0]]))
    p /= p.sum()
    kept, mass = [], 0.0
    for i, token in enumerate(order):
        if (i and top_p < 1 and mass >= top_p) or p[i] < min_p * p[0]:
            break
        kept.append(token)
        mass += p[i]
    return kept


def latent_attention(query, rows, rank, scale):
    """query (width,), rows (T, width) in position order -> the mixture of the rows' first `rank` numbers."""
    scores = np.zeros(len(rows), f32)
    for d in range(len(query)):
        scores = fma(rows[:, d], query[d], scores)
    scores = scores * f32(scale)
    p = exp32(scores - scores.max())
    out = np.zeros(rank, f32)
    for t in range(len(rows)):
        out = fma(p[t], rows[t, :rank], out)
    return out * (f32(1) / lane_sum(p))


def latent_part(x):
    """x (D,) f32 -> (integers, scale, bound of the integers) by norm or by peak, whichever has the larger scale."""
    top, power, norm = norm_of(x)
    factor, scale = f32(0), f32(0)
    if top >= f32(1e-30):
        factor, scale = f32(46000) / norm * power, norm / f32(46000) / power
        if top / f32(32767) > scale:
            factor, scale = f32(32767) / top, top / f32(32767)
    return round_row(x, factor), scale, top * factor + f32(0.5)


def latent_attention16(queries, rows, rank, scale):
    """As latent_attention, for all heads (N, width) over rows that were float16, by sums of integers."""
    values, scales, bounds = (np.array(each) for each in zip(*(latent_part(row[:rank]) for row in rows), strict=True))
    ends, end_scales, _ = (np.array(each) for each in zip(*(latent_part(row[rank:]) for row in rows), strict=True))
    outs = []
    for query in queries:
        (q, q_scale, _), (end, end_scale, _) = latent_part(query[:rank]), latent_part(query[rank:])
        scores = (values @ q).astype(f32) * (scales * (q_scale * f32(scale)))
        scores = fma((ends @ end).astype(f32), end_scales * (end_scale * f32(scale)), scores)
        p = exp32(scores - scores.max())
        out = np.zeros(rank, f32)
        for t in range(0, len(rows), 128):
            block = slice(t, t + 128)
            w, total = p[block] * scales[block], f32(0)
            for each, bound in zip(w, bounds[block], strict=True):
                total = fma(each, bound, total)
            factor = min(f32(2.14e9) / total, f32(32767) / w.max(), f32(1e30))
            out = fma((round_row(w, factor) @ values[block]).astype(f32), f32(1) / factor, out)
        outs.append(out * (f32(1) / lane_sum(p)))
    return np.array(outs)


def choose(q, keys, w, topk):
    """q (H, dim), keys (T, dim) in position order, w (H,) -> the chosen positions, ascending."""
    heads, dim = q.shape
    scores = np.zeros(len(keys), f32)
    for h in range(heads):
        dot = np.zeros(len(keys), f32)
        for d in range(dim):
            dot = fma(keys[:, d], q[h, d], dot)
        dot = dot * f32(dim**-0.5)
        scores = fma(f32(w[h] * f32(heads**-0.5)), np.where(dot < 0, f32(0), dot), scores)
    best = sorted(range(len(keys)), key=lambda t: (-scores[t], t))
    return sorted(best[:topk])
