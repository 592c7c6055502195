"""Sizes and options that the reference folders lack: the forward computes what float64 does, in every cut."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from containers import ORACLE, expected
from forward_runs import Runner
from safetensors.numpy import load_file, save_file
from slow_model import SlowModel

from coli.convert import ConvertOptions, convert
from coli.store.layout import Kind

VOCAB = 330
IDS = [(29 * i * i + 7 * i + 11) % 320 for i in range(40)]
MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
BASES = ("ernie4_5_moe-base", "gpt_oss-base", "granitemoe-base", "phimoe-longrope")
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "num_hidden_layers": 3, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 327,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "hidden_size": 72, "intermediate_size": 20, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 40, "num_local_experts": 12, "num_experts_per_tok": 1, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "swiglu_limit": 1.5,
    "attention_bias": True, "rope_scaling": YARN,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "model_type": "granitemoe", "hidden_size": 80, "intermediate_size": 40, "num_attention_heads": 5,
    "num_key_value_heads": 1, "num_local_experts": 12, "num_experts_per_tok": 3, "attention_bias": True,
    "attention_multiplier": 0.1, "embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 3.0,
}  # fmt: skip
ERNIE: dict[str, Any] = {
    "model_type": "ernie4_5_moe", "hidden_size": 72, "intermediate_size": 80, "moe_intermediate_size": 20,
    "num_attention_heads": 3, "num_key_value_heads": 3, "moe_num_experts": 12, "moe_k": 4,
    "moe_num_shared_experts": 3, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    "use_bias": True,
}  # fmt: skip
PHI: dict[str, Any] = {
    "model_type": "phimoe", "hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_local_experts": 12, "num_experts_per_tok": 2, "attention_bias": True,
    "lm_head_bias": False, "router_jitter_noise": 0.2, "sliding_window": None, "max_position_embeddings": 512,
    "rope_scaling": {
        "type": "longrope", "original_max_position_embeddings": 24, "short_mscale": 1.1, "long_mscale": 1.3,
        "short_factor": [1.0 + 0.1 * i for i in range(10)], "long_factor": [1.5 + 0.4 * i for i in range(10)],
    },
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_oss: widths 72 and 20, top 1 of 12, window 5": GPT_OSS,
    "gpt_oss: all of 5 experts, a window on every layer": GPT_OSS
    | {"num_local_experts": 5, "num_experts_per_tok": 5, "layer_types": ["sliding_attention"] * 3, "sliding_window": 1},
    "granitemoe: widths 80 and 40, 3 of 12, biases": GRANITE,
    "granitemoe: all of 12, tied": GRANITE
    | {"num_experts_per_tok": 12, "tie_word_embeddings": True, "attention_bias": False},
    "granitemoe: top 1, four heads of 20": GRANITE
    | {"num_experts_per_tok": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
    "ernie4_5_moe: widths 72, 80 and 20, 4 of 12, three shared, biases": ERNIE,
    "ernie4_5_moe: top 1, none shared, every other layer": ERNIE
    | {"moe_k": 1, "moe_num_shared_experts": 0, "moe_layer_interval": 2, "use_bias": False, "moe_layer_start_index": 0},
    "ernie4_5_moe: all of 12, an end before the last layer": ERNIE | {"moe_k": 12, "moe_layer_end_index": 1},
    "phimoe: widths 40 and 72, 12 experts, longrope beyond its original length": PHI,
    "phimoe: a window of 7, within the original length": PHI
    | {"sliding_window": 7, "lm_head_bias": True, "attention_bias": False,
       "rope_scaling": PHI["rope_scaling"] | {"original_max_position_embeddings": 64}},
}  # fmt: skip


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint."""
    family, hidden = config["model_type"], config["hidden_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = (config[name] * size for name in ("num_attention_heads", "num_key_value_heads"))
    biased = config.get("attention_bias") or config.get("use_bias")
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, hidden)}

    def norm(name: str) -> None:
        found[f"{name}.weight"] = (hidden,)
        if family == "phimoe":
            found[f"{name}.bias"] = (hidden,)

    def linear(name: str, rows: int, cols: int, bias: Any) -> None:
        found[f"{name}.weight"] = (rows, cols)
        if bias:
            found[f"{name}.bias"] = (rows,)

    def gated(prefix: str, inter: int, bias: Any = False) -> None:
        linear(f"{prefix}gate_proj", inter, hidden, bias)
        linear(f"{prefix}up_proj", inter, hidden, bias)
        linear(f"{prefix}down_proj", hidden, inter, bias)

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        norm(f"{prefix}input_layernorm")
        norm(f"{prefix}post_attention_layernorm")
        for part, rows, cols in (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query)):
            linear(f"{prefix}self_attn.{part}_proj", rows, cols, biased)
        experts, inter = config.get("num_local_experts", 0), config["intermediate_size"]
        if family == "gpt_oss":
            found[f"{prefix}self_attn.sinks"] = (config["num_attention_heads"],)
            linear(f"{prefix}mlp.router", experts, hidden, True)
            found[f"{prefix}mlp.experts.gate_up_proj"] = (experts, hidden, 2 * inter)
            found[f"{prefix}mlp.experts.gate_up_proj_bias"] = (experts, 2 * inter)
            found[f"{prefix}mlp.experts.down_proj"] = (experts, inter, hidden)
            found[f"{prefix}mlp.experts.down_proj_bias"] = (experts, hidden)
        elif family == "granitemoe":
            found[f"{prefix}block_sparse_moe.router.layer.weight"] = (experts, hidden)
            found[f"{prefix}block_sparse_moe.input_linear.weight"] = (experts, 2 * inter, hidden)
            found[f"{prefix}block_sparse_moe.output_linear.weight"] = (experts, hidden, inter)
        elif family == "phimoe":
            found[f"{prefix}block_sparse_moe.gate.weight"] = (experts, hidden)
            for e in range(experts):
                for part, shape in (("w1", (inter, hidden)), ("w2", (hidden, inter)), ("w3", (inter, hidden))):
                    found[f"{prefix}block_sparse_moe.experts.{e}.{part}.weight"] = shape
        elif is_sparse(config, layer):
            experts, inter = config["moe_num_experts"], config["moe_intermediate_size"]
            found[f"{prefix}mlp.gate.weight"] = (experts, hidden)
            found[f"{prefix}mlp.moe_statics.e_score_correction_bias"] = (1, experts)
            for e in range(experts):
                gated(f"{prefix}mlp.experts.{e}.", inter)
            if shared := config["moe_num_shared_experts"]:
                gated(f"{prefix}mlp.shared_experts.", shared * inter, config["use_bias"])
        else:
            gated(f"{prefix}mlp.", inter, config["use_bias"])
    norm("model.norm")
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (VOCAB, hidden)
    if config.get("lm_head_bias") or config.get("use_bias"):
        found["lm_head.bias"] = (VOCAB,)
    return found


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    end = config["moe_layer_end_index"]
    last = config["num_hidden_layers"] - 1 if end == -1 else end
    return (layer + 1) % config["moe_layer_interval"] == 0 and config["moe_layer_start_index"] <= layer <= last


def random_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    found = {}
    for name, shape in shapes_of(config).items():
        values = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif "bias" in name or len(shape) == 1:
            values *= 0.02 if "correction" in name else 0.3
        elif "embed" not in name:
            values *= 1.2 * shape[-2 if name.endswith(("gate_up_proj", "down_proj")) else -1] ** -0.5
        found[name] = values.astype(np.float32)
    return found


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    shutil.copytree(ORACLE / BASES[0], folder, ignore=shutil.ignore_patterns("*.safetensors", "expected.json"))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def runner(folder: Path, quant: str | None = "f32") -> Runner:
    target = folder.with_name(f"{folder.name}-{quant}")
    convert(folder, target, ConvertOptions(quant=quant, dense="f32" if quant is None else None), lambda line: None)
    return Runner(target)


@pytest.mark.parametrize("name", BASES)
def test_the_slow_model_computes_what_transformers_does(name: str) -> None:
    want = expected(name)
    config = json.loads((ORACLE / name / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    scaling = None if rope is None else rope | {"type": rope["rope_type"]}
    config |= {"rope_scaling": scaling, "rope_theta": config.get("rope_theta") or rope["rope_theta"]}
    ids = want["prompt_ids"] + want["greedy_ids"]
    logits = SlowModel(config, load_file(ORACLE / name / "model.safetensors")).logits(ids)
    for position, values in zip(want["logits"]["positions"], want["logits"]["values"], strict=True):
        if position < len(ids):
            assert np.abs(logits[position] - np.array(values)).max() < 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_computes_what_float64_does_in_every_cut(name: str, tmp_path: Path) -> None:
    config = COMMON | VARIANTS[name]
    tensors = random_tensors(config)
    want = SlowModel(config, tensors).logits(IDS)
    model = runner(write_folder(tmp_path / "model", config, tensors))
    found = read(model, [len(IDS)])
    assert np.abs(found - want).max() < 1e-4 * np.abs(want).max()
    for sizes in ([1] * len(IDS), [7, 33], [17, 16, 7]):
        assert np.array_equal(read(model, sizes), found)


def read(model: Runner, sizes: list[int]) -> np.ndarray:
    """Logits of IDS as one prompt, in these chunks."""
    cache, at, out = model.cache(64), 0, []
    cache.expect(len(IDS))
    for size in sizes:
        rows = np.arange(size)
        chunk = np.array(IDS[at : at + size])
        out.append(model.model.forward(cache, chunk, at + rows, None, rows, prefill=False).copy())
        at += size
    return np.concatenate(out)


@pytest.mark.parametrize(("hidden", "inter"), [(72, 20), (40, 80), (96, 33)])
def test_mxfp4_of_sizes_that_fill_no_group(hidden: int, inter: int, tmp_path: Path) -> None:
    """Blocks hold the values that the slow model computes with; as records they round activations only."""
    config = COMMON | GPT_OSS | {"hidden_size": hidden, "intermediate_size": inter, "num_experts_per_tok": 3}
    tensors, rng = random_tensors(config), np.random.default_rng(5)
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups = -(-inputs // 32)
        codes = rng.integers(0, 16, (experts, outputs, groups, 32)).astype(np.uint8)
        exponents = rng.integers(121, 124, (experts, outputs, groups)).astype(np.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes[..., ::2] | codes[..., 1::2] << 4, exponents
        values = MXFP4[codes] * np.ldexp(np.float32(1), exponents.astype(int) - 127)[..., None]
        plain[name] = values.reshape(experts, outputs, -1)[:, :, :inputs].transpose(0, 2, 1)
    config["quantization_config"] = {"quant_method": "mxfp4"}
    want = SlowModel(config, plain).logits(IDS)
    folder = write_folder(tmp_path / "model", config, tensors)
    exact = runner(folder)
    assert np.abs(read(exact, [len(IDS)]) - want).max() < 1e-4 * np.abs(want).max()
    native = runner(folder, None)
    assert {part.kind for part in native.container.expert_layout(0).parts.values()} == {Kind.MXFP4}
    found = read(native, [len(IDS)])
    assert 0 < np.abs(found - want).max() < 0.1 * np.abs(want).max()
    for sizes in ([1] * len(IDS), [7, 33], [17, 16, 7]):
        assert np.array_equal(read(native, sizes), found)
