"""Stop strings through the whole stack: text, ids and counts are cut at the same place, drafted or not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import container, expected

from coli.generation import GenerationResult
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions, SamplerOptions

NAME, NGEN = "mixtral-base", 48
PROMPT = expected(NAME)["prompt_ids"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options = EngineOptions(usage_save=False)
    with LLM.open(container(NAME, "f32"), options, lambda line: None) as opened:
        yield opened


def answer(llm: LLM, stops: tuple[str, ...], drafts: DraftOptions, temperature: float = 0.0) -> GenerationResult:
    sampler = SamplerOptions(temperature=temperature, seed=2)
    return llm.generate(PROMPT, GenerateOptions(NGEN, stops, ignore_eos=True, sampler=sampler), drafts).result


@pytest.fixture(scope="module", params=[0.0, 1.2])
def plain(llm: LLM, request: pytest.FixtureRequest) -> tuple[float, GenerationResult]:
    return request.param, answer(llm, (), DraftOptions(), request.param)


@pytest.fixture(scope="module")
def drafts(plain: tuple[float, GenerationResult], tmp_path_factory: pytest.TempPathFactory) -> list[DraftOptions]:
    path: Path = tmp_path_factory.mktemp("frozen") / "corpus.txt"
    path.write_text(" ".join(map(str, plain[1].token_ids)))
    corpora = [DraftOptions(corpus=path, corpus_k=k, gate="always") for k in (1, 8, 48)]
    return [DraftOptions(), *corpora, DraftOptions(draft=8, gate="always")]


def test_every_stop_string_cuts_text_ids_and_counts_alike(
    llm: LLM, plain: tuple[float, GenerationResult], drafts: list[DraftOptions]
) -> None:
    temperature, whole = plain
    assert len(whole.token_ids) == NGEN
    tried = 0
    for start in range(2, len(whole.text) - 12, 5):
        for length in (1, 3, 9):
            stop = whole.text[start : start + length]
            if "\ufffd" in stop:
                continue
            tried += 1
            results = [answer(llm, ("never in it", stop), options, temperature) for options in drafts]
            for result in results:
                assert result.text == whole.text[: whole.text.index(stop)], stop
                assert result.token_ids == whole.token_ids[: len(result.token_ids)]
                assert result.finish_reason == result.report["finish_reason"] == "stop"
                assert result.report["token_ids"] == list(result.token_ids)
                assert result.report["generated_tokens"] == len(result.token_ids)
                assert result.token_ids == results[0].token_ids
            # the ids are those that begin before the stop string
            pieces, at = [llm.tokenizer.token_bytes(i) for i in whole.token_ids], 0
            begins = [at := at + len(piece) for piece in [b"", *pieces]]
            cut = b"".join(pieces).index(stop.encode())
            assert len(results[0].token_ids) == sum(begin < cut for begin in begins[:-1])
    assert tried > 5


def test_a_stop_string_that_never_comes_changes_nothing(
    llm: LLM, plain: tuple[float, GenerationResult], drafts: list[DraftOptions]
) -> None:
    temperature, whole = plain
    beginning = whole.text[-4:] + "!?"  # held back at the end, then released
    for options in drafts:
        result = answer(llm, (beginning, "never in it"), options, temperature)
        assert (result.text, result.token_ids) == (whole.text, whole.token_ids)
        assert result.finish_reason == "length"


def test_pieces_show_nothing_of_a_stop_string(llm: LLM, plain: tuple[float, GenerationResult]) -> None:
    _, whole = plain
    stop = next(part for at in range(20, 90) if "\ufffd" not in (part := whole.text[at : at + 4]))
    options = GenerateOptions(NGEN, (stop,), ignore_eos=True, sampler=SamplerOptions(temperature=plain[0], seed=2))
    shown = ""
    for piece in llm.generate(PROMPT, options):
        shown += piece
        assert whole.text.startswith(shown)
        assert stop not in shown
    assert shown == whole.text[: whole.text.index(stop)]


@pytest.mark.parametrize("context", [60, 41])
def test_a_context_that_fills_up_inside_an_accepted_run_ends_with_length(
    plain: tuple[float, GenerationResult], drafts: list[DraftOptions], context: int
) -> None:
    temperature, whole = plain
    with LLM.open(container(NAME, "f32"), EngineOptions(context=context, usage_save=False), lambda line: None) as llm:
        for options in drafts:
            result = answer(llm, (), options, temperature)
            assert result.token_ids == whole.token_ids[: context - len(PROMPT)]
            assert result.finish_reason == "length"
