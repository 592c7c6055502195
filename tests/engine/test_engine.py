"""The decode loop: drafts never change ids, limits hold inside accepted runs, counters add up."""

import itertools

import pytest
from adversarial import (
    perfect,
    random_chains,
    random_trees,
    wrong_at_every_depth,
)
from responses import Setup

from coli.drafts.base import DraftSource
from coli.drafts.merge import MergedSources
from coli.drafts.ngram import NgramSource
from coli.options import SamplerOptions

PROMPT = [1, 2, 3, 1, 2]
SAMPLERS = [
    SamplerOptions(),
    SamplerOptions(temperature=0.7),
    SamplerOptions(temperature=1.3, top_k=4),
    SamplerOptions(temperature=1.0, top_p=0.8, min_p=0.05),
    SamplerOptions(repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    SamplerOptions(temperature=1.3, repeat_penalty=1.2, frequency_penalty=0.5),
]


def sources(truth: list[int], vocab: int, seed: int) -> list[list[DraftSource]]:
    return [
        [perfect(truth)],
        [wrong_at_every_depth(truth, vocab)],
        [random_chains(seed, vocab)],
        [random_trees(seed, vocab, truth)],
        [NgramSource(depth=8)],
        [random_trees(seed + 1, vocab, truth), NgramSource(depth=16)],
    ]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("repeat", [0, 1])
def test_any_draft_gives_the_ids_of_no_draft(sampler: SamplerOptions, seed: int, repeat: int) -> None:
    setup = Setup(vocab_size=5, sampler=sampler, seed=seed, salt=seed, repeat=repeat)
    plain = setup.run(PROMPT, 60)
    assert len(plain.ids) == 60
    assert plain.stats.forwards == 59
    truth = PROMPT + plain.ids
    for chain in (False, True):
        for group in sources(truth, 5, seed):
            drafted = setup.run(PROMPT, 60, MergedSources(group, vocab_size=5, chain=chain))
            assert drafted.ids == plain.ids
            assert drafted.session.token_ids == truth
            assert drafted.stats.forwards <= plain.stats.forwards


def test_a_perfect_draft_takes_one_forward_per_64_ids() -> None:
    setup = Setup()
    plain = setup.run(PROMPT, 129)
    drafted = setup.run(PROMPT, 129, MergedSources([perfect(PROMPT + plain.ids)], vocab_size=7))
    assert drafted.stats.forwards == 2  # the first id comes from the prefill
    assert drafted.model.forwards == [5, 64, 64]


def test_the_cache_holds_every_committed_id_but_the_newest() -> None:
    setup = Setup()
    plain = setup.run(PROMPT, 40)
    for group in sources(PROMPT + plain.ids, 7, 3):
        session = setup.run(PROMPT, 40, MergedSources(group, vocab_size=7)).session
        assert session.cache.ids[: len(session.token_ids)] == session.token_ids[: session.cache.length]
        assert session.cache.length == len(session.token_ids) - 1


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 20])
def test_the_limit_holds_inside_an_accepted_run(max_tokens: int) -> None:
    setup = Setup()
    truth = PROMPT + setup.run(PROMPT, 40).ids
    response = setup.run(PROMPT, max_tokens, MergedSources([perfect(truth)], vocab_size=7))
    assert PROMPT + response.ids == truth[: len(PROMPT) + max_tokens]
    assert response.stats.finish_reason == "length"
    assert response.stats.forwards == (0 if max_tokens == 1 else 1)


def test_an_end_id_inside_an_accepted_run_ends_unseen() -> None:
    plain = Setup().run(PROMPT, 40).ids
    for end in set(plain):
        setup = Setup(end_ids=frozenset({end}))
        want = list(itertools.takewhile(lambda i, end=end: i != end, plain))
        response = setup.run(PROMPT, 40, MergedSources([perfect(PROMPT + plain)], vocab_size=7))
        assert response.ids == want
        assert response.stats.finish_reason == "stop"
        assert response.stats.generated_tokens == len(want)


@pytest.mark.parametrize("context", [6, 7, 13, 44])
def test_the_context_ends_the_response_and_is_never_exceeded(context: int) -> None:
    setup = Setup()
    truth = PROMPT + setup.run(PROMPT, 60).ids
    for group in sources(truth, 7, 1):
        response = setup.run(PROMPT, 60, MergedSources(group, vocab_size=7), context=context)
        assert PROMPT + response.ids == truth[:context]
        assert response.stats.finish_reason == "length"


def test_counters_are_in_draft_tokens_and_add_up() -> None:
    setup = Setup(repeat=1, vocab_size=4)
    plain = setup.run(PROMPT, 80)
    source = NgramSource(depth=8)
    response = setup.run(PROMPT, 80, MergedSources([source], vocab_size=4))
    counters = source.counters
    assert counters.proposed >= counters.judged >= counters.accepted > 0
    assert response.ids == plain.ids
    # every forward commits its accepted drafts and one bonus id; the first id came from the prefill
    assert counters.accepted + response.stats.forwards == response.stats.generated_tokens - 1


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_prefill_chunks_do_not_change_ids(chunk: int) -> None:
    prompt = PROMPT * 7
    assert Setup(chunk=chunk).run(prompt, 10).ids == Setup().run(prompt, 10).ids


def test_settle_names_the_rows_that_were_committed() -> None:
    setup = Setup()
    truth = PROMPT + setup.run(PROMPT, 10).ids
    wrong = [*truth[:8], (truth[8] + 1) % 7, *truth[9:]]
    model = setup.run(PROMPT, 10, MergedSources([perfect(wrong)], vocab_size=7)).model
    # ids 5 (prefill), then rows for ids 6, 7 and the bonus 8; then the rest in one go
    assert model.settled[0] == [0, 1, 2]
