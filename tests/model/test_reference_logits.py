"""The forward computes what the transformers classes compute, for every family."""

import numpy as np
import pytest
from containers import FIXTURES, container, expected
from forward_runs import Runner


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_within_a_thousandth_of_the_reference(name: str) -> None:
    want = expected(name)
    ids = want["prompt_ids"] + want["greedy_ids"]
    logits = Runner(container(name, "f32")).chunks(ids, [len(ids)])
    positions = want["logits"]["positions"]
    positions = [p for p in positions if p < len(ids)]
    assert positions
    for position, values in zip(want["logits"]["positions"], want["logits"]["values"], strict=True):
        if position < len(ids):
            assert np.abs(logits[position] - np.array(values, np.float32)).max() < 1e-3


@pytest.mark.parametrize("name", FIXTURES)
def test_argmax_of_every_position_is_the_references(name: str) -> None:
    want = expected(name)
    ids = want["prompt_ids"] + want["greedy_ids"]
    logits = Runner(container(name, "f32")).chunks(ids, [len(ids)])
    count = min(len(ids), len(want["argmax"]))
    assert logits.argmax(axis=1)[:count].tolist() == want["argmax"][:count]
