"""Half of the threads beside reads that decide how long a layer takes, all of them otherwise."""

import numpy as np
import pytest
from containers import container, expected
from forward_runs import Runner

from coli.model import layers
from coli.model.pace import ExpertPace


def known(expert_s: float) -> ExpertPace:
    pace = ExpertPace()
    pace.learn(1, expert_s, halved=False)
    return pace


def test_half_the_threads_where_twice_the_time_ends_before_the_reads() -> None:
    """Eight experts, of which the last waits for its read anyway: twice seven seconds."""
    pace = known(1.0)
    assert [pace.threads(most, 8, 14.0) for most in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert pace.threads(4, 8, 13.9) == 4


def test_what_half_the_threads_took_counts() -> None:
    pace = known(1.0)
    pace.learn(2, 3.0, halved=True)
    assert [pace.threads(2, 8, left) for left in (10.4, 10.5)] == [2, 1]


def test_half_the_threads_are_not_asked_again_soon_where_they_take_twice_as_long() -> None:
    pace = known(1.0)
    pace.learn(1, 2.0, halved=True)
    answers = [pace.threads(2, 8, 99.0) for _ in range(100)]
    assert set(answers[:80]) == {2}
    assert answers[-1] == 1


def test_all_threads_where_no_read_worth_it_is_under_way_or_no_time_is_known() -> None:
    assert known(1.0).threads(2, 1, 0.0) == 2
    assert known(1e-6).threads(2, 8, 0.004) == 2  # too short a read to be worth it
    assert ExpertPace().threads(2, 3, 100.0) == 2


def test_the_pace_follows_what_experts_take() -> None:
    pace = known(4.0)
    for _ in range(60):
        pace.learn(3, 3.0, halved=False)
    assert pace.expert_s == pytest.approx(1.0, rel=1e-2)


@pytest.mark.parametrize("halves", [{0}, {1}, {0, 1, 2, 3, 4, 5, 6, 7}])
def test_fewer_threads_beside_reads_change_no_bit(halves: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of every eight batches on half the threads, the others on all."""
    monkeypatch.setattr(layers, "SMALL_WORK", 0)  # these models are too small for several threads otherwise
    ids = (expected("mixtral-base")["prompt_ids"] * 24)[:24]
    alone = Runner(container("mixtral-base", "q4"), threads=4).chunks(ids, [1] * 24)
    asked = 0

    def threads(self: ExpertPace, most: int, experts: int, reading_left_s: float) -> int:
        nonlocal asked
        asked += 1
        return (most + 1) // 2 if asked % 8 in halves else most

    monkeypatch.setattr(ExpertPace, "threads", threads)
    runner = Runner(container("mixtral-base", "q4"), slots=2, threads=4)
    assert runner.store is not None
    for sizes in ([1] * 24, [3] * 8):
        assert np.array_equal(runner.chunks(ids, sizes), alone)
    assert asked > 24
    runner.store.close()
