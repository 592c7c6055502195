"""Responses that share forwards give the ids they give alone, whatever the others do."""

from collections import Counter

import pytest
from containers import MTP_FIXTURE, container, variant

from coli.drafts.opening import SourceLibrary
from coli.engine.engine import Limits
from coli.engine.sampling import Sampler
from coli.engine.session import Session
from coli.engine.stats import RunStats
from coli.engine.together import Running, _shares, read_together, step_together
from coli.loading import LoadedModel
from coli.model.tensors import container_spec
from coli.options import DraftOptions, EngineOptions, SamplerOptions
from coli.store.container import Container

CONTEXT = 96


@pytest.fixture(scope="module", params=["no head", "head with an indexer"])
def loaded(request):
    path = {
        "no head": lambda: container("qwen3_moe-padvocab", None),
        "head with an indexer": lambda: variant("glm_moe_dsa-sparse", None, head=True, shared="FSS", topk=5),
    }[request.param]()
    opened = Container.open(path)
    model = LoadedModel(opened, container_spec(opened), EngineOptions(usage_save=False), CONTEXT, lambda line: None)
    yield model
    model.close()


def running(loaded: LoadedModel, at: int, session: Session | None = None, prompt: list[int] | None = None) -> Running:
    """Response number `at` of a mixed crowd: prompts, lengths, samplers and drafts all differ."""
    vocab = loaded.spec.vocab_size
    prompt = prompt or [(7 * at + 3 * i % 11) % vocab for i in range(5 + 3 * at)]
    wanted = SamplerOptions(temperature=0.8 * (at % 2), repeat_penalty=1.0 + 0.1 * (at % 3))
    sampler = Sampler(wanted, 40 + at, vocab)
    library = SourceLibrary(vocab, lambda: "", lambda line: None, has_mtp=loaded.spec.mtp is not None)
    drafts = library.sources(DraftOptions(draft=4 * (at % 3), gate="always"))
    limits = Limits(10 + 4 * at, CONTEXT, frozenset())
    session = session or Session(loaded.new_cache(CONTEXT))
    loaded.predict_for(drafts, session.cache, wanted, 40 + at)
    return Running(loaded.engine, session, prompt, limits, sampler, drafts, RunStats())


def finish(loaded: LoadedModel, crowd: list[Running]) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {}
    active: list[Running] = []
    waiting = [*crowd]
    while waiting or active:
        if waiting:  # one joins at each step
            joining = waiting.pop(0)
            while joining.reading:
                read_together(loaded.model, loaded.engine, [joining])
            active.append(joining)
        for each in active:
            ids.setdefault(id(each), []).extend(each.take())
        active = [each for each in active if not each.ended]
        if active:
            step_together(loaded.model, loaded.engine, active)
    return ids


def test_nine_responses_side_by_side_give_each_the_ids_it_has_alone(loaded):
    alone = []
    for at in range(9):
        single = running(loaded, at)
        alone.append(finish(loaded, [single])[id(single)])
    crowd = [running(loaded, at) for at in range(9)]
    together = finish(loaded, crowd)
    assert [together[id(each)] for each in crowd] == alone
    assert any(each.drafter.counters for each in crowd)
    if loaded.spec.mtp is not None:
        assert sum(each.drafter.counters["mtp"].proposed for each in crowd if "mtp" in each.drafter.counters) > 50


@pytest.mark.parametrize("chunk", [512, 70, 9])
def test_prompts_read_in_shared_forwards_give_each_response_the_ids_it_has_alone(loaded, monkeypatch, chunk):
    alone = []
    for at in range(9):
        single = running(loaded, at)
        alone.append(finish(loaded, [single])[id(single)])
    monkeypatch.setattr(loaded.engine, "prefill_chunk", chunk)
    crowd = [running(loaded, at) for at in range(9)]
    forwards = 0
    while reading := [each for each in crowd if each.reading]:
        read_together(loaded.model, loaded.engine, reading)
        forwards += 1
    rows = sum(5 + 3 * at for at in range(9))
    assert forwards == -(-rows // chunk)
    assert sum(each.stats.prefill_tokens for each in crowd) == rows
    together = finish(loaded, crowd)
    assert [together[id(each)] for each in crowd] == alone


@pytest.mark.parametrize("name", ["olmoe-base", "gpt_oss-base", "deepseek_v3-yarn", "phimoe-longrope", MTP_FIXTURE])
def test_whatever_the_attention_prompts_read_together_leave_the_ids_they_leave_alone(name):
    """Windows, latents, indexers, long ropes, MTP heads; f16 caches, forwards of more rows than a verify has."""
    opened = Container.open(container(name, "q8"))
    model = LoadedModel(opened, container_spec(opened), EngineOptions(usage_save=False), CONTEXT, lambda line: None)
    prompts = [[(3 + 5 * at + 7 * i) % 60 for i in range(length)] for at, length in enumerate((40, 11, 33))]
    found = []
    for chunk in (512, 70, 16):
        model.engine.prefill_chunk = chunk
        crowd = [running(model, at, prompt=prompt) for at, prompt in enumerate(prompts)]
        while reading := [each for each in crowd if each.reading]:
            read_together(model.model, model.engine, reading if chunk != 16 else reading[:1])
        together = finish(model, crowd)
        found.append([together[id(each)] for each in crowd])
    model.close()
    assert found[0] == found[1] == found[2]


def test_a_long_prompt_and_those_behind_it_share_a_forward_and_none_waits_for_ever():
    assert _shares(512, [100]) == [100]
    assert _shares(512, [4000]) == [512]
    assert _shares(512, [100, 200, 50]) == [100, 200, 50]
    assert _shares(512, [4000, 300, 20]) == [256, 236, 20]
    assert _shares(512, [4000, 20]) == [492, 20]
    assert _shares(64, [10, 500, 30]) == [10, 24, 30]


def test_every_id_has_an_origin_and_accepted_drafts_have_their_source(loaded):
    crowd = [running(loaded, at) for at in range(6)]
    together = finish(loaded, crowd)
    for each in crowd:
        assert len(each.origins) == len(together[id(each)])
        drafted = Counter(origin.source for origin in each.origins if origin.source)
        assert drafted == Counter({name: found.accepted for name, found in each.drafter.counters.items()})


def test_a_session_continued_after_a_crowd_equals_a_fresh_one(loaded):
    crowd = [running(loaded, at) for at in range(3)]
    finish(loaded, crowd)
    used = crowd[1].session
    used.rewind(4)
    other = Session(loaded.new_cache(CONTEXT))
    other.cache.copy_prefix(used.cache, 4)
    other.token_ids = used.token_ids[:4]
    fresh = Session(loaded.new_cache(CONTEXT))
    outcome = []
    for session, skipped in ((used, 4), (other, 4), (fresh, 0)):
        prompt = [(7 + 3 * i % 11) % loaded.spec.vocab_size for i in range(8)]
        response = running(loaded, 1, session, prompt[skipped:])
        outcome.append(finish(loaded, [response])[id(response)])
    assert outcome[0] == outcome[1] == outcome[2]


def test_gates_learn_what_shared_forwards_cost(loaded):
    library = SourceLibrary(loaded.spec.vocab_size, lambda: "", lambda line: None)

    def crowd() -> list[Running]:
        made = [running(loaded, at) for at in range(4)]
        for each in made:
            each.drafter = library.sources(DraftOptions(gate="auto"))
            each.drafter.begin(each.session.token_ids)
        return made

    alone = []
    for each in crowd():
        alone.append(finish(loaded, [each])[id(each)])
    side_by_side = crowd()
    together = finish(loaded, side_by_side)
    assert [together[id(each)] for each in side_by_side] == alone
    report = side_by_side[0].drafter.report
    assert {"2", "3", "4"} <= set(report["together"])
    assert report["together"]["4"]["costs"][0]["rows"] == 1
