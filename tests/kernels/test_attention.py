"""Attention equals the single-row loop for any slots, company, tiling, threads or windows; cache writes are exact."""

import naive
import numpy as np
import pytest

from coli.kernels import attention as kernel
from coli.kernels.runtime import address

HALVES = pytest.mark.parametrize("half", [False, True], ids=["f32", "f16"])


class Cache:
    """Keys and values of one sequence, poisoned where nothing was written."""

    def __init__(self, kv_heads: int, dim: int, cap: int, half: bool) -> None:
        dtype, poison = (np.uint16, 0x7E00) if half else (np.float32, np.nan)
        self.kv_heads, self.dim, self.cap, self.half = kv_heads, dim, cap, half
        self.k = np.full((kv_heads, cap // 16, dim, 16), poison, dtype)
        self.v = np.full((kv_heads, cap, dim), poison, dtype)

    def addresses(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(rows, address(self.k)), np.full(rows, address(self.v))

    def append(self, k: np.ndarray, v: np.ndarray, slots: np.ndarray, threads: int = 1) -> int:
        return kernel.kv_append(
            k, 0, v, 0, *self.addresses(len(slots)), slots, self.kv_heads, self.dim, self.cap, self.half, threads
        )

    def attend(self, q, prefix_len, path, path_len, window, heads, threads=1, sinks=None):
        out = np.full(q.shape, np.nan, np.float32)
        kernel.attention(
            q, out, *self.addresses(len(q)), np.asarray(prefix_len), path, np.asarray(path_len), window,
            self.dim**-0.5, heads, self.kv_heads, self.dim, self.cap, self.half, threads,
            sinks=sinks,
        )  # fmt: skip
        return out


def stored(x: np.ndarray, half: bool) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32) if half else x


def no_path(rows: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((rows, 1), np.int64), np.zeros(rows, np.int64)


class Case:
    """A sequence of `length` positions and q rows for the last `rows` of them."""

    def __init__(self, heads, kv_heads, dim, half, length=75, rows=9, cap=160):
        rng = np.random.default_rng(heads * dim)
        self.heads, self.kv_heads, self.dim, self.half, self.length, self.rows = (
            heads,
            kv_heads,
            dim,
            half,
            length,
            rows,
        )
        self.k, self.v = (rng.standard_normal((length, kv_heads * dim)).astype(np.float32) for _ in range(2))
        self.q = rng.standard_normal((rows, heads * dim)).astype(np.float32)
        self.cache = Cache(kv_heads, dim, cap, half)
        assert self.cache.append(self.k, self.v, np.arange(length), 2) == 0
        self.prefix = np.arange(length - rows, length) + 1

    def naive(self, window: int, sinks: np.ndarray | None = None) -> np.ndarray:
        k = stored(self.k, self.half).reshape(self.length, self.kv_heads, self.dim)
        v = stored(self.v, self.half).reshape(self.length, self.kv_heads, self.dim)
        out = np.empty((self.rows, self.heads, self.dim), np.float32)
        for s, stop in enumerate(self.prefix):
            for h in range(self.heads):
                q, kh = self.q[s, h * self.dim : (h + 1) * self.dim], h // (self.heads // self.kv_heads)
                out[s, h] = naive.attention(
                    q, k[:stop, kh], v[:stop, kh], window, self.dim**-0.5, -np.inf if sinks is None else sinks[h]
                )
        return out.reshape(self.rows, -1)


SHAPES = pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 1, 24), (16, 2, 64), (3, 3, 80)])


@SHAPES
@HALVES
@pytest.mark.parametrize("window", [0, 5, 20, 64])
def test_equals_the_slow_twin(heads, kv_heads, dim, half, window):
    case = Case(heads, kv_heads, dim, half)
    out = case.cache.attend(case.q, case.prefix, *no_path(case.rows), window, heads, 2)
    assert np.array_equal(out, case.naive(window))


@SHAPES
@HALVES
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_sinks_take_weight_and_give_nothing(heads, kv_heads, dim, half, window, threads):
    case = Case(heads, kv_heads, dim, half)
    sinks = np.linspace(-3, 6, heads).astype(np.float32)
    out = case.cache.attend(case.q, case.prefix, *no_path(case.rows), window, heads, threads, sinks)
    assert np.array_equal(out, case.naive(window, sinks))


@SHAPES
@HALVES
@pytest.mark.parametrize("window", [0, 20])
def test_rows_of_a_tree_equal_rows_of_a_chain(heads, kv_heads, dim, half, window):
    """The last 24 positions lie in scattered slots that the rows name in their paths."""
    case, prefix = Case(heads, kv_heads, dim, half), 51
    scattered = Cache(kv_heads, dim, 160, half)
    scattered.append(case.k[:prefix], case.v[:prefix], np.arange(prefix))
    slots = np.random.default_rng(1).permutation(np.arange(prefix, 160))[: case.length - prefix]
    scattered.append(case.k[prefix:], case.v[prefix:], slots)
    path_len = case.prefix - prefix
    path = np.zeros((case.rows, 30), np.int64)
    for s, count in enumerate(path_len):
        path[s, :count] = slots[:count]
    chain = case.cache.attend(case.q, case.prefix, *no_path(case.rows), window, heads)
    tree = scattered.attend(case.q, np.full(case.rows, prefix), path, path_len, window, heads, 2)
    assert np.array_equal(tree, chain)
    # rows with and without paths side by side
    mixed_prefix, mixed_len = np.full(case.rows, prefix), path_len.copy()
    mixed_prefix[::2], mixed_len[::2] = prefix, 0
    mixed = scattered.attend(case.q, mixed_prefix, path, mixed_len, window, heads)
    assert np.array_equal(mixed[1::2], chain[1::2])


@HALVES
def test_a_row_has_the_same_bits_in_every_batch(half):
    case = Case(16, 2, 64, half, length=140, rows=64)
    path, path_len = no_path(64)
    single = [case.cache.attend(case.q[s : s + 1], case.prefix[s : s + 1], *no_path(1), 33, 16) for s in range(64)]
    single = np.concatenate(single)
    for rows in (2, 3, 7, 16, 33, 64):
        for threads in (1, 2):
            out = case.cache.attend(case.q[-rows:], case.prefix[-rows:], path[:rows], path_len[:rows], 33, 16, threads)
            assert np.array_equal(out, single[-rows:]), (rows, threads)


def test_rows_of_several_sequences_do_not_mix():
    first, second = Case(4, 2, 32, False, length=40), Case(4, 2, 32, False, length=90)
    q = np.concatenate([first.q, second.q])[np.argsort(np.arange(18) % 9, kind="stable")]  # alternating
    k_addr, v_addr = (
        np.array([address(getattr(c.cache, n)) for _ in range(9) for c in (first, second)]) for n in ("k", "v")
    )
    prefix = np.stack([first.prefix, second.prefix], axis=1).ravel()
    out = np.empty_like(q)
    kernel.attention(q, out, k_addr, v_addr, prefix, *no_path(18), 0, 32**-0.5, 4, 2, 32, 160, False, 2)
    assert np.array_equal(out[0::2], first.naive(0))
    assert np.array_equal(out[1::2], second.naive(0))


@HALVES
def test_keys_and_values_are_rounded_to_the_cache_type(half):
    cache = Cache(2, 24, 32, half)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((3, 48)).astype(np.float32) * 1e-4 for _ in range(2))
    assert cache.append(k, v, np.array([5, 17, 31])) == 0
    for s, slot in enumerate((5, 17, 31)):
        kept_k, kept_v = cache.k[:, slot // 16, :, slot % 16], cache.v[:, slot]
        if half:
            kept_k, kept_v = kept_k.view(np.float16), kept_v.view(np.float16)
        assert np.array_equal(kept_k.ravel(), k[s].astype(kept_k.dtype))
        assert np.array_equal(kept_v.ravel(), v[s].astype(kept_v.dtype))


def test_half_precision_overflow_and_nan_are_counted():
    cache = Cache(1, 16, 16, True)
    k, v = np.zeros((2, 16), np.float32), np.zeros((2, 16), np.float32)
    k[0, 3], k[1, 0], v[1, 5], v[1, 6] = 65519.0, 65520.0, -1e30, np.nan
    assert cache.append(k, v, np.array([0, 1]), 2) == 3
    assert Cache(1, 16, 16, False).append(k, v, np.array([0, 1])) == 1


def test_half_conversion_agrees_with_numpy_for_every_pattern():
    """All 65536 values, and float32 around every rounding boundary."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    exact = halves.astype(np.float32)
    with np.errstate(invalid="ignore"):
        x = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), (exact + exact * np.float32(2**-11))])
    x = np.pad(x, (0, -len(x) % 16)).reshape(-1, 16)
    cap = -(-len(x) // 16) * 16
    cache = Cache(1, 16, cap, True)
    cache.append(x, x, np.arange(len(x)))
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    nan = np.isnan(expected)
    assert np.array_equal(cache.v[0, : len(x)][~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(cache.v[0, : len(x)].view(np.float16)[nan]).all()


@HALVES
def test_copied_slots_keep_their_bits(half):
    case = Case(4, 2, 24, half)
    before_k, before_v = case.cache.k.copy(), case.cache.v.copy()
    source, target = np.array([60, 70, 74]), np.array([58, 59, 60])
    kernel.copy_slots(address(case.cache.k), address(case.cache.v), source, target, 2, 24, 160, half)
    for a, b in zip(source, target, strict=True):
        assert np.array_equal(case.cache.v[:, b].view(np.uint8), before_v[:, a].view(np.uint8))
        k_a, k_b = before_k[:, a // 16, :, a % 16], case.cache.k[:, b // 16, :, b % 16]
        assert np.array_equal(np.ascontiguousarray(k_b).view(np.uint8), np.ascontiguousarray(k_a).view(np.uint8))


@HALVES
def test_nan_in_a_seen_position_reaches_the_row(half):
    case = Case(4, 2, 32, half)
    case.k[40, 3] = np.nan
    case.cache.append(case.k[40:41], case.v[40:41], np.array([40]))
    out = case.cache.attend(case.q, case.prefix, *no_path(case.rows), 0, 4)
    assert np.isnan(out[:, :64]).all()  # kv head 0 serves query heads 0 and 1
    assert np.isfinite(out[:, 64:]).all()


def test_given_working_memory_is_enough():
    case = Case(16, 2, 64, True, rows=40)
    size = kernel.working_bytes(40, 16, 2, 64, 160, 2)
    scratch, out = np.full(size, 255, np.uint8), np.empty_like(case.q)
    kernel.attention(
        case.q, out, *case.cache.addresses(40), case.prefix, *no_path(40), 0, 0.125, 16, 2, 64, 160, True, 2,
        most_positions=160, scratch=scratch,
    )  # fmt: skip
    assert np.array_equal(out, case.cache.attend(case.q, case.prefix, *no_path(40), 0, 16))


@pytest.mark.parametrize("threads", [3, 5, 8])
def test_heads_are_split_where_threads_would_idle(threads):
    """The bits of one thread, with units of one, two or four heads."""
    case = Case(16, 2, 64, True)
    one = case.cache.attend(case.q[:1], case.prefix[:1], *no_path(1), 0, 16)
    assert np.array_equal(case.cache.attend(case.q[:1], case.prefix[:1], *no_path(1), 0, 16, threads), one)
    all_rows = case.cache.attend(case.q, case.prefix, *no_path(case.rows), 20, 16)
    assert np.array_equal(case.cache.attend(case.q, case.prefix, *no_path(case.rows), 20, 16, threads), all_rows)
