"""All sources on a real (tiny) model: ids are those of the undrafted run, steps those of the slow simulation."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import container
from drafts.adversarial import every_adversary
from drafts.simulator import RecordingDrafter, predict
from drafts.slow_drafts import SlowCorpus, SlowNgram

from coli.drafts.merge import MergedSources
from coli.drafts.opening import SourceLibrary
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions, SamplerOptions
from coli.tools.corpus_build import BuildOptions, build_index

PROMPT = [5, 17, 40, 3, 9, 17, 40]
NGEN = 40


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.open(container("olmoe-base", "f32"), EngineOptions(), lambda line: None) as opened:
        yield opened


def run(llm: LLM, monkeypatch: pytest.MonkeyPatch, drafter: object, temperature: float) -> tuple[tuple[int, ...], int]:
    """(ids, forwards) of one response with these draft sources."""
    monkeypatch.setattr(llm._sources, "sources", lambda *arguments, **options: drafter)
    options = GenerateOptions(NGEN, ignore_eos=True, sampler=SamplerOptions(temperature=temperature, seed=3))
    result = llm.generate(PROMPT, options, DraftOptions()).result
    return result.token_ids, result.report["forwards"]


@pytest.fixture(scope="module", params=[0.0, 1.0])
def plain(llm: LLM, request: pytest.FixtureRequest) -> tuple[float, list[int]]:
    """(temperature, ids without drafts)."""
    with pytest.MonkeyPatch.context() as patch:
        ids, forwards = run(llm, patch, MergedSources([], vocab_size=llm.spec.vocab_size), request.param)
    assert (len(ids), forwards) == (NGEN, NGEN - 1)
    return request.param, list(ids)


@pytest.mark.parametrize("depth", [8, 16, 48])
@pytest.mark.parametrize("draft", [None, 4])
def test_a_replay_takes_the_steps_of_the_slow_simulation(
    llm: LLM, plain: tuple[float, list[int]], monkeypatch, tmp_path: Path, depth: int, draft: int | None
):
    temperature, ids = plain
    frozen = [*ids[:15], -1, *ids[12:]]
    (tmp_path / "corpus.txt").write_text(" ".join(map(str, frozen)))
    library = SourceLibrary(llm.spec.vocab_size, lambda: "", lambda line: None)
    settings = DraftOptions(corpus=tmp_path / "corpus.txt", corpus_k=depth, draft=draft, gate="seed")
    recorder = RecordingDrafter(library.sources(settings))
    drafted, forwards = run(llm, monkeypatch, recorder, temperature)
    slow = [SlowCorpus(frozen, depth), *([SlowNgram(draft)] if draft else [])]
    prediction = predict(PROMPT, ids, slow, max_tokens=NGEN)
    assert list(drafted) == ids
    assert recorder.steps == [step for step in prediction.steps if step.source]
    assert forwards == prediction.forwards
    assert forwards < NGEN // 3


@pytest.mark.parametrize("chain", [False, True])
def test_adversaries_one_by_one_and_together_change_nothing(
    llm: LLM, plain: tuple[float, list[int]], monkeypatch, chain: bool
):
    temperature, ids = plain
    truth, vocab_size = [*PROMPT, *ids], llm.spec.vocab_size
    lineups = [[source] for source in every_adversary(truth, vocab_size)] + [every_adversary(truth, vocab_size)]
    for lineup in lineups:
        drafter = MergedSources(lineup, vocab_size=vocab_size, chain=chain)
        drafted, _ = run(llm, monkeypatch, drafter, temperature)
        assert list(drafted) == ids, [source.name for source in lineup]


def test_an_index_of_the_answers_drafts_as_corpus_and_as_graph(
    llm: LLM, plain: tuple[float, list[int]], monkeypatch, tmp_path: Path
):
    temperature, ids = plain
    (tmp_path / "log").write_text(f"[TOKENS] {NGEN} generated: {' '.join(map(str, ids))}\n")
    fingerprint = llm.tokenizer.fingerprint
    build_index([str(tmp_path / "log")], tmp_path / "index", llm.tokenizer, llm.spec.vocab_size, BuildOptions())
    library = SourceLibrary(llm.spec.vocab_size, lambda: fingerprint, lambda line: None)
    for name in ("corpus", "graph"):
        sources = library.sources(DraftOptions(**{name: tmp_path / "index"}, gate="seed"), seed=3)
        drafted, forwards = run(llm, monkeypatch, sources, temperature)
        assert list(drafted) == ids
        assert forwards < NGEN // 3
        assert sources.counters[name].accepted > NGEN // 2


def test_the_memory_plan_counts_mapped_indexes(tmp_path: Path):
    opened = LLM.open(container("olmoe-base", "f32"), EngineOptions(), lambda line: None)
    with opened as llm:
        (tmp_path / "log").write_text("[TOKENS] 4 generated: 1 2 3 4\n")
        build_index([str(tmp_path / "log")], tmp_path / "index", llm.tokenizer, llm.spec.vocab_size, BuildOptions())
        llm.new_session(32, drafts=DraftOptions(corpus=tmp_path / "index"))
        assert llm.load(32).plan.needs.drafts_bytes == (tmp_path / "index").stat().st_size
