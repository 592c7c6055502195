"""Layers copied from a recorded one compute what recorded layers compute, for every family, with ==."""

import json
import math
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from containers import FIXTURES, ORACLE
from forward_runs import Runner

from coli.convert import ConvertOptions, convert
from coli.kernels.tape import Tape
from coli.model import layers
from coli.model.layer_copies import LayerCopies

TIMES = 3  # the layers of a checkpoint behind its dense ones, that many times
LAYER = re.compile(r"(model\.layers\.)(\d+)(\..*)")


def rolled(tensor: dict[str, Any], places: int) -> bytes:
    """The values of a tensor, moved on."""
    data = bytes(tensor["data"])
    cut = places * len(data) // math.prod(tensor["shape"]) % len(data)
    return data[cut:] + data[:cut]


def checkpoint(tensors: dict[str, Any]) -> bytes:
    """The bytes of a safetensors file."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        ends = [len(data), len(data) + len(tensor["data"])]
        header[name] = {"dtype": tensor["dtype"], "shape": tensor["shape"], "data_offsets": ends}
        data += tensor["data"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def taller(name: str, target: Path) -> None:
    """The reference checkpoint with its layers repeated, no two the same."""
    config = json.loads((ORACLE / name / "config.json").read_text())
    count = config["num_hidden_layers"]
    dense = config.get("first_k_dense_replace", config.get("moe_layer_start_index", 0))
    period = count - dense
    layers = count + (TIMES - 1) * period

    def source(layer_idx: int) -> int:
        return layer_idx if layer_idx < count else dense + (layer_idx - dense) % period

    config["num_hidden_layers"] = layers
    if "moe_layer_end_index" in config:
        config["moe_layer_end_index"] = layers - 1
    if config.get("mlp_only_layers"):
        config["mlp_only_layers"] = [i for i in range(layers) if source(i) in config["mlp_only_layers"]]
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if isinstance(config.get(key), list):
            config[key] = [config[key][source(i)] for i in range(layers)]
    tensors: dict[str, Any] = {}
    for path in sorted((ORACLE / name).glob("*.safetensors")):
        tensors.update(safetensors.deserialize(path.read_bytes()))
    for key in list(tensors):
        match = LAYER.fullmatch(key)
        for i in range(count, layers) if match else ():
            assert match is not None
            if source(i) == int(match[2]):
                tensors[f"{match[1]}{i}{match[3]}"] = {**tensors[key], "data": rolled(tensors[key], i)}
    target.mkdir()
    (target / "model.safetensors").write_bytes(checkpoint(tensors))
    for path in (ORACLE / name).glob("*.json"):
        if path.name not in ("config.json", "model.safetensors.index.json", "expected.json"):
            (target / path.name).write_bytes(path.read_bytes())
    (target / "config.json").write_text(json.dumps(config))


def container(name: str, folder: Path) -> Path:
    taller(name, folder / "checkpoint")
    convert(folder / "checkpoint", folder / "model", ConvertOptions(quant="q4"), lambda line: None)
    return folder / "model"


@pytest.mark.parametrize("name", FIXTURES)
def test_copied_layers_give_the_logits_of_recorded_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "SMALL_WORK", 0)  # two threads even for models this small
    path, rng = container(name, tmp_path), random.Random(3)
    copying = Runner(path, threads=2)
    ids = [rng.randrange(copying.spec.vocab_size) for _ in range(40)]
    cuts = [[40], [17, 3, 20], [1, 33, 6], [2] * 20]
    with monkeypatch.context() as patch:
        patch.setattr(LayerCopies, "template", lambda self, layer_idx: None)
        recorded = [Runner(path, threads=2).chunks(ids, cut) for cut in cuts]
    for cut, want in zip(cuts, recorded, strict=True):
        assert np.array_equal(copying.chunks(ids, cut), want), cut
    assert copying.model._copies.copied > 0
    assert copying.model._copies._patterns


@pytest.mark.parametrize("name", ["qwen3_moe-padvocab"])
def test_copied_layers_stream_their_experts_like_recorded_ones(name: str, tmp_path: Path) -> None:
    path, rng = container(name, tmp_path), random.Random(4)
    whole = Runner(path)
    ids = [rng.randrange(whole.spec.vocab_size) for _ in range(40)]
    want = whole.chunks(ids, [1] * 40)
    tight = Runner(path, slots=whole.spec.num_experts)
    for cut in ([1] * 40, [40], [7, 9, 24], [4] * 10):
        assert np.array_equal(tight.chunks(ids, cut), want), cut
    assert tight.model._copies.copied > 0


def test_a_layer_whose_words_cannot_be_explained_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rng = container("qwen3_moe-padvocab", tmp_path), random.Random(5)
    runner = Runner(path)
    note = Tape.note
    calls = 0

    def odd(self: Tape, code: int, args: np.ndarray, threads: int) -> None:
        nonlocal calls
        calls += 1
        note(self, code, np.append(args, calls), threads)  # a word of no meaning, another one in every call

    ids = [rng.randrange(runner.spec.vocab_size) for _ in range(60)]
    want = Runner(path).chunks(ids, [1] * 60)
    monkeypatch.setattr(Tape, "note", odd)
    assert np.array_equal(runner.chunks(ids, [20, 40]), want)
    assert runner.model._copies.copied == 0
