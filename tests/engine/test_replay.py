"""Drafting from frozen ids: proposals, acceptance and forwards equal the slow simulation of the rules, step by step."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from containers import FIXTURES, container, expected
from fake_model import FakeModel, ScriptedModel
from forward_runs import Runner
from responses import Response, Setup
from simulator import Prediction, RecordingDrafter, predict
from slow_drafts import SlowCorpus, SlowNgram

from coli.drafts.base import PausingGuard
from coli.drafts.corpus import CorpusSource
from coli.drafts.frozen_index import FrozenIndex
from coli.drafts.merge import MergedSources
from coli.drafts.ngram import NgramSource
from coli.engine.session import Session
from coli.options import SamplerOptions

DEPTHS = [8, 16, 32, 48]
PROMPT = [3, 1, 4, 1, 5]


def draft_from(
    frozen: Sequence[int], depth: int, vocab_size: int, notices: list[str], ngram: int = 0
) -> RecordingDrafter:
    guard = PausingGuard("corpus", notices.append)
    corpus = CorpusSource(FrozenIndex(np.array(frozen, np.int32)), depth=depth, guard=guard)
    return RecordingDrafter(
        MergedSources([corpus, *([NgramSource(depth=ngram)] if ngram else [])], vocab_size=vocab_size)
    )


def simulate(
    frozen: Sequence[int],
    depth: int,
    prompt: Sequence[int],
    plain: Sequence[int],
    ngram: int = 0,
    end_id: int | None = None,
) -> tuple[Prediction, SlowCorpus]:
    corpus = SlowCorpus(frozen, depth)
    slow = [corpus, *([SlowNgram(ngram)] if ngram else [])]
    return predict(prompt, plain, slow, max_tokens=len(plain) + (end_id is not None), end_id=end_id), corpus


def same_steps(response: Response, recorder: RecordingDrafter, prediction: Prediction, plain: Sequence[int]) -> None:
    assert response.ids == plain
    assert recorder.steps == [step for step in prediction.steps if step.source]
    assert response.stats.forwards == prediction.forwards
    if isinstance(response.model, FakeModel):
        assert response.model.forwards[1:] == [1 + len(step.drafted) for step in prediction.steps]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("ngram", [0, 6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("text", ["free", "loops"])
def test_a_replay_takes_the_simulated_steps(depth: int, ngram: int, temperature: float, text: str) -> None:
    setup = Setup(vocab_size=40, repeat=text == "loops", sampler=SamplerOptions(temperature=temperature), seed=depth)
    plain = setup.run(PROMPT, 130).ids
    for frozen in (plain, [*plain[60:], -1, *plain[:70]], [*plain[:20], *plain[40:], *plain[10:50]]):
        recorder = draft_from(frozen, depth, 40, [], ngram)
        prediction, _ = simulate(frozen, depth, PROMPT, plain, ngram)
        same_steps(setup.run(PROMPT, 130, recorder), recorder, prediction, plain)


def test_96_ids_without_repeats_take_13_forwards_at_depth_8() -> None:
    answer = random.Random(0).sample(range(10, 1000), 96)
    model, setup = ScriptedModel(1000, len(PROMPT), answer), Setup(vocab_size=1000)
    recorder = draft_from(answer, 8, 1000, [])
    response = setup.run(PROMPT, 96, recorder, model=model)
    assert response.ids == answer
    assert [(len(step.drafted), step.accepted) for step in recorder.steps] == [(8, 8)] * 10 + [(2, 2)]
    assert response.stats.forwards == 13  # two of them undrafted: the file does not hold the prompt
    assert (96 - 1) / response.stats.forwards == pytest.approx(7.3, abs=0.05)
    assert response.stats.tokens_per_forward == pytest.approx(7.38, abs=0.01)


@pytest.mark.parametrize("depth", DEPTHS)
def test_near_misses_pause_and_re_arm_the_guard_as_simulated(depth: int) -> None:
    rng = random.Random(depth)
    answer = [rng.randrange(10, 300) for _ in range(1500)]
    # every fourth id of the frozen text is wrong, but for a stretch that is all right
    frozen = [t if i % 4 or 500 < i < 900 else 5 for i, t in enumerate(answer)]
    notices: list[str] = []
    recorder = draft_from(frozen, depth, 300, notices)
    setup, model = Setup(vocab_size=300), ScriptedModel(300, len(PROMPT), answer)
    response = setup.run(PROMPT, 1500, recorder, model=model)
    prediction, slow = simulate(frozen, depth, PROMPT, answer)
    same_steps(response, recorder, prediction, answer)
    assert ["paused" if "paused for" in line else "re-armed" for line in notices] == slow.events
    assert slow.events[:3] == ["paused", "re-armed", "paused"]
    (line,) = [line for line in recorder._sources.report_lines() if "guard" in line]
    assert f"paused {slow.events.count('paused')}x, re-armed {slow.events.count('re-armed')}x" in line


def test_a_corpus_of_other_text_changes_no_forward() -> None:
    setup = Setup(vocab_size=500)
    plain = setup.run(PROMPT, 200)
    other = random.Random(1).choices(range(500), k=20_000)
    recorder = draft_from(other, 8, 500, [])
    response = setup.run(PROMPT, 200, recorder)
    assert response.ids == plain.ids
    assert recorder.steps == []
    assert response.model.forwards == plain.model.forwards


@pytest.mark.parametrize("depth", [8, 48])
def test_an_end_id_inside_the_replay_is_simulated_too(depth: int) -> None:
    answer = [*range(10, 60)]
    setup, end = Setup(vocab_size=70, end_ids=frozenset({69})), [*answer, 69, 7, 7, 7]
    recorder = draft_from(end, depth, 70, [])
    response = setup.run(PROMPT, 51, recorder, model=ScriptedModel(70, len(PROMPT), end))
    prediction, _ = simulate(end, depth, PROMPT, answer, end_id=69)
    same_steps(response, recorder, prediction, answer)
    assert response.stats.finish_reason == "stop"


@pytest.mark.parametrize("quant", ["f32", "q8", "q4"])
@pytest.mark.parametrize("name", FIXTURES)
def test_a_replay_on_every_family_takes_the_simulated_steps(name: str, quant: str) -> None:
    runner, prompt = Runner(container(name, quant)), expected(name)["prompt_ids"]
    vocab_size = runner.spec.vocab_size
    for temperature in (0.0, 0.8):
        setup = Setup(vocab_size, sampler=SamplerOptions(temperature=temperature), seed=11)

        def run(drafter: RecordingDrafter | None, setup: Setup = setup) -> Response:
            return setup.run(prompt, 72, drafter, model=runner.model, session=Session(runner.cache(128)))

        plain = run(None)
        assert plain.stats.forwards == 71
        if quant == "f32" and temperature == 0:
            assert plain.ids[:32] == expected(name)["greedy_ids"]
        for depth in DEPTHS:
            recorder = draft_from(plain.ids, depth, vocab_size, [])
            prediction, _ = simulate(plain.ids, depth, prompt, plain.ids)
            same_steps(run(recorder), recorder, prediction, plain.ids)
            assert prediction.forwards < 30
