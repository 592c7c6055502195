"""Costs of row counts: ratios to a plain forward, discounted, rising, filled in between."""

import pytest

from coli.drafts.costs import MAX_ROWS, PRIOR_SLOPE, RowCosts


def costs_of(samples: dict[int, float], plain: float = 0.01, times: int = 5) -> RowCosts:
    costs = RowCosts()
    for _ in range(times):
        costs.add(1, plain, 0)
        for rows, ratio in samples.items():
            costs.add(rows, ratio * plain, 100 * rows)
    return costs


def test_nothing_known_means_the_prior_slope():
    costs = RowCosts()
    assert costs.ratio(1) == 1
    assert costs.ratio(5) == 1 + 4 * PRIOR_SLOPE
    assert not costs.streams


def test_measured_counts_are_found_and_others_lie_between_or_go_on():
    costs = costs_of({3: 1.5, 9: 3.0}, times=30)
    assert costs.ratio(3) == pytest.approx(1.5, rel=0.02)
    assert costs.ratio(6) == pytest.approx(2.25, rel=0.02)
    assert costs.ratio(17) == pytest.approx(3.0 + 8 * 2 / 8, rel=0.02)
    assert costs.is_known(3)
    assert not costs.is_known(6)


def test_beyond_the_largest_count_costs_go_on_as_steeply_as_they_rose_at_last():
    costs = costs_of({3: 1.4, 9: 2.6, 17: 6.6}, times=30)
    assert costs.ratio(25) == pytest.approx(6.6 + 4.0, rel=0.05)
    assert costs.ratio(17) < costs.lowest(25) < costs.ratio(25)
    flat = costs_of({3: 2.0, 9: 2.0}, times=30)
    assert flat.ratio(17) > 2.5, "or as the line that all of them share"


def test_what_only_the_prior_says_is_doubted_most():
    assert RowCosts().lowest(3) - 1 < (RowCosts().ratio(3) - 1) / 4


def test_costs_never_fall_with_more_rows():
    costs = costs_of({2: 1.9, 3: 1.2, 4: 1.4, 8: 0.7, 16: 5.0})
    curve = [costs.ratio(rows) for rows in range(1, MAX_ROWS + 1)]
    assert curve == sorted(curve)
    assert curve[0] == 1


def test_one_lucky_sample_does_not_make_a_row_count_the_cheapest():
    costs = costs_of({3: 1.6, 5: 2.2}, times=20)
    costs.add(4, 0.0101, 0)
    assert 1.6 <= costs.ratio(4) <= 2.0
    assert costs.lowest(4) <= 1.65, "but it is worth a second look"
    for _ in range(20):
        costs.add(4, 0.019, 0)
    assert costs.ratio(4) == pytest.approx(1.9, rel=0.05)


def test_bounds_hold_what_was_not_measured():
    costs = costs_of({3: 1.5}, times=30)
    assert costs.lowest(3) == costs.ratio(3) == costs.highest(3)
    assert costs.ratio(3) <= costs.lowest(9) < costs.ratio(9) < costs.highest(9)
    assert costs.highest(9) == pytest.approx(costs.ratio(3) + 6)


def test_a_slower_machine_changes_no_ratio():
    costs = costs_of({4: 2.0})
    for _ in range(150):
        costs.add(1, 0.05, 0)
        costs.add(4, 0.10, 0)
    assert costs.ratio(4) == pytest.approx(2.0, rel=0.1)
    assert costs.plain_seconds == pytest.approx(0.05, rel=0.1)


def test_new_costs_replace_old_ones_and_one_hiccup_does_not():
    costs = costs_of({4: 2.0}, times=30)
    costs.add(4, 10.0, 0)
    assert costs.ratio(4) < 2.5
    for _ in range(100):
        costs.add(4, 0.04, 0)
    assert costs.ratio(4) == pytest.approx(4.0, rel=0.1)


def test_what_was_remembered_yields_to_what_is_measured():
    costs = RowCosts()
    costs.remember(4, 3.5, 7000)
    assert costs.ratio(4) == pytest.approx(3.5, rel=0.05)
    assert costs.measured() == {}
    for _ in range(12):
        costs.add(1, 0.01, 0)
        costs.add(4, 0.02, 100)
    assert costs.ratio(4) == pytest.approx(2.0, rel=0.2)
    assert set(costs.measured()) == {1, 4}


def test_experts_stream_from_two_hundredths_of_a_row_s_experts_on():
    costs = RowCosts(cycle_bytes=1000)
    costs.add(1, 0.01, 10)
    assert not costs.streams
    for _ in range(9):
        costs.add(1, 0.01, 100)
    assert costs.streams


def test_the_table_says_what_was_measured():
    table = costs_of({3: 2.0}).table()
    assert [line["rows"] for line in table] == [1, 3]
    assert table[1] == {"rows": 3, "plain_forwards": 2.0, "seconds": 0.02, "expert_bytes": 300, "samples": 5}
