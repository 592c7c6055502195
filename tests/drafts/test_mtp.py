"""The MTP source alone, and beside all others on a model whose head is always right and on one whose head never is."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from containers import MTP_FIXTURE, container, variant
from convert.checkpoints import copy_fixture, read_tensors, write_tensors

from coli.convert import ConvertOptions, convert
from coli.drafts.base import PausingGuard
from coli.drafts.mtp import ASKED_EVERY, LONGEST_EXTENSION, MtpSource
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions, SamplerOptions

VOCAB, NGEN = 330, 60
PROMPT = [5, 17, 40, 3, 9, 17, 41]


class Counting:
    """Guesses n, n + 1, ... behind id n - 1."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[int, ...], int]] = []

    def predict(self, newest_id: int, extension: Sequence[int], limit: int) -> list[int]:
        self.asked.append((newest_id, tuple(extension), limit))
        last = [newest_id, *extension][-1]
        return list(range(last + 1, last + 1 + limit))


class Worth:
    def __init__(self, depth: int) -> None:
        self.answer = depth

    def depth(self, limit: int, behind: int, seconds: float) -> int:
        return min(self.answer, limit)


def source(**options: object) -> tuple[MtpSource, Counting]:
    made = MtpSource(**({"depth": 3} | options))  # type: ignore[arg-type]
    made.predictor = counting = Counting()
    return made, counting


def test_guesses_follow_the_newest_id_and_the_extension() -> None:
    made, _ = source()
    made.begin([1, 2])
    draft = made.propose(8)
    assert draft is not None
    assert (draft.token_ids, draft.is_chain, draft.source) == ((3, 4, 5), True, "mtp")
    made.commit([20, 30])
    assert made.propose(2).token_ids == (31, 32)  # type: ignore[union-attr]
    assert made.propose(8, [40, 50]).token_ids == (51, 52, 53)  # type: ignore[union-attr]
    assert made.propose(8, range(LONGEST_EXTENSION + 1)) is None
    assert made.propose(0) is None
    made.judged(3, 2)
    assert (made.counters.proposed, made.counters.judged, made.counters.accepted) == (8, 3, 2)
    assert made.report_lines()[0].startswith("mtp drafts: 25% acceptance (2/8), 8 guesses of ")


def test_without_a_predictor_or_a_prompt_nothing_is_proposed() -> None:
    made = MtpSource(depth=3)
    made.begin([1, 2])
    assert made.propose(8) is None
    made, _ = source()
    assert made.propose(8) is None
    assert made.report_lines() == []


def test_what_is_not_worth_it_is_guessed_once_in_a_while() -> None:
    worth = Worth(0)
    made, counting = source(worth=worth)
    made.begin([1])
    for _ in range(4 * ASKED_EVERY):
        made.propose(8)
        assert made.propose(8, [7]) is None
    assert [limit for _, _, limit in counting.asked] == [1] * 4
    worth.answer = 2
    assert len(made.propose(8)) == 2  # type: ignore[arg-type]


def test_the_seeds_guard_pauses_it() -> None:
    lines: list[str] = []
    made, counting = source(depth=1, guard=PausingGuard("mtp drafts", lines.append, percent=70))
    made.begin([1])
    for _ in range(30):
        made.propose(1)
        made.commit([5])
    assert len(counting.asked) == 24
    assert lines == ["mtp drafts: 0% acceptance (0/24) is below 70%, paused for 256 tokens"]


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says 7 t + 3 (mod vocabulary) behind every id t, and whose head knows that."""
    folder = copy_fixture(MTP_FIXTURE, tmp_path_factory.mktemp("knowing") / "source")
    tensors = {name: values.astype(np.float32) for name, values in read_tensors(folder).items()}
    rng, hidden = np.random.default_rng(1), 64
    embedding = rng.standard_normal((VOCAB, hidden)).astype(np.float32)
    output = np.empty_like(embedding)
    output[(7 * np.arange(VOCAB) + 3) % VOCAB] = embedding
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name][:] = 0
        elif name.endswith("norm.weight"):
            tensors[name][:] = 1
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = embedding
        elif name.endswith(("lm_head.weight", "shared_head.head.weight")):
            tensors[name] = output
    head = "model.layers.3."
    tensors[head + "eh_proj.weight"] = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], 1, dtype=np.float32)
    write_tensors(folder / "model.safetensors", tensors)
    notices: list[str] = []
    convert(folder, folder.parent / "model", ConvertOptions(quant="q8"), notices.append)
    assert notices == []
    return folder.parent / "model"


@pytest.fixture(scope="module")
def knower(knowing: Path) -> Iterator[LLM]:
    with LLM.open(knowing, EngineOptions(gate_save=False, usage_save=False), lambda line: None) as opened:
        yield opened


@pytest.fixture(scope="module")
def guesser() -> Iterator[LLM]:
    options = EngineOptions(gate_save=False, usage_save=False)
    with LLM.open(container(MTP_FIXTURE, "f32"), options, lambda line: None) as opened:
        yield opened


def answer(llm: LLM, temperature: float = 0.0, **drafts: object) -> tuple[list[int], dict]:
    options = GenerateOptions(NGEN, ignore_eos=True, sampler=SamplerOptions(temperature=temperature, seed=3))
    result = llm.generate(PROMPT, options, DraftOptions(**drafts)).result  # type: ignore[arg-type]
    return list(result.token_ids), result.report


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("gate", ["seed", "auto", "always"])
@pytest.mark.parametrize("draft", [None, 1, 4])
def test_drafts_change_no_id_alone_or_merged(
    knower: LLM, guesser: LLM, tmp_path: Path, gate: str, draft: int | None, temperature: float
) -> None:
    for llm in (knower, guesser):
        plain, _ = answer(llm, temperature, enabled=False)
        assert answer(llm, temperature, gate=gate, draft=draft)[0] == plain
        (tmp_path / "corpus").write_text(" ".join(map(str, [*plain[5:15], -1, *plain[20:24], 1, 2, 3])))
        merged, report = answer(llm, temperature, gate=gate, draft=draft, corpus=tmp_path / "corpus")
        assert merged == plain
        assert set(report["drafts"]) >= {"corpus", "mtp"}


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
def test_streamed_heads_change_no_id_of_a_response(knowing: Path, io: str) -> None:
    """Heads that know, that do not, that have an indexer of their own: experts come and go, the head's among them."""
    off = EngineOptions(gate_save=False, usage_save=False)
    few = replace(off, cap=3, io=io, prefetch=True)
    for path in (
        knowing,
        container(MTP_FIXTURE, "q4"),
        variant("glm4_moe-base", "q4", head=True),
        variant("glm_moe_dsa-sparse", "q4", head=True, shared="FSS", topk=5),
    ):
        with LLM.open(path, off, lambda line: None) as whole, LLM.open(path, few, lambda line: None) as llm:
            plain, _ = answer(whole, 0.7, enabled=False)
            assert answer(llm, 0.7, enabled=False)[0] == plain
            drafted, report = answer(llm, 0.7, gate="always", draft=3)
            assert drafted == plain
            assert report["drafts"]["mtp"]["proposed"] > 0
            assert report["expert_hit_rate"] < 1


def test_a_head_that_knows_is_believed(knower: LLM) -> None:
    for temperature in (0.0, 0.3):  # coupled: the guess is drawn with the target's own noise
        _, report = answer(knower, temperature, gate="seed", draft=4)
        assert report["drafts"]["mtp"]["accepted"] > 0.9 * report["drafts"]["mtp"]["proposed"] > 30
        assert report["forwards"] <= 14
    _, report = answer(knower, gate="seed")
    assert report["forwards"] <= NGEN // 2


def test_it_goes_on_where_a_span_ends_and_leaves_the_rest_to_others(knower: LLM, tmp_path: Path) -> None:
    plain, _ = answer(knower, enabled=False)
    (tmp_path / "corpus").write_text(" ".join(map(str, [*PROMPT, *plain[:12], -1, *plain[12:]])))
    _, report = answer(knower, gate="always", draft=3, corpus=tmp_path / "corpus")
    assert report["drafts"]["corpus"]["accepted"] > 10
    assert report["drafts"]["mtp"]["accepted"] > 3
    assert report["forwards"] < 10


@pytest.mark.parametrize("off", [{"mtp": False}, {"draft": 0}, {"enabled": False}])
def test_it_can_be_switched_off(knower: LLM, off: dict) -> None:
    _, report = answer(knower, **off)
    assert "mtp" not in report["drafts"]


def test_a_model_without_a_head_is_told_once_and_only_when_asked(tmp_path: Path) -> None:
    lines: list[str] = []
    with LLM.open(container("olmoe-base", "f32"), EngineOptions(), lines.append) as llm:
        answer(llm)
        assert not [line for line in lines if "mtp" in line]
        for _ in range(2):
            answer(llm, mtp=True)
    assert [line for line in lines if "mtp" in line] == [
        "mtp drafts: this model has no MTP head; the other sources draft without it"
    ]


def test_not_loading_the_head_saves_its_memory(knowing: Path) -> None:
    with (
        LLM.open(knowing, EngineOptions(), lambda line: None) as with_head,
        LLM.open(knowing, EngineOptions(mtp=False), lambda line: None) as without,
    ):
        needs = [llm.load(100).plan.needs for llm in (with_head, without)]
        assert needs[0].dense_bytes > needs[1].dense_bytes
        assert needs[0].kv_bytes > needs[1].kv_bytes
        assert answer(without)[0] == answer(with_head)[0]
    assert json.loads((knowing / "coli.json").read_text())["quantization"]["mtp"] == "q8"
