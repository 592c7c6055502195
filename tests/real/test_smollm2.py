"""SmolLM2-135M-Instruct, dense and cut into experts: reference ids, replays, and byte identity with drafts.

Needs the folders scripts/make_smol_moe.py writes: SMOL_LLAMA (--layout llama) and SMOL_MOE (--layout mixtral).
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from containers import ORACLE
from forward_runs import Runner
from simulator import predict
from slow_drafts import SlowCorpus

from coli.convert import ConvertOptions, convert
from coli.generation import GenerationResult
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions, SamplerOptions

pytestmark = pytest.mark.real

REFERENCE: list[dict[str, Any]] = json.loads((ORACLE / "smollm2-135m.json").read_text())["prompts"]
CLOSE = 0.01  # below this distance of the two best logits another summation order may decide differently
PARIS = "What is the capital of France?"
OFF = DraftOptions(enabled=False)


def source(variable: str) -> Path:
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"{variable} is not set to a folder made by scripts/make_smol_moe.py")
    return Path(folder)


@pytest.fixture(scope="module")
def moe_q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("smol") / "moe-q4"
    convert(source("SMOL_MOE"), target, ConvertOptions(), lambda line: None)
    return target


@pytest.fixture(scope="module")
def llm(moe_q4: Path) -> Iterator[LLM]:
    with LLM.open(moe_q4, EngineOptions(usage_save=False), lambda line: None) as opened:
        yield opened


def answer(
    llm: LLM, prompt_ids: Sequence[int], tokens: int, drafts: DraftOptions = OFF, sampler: SamplerOptions | None = None
) -> GenerationResult:
    options = GenerateOptions(tokens, ignore_eos=True, sampler=sampler or SamplerOptions())
    return llm.generate(prompt_ids, options, drafts).result


def certain(gaps: Sequence[float]) -> int:
    """Steps before the first close one."""
    return sum(1 for _ in itertools.takewhile(lambda gap: gap >= CLOSE, gaps))


@pytest.fixture(scope="module")
def float_ids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, ...]]]:
    """Greedy ids of the ten prompts in float32, by layout."""
    result: dict[str, list[tuple[int, ...]]] = {}
    for variable in ("SMOL_LLAMA", "SMOL_MOE"):
        target = tmp_path_factory.mktemp("smol") / f"{variable}-f32"
        convert(source(variable), target, ConvertOptions(quant="f32"), lambda line: None)
        with LLM.open(target, EngineOptions(usage_save=False), lambda line: None) as llm:
            for case in REFERENCE:
                prompt = llm.prompt_ids(case["prompt"], raw=case["kind"] == "raw")
                assert prompt == case["prompt_ids"], case["prompt"]
            ids = [answer(llm, case["prompt_ids"], len(case["greedy_ids"])).token_ids for case in REFERENCE]
        result[variable] = ids
        for path in target.iterdir():
            path.unlink()  # half a gigabyte
    return result


@pytest.mark.parametrize("layout", ["SMOL_LLAMA", "SMOL_MOE"])
def test_float32_ids_are_the_reference_s_up_to_the_first_close_step(
    float_ids: dict[str, list[tuple[int, ...]]], layout: str
) -> None:
    for case, ids in zip(REFERENCE, float_ids[layout], strict=True):
        steps = certain(case["gaps"])
        assert list(ids[:steps]) == case["greedy_ids"][:steps], case["prompt"]
    assert sum(certain(case["gaps"]) for case in REFERENCE) > 500  # of 640


def test_both_layouts_give_the_same_ids(float_ids: dict[str, list[tuple[int, ...]]]) -> None:
    for case, dense, moe in zip(REFERENCE, float_ids["SMOL_LLAMA"], float_ids["SMOL_MOE"], strict=True):
        steps = certain(case["gaps"])
        assert dense[:steps] == moe[:steps], case["prompt"]


def test_q4_experts_answer_paris(llm: LLM) -> None:
    result = llm.generate(llm.prompt_ids(PARIS), GenerateOptions(24), OFF).result
    assert "Paris" in result.text
    assert result.finish_reason == "stop"


def test_the_pipeline_of_the_corpus_document_works_verbatim(moe_q4: Path, tmp_path: Path) -> None:
    coli = f"{shlex.quote(sys.executable)} -m coli"
    script = f"""
        set -o pipefail
        export COLI_MODEL={shlex.quote(str(moe_q4))}
        coli() {{ {coli} "$@"; }}
        TOKENS=1 COLI_TEMP=0 coli run --ngen 96 "Tell me about rivers." 2>&1 |
          sed -n 's/.*\\[TOKENS\\][0-9 ]*generated://p' > corpus.txt
        TOKENS=1 COLI_TEMP=0 coli run --ngen 96 "Tell me about rivers." >plain.txt 2>plain.err
        COLI_DRAFT_CORPUS=corpus.txt COLI_CORPUS_K=8 COLI_TEMP=0 coli run --ngen 96 "Tell me about rivers." \\
          >drafted.txt 2>drafted.err
    """
    subprocess.run(["bash", "-c", script], check=True, cwd=tmp_path, timeout=300)
    ids = (tmp_path / "corpus.txt").read_text().split()
    assert 1 < len(ids) <= 96
    assert (tmp_path / "drafted.txt").read_bytes() == (tmp_path / "plain.txt").read_bytes()
    report = (tmp_path / "drafted.err").read_text()
    assert f"proposed from {len(ids)} frozen ids)" in report
    assert "tokens/forward" in report


@pytest.mark.parametrize("number", [0, 3, 5, 7, 9])
def test_a_replay_takes_the_simulated_forwards(llm: LLM, tmp_path: Path, number: int) -> None:
    prompt, tokens = REFERENCE[number]["prompt_ids"], 96
    plain = answer(llm, prompt, tokens)
    assert plain.report["forwards"] == tokens - 1
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(" ".join(map(str, plain.token_ids)))
    for depth in (8, 16, 32, 48):
        result = answer(llm, prompt, tokens, DraftOptions(corpus=corpus, corpus_k=depth, gate="seed"))
        slow = SlowCorpus(plain.token_ids, depth)
        prediction = predict(prompt, plain.token_ids, [slow], max_tokens=tokens)
        assert (result.token_ids, result.text) == (plain.token_ids, plain.text)
        assert result.report["forwards"] == prediction.forwards
        counters = result.report["drafts"]["corpus"]
        assert (counters["proposed"], counters["accepted"]) == (slow.proposed, slow.accepted)
        assert slow.accepted >= 0.9 * (tokens - 3 - prediction.forwards)


def test_logits_are_the_same_in_any_cut_and_on_any_number_of_threads(moe_q4: Path) -> None:
    ids = (REFERENCE[8]["prompt_ids"] + REFERENCE[8]["greedy_ids"])[:80]
    alone = Runner(moe_q4, threads=1, kv="f16").chunks(ids, [1] * 80)
    for threads in (1, 2):
        runner = Runner(moe_q4, threads=threads, kv="f16")
        for cut in ([80], [2] * 40, [17, 63], [64, 16]):
            assert np.array_equal(runner.chunks(ids, cut), alone), (threads, cut)


MORE = [
    "Write a haiku about the sea.",
    "Count from one to thirty in words.",
    'Give me a JSON object with the keys "name", "age" and "city".',
    "def fibonacci(n):",
    "Die Hauptstadt von Frankreich ist",
    "List the days of the week, then list them again.",
    "Explain why the sky is blue 🌤️.",
    "1 2 3 1 2 3 1 2 3",
    "Repeat the word river twenty times.",
    "What is 17 times 23?",
]


def test_bytes_are_the_same_with_corpus_and_ngram_over_20_prompts(llm: LLM, tmp_path: Path) -> None:
    prompts = [case["prompt_ids"] for case in REFERENCE] + [llm.prompt_ids(text) for text in MORE]
    chains = [
        SamplerOptions(),
        SamplerOptions(temperature=0.7, seed=1),
        SamplerOptions(),
        SamplerOptions(temperature=1.3, top_p=0.9, repeat_penalty=1.1, seed=2),
    ]
    plain = [answer(llm, prompt, 128, OFF, chains[i % 4]) for i, prompt in enumerate(prompts)]
    # the frozen text: every answer with one id in nine wrong, so that drafts fail at all depths
    spans = [[7 if at % 9 == 8 else token for at, token in enumerate(result.token_ids)] for result in plain]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n-1\n".join(" ".join(map(str, span)) for span in spans))
    accepted = dict.fromkeys(("corpus", "ngram"), 0)
    for i, (prompt, want) in enumerate(zip(prompts, plain, strict=True)):
        gate = "always" if i % 2 else "seed"
        drafts = DraftOptions(corpus=corpus, corpus_k=(8, 48, 16)[i % 3], draft=(8, 63)[i % 2], gate=gate)
        result = answer(llm, prompt, 128, drafts, chains[i % 4])
        assert (result.token_ids, result.text) == (want.token_ids, want.text), i
        for name, counters in result.report["drafts"].items():
            accepted[name] += counters["accepted"]
            assert counters["proposed"] >= counters["judged"] >= counters["accepted"]
    assert accepted["corpus"] > 500
    assert accepted["ngram"] > 100
