"""Latent attention against its slow twin, with ==: chains, trees, chosen slots, both cache types, any thread count."""

import naive
import numpy as np
import pytest

from coli.kernels import latent

CAP = 256


def run(query, cache, prefix, path, length, threads, chosen=None, rotary=16, cap=CAP):
    """`cache`: of all rows, or one for each."""
    rows, heads, width = query.shape
    rank = width - rotary
    out = np.full((rows, heads, rank), np.nan, np.float32)
    scratch = np.full(latent.working_bytes(rows, heads, rank, rotary, cap, threads), 255, np.uint8)
    caches = [cache] * rows if isinstance(cache, np.ndarray) else cache
    addresses, is_f16 = np.array([each.ctypes.data for each in caches]), caches[0].dtype == np.uint16
    latent.attention(query, out, addresses, prefix, path, length, 0.17, cap, is_f16, threads, scratch, chosen)
    return out


def twin(query, rows, rank, is_f16):
    """What every head of a row computes."""
    rows = rows.astype(np.float32)
    if is_f16:
        return naive.latent_attention16(query, rows, rank, 0.17)
    return np.array([naive.latent_attention(head, rows, rank, 0.17) for head in query])


def half_cache(rng, rows, width):
    """Standard normal numbers (rows, width), and as a float16 cache keeps them."""
    numbers = rng.standard_normal((rows, width)).astype(np.float16)
    return numbers, numbers.view(np.uint16)


def exactly(query, rows, rank, scale=0.17):
    """The attention of one query head over rows, in float64."""
    query, rows = query.astype(np.float64), rows.astype(np.float64)
    scores = rows @ query * scale
    p = np.exp(scores - scores.max())
    return p / p.sum() @ rows[:, :rank]


@pytest.mark.parametrize("is_f16", [False, True])
@pytest.mark.parametrize(("heads", "rank", "rotary"), [(1, 16, 16), (5, 32, 16), (20, 48, 32), (70, 16, 16)])
def test_every_row_is_what_the_twin_computes(heads: int, rank: int, rotary: int, is_f16: bool) -> None:
    rng = np.random.default_rng(heads)
    rows, width = 4, rank + rotary
    numbers = rng.standard_normal((CAP, width)).astype(np.float16 if is_f16 else np.float32)
    cache = numbers.view(np.uint16) if is_f16 else numbers
    query = rng.standard_normal((rows, heads, width)).astype(np.float32)
    prefix, length = np.array([1, 16, 33, 140]), np.array([0, 3, 1, 2])  # beyond a span of positions
    path = rng.integers(180, CAP, (rows, 3))
    found = [run(query, cache, prefix, path, length, threads, rotary=rotary) for threads in (1, 2, 3)]
    for s in range(rows):
        slots = [*range(prefix[s]), *path[s, : length[s]]]
        wanted = twin(query[s], numbers[slots], rank, is_f16)
        assert all(np.array_equal(each[s], wanted) for each in found), s


@pytest.mark.parametrize("is_f16", [False, True])
@pytest.mark.parametrize("rows", [2, 9])  # 9 x 40 positions: more than the cache has, so its int16 rows are kept
def test_chosen_slots_are_attended_in_their_order_and_nothing_else(rows: int, is_f16: bool) -> None:
    rng = np.random.default_rng(3)
    numbers, cache = half_cache(rng, CAP, 48)
    if not is_f16:
        numbers = cache = rng.standard_normal((CAP, 48)).astype(np.float32)
    query = rng.standard_normal((rows, 3, 48)).astype(np.float32)
    slots = np.array([rng.permutation(CAP)[:40] for _ in range(rows)])
    counts, none = np.full(rows, 40), np.zeros(rows, np.int64)
    counts[1] = 7
    found = run(query, cache, none + CAP, none[:, None], none, 2, (slots, counts))
    for s in range(rows):
        assert np.array_equal(found[s], twin(query[s], numbers[slots[s, : counts[s]]], 32, is_f16)), s


def test_a_row_gets_its_bits_whatever_rows_of_whichever_sequences_are_beside_it() -> None:
    rng = np.random.default_rng(5)
    caches = [half_cache(rng, CAP, 48)[1] for _ in range(3)]
    of_row = np.array([0, 0, 0, 1, 2, 2])  # together more positions than there is room for int16 rows
    prefix, length = np.array([139, 139, 140, 150, 90, 91]), np.array([2, 3, 0, 1, 2, 1])
    path = rng.integers(150, CAP, (6, 3))
    query = rng.standard_normal((6, 5, 48)).astype(np.float32)
    together = run(query, [caches[i] for i in of_row], prefix, path, length, 2)
    for s in range(6):
        alone = run(query[s : s + 1], caches[of_row[s]], prefix[s : s + 1], path[s : s + 1], length[s : s + 1], 1)
        assert np.array_equal(together[s], alone[0]), s


def test_where_positions_lie_does_not_matter() -> None:
    rng = np.random.default_rng(6)
    _, cache = half_cache(rng, CAP, 48)
    query, none = rng.standard_normal((1, 5, 48)).astype(np.float32), np.zeros(1, np.int64)
    straight = run(query, cache, none + 200, none[:, None], none, 1)
    moved = np.zeros_like(cache)
    path = rng.permutation(np.arange(100, CAP))[None, :100].copy()
    moved[:100], moved[path[0]] = cache[:100], cache[100:200]
    assert np.array_equal(run(query, moved, none + 100, path, none + 100, 2), straight)


@pytest.mark.parametrize("sharpness", [0.05, 1.0, 6.0])
def test_integers_of_a_float16_cache_cost_little_beside_its_rounding(sharpness: float) -> None:
    rng = np.random.default_rng(7)
    rank, rotary, heads, positions = 256, 64, 8, 600
    rows = rng.standard_normal((positions, rank + rotary)).astype(np.float32)
    rows[:, rank:] *= 4  # the rotated part is not normed
    half = rows.astype(np.float16)
    query = (rng.standard_normal((1, heads, rank + rotary)) * sharpness).astype(np.float32)
    none = np.zeros(1, np.int64)
    before, after = (
        run(query, cache, none + positions, none[:, None], none, 1, rotary=rotary, cap=positions)[0]
        for cache in (half.astype(np.float32), half.view(np.uint16))
    )
    true = np.array([exactly(head, rows, rank) for head in query[0]])
    assert np.linalg.norm(after - true) < 2 * np.linalg.norm(before - true)


def test_the_largest_sums_fit_int32() -> None:
    """Rows along their queries, and latents that are one number each, which 128 positions weigh alike."""
    rows = np.zeros((CAP, 48), np.float16)
    rows[:, 5], rows[:, 32:] = 60000, 3
    none, query = np.zeros(1, np.int64), np.array([[rows[0], -rows[0]]], np.float32) / 60000
    found = run(query, rows.view(np.uint16), none + CAP, none[:, None], none, 1)
    assert np.allclose(found[0, :, 5], 60000, rtol=1e-3)  # 510.2 of them are 510
    assert not found[0, :, :5].any()


def test_a_query_that_is_no_number_gives_none() -> None:
    _, cache = half_cache(np.random.default_rng(8), CAP, 48)
    query, none = np.ones((1, 3, 48), np.float32), np.zeros(1, np.int64)
    query[0, 0, 3], query[0, 1, 40] = np.nan, np.inf
    found = run(query, cache, none + 150, none[:, None], none, 1)
    assert np.isnan(found[0, :2]).all()
    assert np.isfinite(found[0, 2]).all()
