"""The n-gram source equals its slow twin step by step, forgets other requests and never invents a token."""

import random

import pytest
from drafts.slow_drafts import ngram_lookup

from coli.drafts.ngram import NgramSource
from coli.kernels.suffix import Suffixes


def random_ids(rng: random.Random, length: int) -> list[int]:
    """Ids with repeats of every scale: few symbols, copied pieces, loops."""
    vocab_size = rng.choice([1, 2, 3, 10, 1000])
    ids: list[int] = []
    while len(ids) < length:
        kind = rng.random()
        if kind < 0.5 or not ids:
            ids.extend(rng.randrange(vocab_size) for _ in range(rng.randrange(1, 12)))
        elif kind < 0.8:
            start = rng.randrange(len(ids))
            ids.extend(ids[start : start + rng.randrange(1, 60)])
        else:
            ids.extend(ids[-rng.randrange(1, 6) :] * rng.randrange(1, 8))
    return ids[:length]


@pytest.mark.parametrize("seed", range(30))
def test_every_step_equals_a_scan_of_the_context(seed: int):
    rng = random.Random(seed)
    ids = random_ids(rng, 250)
    depth = rng.choice([1, 3, 8, 63])
    source = NgramSource(depth=depth)
    start = rng.randrange(40)
    source.begin(ids[:start])
    at = start
    while at < len(ids):
        extension = ids[at : at + rng.randrange(4)] if rng.random() < 0.3 else []
        limit = rng.choice([1, 5, 64])
        expected, match_length = ngram_lookup(ids[:at], extension, min(depth, limit))
        draft = source.propose(limit, extension)
        if not expected:
            assert draft is None
        else:
            assert draft is not None
            assert (list(draft.token_ids), draft.match_length) == (expected, match_length)
            assert draft.is_chain
        step = rng.randrange(1, 9)
        source.commit(ids[at : at + step])
        at += step


def test_a_loop_is_drafted_to_full_depth_through_the_present():
    source = NgramSource(depth=10)
    source.begin([7, 1, 2, 1, 2])
    draft = source.propose(63)
    assert draft is not None
    assert draft.token_ids == (1, 2) * 5


def test_three_equal_prompt_ids_only_propose():
    source = NgramSource(depth=1)
    source.begin([1, 1, 1])
    draft = source.propose(63)
    assert draft is not None
    assert draft.token_ids == (1,)


def test_nothing_matching_means_no_draft_rather_than_a_dummy():
    source = NgramSource()
    assert source.propose(63) is None
    source.begin([5])
    assert source.propose(63) is None
    source.begin(list(range(100)))
    assert source.propose(63) is None
    assert source.report_lines() == []


def test_a_second_shorter_request_sees_nothing_of_the_first():
    source = NgramSource()
    source.begin([1, 2, 3, 4, 1, 2])
    assert source.propose(4) is not None
    source.begin([1, 2])
    assert source.propose(4) is None
    source.begin([9, 1, 2])
    assert source.propose(4) is None


def test_a_chat_turn_that_continues_the_context_equals_a_fresh_start():
    ids = random_ids(random.Random(7), 300)
    warm, cold = NgramSource(), NgramSource()
    for turn in (100, 180, 300):
        warm.begin(ids[:turn])
        cold = NgramSource()
        cold.begin(ids[:turn])
        assert warm.propose(20) == cold.propose(20)


@pytest.mark.parametrize("asked", [1, 7, 10_000])
def test_repetitive_text_stays_within_two_nodes_a_token(asked: int):
    suffixes = Suffixes()
    piece = [random.Random(3).randrange(50) for _ in range(400)]
    for at, token_id in enumerate(piece * 5 + [1] * 2000):
        suffixes.ids.append(token_id)
        if at % asked == 0:
            suffixes.continuation((), 1)
    assert suffixes.continuation((), 5) == (32, [1] * 5)
    assert suffixes.num_nodes <= 2 * len(suffixes.ids)


def test_a_source_asked_seldom_says_what_one_asked_always_says():
    ids = random_ids(random.Random(11), 3000)
    often, seldom = NgramSource(), NgramSource()
    often.begin(ids[:5])
    seldom.begin(ids[:5])
    for at in range(5, len(ids)):
        said = often.propose(9)
        if at % 131 == 0:
            assert seldom.propose(9) == said
        often.commit(ids[at : at + 1])
        seldom.commit(ids[at : at + 1])
