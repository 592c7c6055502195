"""Counter-based randomness for sampling, and the exact argmax of logits plus Gumbel noise.

The 32-bit word of (seed, position, token id) is word id % 4 of Philox4x32-10 (Salmon et al., SC 2011) with key seed,
counter = (id // 4, position low, position high, 0). u = (word + 0.5) / 2**32 lies strictly in (0, 1);
gumbel = -log(-log(u)) in float64 with our own log, between -3.14 and 22.9.
"""

import numpy as np

from coli.kernels.ops import (
    abs_bits,
    bits_f32,
    exp64,
    fmax,
    hmax_f32,
    hmax_i32,
    imax,
    load_f32,
    load_f32x16,
    load_f64,
    load_i32,
    load_i64,
    load_u8,
    log64,
    philox16,
    splat_f32,
    splat_i32,
    stack,
    store_f64,
    store_i64,
)
from coli.kernels.runtime import Stage, address, arguments, device, unpacker

unpack3, unpack4, unpack6, unpack8 = unpacker(3), unpacker(4), unpacker(6), unpacker(8)
sort_counts, chunk_words = stack(2048 * 8), stack(4 * 64)

PEAK_BLOCK = 1024  # logits whose largest is found at once
CHUNK = 64  # neighbouring ids whose noise is drawn at once
GUMBEL_MAX = 22.9  # above -log(-log(1 - 2**-33)) = 22.87
LN2 = 0.6931471805599453


@device
def _philox(block, position, seed):
    """The four words of Philox4x32-10."""
    c0, c1 = np.uint32(block), np.uint32(position)
    c2, c3 = np.uint32(np.uint64(position) >> np.uint64(32)), np.uint32(0)
    k0, k1 = np.uint32(seed), np.uint32(np.uint64(seed) >> np.uint64(32))
    for _ in range(10):
        p0 = np.uint64(0xD2511F53) * np.uint64(c0)
        p1 = np.uint64(0xCD9E8D57) * np.uint64(c2)
        c0, c1, c2, c3 = (
            np.uint32(p1 >> np.uint64(32)) ^ c1 ^ k0,
            np.uint32(p1),
            np.uint32(p0 >> np.uint64(32)) ^ c3 ^ k1,
            np.uint32(p0),
        )
        k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
        k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
    return c0, c1, c2, c3


@device
def _word(words, k):
    low = words[0] if k == 0 else words[1]
    high = words[2] if k == 2 else words[3]
    return low if k < 2 else high


@device
def _gumbel_of(word):
    u = (np.float64(word) + 0.5) * 2.3283064365386963e-10
    return -log64(-log64(u))


def _gumbel(args, part, parts):
    """args: seed, position, ids, n, out f64, words (1: raw words as f64)."""
    seed, position, ids, n, out, words = unpack6(args, 0)
    for i in range(n * part // parts, n * (part + 1) // parts):
        token = load_i64(ids + 8 * i)
        word = _word(_philox(token // 4, position, seed), token % 4)
        store_f64(out + 8 * i, np.float64(word) if words else _gumbel_of(word))


GUMBEL = Stage(_gumbel)


@device
def _bound(word):
    """An upper bound of the noise of a word by a few integer steps: 1 - u >= 2**-(n+1) when ~word has n leading zeros,
    and -log(-log(u)) <= -log(1 - u)."""
    rest = np.uint32(~word)
    n = 0
    if rest < np.uint32(0x10000):
        rest, n = np.uint32(rest << np.uint32(16)), n + 16
    if rest < np.uint32(0x1000000):
        rest, n = np.uint32(rest << np.uint32(8)), n + 8
    if rest < np.uint32(0x10000000):
        rest, n = np.uint32(rest << np.uint32(4)), n + 4
    if rest < np.uint32(0x40000000):
        rest, n = np.uint32(rest << np.uint32(2)), n + 2
    if rest < np.uint32(0x80000000):
        rest, n = np.uint32(rest << np.uint32(1)), n + 1
    return (n + 2 if rest == np.uint32(0) else n + 1) * LN2 + 1e-9


@device
def _largest(logits, n):
    """The largest of n <= CHUNK logits, NaN left out; -inf when there is none."""
    top, i = splat_f32(np.float32(-np.inf)), 0
    while i + 16 <= n:
        top = fmax(load_f32x16(logits + 4 * i), top)
        i += 16
    largest = hmax_f32(top)
    while i < n:
        y = load_f32(logits + 4 * i)
        largest = y if y > largest else largest
        i += 1
    return largest


@device
def _first_peak(logits, n):
    """(largest logit, its first id), by vectors; (-inf, -1) where one is NaN or all are -inf, for the loop over ids."""
    peak, at, special = np.float32(-np.inf), -1, splat_i32(np.int32(0))
    for start in range(0, n, PEAK_BLOCK):
        stop = min(start + PEAK_BLOCK, n)
        top, i = splat_f32(np.float32(-np.inf)), start
        while i + 16 <= stop:
            x = load_f32x16(logits + 4 * i)
            top, special = fmax(x, top), imax(special, abs_bits(x))
            i += 16
        largest = hmax_f32(top)
        while i < stop:
            y = load_f32(logits + 4 * i)
            if y != y:
                return np.float32(-np.inf), -1
            largest = y if y > largest else largest
            i += 1
        if largest > peak:
            peak, at = largest, start
    if at < 0 or hmax_i32(special) > 0x7F800000:
        return np.float32(-np.inf), -1
    while load_f32(logits + 4 * at) != peak:
        at += 1
    return peak, at


def _argmax(args, part, parts):
    """args: logits f32, n, ids (0: 0..n-1), allowed u8 by id (0: all), noisy, seed, position, out (best, NaN count)."""
    logits, n, ids, allowed, noisy, seed, position, out = unpack8(args, 0)
    words = chunk_words()
    peak, found, bad = -np.inf, -1, 0
    if ids == 0 and allowed == 0:
        largest, found = _first_peak(logits, n)
        peak = np.float64(largest)
    for i in range(0 if found < 0 else n, n):
        token = load_i64(ids + 8 * i) if ids != 0 else i
        if allowed != 0 and load_u8(allowed + token) == 0:
            continue
        x = np.float64(load_f32(logits + 4 * token))
        if x != x:
            bad += 1
        elif found < 0 or x > peak or (x == peak and token < found):
            peak, found = x, token
    if noisy != 0 and found >= 0:
        # the noise of the largest logit sets a floor; ids that cannot reach it need no noise
        best = peak + _gumbel_of(_word(_philox(found >> 2, position, seed), found & 3))
        for i in range(0, n, CHUNK):
            count = min(CHUNK, n - i)
            if ids == 0:
                reach = np.float64(_largest(logits + 4 * i, count))
                if reach + GUMBEL_MAX < best:
                    continue
                top = np.uint32(philox16(i >> 2, position, seed, words))
                if reach + _bound(top) < best:
                    continue
            for k in range(count):
                token = load_i64(ids + 8 * (i + k)) if ids != 0 else i + k
                x = np.float64(load_f32(logits + 4 * token))
                if x != x or x + GUMBEL_MAX < best or (allowed != 0 and load_u8(allowed + token) == 0):
                    continue
                if ids == 0:
                    word = np.uint32(load_i32(words + 64 * (k & 3) + 4 * (k >> 2)))
                else:
                    word = _word(_philox(token >> 2, position, seed), token & 3)
                if x + _bound(word) < best:
                    continue
                value = x + _gumbel_of(word)
                if value > best or (value == best and token < found):
                    best, found = value, token
    store_i64(out, found)
    store_i64(out + 8, bad)


ARGMAX = Stage(_argmax)


@device
def _key(x, token):
    """Orders by logit descending, then id ascending; as a non-negative int64."""
    bits = np.int64(bits_f32(x + np.float32(0)))  # -0 becomes +0
    order = bits ^ 0x7FFFFFFF if bits < 0 else bits  # int32 order of floats
    return (0x7FFFFFFF - order) << 31 | token


@device
def _sort(keys, n, other, counts):
    """Sort n keys by their bits 31..62, stable, in three passes of 11 bits; `other` holds n keys, and the result."""
    source, target = keys, other
    for shift in (31, 42, 53):
        for i in range(2048):
            store_i64(counts + 8 * i, 0)
        for i in range(n):
            at = counts + 8 * ((load_i64(source + 8 * i) >> shift) & 2047)
            store_i64(at, load_i64(at) + 1)
        total = 0
        for i in range(2048):
            count = load_i64(counts + 8 * i)
            store_i64(counts + 8 * i, total)
            total += count
        for i in range(n):
            key = load_i64(source + 8 * i)
            at = counts + 8 * ((key >> shift) & 2047)
            place = load_i64(at)
            store_i64(target + 8 * place, key)
            store_i64(at, place + 1)
        source, target = target, source


def _candidates(args, part, parts):
    """args: logits f32, n, allowed u8 (0: all), top_k, top_p, min_p, ids (n), probabilities f64 (n), out (kept,
    NaN logits)."""
    logits, n, allowed, top_k = unpack4(args, 0)
    top_p, min_p = load_f64(args + 32), load_f64(args + 40)
    ids, chances, out = unpack3(args, 6)
    peak, usable, bad = np.float32(-np.inf), 0, 0
    for i in range(n):
        x = load_f32(logits + 4 * i)
        if allowed != 0 and load_u8(allowed + i) == 0:
            continue
        if x != x:
            bad += 1
        elif x > np.float32(-np.inf):
            usable += 1
            peak = max(peak, x)
    keep = min(top_k, usable) if top_k > 0 else usable
    # only what lies near the peak is sorted, unless that turns out not to be enough
    counts = sort_counts()
    margin, count, kept, total = 6.0, 0, 0, 0.0
    if top_k <= 0 or top_k >= usable:
        for i in range(n):
            x = load_f32(logits + 4 * i)
            if (allowed == 0 or load_u8(allowed + i) != 0) and x > np.float32(-np.inf):
                total += exp64(np.float64(x) - np.float64(peak))
    while usable > 0:
        count = 0
        whole = margin > 1000.0
        for i in range(n):
            x = load_f32(logits + 4 * i)
            if allowed != 0 and load_u8(allowed + i) == 0:
                continue
            if x > np.float32(-np.inf) and (whole or np.float64(x) >= np.float64(peak) - margin):
                store_i64(ids + 8 * count, _key(x, i))
                count += 1
        if not whole and top_k > 0 and top_k < usable and count < keep:
            margin = margin * 3.0 if margin < 30.0 else 1e9
            continue
        _sort(ids, count, chances, counts)
        limit = min(count, keep)
        for i in range(limit):
            token = load_i64(chances + 8 * i) & 0x7FFFFFFF
            store_i64(ids + 8 * i, token)
            store_f64(chances + 8 * i, exp64(np.float64(load_f32(logits + 4 * token)) - np.float64(peak)))
        if top_k > 0 and top_k < usable:
            total = 0.0
            for i in range(limit):
                total += load_f64(chances + 8 * i)
        kept, mass, complete = 0, 0.0, limit == keep
        for i in range(limit):
            p = load_f64(chances + 8 * i)
            if p < min_p or (i > 0 and top_p < 1.0 and mass >= top_p * total):
                complete = True
                break
            mass += p
            kept = i + 1
        complete = complete or (top_p < 1.0 and mass >= top_p * total)
        if complete or whole:
            break
        margin = margin * 3.0 if margin < 30.0 else 1e9
    for i in range(kept):
        store_f64(chances + 8 * i, load_f64(chances + 8 * i) / total)
    store_i64(out, kept)
    store_i64(out + 8, bad)


CANDIDATES = Stage(_candidates)


# ------------------------------------------------------------------ entries
def gumbel(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """float64 noise of (seed, position, id) for ids int64 (n,); 0 <= seed < 2**64, ids below 2**34."""
    return _noise(seed, position, ids, 0)


def words(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """The 32-bit words behind `gumbel`: uint32 (n,)."""
    return _noise(seed, position, ids, 1).astype(np.uint32)


def _noise(seed: int, position: int, ids: np.ndarray, raw: int) -> np.ndarray:
    ids = np.ascontiguousarray(ids, np.int64)
    out = np.empty(ids.shape, np.float64)
    GUMBEL.run(arguments(_signed(seed), position, address(ids), ids.size, address(out), raw))
    return out


def _signed(seed: int) -> int:
    assert 0 <= seed < 1 << 64
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def gumbel_argmax(
    logits: np.ndarray,
    seed: int | None,
    position: int,
    candidates: np.ndarray | None = None,
    allowed: np.ndarray | None = None,
) -> tuple[int | None, int]:
    """The id with the largest logit + gumbel(seed, position, id), in float64, ties to the lowest id.

    logits f32 (V,), already divided by the temperature; seed None adds no noise (greedy). candidates int64 (n,) limits
    the choice to these ids, allowed uint8/bool (V,) to those that are not 0. Returns (id or None if there is none, NaN
    logits met); NaN logits are never chosen."""
    assert logits.dtype == np.float32
    assert logits.ndim == 1
    assert logits.flags.c_contiguous
    assert candidates is None or (candidates.dtype == np.int64 and candidates.flags.c_contiguous)
    assert allowed is None or (allowed.itemsize == 1 and len(allowed) >= len(logits) and allowed.flags.c_contiguous)
    out = np.empty(2, np.int64)
    block = arguments(
        address(logits), len(logits) if candidates is None else len(candidates),
        0 if candidates is None else address(candidates), 0 if allowed is None else address(allowed),
        int(seed is not None), 0 if seed is None else _signed(seed), position, address(out),
    )  # fmt: skip
    ARGMAX.run(block)
    return (int(out[0]) if out[0] >= 0 else None), int(out[1])


def select_candidates(
    logits: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, allowed: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """The ids that top_k, then top_p, then min_p leave, best first: (ids int64, probabilities f64, NaN logits met).

    Order and every cut go by (logit descending, id ascending), so among equal logits the lowest ids stay. Probabilities
    are a float64 softmax over what top_k leaves (0: all), sums in id order, or in rank order after top_k. top_p keeps
    the shortest prefix whose mass reaches top_p (never empty); min_p then keeps p >= min_p * best p. They are not
    renormalized after the cuts. -inf logits are never kept."""
    assert logits.dtype == np.float32
    assert logits.ndim == 1
    assert logits.flags.c_contiguous
    assert allowed is None or (allowed.itemsize == 1 and len(allowed) >= len(logits) and allowed.flags.c_contiguous)
    n = len(logits)
    ids, chances, out = np.empty(n, np.int64), np.empty(n, np.float64), np.zeros(2, np.int64)
    block = arguments(
        address(logits), n, 0 if allowed is None else address(allowed), top_k, float(top_p), float(min_p),
        address(ids), address(chances), address(out),
    )  # fmt: skip
    CANDIDATES.run(block)
    kept = int(out[0])
    return ids[:kept].copy(), chances[:kept].copy(), int(out[1])
