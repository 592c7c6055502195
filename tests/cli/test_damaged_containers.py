"""A container that was damaged after its conversion: one line and a status, never a crash, a hang or a wrong answer."""

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from containers import container

from coli.store.container import Container


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(container("olmoe-base", "f32"), tmp_path / "model"))


def poke(model: Path, tensor: str, value: float) -> None:
    """Overwrite the first 50 numbers of a float32 tensor."""
    for path in model.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        (header_bytes,) = struct.unpack("<Q", data[:8])
        entry = json.loads(data[8 : 8 + header_bytes]).get(tensor)
        if entry:
            start = 8 + header_bytes + entry["data_offsets"][0]
            data[start : start + 200] = np.full(50, value, "<f4").tobytes()
            path.write_bytes(data)
            return
    raise AssertionError(tensor)


def outcome(coli, model, *args):
    done = coli("run", "--model", model, "--quiet", "--ngen", 2, "--prompt-ids", "0,1,2,3", *args)
    assert done.err.count("\n") == (done.status != 0)
    return done


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("model.norm.weight", "the logits of position 4 are not numbers: the weights are damaged, convert"),
        ("model.norm.weight", "; the first that is not finite is the final norm or output matrix"),
        ("lm_head.weight", "; the first that is not finite is the final norm or output matrix"),
        ("model.layers.1.mlp.gate.weight", "layer 1: the router's logits are not numbers: the weights are damaged"),
        ("model.layers.0.input_layernorm.weight", "layer 0: a key or value is not a number: the weights are damaged"),
    ],
)
def test_weights_that_are_no_numbers_are_status_1_and_name_the_place(coli, model, tensor, value, words):
    poke(model, tensor, value)
    done = outcome(coli, model)
    assert (done.status, done.out) == (1, "")
    assert words in done.err


@pytest.mark.parametrize("threads", [1, 2])
def test_what_only_the_logits_show_is_traced_to_its_layer(coli, tmp_path, threads):
    model = Path(shutil.copytree(container("llama-bias-sharded", "f32"), tmp_path / "model"))
    poke(model, "model.layers.1.mlp.down_proj.weight", float("nan"))
    done = outcome(coli, model, "--threads", threads)
    assert done.status == 1
    assert done.err.endswith("; the first that is not finite is layer 1\n")


@pytest.mark.parametrize("slots", ["1", "1000"])
def test_the_layer_whose_experts_are_no_numbers_is_named(coli, model, slots, monkeypatch):
    monkeypatch.setenv("CAP", slots)
    layout = Container.open(model).expert_layout(1)
    data = bytearray(layout.path.read_bytes())
    numbers = layout.num_experts * layout.record_bytes // 4
    data[layout.offset : layout.offset + 4 * numbers] = np.full(numbers, np.nan, "<f4").tobytes()
    layout.path.write_bytes(data)
    done = outcome(coli, model)
    assert done.status == 1
    assert "position 4 are not numbers" in done.err
    assert done.err.endswith("; the first that is not finite is layer 1\n")


def test_values_too_large_for_a_float16_cache_name_the_flag_that_helps(coli, model):
    poke(model, "model.layers.0.self_attn.v_proj.weight", 1e7)
    assert outcome(coli, model, "--kv", "f32").status == 0
    done = outcome(coli, model, "--kv", "f16")
    assert done.status == 1
    assert "too large for a float16 cache: use --kv f32" in done.err


@pytest.mark.parametrize(
    "name", ["config.json", "coli.json", "dense.safetensors", "experts-00001.safetensors", "tokenizer.json"]
)
def test_a_pipe_under_a_file_s_name_is_refused_and_not_waited_for(coli, model, name):
    (model / name).unlink()
    os.mkfifo(model / name)
    done = outcome(coli, model)
    assert done.status in (1, 2)
    assert str(model) in done.err


@pytest.mark.parametrize("name", ["dense.safetensors", "experts-00001.safetensors"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_bytes_instead_of_weights_never_crash(coli, model, name, seed):
    data = bytearray((model / name).read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    data[start:] = np.random.default_rng(seed).bytes(len(data) - start)
    (model / name).write_bytes(data)
    assert outcome(coli, model, "--temp", "1").status in (0, 1)
