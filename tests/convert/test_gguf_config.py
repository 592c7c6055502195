"""Metadata becomes the config.json that the model's own folder has: rope scaling, sizes, experts, defaults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli.convert.gguf_config import ROPE_FREQS, Metadata, config_from_metadata
from coli.errors import CheckpointError, UnsupportedModelError
from coli.model.config import ModelSpec
from coli.model.families import spec_from_config

PATH = Path("m.gguf")
SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (320, 64), "output.weight": (320, 64)}


def config(
    arch: str, rope_freqs: np.ndarray | None = None, shapes: dict[str, tuple[int, ...]] | None = None, **keys: Any
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "block_count": 2, "context_length": 131072, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    } | {key.replace("__", "."): value for key, value in keys.items()}  # fmt: skip
    metadata = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in values.items() if v is not None}
    rope = {} if rope_freqs is None else {ROPE_FREQS: rope_freqs}
    return config_from_metadata(Metadata(metadata, PATH), SHAPES if shapes is None else shapes, rope)[0]


def spec(arch: str, rope_freqs: np.ndarray | None = None, **keys: Any) -> ModelSpec:
    return spec_from_config(config(arch, rope_freqs, **keys), PATH)


def llama3_factors(theta: float, dim: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """As llama.cpp's converter writes rope_freqs.weight, in float32."""
    freqs = (1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))).astype(np.float32)
    found = []
    for wavelength in (2 * np.pi / freqs).astype(np.float32):
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_defaults_are_those_of_llama_cpp():
    found = spec("llama")
    assert (found.num_key_value_heads, found.head_dim, found.rope.theta) == (1, 64, 10000.0)
    assert found.rope.kind == "default"
    assert found.assumed == ()


def test_a_missing_output_tensor_means_tied_embeddings():
    assert config("llama", shapes={"token_embd.weight": (320, 64)})["tie_word_embeddings"] is True
    assert config("llama")["tie_word_embeddings"] is False


def test_explicit_head_size_is_used():
    keys = {"attention__key_length": 128, "attention__value_length": 128}
    assert spec("qwen3", **keys).head_dim == 128


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"), [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 1.0, 2.5, 4096)]
)
def test_llama3_scaling_is_read_back_from_its_factors(factor: float, low: float, high: float, original: int):
    rope = spec("llama", llama3_factors(500000.0, 64, factor, low, high, original), rope__freq_base=500000.0).rope
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", factor, low, high)
    assert rope.original_max_position_embeddings == original


def test_factors_of_one_are_no_scaling():
    assert spec("llama", np.ones(32, np.float32)).rope.kind == "default"


def test_factors_that_no_llama3_scaling_gives_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        config("llama", np.linspace(1, 8, 32, dtype=np.float32))
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        config("llama", np.ones(7, np.float32) * 2)


@pytest.mark.parametrize("keys", [{"rope__scaling__factor": 4.0}, {"rope__scale_linear": 4.0}])
def test_a_factor_alone_is_linear_under_either_name(keys: dict[str, float]):
    rope = spec("llama", **keys).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_scaling_none_ignores_the_factor():
    assert spec("llama", rope__scaling__factor=4.0, rope__scaling__type="none").rope.kind == "default"


def test_yarn_keeps_all_its_parameters():
    keys = {
        "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32768,
        "rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__yarn_beta_slow": 2.0,
        "rope__scaling__yarn_attn_factor": 1.5,
    }  # fmt: skip
    rope = spec("qwen3", **keys).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32768)
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (16.0, 2.0, 1.5)


def test_llama_with_experts_is_mixtral():
    found = spec("llama", expert_count=8, expert_used_count=2)
    assert (found.model_type, found.num_experts, found.num_experts_per_tok) == ("mixtral", 8, 2)
    assert found.norm_topk_prob
    assert found.moe_intermediate_size == 96


def test_a_window_is_mixtral_s_alone_and_only_below_the_context():
    keys = {"expert_count": 8, "expert_used_count": 2}
    assert spec("llama", attention__sliding_window=4096, **keys).layers[0].sliding_window == 4096
    assert spec("llama", attention__sliding_window=131072).layers[0].sliding_window is None
    with pytest.raises(UnsupportedModelError, match=r"llama\.attention\.sliding_window"):
        config("llama", attention__sliding_window=4096)


def test_expert_weights_are_normalized_as_the_family_or_the_file_says():
    keys = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    assert spec("qwen3moe", **keys).norm_topk_prob
    assert not spec("qwen2moe", expert_shared_feed_forward_length=32, **keys).norm_topk_prob
    assert not spec("olmoe", **keys).norm_topk_prob
    assert spec("olmoe", expert_weights_norm=True, **keys).norm_topk_prob
    with pytest.raises(UnsupportedModelError, match=r"llama\.expert_weights_norm"):
        config("llama", expert_weights_norm=False, **keys)


def test_expert_sizes_that_are_not_given_follow_llama_cpp():
    keys = {"expert_count": 8, "expert_used_count": 4}
    assert spec("qwen3moe", **keys).moe_intermediate_size == 24
    assert spec("qwen2moe", **keys).shared_expert_intermediate_size == 96


def test_olmoe_clips_when_the_file_says_so():
    keys = {"expert_count": 8, "expert_used_count": 2}
    assert spec("olmoe", attention__clamp_kqv=8.0, **keys).clip_qkv == 8.0
    assert spec("olmoe", attention__clamp_kqv=0.0, **keys).clip_qkv is None
    with pytest.raises(UnsupportedModelError, match=r"qwen3moe\.attention\.clamp_kqv"):
        config("qwen3moe", attention__clamp_kqv=8.0, **keys)


@pytest.mark.parametrize("arch", ["olmoe", "qwen2moe", "qwen3moe"])
def test_expert_architectures_need_experts(arch: str):
    with pytest.raises(CheckpointError, match=rf"{arch}\.expert_count"):
        config(arch)


def test_one_value_for_every_layer_is_that_value():
    assert config("llama", attention__head_count=[2, 2])["num_attention_heads"] == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention__causal", False), ("expert_gating_func", 2), ("logit_scale", 0.1), ("nextn_predict_layers", 1),
     ("rope__scaling__attn_factor", 2.0), ("leading_dense_block_count", 1)],
)  # fmt: skip
def test_keys_that_would_change_the_result_are_refused(key: str, value: object):
    with pytest.raises(UnsupportedModelError, match=r"llama\." + key.replace("__", r"\.")):
        config("llama", **{key: value})


def test_their_neutral_values_are_not():
    config("llama", attention__causal=True, expert_gating_func=1, logit_scale=1.0, nextn_predict_layers=0)
