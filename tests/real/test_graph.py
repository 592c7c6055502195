"""Graphs on SmolLM2: of its own answers, of text near the prompt and of unrelated text, none of which changes a byte.

Needs SMOL_MOE, the folder `scripts/make_smol_moe.py --layout mixtral` writes.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from coli.convert import ConvertOptions, convert
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions, GraphKnobs, SamplerOptions
from coli.tools.corpus_build import BuildOptions, build_index

pytestmark = pytest.mark.real
ROOT = Path(__file__).parent.parent.parent
PROMPTS = ("Neither party is in breach of this Agreement if it is prevented from", "The capital of France is")
TOKENS = 48


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = os.environ.get("SMOL_MOE")
    if not folder:
        pytest.skip("SMOL_MOE is not set to a folder made by scripts/make_smol_moe.py")
    target = tmp_path_factory.mktemp("smol") / "moe-q4"
    convert(Path(folder), target, ConvertOptions(), lambda line: None)
    with LLM.open(target, EngineOptions(usage_save=False, gate_save=False), lambda line: None) as opened:
        yield opened


def generated(llm: LLM, prompt: str, drafts: DraftOptions, temperature: float) -> tuple[tuple[int, ...], dict]:
    """(ids, report)."""
    options = GenerateOptions(TOKENS, ignore_eos=True, sampler=SamplerOptions(temperature=temperature, seed=11))
    result = llm.generate(llm.prompt_ids(prompt, raw=True), options, drafts).result
    return result.token_ids, result.report


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_graph_changes_a_byte_and_its_own_answers_save_most_forwards(llm: LLM, tmp_path: Path, temperature: float):
    plain = [generated(llm, prompt, DraftOptions(enabled=False), temperature)[0] for prompt in PROMPTS]
    (tmp_path / "own.ids").write_text(" -1 ".join(" ".join(map(str, ids)) for ids in plain))
    graphs = {
        "own": [str(tmp_path / "own.ids")],
        "near": [str(ROOT / "scripts" / "legal_contract.md")],
        "unrelated": [str(ROOT / "coli" / "llm.py")],
    }
    for name, inputs in graphs.items():
        path = tmp_path / f"{name}.safetensors"
        banned = frozenset(llm.tokenizer.special_ids)
        build_index(inputs, path, llm.tokenizer, llm.spec.vocab_size, BuildOptions(banned=banned))
        for gate, strategy in (("seed", "greedy"), ("seed", "sampling"), ("auto", "greedy")):
            drafts = DraftOptions(graph=path, draft=0, gate=gate, knobs=GraphKnobs(k=8, strategy=strategy))
            for prompt, ids in zip(PROMPTS, plain, strict=True):
                same, report = generated(llm, prompt, drafts, temperature)
                assert same == ids, (name, gate, strategy)
                assert sum(report["drafts"]["graph"]["judged_at"]) == report["drafts"]["graph"]["judged"]
                if (name, gate, strategy) == ("own", "seed", "greedy"):
                    assert report["forwards"] < TOKENS / 3
