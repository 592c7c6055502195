"""Sampling noise: known answers, uniformity and independence; the pruned argmax and the cuts are exact."""

import math

import naive
import numpy as np
import pytest

from coli.kernels import noise


def test_philox_known_answers():
    """Vectors of the authors' Random123 distribution."""
    assert naive.philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert noise.words(0, 0, np.arange(4)).tolist() == naive.philox(0, 0, 0)


@pytest.mark.parametrize("seed", [0, 1, 0x123456789ABCDEF0, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 7, 2**33 + 5])
def test_words_equal_the_slow_twin(seed, position):
    ids = [0, 1, 2, 3, 4, 1001, 151_935]
    assert noise.words(seed, position, np.array(ids)).tolist() == [
        naive.philox(seed, i // 4, position)[i % 4] for i in ids
    ]


def test_words_are_uniform_and_independent():
    """Chi-square over 256 values of every byte, and correlation between neighbours of id, position and seed."""
    n = 200_000
    words = noise.words(11, 5, np.arange(n))
    for shift in (0, 8, 16, 24):
        counts = np.bincount(words >> shift & 255, minlength=256)
        chi = ((counts - n / 256) ** 2 / (n / 256)).sum()
        assert 160 < chi < 370  # 255 degrees of freedom, beyond 4 sigma
    u = words / 2.0**32 - 0.5
    for other in (
        noise.words(11, 5, np.arange(1, n + 1)),
        noise.words(11, 6, np.arange(n)),
        noise.words(12, 5, np.arange(n)),
        noise.words(11 + 2**32, 5, np.arange(n)),
        noise.words(11, 5 + 2**32, np.arange(n)),
    ):
        correlation = float((u * (other / 2.0**32 - 0.5)).mean() * 12)
        assert abs(correlation) < 4.5 / math.sqrt(n)


def test_gumbel_is_the_double_logarithm():
    ids = np.arange(5000)
    u = (noise.words(3, 1, ids) + 0.5) / 2.0**32
    expected = -np.log(-np.log(u))
    assert np.abs(noise.gumbel(3, 1, ids) - expected).max() < 1e-14
    assert abs(noise.gumbel(3, 1, np.arange(300_000)).mean() - 0.5772156649) < 0.01


def test_gumbel_argmax_samples_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    n = 20_000
    counts = np.bincount([noise.gumbel_argmax(logits, 77, p)[0] for p in range(n)], minlength=4)
    expected = n * np.array([0.5, 0.3, 0.15, 0.05])
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, 0.1 %


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 30.0])
def test_pruning_never_changes_the_choice(scale):
    rng = np.random.default_rng(0)
    for position in [*range(40), 2**31, 2**40 + 3]:
        for size in (3001, 64, 63, 65, 5):
            logits = (rng.standard_normal(size) * scale).astype(np.float32)
            total = logits.astype(np.float64) + noise.gumbel(2**63 + 5, position, np.arange(size))
            best = int(np.argmax(total))
            assert noise.gumbel_argmax(logits, 2**63 + 5, position) == (best, 0)
            without = np.ones(size, np.uint8)
            without[best] = 0
            total[best] = -np.inf
            assert noise.gumbel_argmax(logits, 2**63 + 5, position, allowed=without) == (int(np.argmax(total)), 0)


def test_greedy_takes_the_lowest_of_equals():
    logits = np.array([1, 3, 2, 3, np.nan, 3], np.float32)
    assert noise.gumbel_argmax(logits, None, 0) == (1, 1)
    assert noise.gumbel_argmax(logits, None, 0, candidates=np.array([5, 3])) == (3, 0)
    allowed = np.array([1, 0, 1, 0, 1, 1], np.uint8)
    assert noise.gumbel_argmax(logits, None, 0, allowed=allowed) == (5, 1)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("values", [[-np.inf], [0.0, -0.0], [np.nan], [np.inf, -np.inf], [-1e30, np.nan, 5.0]])
def test_the_peak_found_by_vectors_is_the_one_found_id_by_id(size, values):
    rng = np.random.default_rng(size)
    every = np.ones(size, np.uint8)  # a restriction that restricts nothing takes the loop over ids
    for count in (1, 2, size):
        logits = rng.integers(-3, 1, size).astype(np.float32)
        logits[rng.integers(0, size, count)] = rng.choice(np.array(values, np.float32), count)
        for seed in (None, 7):
            expected = noise.gumbel_argmax(logits, seed, 5, allowed=every)
            assert noise.gumbel_argmax(logits, seed, 5) == expected
            if seed is None and not np.isnan(logits).any():
                assert expected[0] == int(np.argmax(logits))


def test_nothing_to_choose_from():
    logits = np.full(4, np.nan, np.float32)
    assert noise.gumbel_argmax(logits, 1, 0) == (None, 4)
    assert noise.gumbel_argmax(np.zeros(4, np.float32), 1, 0, allowed=np.zeros(4, np.uint8)) == (None, 0)
    ids, chances, bad = noise.select_candidates(logits)
    assert (len(ids), len(chances), bad) == (0, 0, 4)


def test_minus_infinity_is_never_sampled_before_a_finite_logit():
    logits = np.array([-np.inf, 0, -np.inf, -5], np.float32)
    assert {noise.gumbel_argmax(logits, 9, p)[0] for p in range(2000)} == {1, 3}


@pytest.mark.parametrize("restricted", ["candidates", "allowed"])
def test_restricting_the_choice_keeps_the_noise_of_each_id(restricted):
    logits = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    some = np.arange(3, 500, 7)
    mask = np.zeros(500, np.uint8)
    mask[some] = 1
    for position in range(50):
        total = logits[some].astype(np.float64) + noise.gumbel(2, position, some)
        limits = {"candidates": some} if restricted == "candidates" else {"allowed": mask}
        assert noise.gumbel_argmax(logits, 2, position, **limits)[0] == some[np.argmax(total)]


CUTS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (40, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.999999, 0.0),
    (0, 1.0, 0.05),
    (50, 0.8, 0.02),
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), CUTS)
@pytest.mark.parametrize("scale", [0.01, 2.0, 10.0])
def test_cuts_equal_the_slow_twin(top_k, top_p, min_p, scale):
    logits = (np.random.default_rng(6).standard_normal(2000) * scale).astype(np.float32)
    logits[5] = -np.inf
    ids, chances, bad = noise.select_candidates(logits, top_k, top_p, min_p)
    assert bad == 0
    assert ids.tolist() == naive.select(logits, top_k, top_p, min_p)
    if not top_k and top_p == 1.0 and not min_p:
        assert abs(chances.sum() - 1) < 1e-12


def test_ties_at_a_cut_keep_the_lowest_ids():
    logits = np.zeros(100, np.float32)
    logits[50] = 1
    assert noise.select_candidates(logits, top_k=4)[0].tolist() == [50, 0, 1, 2]
    ids, _, _ = noise.select_candidates(np.array([0, -0.0, 0, -0.0], np.float32), top_p=0.6)
    assert ids.tolist() == [0, 1, 2]


def test_cuts_respect_the_allowed_ids():
    logits, mask = np.arange(10, dtype=np.float32), np.zeros(10, np.uint8)
    mask[[2, 4, 8]] = 1
    ids, chances, _ = noise.select_candidates(logits, top_k=2, allowed=mask)
    assert ids.tolist() == [8, 4]
    assert chances.sum() == pytest.approx(1)
