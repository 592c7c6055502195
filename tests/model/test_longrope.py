"""Longrope: which factors turn a row follows from the prompt and its position, never from how rows are cut."""

import numpy as np
from containers import container, expected
from forward_runs import Runner

NAME = "phimoe-longrope"  # 56 positions of the short factors
WANT = expected(NAME)
LONG = WANT["long"]["ids"]


def run(runner: Runner, prompt: int, ids: list[int], sizes: list[int]) -> np.ndarray:
    cache, at, out = runner.cache(160), 0, []
    cache.expect(prompt)
    for size in sizes:
        rows = np.arange(size)
        out.append(
            runner.model.forward(cache, np.array(ids[at : at + size]), at + rows, None, rows, prefill=False).copy()
        )
        at += size
    return np.concatenate(out)


def test_a_longer_prompt_is_turned_by_the_long_factors_throughout() -> None:
    logits = run(Runner(container(NAME, "f32")), len(LONG), LONG, [len(LONG)])
    for position, values in zip(WANT["long"]["positions"], WANT["long"]["values"], strict=True):
        assert np.abs(logits[position] - np.array(values, np.float32)).max() < 1e-3


def test_cuts_do_not_change_a_bit_on_either_side() -> None:
    runner = Runner(container(NAME, "q8"))
    for prompt in (10, len(LONG)):
        alone = run(runner, prompt, LONG, [1] * len(LONG))
        for sizes in ([70], [55, 15], [56, 14], [33, 37]):
            assert np.array_equal(run(runner, prompt, LONG, sizes), alone)
    assert not np.array_equal(run(runner, 10, LONG, [70]), run(runner, 70, LONG, [70]))


def test_rows_turned_the_other_way_are_forgotten() -> None:
    runner = Runner(container(NAME, "f32"))
    cache, rows = runner.cache(160), np.arange(50)
    cache.expect(50)
    runner.model.forward(cache, np.array(LONG[:50]), rows, None, rows, prefill=True)
    cache.expect(56)
    assert cache.length == 50
    cache.expect(57)
    assert (cache.length, cache.is_long) == (0, True)
