"""Routing picks the best experts, lowest id on ties, and returns them in ascending order with their weights."""

import naive
import numpy as np
import pytest

from coli.kernels import routing

NONE, MAX, TOP2 = routing.GROUPS_NONE, routing.GROUPS_MAX, routing.GROUPS_TOP2


def run(logits, active, scoring=0, bias=None, n_group=1, topk_group=1, mode=NONE, norm=True, factor=1.0, threads=1):
    ids, weights = np.empty((len(logits), active), np.int64), np.empty((len(logits), active), np.float32)
    bad = routing.route(logits, active, scoring, bias, n_group, topk_group, mode, norm, factor, ids, weights, threads)
    return ids, weights, bad


def logits(rows: int, experts: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, experts)).astype(np.float32)


@pytest.mark.parametrize("experts", [8, 60, 128])
@pytest.mark.parametrize("active", [1, 4, 8])
@pytest.mark.parametrize("scoring", [routing.SOFTMAX, routing.SIGMOID])
@pytest.mark.parametrize("norm", [True, False])
def test_equals_the_slow_twin(experts, active, scoring, norm):
    x = logits(5, experts)
    ids, weights, bad = run(x, active, scoring, norm=norm, factor=2.5, threads=2)
    assert bad == 0
    for row, row_ids, row_weights in zip(x, ids, weights, strict=True):
        expected_ids, expected = naive.route(row, active, scoring, None, 1, 1, NONE, norm, 2.5)
        assert np.array_equal(row_ids, expected_ids)
        assert np.array_equal(row_weights, expected)


@pytest.mark.parametrize("mode", [MAX, TOP2])
@pytest.mark.parametrize("scoring", [routing.SOFTMAX, routing.SIGMOID])
def test_groups_and_bias_choose_but_do_not_weigh(mode, scoring):
    x, bias = logits(20, 64), logits(1, 64, 1)[0] * np.float32(0.3)
    ids, weights, _ = run(x, 6, scoring, bias, 8, 3, mode, True, 2.5)
    for row, row_ids, row_weights in zip(x, ids, weights, strict=True):
        expected_ids, expected = naive.route(row, 6, scoring, bias, 8, 3, mode, True, 2.5)
        assert np.array_equal(row_ids, expected_ids)
        assert np.array_equal(row_weights, expected)


def test_experts_of_groups_that_fell_are_not_chosen_for_a_score_above_zero():
    """A08: scores can be negative; a group that was masked with 0 would come back."""
    x, bias = np.zeros((1, 16), np.float32), np.full(16, -3, np.float32)
    bias[[4, 5]] = -1, -1.5  # the best group; its others are far below the best of the fallen ones
    bias[[6, 7]] = -9
    ids, _, _ = run(x, 4, routing.SIGMOID, bias, 4, 1, TOP2)
    assert ids.tolist() == [[4, 5, 6, 7]]


def test_a_large_bias_leaves_tiny_scores_as_they_are():
    """A10: 12 and 1e-8 are not added and subtracted again."""
    x, bias = logits(4, 32) - np.float32(18), np.full(32, 12, np.float32)
    ids, weights, _ = run(x, 4, routing.SIGMOID, bias, norm=True)
    for row, row_ids, row_weights in zip(x, ids, weights, strict=True):
        scores = 1 / (1 + np.exp(-row[row_ids].astype(np.float64)))
        assert np.allclose(row_weights, scores / scores.sum(), rtol=1e-4)


@pytest.mark.parametrize("mode", [MAX, TOP2])
def test_one_group_is_plain_top_k_and_equal_groups_are_taken_from_the_first(mode):
    """A13, A13c: whatever the number of rows."""
    x, bias = logits(8, 32), logits(1, 32, 1)[0]
    for scoring in (routing.SOFTMAX, routing.SIGMOID):
        grouped, plain = run(x, 5, scoring, bias, 1, 1, mode), run(x, 5, scoring, bias)
        assert np.array_equal(grouped[0], plain[0])
        assert np.array_equal(grouped[1], plain[1])
    for rows in (1, 7):
        ids, weights, _ = run(np.zeros((rows, 32), np.float32), 6, routing.SIGMOID, None, 8, 3, mode)
        assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * rows
        assert (weights == weights[0, 0]).all()


def test_ties_go_to_the_lowest_id():
    x = np.zeros((1, 40), np.float32)
    x[0, [7, 30]] = 1
    ids, weights, _ = run(x, 5)
    assert ids.tolist() == [[0, 1, 2, 7, 30]]
    assert weights[0, 3] == weights[0, 4] > weights[0, 0]


def test_all_experts_may_be_taken():
    ids, weights, _ = run(logits(3, 8), 8)
    assert ids.tolist() == [list(range(8))] * 3
    assert np.abs(weights.sum(axis=1) - 1).max() < 1e-6


def test_a_nan_logit_is_counted_and_reaches_the_weights():
    x = logits(4, 16)
    x[2, 9] = np.nan
    ids, weights, bad = run(x, 4, threads=2)
    assert bad == 1
    assert np.isnan(weights[2]).all()
    assert len(set(ids[2].tolist())) == 4
    assert ((ids >= 0) & (ids < 16)).all()
    assert np.isfinite(weights[[0, 1, 3]]).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_logits_give_valid_ids(value):
    x = np.full((1, 8), value, np.float32)
    ids, _, _ = run(x, 3)
    assert ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("jitter", [0.01, 0.3])
def test_sparsemixer_equals_the_slow_twin(jitter):
    x = logits(40, 16)
    x[0, [3, 9]] = 2.5  # equal best
    x[1] = -np.abs(x[1])
    ids, weights = np.empty((40, 2), np.int64), np.empty((40, 2), np.float32)
    assert not routing.route(x, 2, routing.SPARSEMIXER, None, 1, 1, NONE, False, 1.0, ids, weights, 2, jitter=jitter)
    for row, row_ids, row_weights in zip(x, ids, weights, strict=True):
        expected_ids, expected = naive.sparse_mix(row, 2, jitter)
        assert np.array_equal(row_ids, expected_ids)
        assert np.array_equal(row_weights, expected)
    assert (weights == 1).any()
    assert (weights < 1).any()
