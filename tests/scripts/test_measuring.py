"""The measuring scripts: perplexity is the definition's, the comparison alternates two engines over one protocol."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import compare_llamacpp
import perplexity
import stage_bench

from coli.convert import ConvertOptions, convert
from coli.llm import LLM
from coli.options import EngineOptions

ROOT = Path(__file__).parents[2]
FAKE = """
class Llama:
    n_tokens = 0
    def __init__(self, path, **options): self.ids = []
    def n_vocab(self): return 300
    def eval(self, ids):
        del self.ids[self.n_tokens:]
        self.ids += ids
        self.n_tokens = len(self.ids)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "olmoe"
    convert(ROOT / "tests" / "oracle" / "olmoe-base", path, ConvertOptions("f32"), lambda line: None)
    return path


def test_losses_are_those_of_one_forward_over_each_window(model: Path):
    ids = np.random.default_rng(1).integers(0, 327, 90).tolist()
    with LLM.open(model, EngineOptions(usage_save=False), lambda line: None) as llm:
        nats, best = perplexity.losses(llm, ids, window=40)
        loaded = llm.load(40)
        expected = []
        for start in (0, 40, 80):
            piece = np.array(ids[start : start + 40])
            n = len(piece)
            logits = loaded.model.forward(loaded.new_cache(40), piece, np.arange(n), None, np.arange(n), prefill=True)
            wide = logits.astype(np.float64)
            log_p = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
            expected.append(-log_p[np.arange(n - 1), piece[1:]])
    assert np.allclose(nats, np.concatenate(expected), rtol=1e-9)
    assert len(nats) == 39 + 39 + 9
    assert 0 <= best <= len(nats)


def test_work_counts_what_one_id_reads(model: Path):
    work = compare_llamacpp.work_per_id(model)
    attention, router, experts, head = 4 * 64 * 64, 8 * 64, 2 * 3 * 64 * 24, 330 * 64
    assert work.macs == 2 * (attention + router + experts) + head


def test_both_engines_answer_in_turn(model: Path, tmp_path: Path):
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    script = ROOT / "scripts" / "compare_llamacpp.py"
    options = [
        "--container",
        model,
        "--llama-python",
        sys.executable,
        "-p",
        "16",
        "-n",
        "4",
        "-r",
        "2",
        "--depth",
        "0,8",
    ]
    done = subprocess.run(
        [sys.executable, script, tmp_path / "m.gguf", *options, "--threads", "1", "--depth", "0,8", "-o", "json"],
        env={"PYTHONPATH": str(tmp_path), "PATH": ""} | compare_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [(item["test"], item["depth"]) for item in results] == [("pp16", 0), ("tg4", 0), ("pp16", 8), ("tg4", 8)]
    assert all(item["coli"] > 0 and item["lowest_ratio"] <= item["ratio"] for item in results)


def test_stages_of_prompts_and_tokens_come_as_a_table_by_context(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stage_bench, "raw_speed", lambda plan: 1e9)
    options = {"ram": "1GB", "depths": [0, 9], "prompt": 7, "tokens": 3, "io": "auto", "threads": 1}
    stage_bench.measure(Namespace(container=model, output=tmp_path / "table.md", **options))
    lines = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[1:]] == ["| pp7", "| tg3", "| pp7 @ d9", "| tg3 @ d9"]
    assert {line.count("|") for line in lines} == {len(stage_bench.HEAD) + 1}


def compare_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith(("HOME", "NUMBA", "COLI_", "XDG"))}
