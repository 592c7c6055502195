"""The graph tool's examples run nearly as its document writes them, on a tiny model that was pulled under a hub id."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from containers import container
from safetensors import safe_open

from coli.errors import CorpusError, OptionError
from coli.speculant import (
    DraftConfig,
    GenerationConfig,
    GraphBuilder,
    GraphConfig,
    SpeculativeDecoder,
    VerifierConfig,
    pull,
)

MODEL_NAME = "some-lab/Tiny-3B"
ROOT = Path(__file__).parent.parent.parent
CONTRACT = ROOT / "scripts" / "legal_contract.md"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model home with one model, pulled from the hub; the working folder has a corpus."""
    home = tmp_path / "home"
    shutil.copytree(container("olmoe-base", "f32"), home / "Tiny-3B")
    (home / "Tiny-3B" / "pull.json").write_text(json.dumps({"what": f"hf:{MODEL_NAME}@main"}))
    monkeypatch.setenv("COLI_HOME", str(home))
    monkeypatch.setenv("COLI_GATE", "seed")  # what the measured gate lets pass depends on the machine's mood
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(CONTRACT, "corpus.txt")
    return home


def build(path: str, notices: list[str] | None = None) -> None:
    builder = GraphBuilder(tokenizer_name=MODEL_NAME, notice=(notices if notices is not None else []).append)
    builder.build_from_files(["corpus.txt"])
    builder.save(path)


def test_a_single_path_is_a_file_and_not_a_row_of_letters(home: Path):
    builder = GraphBuilder(tokenizer_name=MODEL_NAME, notice=lambda line: None)
    whole = builder.build_from_files(["corpus.txt"])
    assert builder.build_from_files("corpus.txt") == builder.build_from_files(Path("corpus.txt")) == whole
    with pytest.raises(OptionError, match="absent"):
        builder.build_from_files("absent")
    with pytest.raises(OptionError, match="no files given"):
        builder.build_from_files([])
    builder.build_from_files("corpus.txt")
    Path("link").symlink_to("real.safetensors")
    builder.save("link.safetensors")
    builder.save("link")
    assert Path("link").is_symlink()
    assert Path("real.safetensors").read_bytes() == Path("link.safetensors").read_bytes()
    with pytest.raises(OptionError, match="is a folder"):
        builder.save(home)


def test_the_document_s_llama_example(home: Path):
    notices: list[str] = []
    graph_config = GraphConfig(tokenizer_name=MODEL_NAME)
    builder = GraphBuilder(
        tokenizer_name=graph_config.tokenizer_name, chunk_size=graph_config.chunk_size, notice=notices.append
    )
    graph = builder.build_from_files(["corpus.txt"])
    builder.save("llama_graph.pkl")
    assert len(notices) == 1
    assert "safetensors" in notices[0]
    with safe_open("llama_graph.pkl", "numpy") as file:
        assert file.metadata()["format"] == "coli n-gram index"
    assert graph.max_order == 5
    assert graph.num_tokens > 1000
    assert list(graph.contexts) == [1, 2, 3, 4, 5]
    verifier_config = VerifierConfig(model_name=MODEL_NAME)
    decoder = SpeculativeDecoder(
        graph_path="llama_graph.pkl",
        verifier_config=verifier_config,
        draft_config=DraftConfig(k=8, strategy="greedy"),
    )
    result = decoder.generate(
        prompt="The Supplier shall", generation_config=GenerationConfig(max_tokens=40, temperature=0.9, seed=5)
    )
    print(result.text)
    print(f"Acceptance rate: {result.acceptance_rate:.2%}")
    assert result.generated_tokens == 40
    assert len(result.position_acceptance) == 8
    assert result.num_draft_tokens == sum(compared for _, compared in result.position_acceptance) > 0
    assert result.num_accepted_tokens == sum(accepted for accepted, _ in result.position_acceptance)
    assert result.acceptance_rate == result.num_accepted_tokens / result.num_draft_tokens
    decoder.close()
    with SpeculativeDecoder(None, verifier_config) as plain:
        same = plain.generate("The Supplier shall", GenerationConfig(max_tokens=40, temperature=0.9, seed=5))
    assert same.token_ids == result.token_ids
    assert (same.num_draft_tokens, same.acceptance_rate, same.position_acceptance) == (0, 0.0, ())


@pytest.mark.parametrize("accept", ["match", "rejection"])
@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
def test_both_strategies_under_both_rules(home: Path, accept: str, strategy: str):
    build("g.safetensors")
    draft_config = DraftConfig(
        k=8,
        strategy=strategy,
        attentive_mix=True,
        order_bias=1.0,
        mix_temperature=1.0,
        reliability_weight=1.0,
        entropy_penalty=0.5,
    )
    config = GenerationConfig(max_tokens=30, temperature=0.8, seed=2)
    with SpeculativeDecoder("g.safetensors", VerifierConfig(model_name="Tiny-3B"), draft_config, accept=accept) as it:
        first, second = (it.generate("Neither party is", config) for _ in range(2))
        cold = it.generate("Neither party is", GenerationConfig(max_tokens=30, temperature=0))
    assert first.token_ids == second.token_ids
    assert first.report["drafts"]["graph"]["strategy"] == strategy
    with SpeculativeDecoder(None, VerifierConfig(model_name="Tiny-3B")) as plain:
        assert (
            cold.token_ids
            == plain.generate("Neither party is", GenerationConfig(max_tokens=30, temperature=0)).token_ids
        )


def test_fields_come_from_the_variables_and_from_the_tool_s_defaults(home: Path, monkeypatch: pytest.MonkeyPatch):
    assert DraftConfig().knobs == DraftConfig(
        k=5, strategy="greedy", attentive_mix=True, order_bias=1, mix_temperature=1, reliability_weight=1,
        entropy_penalty=0.5,
    ).knobs  # fmt: skip
    generation = GenerationConfig()
    assert (generation.max_tokens, generation.temperature, generation.seed) == (100, 1.0, None)
    graph = GraphConfig()
    assert (graph.max_order, graph.chunk_size, graph.hf_token, graph.download_mode) == (5, 10000, None, "auto")
    assert VerifierConfig().model_name is None
    for name, value in {
        "SPECULANT_DRAFT__K": "10",
        "SPECULANT_DRAFT__STRATEGY": "sampling",
        "SPECULANT_DRAFT__ATTENTIVE_MIX": "0",
        "SPECULANT_DRAFT__ORDER_BIAS": "2",
        "SPECULANT_VERIFIER__MODEL_NAME": MODEL_NAME,
        "SPECULANT_VERIFIER__DOWNLOAD_MODE": "hf_transfer",
        "SPECULANT_VERIFIER__HF_TOKEN": "hf_secret",
        "SPECULANT_VERIFIER__DEVICE": "cpu",
        "SPECULANT_GENERATION__MAX_TOKENS": "7",
        "SPECULANT_GENERATION__TEMPERATURE": "0",
        "SPECULANT_GENERATION__SEED": "4",
        "SPECULANT_GRAPH__MAX_ORDER": "3",
        "SPECULANT_GRAPH__TOKENIZER_NAME": "Tiny-3B",
        "SPECULANT_GRAPH__CHUNK_SIZE": "77",
    }.items():
        monkeypatch.setenv(name, value)
    knobs = DraftConfig().knobs
    assert (knobs.k, knobs.strategy, knobs.mix, knobs.order_bias) == (10, "sampling", "single", 2.0)
    assert DraftConfig(k=3).k == 3
    verifier = VerifierConfig()
    assert (verifier.model_name, verifier.download_mode, verifier.device) == (MODEL_NAME, "hf_transfer", "cpu")
    assert verifier.hf_token == "hf_secret"
    assert "hf_secret" not in repr(verifier)
    generation = GenerationConfig()
    assert (generation.max_tokens, generation.temperature, generation.seed) == (7, 0.0, 4)
    graph = GraphConfig()
    assert (graph.max_order, graph.tokenizer_name, graph.chunk_size) == (3, "Tiny-3B", 77)
    builder = GraphBuilder()
    assert builder.build_from_files(["corpus.txt"]).max_order == 3
    with SpeculativeDecoder() as decoder:
        assert decoder.generate("The").generated_tokens == 7


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: DraftConfig(k=0), "DraftConfig.k"),
        (lambda: DraftConfig(strategy="beam"), "DraftConfig.strategy"),
        (lambda: DraftConfig(mix_temperature=0), "DraftConfig.mix_temperature"),
        (lambda: GraphConfig(max_order=11), "GraphConfig.max_order"),
        (lambda: GraphConfig(download_mode="fast"), "GraphConfig.download_mode"),
        (lambda: VerifierConfig(device="cuda"), "VerifierConfig.device: 'cuda'"),
        (lambda: GenerationConfig(max_tokens=0), "GenerationConfig.max_tokens"),
        (lambda: GenerationConfig(temperature=-1), "GenerationConfig.temperature"),
        (lambda: GraphBuilder(max_order=11), "GraphConfig.max_order"),
    ],
)
def test_a_value_that_is_not_allowed_names_its_field(make, named: str):
    with pytest.raises(OptionError, match=named):
        make()


def test_a_model_that_is_not_here_is_named_with_the_line_to_type(home: Path):
    for use in (
        lambda: SpeculativeDecoder("g", VerifierConfig(model_name="other/Model-7B")),
        lambda: GraphBuilder(tokenizer_name="other/Model-7B").build_from_files(["corpus.txt"]),
    ):
        with pytest.raises(OptionError, match="coli pull hf:other/Model-7B"):
            use()
    assert pull(VerifierConfig(model_name=MODEL_NAME)) == home / "Tiny-3B"
    assert pull(GraphConfig(tokenizer_name="Tiny-3B")) == home / "Tiny-3B"


def test_a_pickle_another_model_s_graph_and_nothing_are_refused(home: Path):
    import pickle

    Path("graph.pkl").write_bytes(pickle.dumps({"a": 1}))
    verifier = VerifierConfig(model_name=MODEL_NAME)
    with pytest.raises(CorpusError, match=r"graph\.pkl"):
        SpeculativeDecoder("graph.pkl", verifier)
    build("g.safetensors")
    with pytest.raises(CorpusError, match="another tokenizer"):
        SpeculativeDecoder("g.safetensors", VerifierConfig())
    with pytest.raises(OptionError, match="nothing to save"):
        GraphBuilder(tokenizer_name=MODEL_NAME).save("x")


def test_the_legal_example_runs(home: Path):
    command = [sys.executable, str(ROOT / "scripts" / "legal_example.py"), "--model", MODEL_NAME, "--max-tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**_environment(home)})
    assert done.returncode == 0, done.stderr
    assert "What is a force majeure clause?" in done.stdout
    assert done.stderr.count("acceptance rate: ") == 3


def _environment(home: Path) -> dict[str, str]:
    import os

    return {**os.environ, "COLI_HOME": str(home), "PYTHONPATH": str(ROOT)}


def test_importing_it_is_light():
    code = "import coli.speculant, sys; assert not {'numba', 'numpy'} & sys.modules.keys(), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment(Path()), timeout=600)
