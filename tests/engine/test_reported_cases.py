"""What broke other engines around drafts, stops and seeds, each as the smallest response that shows it."""

import pytest
from adversarial import ScriptedSource, perfect
from fake_model import FakeModel, ScriptedModel
from responses import Setup

from coli.drafts.base import Draft
from coli.drafts.merge import MergedSources
from coli.drafts.ngram import NgramSource
from coli.options import SamplerOptions

STOP = 12


def drafting(*token_ids: int) -> MergedSources:
    return MergedSources(
        [ScriptedSource("fixed", lambda context, limit: Draft.chain(token_ids, "fixed"))], vocab_size=30
    )


def test_a_first_draft_that_repeats_the_prompt_is_not_committed_unverified() -> None:
    setup, model = Setup(vocab_size=30), ScriptedModel(30, 3, [2, 3, 4, 5])
    response = setup.run([1, 1, 1], 4, drafting(1), model=model)
    assert response.ids == [2, 3, 4, 5]
    assert response.stats.forwards == 3


def test_a_first_draft_that_is_the_argmax_is_committed() -> None:
    response = Setup(vocab_size=30).run([1, 1, 1], 4, drafting(1), model=ScriptedModel(30, 3, [1, 1, 1, 1]))
    assert response.ids == [1, 1, 1, 1]
    assert response.stats.forwards == 2


@pytest.mark.parametrize("drafted", [1, 2, 3, 6])
def test_an_end_id_among_accepted_drafts_ends_unseen_and_nothing_behind_it_is_emitted(drafted: int) -> None:
    answer = [10, 11, STOP, 20, 21, 22]
    setup, model = Setup(vocab_size=30, end_ids=frozenset({STOP})), ScriptedModel(30, 1, answer)
    response = setup.run([5], 5, MergedSources([perfect([5, *answer], drafted)], vocab_size=30), model=model)
    assert response.ids == [10, 11]
    assert response.stats.finish_reason == "stop"
    assert response.stats.generated_tokens == 2
    assert response.session.token_ids == [5, 10, 11]
    assert response.session.cache.length == 3


def test_an_end_id_is_text_when_end_ids_are_ignored() -> None:
    answer = [10, 11, STOP, 20, 21, 22]
    source = MergedSources([perfect([5, *answer])], vocab_size=30)
    assert Setup(vocab_size=30).run([5], 5, source, model=ScriptedModel(30, 1, answer)).ids == answer[:5]


def test_an_end_id_first_gives_an_empty_answer_without_a_forward() -> None:
    setup = Setup(vocab_size=30, end_ids=frozenset({STOP}))
    response = setup.run([5], 5, drafting(STOP), model=ScriptedModel(30, 1, [STOP, 1, 1]))
    assert (response.ids, response.stats.forwards, response.stats.finish_reason) == ([], 0, "stop")


def test_a_second_shorter_request_does_not_see_the_first_one_s_context() -> None:
    setup = Setup(vocab_size=4, repeat=1)
    kept = MergedSources([NgramSource(depth=8)], vocab_size=4)
    for prompt in ([1, 2, 3, 1, 2, 3, 1, 2, 3, 0], [1, 2], [3], [1, 2, 3]):
        fresh = MergedSources([NgramSource(depth=8)], vocab_size=4)
        reused, alone = setup.run(prompt, 30, kept), setup.run(prompt, 30, fresh)
        assert reused.ids == alone.ids
        assert reused.model.forwards == alone.model.forwards


def test_where_nothing_matches_nothing_is_drafted() -> None:
    source = NgramSource(depth=8)
    model = ScriptedModel(100, 3, list(range(4, 99)))
    response = Setup(vocab_size=100).run([1, 2, 3], 90, MergedSources([source], vocab_size=100), model=model)
    assert response.model.forwards == [3, *[1] * 89]
    assert source.counters.proposed == 0


def test_each_request_is_verified_with_its_own_settings() -> None:
    model = FakeModel(6)
    settings = [
        (SamplerOptions(), 0),
        (SamplerOptions(temperature=1.5), 1),
        (SamplerOptions(temperature=0.3, top_k=2), 1),
        (SamplerOptions(temperature=1.5), 2),
        (SamplerOptions(repeat_penalty=2.0), 0),
    ]
    alone = {}
    for number, (sampler, seed) in enumerate(settings):
        alone[number] = Setup(vocab_size=6, sampler=sampler, seed=seed).run([1, 2], 30).ids
    assert len({tuple(ids) for ids in alone.values()}) == len(settings)
    shared = MergedSources([NgramSource(depth=16)], vocab_size=6)
    for number in (4, 1, 0, 3, 2, 1, 4):
        sampler, seed = settings[number]
        setup = Setup(vocab_size=6, sampler=sampler, seed=seed)
        assert setup.run([1, 2], 30, shared, model=model).ids == alone[number]
