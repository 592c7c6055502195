"""MXFP4 experts of gpt-oss keep their bits, and compute what their numbers compute."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from containers import ORACLE, expected
from convert.gguf_models import vocabulary_of, write
from forward_runs import Runner
from safetensors.numpy import load_file, save_file

from coli.convert import ConvertOptions, convert
from coli.errors import CheckpointError, OptionError
from coli.kernels import quantize
from coli.model.families import spec_from_config
from coli.store.container import Container
from coli.store.layout import Kind

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Source:
    """The gpt_oss fixture with random MXFP4 experts, and the same model with their values as float32."""

    def __init__(self, folder: Path, inter: int = 24) -> None:
        self.inter = inter
        self.packed, self.floats = folder / "packed", folder / "floats"
        rng = np.random.default_rng(4)
        tensors = load_file(ORACLE / "gpt_oss-base" / "model.safetensors")
        for name in [name for name in tensors if ".experts." in name and inter != 24]:
            shape = {
                "gate_up_proj": (8, 64, 2 * inter),
                "down_proj": (8, inter, 64),
                "gate_up_proj_bias": (8, 2 * inter),
            }
            wanted = shape.get(name.rsplit(".", 1)[1], tensors[name].shape)
            tensors[name] = rng.standard_normal(wanted).astype(np.float32)
        plain, blocks = dict(tensors), dict(tensors)
        self.codes: dict[str, np.ndarray] = {}
        self.exponents: dict[str, np.ndarray] = {}
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = tensors[name].shape
            groups = -(-inputs // 32)  # 24 inputs of down_proj do not fill their only one
            codes = rng.integers(0, 16, (experts, outputs, groups, 32)).astype(np.uint8)
            exponents = rng.integers(120, 124, (experts, outputs, groups)).astype(np.uint8)
            self.codes[name], self.exponents[name] = codes.reshape(experts, outputs, -1), exponents
            values = VALUES[codes] * np.ldexp(np.float32(1), exponents.astype(int) - 127)[..., None]
            values = values.reshape(experts, outputs, -1)[:, :, :inputs]
            plain[name] = np.ascontiguousarray(values.transpose(0, 2, 1))
            del blocks[name]
            blocks[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
            blocks[f"{name}_scales"] = exponents
        self.write(self.floats, plain)
        self.write(self.packed, blocks, {"quant_method": "mxfp4"})

    def write(self, folder: Path, tensors: dict[str, np.ndarray], method: dict[str, str] | None = None) -> None:
        shutil.copytree(ORACLE / "gpt_oss-base", folder, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["intermediate_size"] = self.inter
        if method:
            config["quantization_config"] = method
        (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture(scope="module")
def converted(source: Source, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], Path]:
    folder = tmp_path_factory.mktemp("containers")

    def make(which: str, quant: str | None) -> Path:
        target = folder / f"{which}-{quant}"
        if not target.exists():
            convert(
                getattr(source, which), target, ConvertOptions(quant=quant, dense=quant or "f32"), lambda line: None
            )
        return target

    return make


def test_the_values_of_blocks_are_those_of_the_same_floats(converted: Callable[[str, str | None], Path]) -> None:
    first, second = (Container.open(converted(which, "f32")) for which in ("packed", "floats"))
    assert first.fingerprint != second.fingerprint  # of another config.json
    weights = [
        {name: digest for name, digest in c.manifest.digests.items() if "safet" in name} for c in (first, second)
    ]
    assert weights[0] == weights[1]


def test_records_hold_the_codes_and_exponents_of_the_source(
    source: Source, converted: Callable[[str, str | None], Path]
) -> None:
    container = Container.open(converted("packed", None))
    layout = container.expert_layout(1)
    assert {part.kind for part in layout.parts.values()} == {Kind.MXFP4}
    raw = np.fromfile(layout.path, np.uint8, offset=layout.offset).reshape(8, -1)[5]
    fused = "model.layers.1.mlp.experts.gate_up_proj"
    for part, name, rows in (
        ("gate", fused, slice(0, None, 2)),
        ("up", fused, slice(1, None, 2)),
        ("down", "model.layers.1.mlp.experts.down_proj", slice(None)),
    ):
        shape = layout.parts[part].shape
        at, scales_at = layout.parts[part].weights_offset, layout.parts[part].scales_offset
        assert scales_at is not None
        packed = raw[at : at + shape.weights_bytes].reshape(shape.tiles, shape.groups, 256)
        stored = raw[scales_at : scales_at + shape.scales_bytes].reshape(shape.tiles, shape.groups, 16)
        codes, exponents = quantize.unpack_q4(packed, stored)
        assert np.array_equal(codes[: shape.rows], source.codes[name][5][rows])
        assert np.array_equal(exponents[: shape.rows], source.exponents[name][5][rows])


def test_logits_differ_from_those_of_the_floats_by_the_rounding_of_activations_only(
    converted: Callable[[str, str | None], Path],
) -> None:
    ids = expected("gpt_oss-base")["prompt_ids"]
    native, floats = (
        Runner(converted(*which)).chunks(ids, [len(ids)]) for which in (("packed", None), ("floats", "f32"))
    )
    assert 0 < np.abs(native - floats).max() < 0.05 * np.abs(floats).max()


def test_any_cut_and_number_of_threads_gives_the_bits_of_row_by_row(
    converted: Callable[[str, str | None], Path],
) -> None:
    want = expected("gpt_oss-base")
    ids = (want["prompt_ids"] + want["greedy_ids"])[:40]
    runner = Runner(converted("packed", None))
    alone = runner.chunks(ids, [1] * len(ids))
    for sizes in ([40], [5, 35], [17, 16, 7], [2] * 20):
        assert np.array_equal(runner.chunks(ids, sizes), alone)
    assert np.array_equal(Runner(converted("packed", None), threads=2, slots=9).chunks(ids, [40]), alone)


def test_experts_may_be_quantized_anew_where_that_is_asked(source: Source, tmp_path: Path) -> None:
    convert(source.packed, tmp_path / "q8", ConvertOptions(quant="q8"), lambda line: None)
    assert {part.kind for part in Container.open(tmp_path / "q8").expert_layout(0).parts.values()} == {Kind.Q8}
    with pytest.raises(OptionError, match="allowed: f32, q4, q8"):
        convert(source.packed, tmp_path / "no", ConvertOptions(quant="mxfp4"), lambda line: None)


@pytest.mark.parametrize("fault", ["no scales", "shape", "nan"])
def test_damaged_blocks_are_refused_by_name(source: Source, tmp_path: Path, fault: str) -> None:
    tensors = load_file(source.packed / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    if fault == "no scales":
        del tensors[name]
    elif fault == "shape":
        tensors[name] = tensors[name][:, :-1]
    else:
        tensors[name][3, 2, 0] = 255
    shutil.copytree(source.packed, tmp_path / "bad")
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, tmp_path / "bad/model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.down_proj"):
        convert(tmp_path / "bad", tmp_path / "out", ConvertOptions(), lambda line: None)


def gguf_of(source: Source, target: Path) -> Path:
    """The packed folder as llama.cpp's converter lays it out: gate and up apart, blocks of an exponent and 16 bytes."""
    tensors: dict[str, np.ndarray] = {}
    names = (
        ("model.layers.", "blk."), ("self_attn.sinks", "attn_sinks.weight"), ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
        ("post_attention_layernorm", "post_attention_norm"), ("input_layernorm", "attn_norm"),
        ("mlp.router", "ffn_gate_inp"), ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"),
        ("lm_head", "output"),
    )  # fmt: skip
    for name, values in load_file(source.floats / "model.safetensors").items():
        if ".experts." in name and not name.endswith("_bias"):
            continue
        stem = name
        for old, new in names:
            stem = stem.replace(old, new)
        if name.endswith("gate_up_proj_bias"):
            for first, part in enumerate(("gate", "up")):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.bias"] = values[:, first::2].copy()
        elif name.endswith("down_proj_bias"):
            tensors[f"blk.{name.split('.')[2]}.ffn_down_exps.bias"] = values
        else:
            tensors[stem] = values
    for name, codes in source.codes.items():
        codes = codes.reshape(*codes.shape[:2], -1, 2, 16)
        blocks = np.concatenate([source.exponents[name][..., None], codes[..., 0, :] | codes[..., 1, :] << 4], axis=-1)
        layer, fused = name.split(".")[2], "gate_up" in name
        for first, part in enumerate(("gate", "up") if fused else ("down",)):
            rows = blocks[:, first :: 2 if fused else 1]
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = rows.reshape(*rows.shape[:2], -1).copy()
    keys = {
        "block_count": 2, "context_length": 2048, "embedding_length": 64, "feed_forward_length": 32,
        "expert_feed_forward_length": 32, "attention.head_count": 3, "attention.head_count_kv": 1,
        "attention.key_length": 32, "attention.value_length": 32, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 8, "rope.freq_base": 150000.0, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 64, "expert_count": 8,
        "expert_used_count": 2,
    }  # fmt: skip
    metadata = {"general.architecture": "gpt-oss", **{f"gpt-oss.{key}": value for key, value in keys.items()}}
    return write(target, metadata | vocabulary_of("gpt_oss-base", 330), tensors)


def test_a_gguf_file_gives_the_experts_of_the_folder_it_was_made_from(tmp_path: Path) -> None:
    source = Source(tmp_path, inter=32)
    file = gguf_of(source, tmp_path / "model.gguf")
    for quant in (None, "f32"):
        digests = []
        for path in (source.packed, file):
            target = tmp_path / f"{path.name}-{quant}"
            convert(path, target, ConvertOptions(quant=quant, dense="f32"), lambda line: None)
            digests.append({n: d for n, d in Container.open(target).manifest.digests.items() if n.endswith("tensors")})
        assert digests[0] == digests[1]
    assert {part.kind for part in Container.open(tmp_path / "model.gguf-None").expert_layout(0).parts.values()} == {
        Kind.MXFP4
    }
    specs = [
        spec_from_config(Container.open(tmp_path / f"{n}-None").config, tmp_path) for n in ("packed", "model.gguf")
    ]
    assert specs[0] == specs[1]
