"""What no family can be is refused by name: types, sizes, routing, quantizing."""

from typing import Any

import pytest
from family_configs import refusal, spec

from coli.errors import CheckpointError, UnsupportedModelError
from coli.model.families import FAMILIES


def test_unknown_model_types_are_refused_by_name_with_what_is_known() -> None:
    text = refusal(UnsupportedModelError, "llama", model_type="mamba9")
    assert f"model_type 'mamba9' is not supported; supported: {', '.join(sorted(FAMILIES))}" in text
    assert UnsupportedModelError.exit_code == 2


def test_unknown_activations_are_refused_by_name() -> None:
    assert "hidden_act 'gelu'" in refusal(UnsupportedModelError, "llama", hidden_act="gelu")


def test_quantized_checkpoints_are_refused_by_method() -> None:
    text = refusal(UnsupportedModelError, "llama", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantization_config 'gptq' is not supported" in text


@pytest.mark.parametrize("per_token", [0, -1, 9])
def test_experts_per_token_must_be_within_the_experts(per_token: int) -> None:
    text = refusal(CheckpointError, "olmoe", num_experts_per_tok=per_token)
    assert f"num_experts_per_tok: expected 1..8, found {per_token}" in text


REQUIRED = [
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "rms_norm_eps",
    "max_position_embeddings", "num_experts_per_tok", "moe_intermediate_size",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_keys_are_named(key: str) -> None:
    assert f"key '{key}' is missing" in refusal(CheckpointError, "qwen3_moe", **{key: ...})


def test_a_missing_expert_count_is_named_under_both_names() -> None:
    assert "key 'num_experts' or 'num_local_experts' is missing" in refusal(CheckpointError, "olmoe", num_experts=...)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", 64.5),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("hidden_size", -64),
        ("hidden_size", [64]),
        ("vocab_size", 10**30),
        ("num_hidden_layers", 10**9),
        ("num_experts", 10**9),
        ("rms_norm_eps", "tiny"),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", float("inf")),
        ("rms_norm_eps", 10**400),
        ("tie_word_embeddings", "yes"),
        ("norm_topk_prob", 1),
        ("mlp_only_layers", [0.5]),
        ("mlp_only_layers", 3),
        ("rope_theta", -1.0),
        ("rope_scaling", "linear"),
        ("rope_scaling", [1, 2]),
        ("num_key_value_heads", 2),
        ("head_dim", 31),
        ("model_type", 7),
        ("quantization_config", "fp8"),
    ],
)
def test_wrong_values_are_refused_with_key_and_value(key: str, value: Any) -> None:
    text = refusal(CheckpointError, "qwen3_moe", **{key: value})
    assert f"{key}: expected" in text
    assert len(text) < 250


def test_heads_that_do_not_divide_the_hidden_size_are_refused() -> None:
    assert "num_attention_heads" in refusal(CheckpointError, "olmoe", num_attention_heads=3, num_key_value_heads=3)


def test_whole_numbers_written_as_floats_are_accepted() -> None:
    assert spec("qwen3_moe", hidden_size=64.0).hidden_size == 64


@pytest.mark.parametrize(
    ("key", "value"), [("n_group", 3), ("topk_group", 3), ("partial_rotary_factor", 0.1), ("num_experts_per_tok", 9)]
)
def test_routing_that_cannot_be_is_refused_by_name(key: str, value: Any) -> None:
    assert key in refusal(CheckpointError, "glm4_moe", **{key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("topk_method", "greedy"), ("scoring_func", "softmax"), ("moe_layer_freq", 2)]
)
def test_routing_that_is_not_known_is_refused_by_name(key: str, value: Any) -> None:
    assert key in refusal(UnsupportedModelError, "glm4_moe", **{key: value})


@pytest.mark.parametrize("name", ["llama4", "llama4_text", "dbrx", "jamba", "granitemoehybrid"])
def test_an_unknown_family_is_refused_by_its_name(name: str) -> None:
    assert name in refusal(UnsupportedModelError, "llama", model_type=name)
