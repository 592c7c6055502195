"""Suffix search in a sorted index of n-grams, and drafts from the successors of all orders.

An index is a sequence of ids and its positions sorted by the ids before them, read backwards, so the occurrences of a
context of any order are one range (coli.drafts.suffix_order). Ranges of at least 256 have their successors summed up.
Nothing here reaches a logit: a draft is only a guess.
"""

from collections.abc import Sequence

import numpy as np

from coli.kernels.ops import exp64, load_f32, load_f64, load_i32, load_i64, log64, store_f64, store_i64
from coli.kernels.runtime import Stage, address, arguments, device

MAX_ORDER = 10
ATTENTIVE, SINGLE_ORDER, WITTEN_BELL = 0, 1, 2
ARRAY_TYPES = ("u1", "u4", "i4", "i8", "i8", "u4", "u4", "f4", "i8", "i4", "u4")
STRIDE, SAMPLED = 256, 4  # the directory holds the last 4 ids before every 256th sorted position
HEAVY = 256  # ranges of this size have an entry among the heavy contexts
SLOTS = 8192  # of the accumulator: at most 10 orders x 256 successors are in it
MAX_DRAFTED = 63
RELIABLE = 16  # occurrences beyond which a context counts as no more reliable

TOKEN_BYTES = 3  # of one id among the tokens; all ones: a separator

# words of the index block: 0 tokens, 1 their number (but for the last, so that four bytes can be read at any of them),
# 2 positions, 3 their number, 4 first, 5 vocabulary, then of the heavy contexts 6 keys, 7 their number, 8 latest,
# 9 types, 10 entropy, 11 first, 12 ids, 13 counts, 14 number of ids; 15 is the directory
# A file may be damaged where nobody looked: whatever is read from it is brought into range before it is an index.


@device
def _word(index, i):
    return load_i64(index + 8 * i)


@device
def _u32(at):
    return np.int64(load_i32(at)) & 0xFFFFFFFF


@device
def _id(index, at):
    """Token `at`, -1 for a separator."""
    bits = np.int64(load_i32(_word(index, 0) + 3 * max(at, 0))) & 0xFFFFFF
    return bits - ((bits + 1) & 0x1000000)


@device
def _id_before(index, place, distance):
    """The id `distance` before the position at `place` of the sorted order."""
    return _id(index, min(_u32(_word(index, 2) + 4 * place), _word(index, 1) - 1) - distance)


@device
def _bound(index, low, high, distance, wanted):
    """First place of [low, high) whose id `distance` before is at least `wanted`."""
    if distance <= 4:  # every 256th place is in the directory: one small array instead of pages all over the file
        left, right = (low + 255) >> 8, (high + 255) >> 8
        while left < right:
            middle = (left + right) >> 1
            if np.int64(load_i32(_word(index, 15) + 16 * middle + 4 * (distance - 1))) < wanted:
                left = middle + 1
            else:
                right = middle
        low, high = max(low, ((left - 1) << 8) + 1), min(high, left << 8)
    while low < high:
        middle = (low + high) >> 1
        if _id_before(index, middle, distance) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


@device
def _end(index, low, high, distance, wanted):
    """First place of [low, high) whose id `distance` before is not `wanted`, which place `low` has. In growing steps:
    most contexts are rare, so this end is near, in lines of memory that the search for the other one has fetched."""
    step = 1
    while low + step < high and step < 512 and _id_before(index, low + step, distance) == wanted:
        low += step
        step *= 2
    return _bound(index, low + 1, min(high, low + step) if step < 512 else high, distance, wanted + 1)


@device
def _ranges(index, context, n, depth, out):
    """Ranges of the last 1..depth ids of context i64 (n,), to out i64 (depth, 2); returns how many are not empty."""
    if n < 1 or depth < 1:
        return 0
    newest = load_i64(context + 8 * (n - 1))
    if newest < 0 or newest >= _word(index, 5):
        return 0
    low, high = load_i64(_word(index, 4) + 8 * newest), load_i64(_word(index, 4) + 8 * newest + 8)
    low, high = max(low, 0), min(high, _word(index, 3))
    order = 0
    while low < high:
        store_i64(out + 16 * order, low)
        store_i64(out + 16 * order + 8, high)
        order += 1
        if order >= depth or order >= n:
            break
        wanted = load_i64(context + 8 * (n - 1 - order))
        if high - low > 1:
            low = _bound(index, low, high, order + 1, wanted)
        if low >= high or _id_before(index, low, order + 1) != wanted:
            break
        if high - low > 1:
            high = _end(index, low, high, order + 1, wanted)
    return order


@device
def _heavy(index, low, high, order):
    """Entry of the heavy context of this range, or -1 if it is a light one."""
    if high - low < 256:
        return -1
    keys, left, right = _word(index, 6), 0, _word(index, 7)
    wanted = low << 4 | order
    while left < right:
        middle = (left + right) >> 1
        if load_i64(keys + 8 * middle) < wanted:
            left = middle + 1
        else:
            right = middle
    return left if left < _word(index, 7) and load_i64(keys + 8 * left) == wanted else -1


def _search(args, part, parts):
    """args: index, context, n, depth, ranges (depth, 2), out (orders matched, latest position of the longest, number of
    ids that follow there), ids i64 of those, most of them."""
    index, ranges, out = load_i64(args), load_i64(args + 32), load_i64(args + 40)
    order = _ranges(index, load_i64(args + 8), load_i64(args + 16), load_i64(args + 24), ranges)
    latest = -1
    if order > 0:
        low, high = load_i64(ranges + 16 * order - 16), load_i64(ranges + 16 * order - 8)
        entry = _heavy(index, low, high, order)
        if entry >= 0:
            latest = _u32(_word(index, 8) + 4 * entry)
        else:  # also a long range of an order that is not summed up
            for place in range(low, high):
                latest = max(latest, _u32(_word(index, 2) + 4 * place))
    latest = min(latest, _word(index, 1) - 1)
    count = 0
    if latest >= 0:
        most = min(load_i64(args + 56), _word(index, 1) - latest)
        while count < most:
            token = _id(index, latest + count)
            if token < 0:
                break
            store_i64(load_i64(args + 48) + 8 * count, token)
            count += 1
    store_i64(out, order)
    store_i64(out + 8, latest)
    store_i64(out + 16, count)


SEARCH = Stage(_search)


@device
def _add(table, token, amount, used):
    """Add to the accumulator; returns the number of slots in use. table: keys i64, values f64, used slots i64."""
    slot = (token * 0x9E3779B1 >> 7) & 8191
    while True:
        key = load_i64(table + 8 * slot)
        if key == token:
            store_f64(table + 65536 + 8 * slot, load_f64(table + 65536 + 8 * slot) + amount)
            return used
        if key < 0:
            store_i64(table + 8 * slot, token)
            store_f64(table + 65536 + 8 * slot, amount)
            store_i64(table + 131072 + 8 * used, slot)
            return used + 1
        slot = (slot + 1) & 8191


@device
def _clear(table, used):
    for i in range(used):
        store_i64(table + 8 * load_i64(table + 131072 + 8 * i), -1)


@device
def _summarize(index, table, low, high, entry, ids):
    """(successors kept, distinct ones, entropy in nats) of a range; those of a light one go to ids (id, count)."""
    if entry >= 0:
        first, last = load_i64(_word(index, 11) + 8 * entry), load_i64(_word(index, 11) + 8 * entry + 8)
        kept = min(max(last, 0), _word(index, 14)) - max(first, 0)
        nats = np.float64(load_f32(_word(index, 10) + 4 * entry))
        return min(max(kept, 0), 256), _u32(_word(index, 9) + 4 * entry), nats if nats == nats else 0.0
    used = 0
    for place in range(low, min(high, low + 256)):
        token = _id_before(index, place, 0)
        if token >= 0:
            used = _add(table, token, 1.0, used)
    spread = 0.0
    for i in range(used):
        slot = load_i64(table + 131072 + 8 * i)
        count = load_f64(table + 65536 + 8 * slot)
        store_i64(ids + 16 * i, load_i64(table + 8 * slot))
        store_i64(ids + 16 * i + 8, np.int64(count))
        if count > 1.0:
            spread += count * log64(count)
    _clear(table, used)
    total = np.float64(high - low)
    return used, used, log64(total) - spread / total


@device
def _weights(orders, mode, order_bias, temperature, reliability, penalty, ranges, types, entropy, weights):
    """Weights (sum 1) of the matched orders 1..orders."""
    if mode == 1:
        for o in range(orders):
            store_f64(weights + 8 * o, 1.0 if o == orders - 1 else 0.0)
        return
    total = 0.0
    if mode == 2:
        rest = 1.0
        for o in range(orders - 1, -1, -1):
            n = np.float64(load_i64(ranges + 16 * o + 8) - load_i64(ranges + 16 * o))
            t = np.float64(load_i64(types + 8 * o))
            store_f64(weights + 8 * o, rest * n / (n + t))
            total += rest * n / (n + t)
            rest *= t / (n + t)
    else:
        peak = -1e300
        for o in range(orders):
            n = min(load_i64(ranges + 16 * o + 8) - load_i64(ranges + 16 * o), 16)
            score = order_bias * (o + 1) + reliability * log64(np.float64(1 + n))
            score = (score - penalty * load_f64(entropy + 8 * o)) / temperature
            store_f64(weights + 8 * o, score)
            peak = max(peak, score)
        for o in range(orders):
            w = exp64(load_f64(weights + 8 * o) - peak)
            store_f64(weights + 8 * o, w)
            total += w
    for o in range(orders):
        store_f64(weights + 8 * o, load_f64(weights + 8 * o) / total)


@device
def _mix(index, table, orders, ranges, kept, entries, weights, ids):
    """Put the mixture into the accumulator; returns (slots in use, mass)."""
    used, mass = 0, 0.0
    for o in range(orders):
        size = load_i64(ranges + 16 * o + 8) - load_i64(ranges + 16 * o)
        share = load_f64(weights + 8 * o) / np.float64(size)
        if share == 0.0:
            continue
        entry = load_i64(entries + 8 * o)
        first = max(load_i64(_word(index, 11) + 8 * entry), 0) if entry >= 0 else 0
        for i in range(load_i64(kept + 8 * o)):
            if entry >= 0:
                token = np.int64(load_i32(_word(index, 12) + 4 * (first + i)))
                count = _u32(_word(index, 13) + 4 * (first + i))
            else:
                token = load_i64(ids + 4096 * o + 16 * i)
                count = load_i64(ids + 4096 * o + 16 * i + 8)
            if token >= 0:
                used = _add(table, token, share * np.float64(count), used)
                mass += share * np.float64(count)
    return used, mass


def _draft(args, part, parts):
    """args: index, context (n + k), n, depth, mode, order bias, temperature, reliability, penalty, k, scratch,
    ids i64 (k), probabilities f64 (k), orders i64 (k), law ids i64, law probabilities f64, out (drafted, law size)."""
    index, context, n, depth = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
    mode, order_bias, temperature = load_i64(args + 32), load_f64(args + 40), load_f64(args + 48)
    reliability, penalty, k = load_f64(args + 56), load_f64(args + 64), load_i64(args + 72)
    table = load_i64(args + 80)  # keys, values, used slots (8192 each); then 10 of: ranges (2), kept, entry, types,
    ranges = table + 3 * 65536  # entropy, weight; then 10 x 256 successors of light contexts (id, count)
    kept, entries, types, entropy = ranges + 160, ranges + 240, ranges + 320, ranges + 400
    weights, light = ranges + 480, ranges + 560
    used, mass, drafted = 0, 1.0, 0
    while drafted < k:
        _clear(table, used)
        used = 0
        orders = _ranges(index, context, n + drafted, depth, ranges)
        if orders == 0:
            break
        for o in range(orders):
            if mode == 1 and o < orders - 1:
                continue
            low, high = load_i64(ranges + 16 * o), load_i64(ranges + 16 * o + 8)
            entry = _heavy(index, low, high, o + 1)
            keep, distinct, nats = _summarize(index, table, low, high, entry, light + 4096 * o)
            store_i64(kept + 8 * o, keep)
            store_i64(entries + 8 * o, entry)
            store_i64(types + 8 * o, distinct)
            store_f64(entropy + 8 * o, nats)
        _weights(orders, mode, order_bias, temperature, reliability, penalty, ranges, types, entropy, weights)
        used, mass = _mix(index, table, orders, ranges, kept, entries, weights, light)
        best, best_value = -1, 0.0
        for i in range(used):
            slot = load_i64(table + 131072 + 8 * i)
            token, value = load_i64(table + 8 * slot), load_f64(table + 65536 + 8 * slot)
            if value > best_value or (value == best_value and token < best):
                best, best_value = token, value
        if best < 0:
            break
        store_i64(load_i64(args + 88) + 8 * drafted, best)
        store_f64(load_i64(args + 96) + 8 * drafted, best_value / mass)
        store_i64(load_i64(args + 104) + 8 * drafted, orders)
        store_i64(context + 8 * (n + drafted), best)
        drafted += 1
    law_ids, law, out = load_i64(args + 112), load_i64(args + 120), load_i64(args + 128)
    if law_ids != 0:
        for i in range(used):
            slot = load_i64(table + 131072 + 8 * i)
            store_i64(law_ids + 8 * i, load_i64(table + 8 * slot))
            store_f64(law + 8 * i, load_f64(table + 65536 + 8 * slot) / mass)
    _clear(table, used)
    store_i64(out, drafted)
    store_i64(out + 8, used)


DRAFT = Stage(_draft)


# ------------------------------------------------------------------ entries
class IndexArrays:
    """One index in memory or mapped, and the scratch memory of searches in it. One thread at a time.

    tokens uint8 (3 (n + 1),), ids of 3 bytes, low one first, and separators (all ones), the first MAX_ORDER separators,
    the last one too, which does not count; positions uint32 (m,); directory int32
    (ceil(m / STRIDE) * SAMPLED,), the ids before every STRIDE-th of them, newest first; first int64 (V + 1,) range of
    the positions behind each id; of the contexts with at least HEAVY occurrences keys int64 (h,) start << 4 | order
    ascending, latest and types uint32 (h,), entropy float32 (h,), heavy_first int64 (h + 1,) range in ids int32 (e,)
    and counts uint32 (e,), at most 256 successors a context, best first. Values out of range give wrong drafts, never
    a wrong access. `draft` and `law` must not be asked for orders that were not summed up."""

    def __init__(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        directory: np.ndarray,
        first: np.ndarray,
        keys: np.ndarray,
        latest: np.ndarray,
        types: np.ndarray,
        entropy: np.ndarray,
        heavy_first: np.ndarray,
        ids: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        self._arrays = (tokens, positions, directory, first, keys, latest, types, entropy, heavy_first, ids, counts)
        for array, dtype in zip(self._arrays, ARRAY_TYPES, strict=True):
            assert array.dtype == np.dtype(dtype)
            assert array.ndim == 1
            assert array.flags.c_contiguous
        assert len(tokens) % TOKEN_BYTES == 0
        assert len(tokens) > TOKEN_BYTES
        assert len(latest) == len(types) == len(entropy) == len(keys) == len(heavy_first) - 1
        assert len(ids) == len(counts)
        assert len(directory) == -(-len(positions) // STRIDE) * SAMPLED
        self._block = arguments(
            address(tokens), len(tokens) // TOKEN_BYTES - 1, address(positions), len(positions),
            address(first), len(first) - 1, address(keys), len(keys),
            address(latest), address(types), address(entropy), address(heavy_first),
            address(ids), address(counts), len(ids), address(directory),
        )  # fmt: skip
        _ = SEARCH.address  # loaded now, not while a token is waited for
        self._context = np.empty(MAX_ORDER + MAX_DRAFTED, np.int64)
        self._ranges, self._out = np.empty((MAX_ORDER, 2), np.int64), np.empty(3, np.int64)
        self._scratch = np.zeros(3 * SLOTS + 70 + MAX_ORDER * 2 * HEAVY, np.int64)
        self._scratch[:SLOTS] = -1
        self._ids, self._orders = np.empty(MAX_DRAFTED, np.int64), np.empty(MAX_DRAFTED, np.int64)
        self._chances = np.empty(MAX_DRAFTED, np.float64)
        self._search_block = arguments(
            address(self._block), address(self._context), 0, 0, address(self._ranges), address(self._out),
            address(self._ids), 0,
        )  # fmt: skip

    def _load(self, context, depth):
        """The last ids of `context` into the buffer; returns their number."""
        recent = context[-depth:]
        self._context[: len(recent)] = recent
        return len(recent)

    def search(self, context: Sequence[int], depth: int) -> tuple[np.ndarray, int]:
        """Ranges int64 (orders, 2) of the last 1, 2 .. depth ids of `context`, as far as they occur (valid until the
        next call), and the highest position that follows the longest one (-1: none)."""
        orders, latest, _ = self._run_search(context, depth, 0)
        return self._ranges[:orders], latest

    def continuation(self, context: Sequence[int], depth: int, limit: int) -> tuple[int, list[int]]:
        """(orders, ids): how many of the last 1, 2 .. depth ids of `context` occur, and up to `limit` ids behind the
        last occurrence of the longest, to the end of its document."""
        orders, _, count = self._run_search(context, depth, limit)
        return orders, self._ids[:count].tolist()

    def _run_search(self, context, depth, limit):
        assert 1 <= depth <= MAX_ORDER
        assert 0 <= limit <= MAX_DRAFTED
        block = self._search_block
        block[2], block[3], block[7] = self._load(context, depth), depth, limit
        SEARCH.run(block)
        return self._out.tolist()

    def draft(
        self,
        context: Sequence[int],
        k: int,
        max_order: int,
        mode: int,
        order_bias: float = 1.0,
        temperature: float = 1.0,
        reliability: float = 1.0,
        penalty: float = 0.5,
    ) -> tuple[list[int], list[float], list[int]]:
        """Up to k ids, each the likeliest behind `context` and the ones before; fewer where nothing matches.

        Returns the ids, their probabilities and the longest matching orders.
        mode ATTENTIVE weighs order o by softmax((order_bias o + reliability ln(1 + min(N, 16)) - penalty H) /
        temperature) with N occurrences and successor entropy H nats; SINGLE_ORDER takes the longest alone; WITTEN_BELL
        gives order o N / (N + T) of what longer ones left, with T distinct successors. Laws are counts / N over the
        256 most frequent successors, the mixture is renormalized. Equal probabilities: the lowest id."""
        knobs = float(order_bias), float(temperature), float(reliability), float(penalty)
        drafted, _, _ = self._draft(context, k, max_order, mode, knobs, 0, 0)
        return self._ids[:drafted].tolist(), self._chances[:drafted].tolist(), self._orders[:drafted].tolist()

    def law(
        self,
        context: Sequence[int],
        max_order: int,
        mode: int,
        order_bias: float = 1.0,
        temperature: float = 1.0,
        reliability: float = 1.0,
        penalty: float = 0.5,
    ) -> tuple[np.ndarray, np.ndarray]:
        """ids int64 (m,) and probabilities float64 (m,) of the mixture behind context, unordered; empty if unknown."""
        knobs = float(order_bias), float(temperature), float(reliability), float(penalty)
        ids, chances = np.empty(MAX_ORDER * HEAVY, np.int64), np.empty(MAX_ORDER * HEAVY, np.float64)
        _, used, _ = self._draft(context, 1, max_order, mode, knobs, address(ids), address(chances))
        return ids[:used], chances[:used]

    def _draft(self, context, k, max_order, mode, knobs, law_ids, law):
        assert 1 <= max_order <= MAX_ORDER
        assert 0 <= k <= MAX_DRAFTED
        n = self._load(context, max_order)
        block = arguments(
            address(self._block), address(self._context), n, max_order, mode, *knobs, k, address(self._scratch),
            address(self._ids), address(self._chances), address(self._orders), law_ids, law, address(self._out),
        )  # fmt: skip
        DRAFT.run(block)
        return self._out.tolist()
