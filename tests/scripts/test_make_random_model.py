"""Random models of every architecture are files that convert and whose weights have the size that was asked for."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from convert.gguf_models import metadata_of, write

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from make_random_model import SHAPES, RandomBlocks, Shape, Type, vocabulary, write_model

from coli.convert import ConvertOptions, convert
from coli.convert.gguf_file import GgufFile
from coli.convert.gguf_tensors import to_float32
from coli.model.tensors import container_spec
from coli.store.container import Container

POOL = 1 << 12


@pytest.fixture
def vocab(tmp_path: Path) -> Path:
    return write(tmp_path / "vocab.gguf", metadata_of("qwen3-base"), {})


def small(shape: Shape) -> Shape:
    """The same architecture with sizes of a test."""
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "inter": 64, "vocab": 384}
    experts = {"experts": 4, "per_token": 2} if shape.experts else {}
    latent = shape.latent
    if latent is not None:
        index = latent.index and (2, 32, 8)
        ranks = {"q_rank": 32, "kv_rank": 32, "nope": 32, "rope": 32, "value": 32}
        latent = replace(latent, **ranks, dense_inter=64, dense_layers=1, groups=1, groups_used=1, index=index)
    return replace(shape, **sizes, **experts, shared_inter=64 if shape.shared_inter else 0, latent=latent)


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "f16"])
def test_every_shape_converts(name: str, kind: str, tmp_path: Path, vocab: Path):
    shape = small(SHAPES[name])
    write_model(tmp_path / "m.gguf", shape, kind, vocab, 1, POOL)
    notices: list[str] = []
    convert(tmp_path / "m.gguf", tmp_path / "model", ConvertOptions(), notices.append)
    assert notices == []
    spec = container_spec(Container.load(tmp_path / "model"))
    assert (spec.num_hidden_layers, spec.vocab_size, spec.num_experts) == (2, 384, shape.experts)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0, Type.F16])
def test_weights_have_zero_mean_and_the_deviation_asked_for(kind: Type):
    blocks = RandomBlocks(kind, np.random.default_rng(1), blocks=1 << 15)
    weights = to_float32(blocks.rows((512, 1024), 0.02), kind)
    assert weights.shape == (512, 1024)
    assert abs(weights.mean()) < 1e-4
    assert 0.018 < weights.std() < 0.022


def test_the_vocabulary_is_cut_with_its_merges(vocab: Path):
    cut = vocabulary(vocab, 300)
    tokens = set(cut["tokenizer.ggml.tokens"])
    assert len(cut["tokenizer.ggml.tokens"]) == len(cut["tokenizer.ggml.token_type"]) == 300
    for merge in cut["tokenizer.ggml.merges"]:
        left, _, right = merge.partition(" ")
        assert {left, right, left + right} <= tokens


def test_the_file_is_the_same_for_the_same_seed(tmp_path: Path, vocab: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_model(tmp_path / name, small(SHAPES["olmoe"]), "q4_0", vocab, seed, POOL)
    first, again, other = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == again != other
    with GgufFile(tmp_path / "a") as file:
        assert all(tensor.start % 32 == 0 for tensor in file.header.tensors.values())
