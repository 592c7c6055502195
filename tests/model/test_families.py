"""What each family makes of its config."""

import math
from typing import Any

import pytest
from family_configs import FIXTURE, config, refusal, spec

from coli.errors import CheckpointError, UnsupportedModelError
from coli.model.config import ModelSpec
from coli.model.families import FAMILIES


def test_every_supported_family_has_a_fixture() -> None:
    assert set(FAMILIES) == set(FIXTURE)


def test_llama_has_biases_where_the_config_says() -> None:
    found = spec("llama")
    assert (found.qkv_bias, found.o_bias, found.mlp_bias) == (True, True, True)
    plain = spec("llama", attention_bias=False, mlp_bias=...)
    assert (plain.qkv_bias, plain.o_bias, plain.mlp_bias) == (False, False, False)


def test_explicit_head_dim_wins_over_the_quotient() -> None:
    found = spec("llama")
    assert (found.hidden_size // found.num_attention_heads, found.head_dim) == (20, 24)
    assert found.attention_scale == pytest.approx(24**-0.5)


@pytest.mark.parametrize("absent", [..., None])
def test_head_dim_is_derived_where_it_is_absent(absent: Any) -> None:
    assert spec("qwen2_moe", head_dim=absent).head_dim == 16


def test_qwen3_without_head_dim_has_the_class_default() -> None:
    assert spec("qwen3", head_dim=...).head_dim == 128


def test_missing_key_value_heads_means_one_per_query_head() -> None:
    assert spec("llama", num_key_value_heads=...).num_key_value_heads == 4


def test_olmoe_norms_rows_and_does_not_renormalize() -> None:
    found = spec("olmoe", clip_qkv=7.5)
    assert (found.qk_norm, found.norm_topk_prob, found.clip_qkv) == ("row", False, 7.5)
    assert (found.num_experts, found.num_experts_per_tok, found.moe_intermediate_size) == (8, 2, 24)
    assert found.moe_layers == (0, 1)


def test_mixtral_always_renormalizes_and_sizes_experts_by_intermediate_size() -> None:
    found = spec("mixtral")
    assert (found.norm_topk_prob, found.num_experts, found.moe_intermediate_size) == (True, 8, 24)


@pytest.mark.parametrize("model_type", ["mixtral", "olmoe", "qwen3_moe"])
def test_expert_count_is_read_under_both_names(model_type: str) -> None:
    for name, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
        assert spec(model_type, **{name: 8, other: ...}).num_experts == 8


def test_qwen2_moe_has_bias_without_a_key_and_a_gated_shared_expert() -> None:
    found = spec("qwen2_moe")
    assert (found.qkv_bias, found.o_bias) == (True, False)
    assert (found.shared_expert_intermediate_size, found.shared_expert_gate) == (72, True)


def test_qwen2_moe_sparse_step_and_dense_layers_decide_which_layers_are_sparse() -> None:
    assert spec("qwen2_moe").moe_layers == (3,)
    assert spec("qwen2_moe", mlp_only_layers=None).moe_layers == (1, 3)
    assert spec("qwen2_moe", decoder_sparse_step=1).moe_layers == (0, 2, 3)


def test_qwen3_moe_norms_heads() -> None:
    found = spec("qwen3_moe")
    assert (found.qk_norm, found.head_dim, found.norm_topk_prob) == ("head", 32, True)


def test_intermediate_size_is_not_needed_when_every_layer_is_sparse() -> None:
    assert spec("qwen3_moe", intermediate_size=...).intermediate_size == 0
    assert "intermediate_size" in refusal(CheckpointError, "qwen2_moe", intermediate_size=...)


# windows


def windows(found: ModelSpec) -> list[int | None]:
    return [layer.sliding_window for layer in found.layers]


def test_qwen_ignores_the_window_unless_told_to_use_it() -> None:
    assert windows(spec("qwen3", sliding_window=8, use_sliding_window=False)) == [None] * 3
    assert windows(spec("qwen3_moe", sliding_window=8, use_sliding_window=False)) == [None] * 2


def test_qwen3_slides_layers_from_max_window_layers_on() -> None:
    found = spec("qwen3", sliding_window=8, use_sliding_window=True, max_window_layers=2)
    assert windows(found) == [None, None, 8]


def test_qwen2_moe_slides_every_other_layer_below_max_window_layers() -> None:
    found = spec("qwen2_moe", sliding_window=8, use_sliding_window=True, max_window_layers=3)
    assert windows(found) == [8, None, 8, None]


def test_qwen3_moe_and_mixtral_slide_all_layers() -> None:
    assert windows(spec("qwen3_moe", sliding_window=8, use_sliding_window=True)) == [8, 8]
    assert windows(spec("mixtral", sliding_window=8)) == [8, 8]


def test_a_null_window_is_no_window() -> None:
    assert windows(spec("qwen3", sliding_window=None, use_sliding_window=True)) == [None] * 3
    assert windows(spec("mixtral", sliding_window=None)) == [None] * 2


def test_layer_types_override_the_rule() -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert windows(spec("qwen3", use_sliding_window=True, layer_types=types)) == [8, None, None]
    assert "layer_types" in refusal(CheckpointError, "qwen3", layer_types=types[:2])
    text = refusal(UnsupportedModelError, "qwen3", layer_types=["linear_attention"] * 3)
    assert "layer_types 'linear_attention' is not supported" in text


# rope


def test_old_and_new_rope_styles_mean_the_same() -> None:
    scaling = {"factor": 4.0}
    old = spec("llama", rope_theta=500000.0, rope_scaling={"type": "linear", **scaling})
    old_named = spec("llama", rope_theta=500000.0, rope_scaling={"rope_type": "linear", **scaling})
    parameters = {"rope_type": "linear", "rope_theta": 500000.0, **scaling}
    new = spec("llama", rope_theta=..., rope_scaling=..., rope_parameters=parameters)
    typed = spec("llama", rope_theta=..., rope_scaling=..., rope_parameters={"full_attention": parameters})
    assert old == old_named == new == typed
    assert (new.rope.kind, new.rope.theta, new.rope.factor, new.rope.rotary_dim) == ("linear", 500000.0, 4.0, 24)


def test_new_style_without_theta_takes_the_key_beside_it() -> None:
    found = spec("llama", rope_scaling=..., rope_theta=2e6, rope_parameters={"rope_type": "default"})
    assert (found.rope.theta, found.assumed) == (2e6, ())


def test_a_missing_theta_is_the_family_default_and_is_said() -> None:
    found = spec("mixtral", rope_theta=...)
    assert (found.rope.theta, found.assumed) == (1e6, ("rope_theta 1e+06",))


def test_llama3_rope_keeps_all_its_parameters() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    rope = spec("llama", rope_scaling=scaling).rope
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", 8.0, 1.0, 4.0)
    assert rope.original_max_position_embeddings == 8192
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        broken = {name: value for name, value in scaling.items() if name != key}
        assert f"'rope_scaling.{key}' is missing" in refusal(CheckpointError, "llama", rope_scaling=broken)


def test_yarn_attention_factor_follows_the_paper_unless_given() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    rope = spec("qwen3", rope_parameters=..., rope_theta=1e6, rope_scaling=scaling).rope
    assert (rope.kind, rope.factor, rope.beta_fast, rope.beta_slow, rope.truncate) == ("yarn", 4.0, 32.0, 1.0, True)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0, rel=1e-15)
    given = spec("llama", rope_scaling=scaling | {"attention_factor": 1.25, "truncate": False}).rope
    assert (given.attention_factor, given.truncate) == (1.25, False)
    scaled = spec("llama", rope_scaling=scaling | {"mscale": 1.0, "mscale_all_dim": 1.0}).rope
    assert scaled.attention_factor == 1.0


def test_yarn_without_a_factor_takes_the_ratio_of_the_context_lengths() -> None:
    rope = spec("llama", rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 1024}).rope
    assert (rope.factor, rope.original_max_position_embeddings) == (4.0, 1024)


@pytest.mark.parametrize("kind", ["dynamic", "su", "mrope", "something new"])
def test_unknown_rope_types_are_refused_by_name(kind: str) -> None:
    for key in ("type", "rope_type"):
        text = refusal(UnsupportedModelError, "llama", rope_scaling={key: kind, "factor": 2.0})
        assert f"rope_scaling.rope_type '{kind}' is not supported" in text
        assert "llama3" in text


def test_different_ropes_per_attention_type_are_refused() -> None:
    tables = {name: {"rope_type": "default", "rope_theta": theta} for name, theta in
              (("full_attention", 1e6), ("sliding_attention", 1e4))}  # fmt: skip
    assert "differs between attention types" in refusal(UnsupportedModelError, "qwen3", rope_parameters=tables)


def test_partial_rotary_is_refused_where_the_family_has_none() -> None:
    assert "partial_rotary_factor 0.5" in refusal(UnsupportedModelError, "llama", partial_rotary_factor=0.5)


def test_glm4_rotates_half_a_head_and_routes_by_sigmoid() -> None:
    found = spec("glm4_moe", n_routed_experts=8, n_group=2, topk_group=1, routed_scaling_factor=2.5)
    assert (found.head_dim, found.rope.rotary_dim, found.rope.interleaved) == (32, 16, False)
    assert (found.scoring_func, found.e_score_correction_bias, found.group_score) == ("sigmoid", True, "top2")
    assert (found.n_group, found.topk_group, found.routed_scaling_factor) == (2, 1, 2.5)
    assert (found.qkv_bias, found.o_bias, found.shared_expert_gate) == (True, False, False)
    assert [layer.is_moe for layer in found.layers] == [False, True, True]


def test_latent_attention_scales_by_mscale_all_dim_squared_and_rotates_by_the_ratio() -> None:
    scaling = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    found = spec("deepseek_v3", rope_scaling=scaling)
    whole, half = 0.1 * math.log(40) + 1, 0.05 * math.log(40) + 1
    assert found.attention_scale == pytest.approx(24**-0.5 * half**2)
    assert found.rope.attention_factor == pytest.approx(whole / half)
    assert (found.rope.rotary_dim, found.rope.interleaved, found.head_dim) == (8, True, 24)
    assert spec("deepseek_v3", rope_interleave=False).rope.interleaved is False
    assert spec("deepseek_v3", rope_scaling=None).attention_scale == pytest.approx(24**-0.5)


def test_new_and_old_config_styles_of_deepseek_are_one_spec() -> None:
    old = config("deepseek_v3")
    scaling = dict(old["rope_scaling"])
    new = {"rope_type": scaling.pop("type"), "rope_theta": old["rope_theta"], **scaling}
    assert spec("deepseek_v3", rope_scaling=..., rope_theta=..., rope_parameters=new) == spec("deepseek_v3")


def test_deepseek_v2_without_groups_or_compressed_queries() -> None:
    found = spec("deepseek_v2", topk_method="greedy")
    assert (found.group_score, found.n_group, found.norm_topk_prob) == ("none", 1, False)
    assert spec("deepseek_v2").group_score == "max"
    assert found.latent is not None
    assert found.latent.q_lora_rank is None
    assert found.shared_expert_intermediate_size == 24  # two of 12


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
def test_latent_sizes_that_are_missing_or_impossible_are_named(key: str) -> None:
    assert key in refusal(CheckpointError, "deepseek_v3", **{key: ...})
    assert key in refusal(CheckpointError, "deepseek_v3", **{key: 0})


def roles(**changes: Any) -> str:
    return "".join(layer.indexer[0] for layer in spec("glm_moe_dsa", **changes).layers)


def test_indexer_types_beat_the_pattern_and_the_pattern_beats_the_frequency() -> None:
    assert roles() == "fff"
    assert roles(index_topk_freq=2, index_skip_topk_offset=1) == "fsf"
    assert roles(index_topk_freq=4) == "ffs"
    assert roles(index_topk_freq=4, index_topk_pattern="FSS") == "fss"
    assert roles(index_topk_pattern="FSS", indexer_types=["full", "full", "shared"]) == "ffs"


def test_mlp_layer_types_beat_the_count_of_dense_layers() -> None:
    def sparse(**changes: Any) -> tuple[int, ...]:
        return spec("glm_moe_dsa", **changes).moe_layers

    assert sparse() == (1, 2)
    assert sparse(mlp_layer_types=["sparse", "dense", "sparse"]) == (0, 2)
    assert sparse(first_k_dense_replace=..., num_hidden_layers=5) == (3, 4)  # the class default
    assert "mlp_layer_types" in refusal(CheckpointError, "glm_moe_dsa", mlp_layer_types=["sparse"])
    assert "mlp_layer_types 'odd'" in refusal(UnsupportedModelError, "glm_moe_dsa", mlp_layer_types=["odd"] * 3)


def test_indexers_that_cannot_be_are_refused_by_name() -> None:
    assert "indexer_types" in refusal(CheckpointError, "glm_moe_dsa", indexer_types=["shared", "full", "full"])
    assert "indexer_types" in refusal(CheckpointError, "glm_moe_dsa", indexer_types=["full"])
    assert "indexer_types 'lazy'" in refusal(UnsupportedModelError, "glm_moe_dsa", indexer_types=["lazy"] * 3)
    assert "q_lora_rank" in refusal(CheckpointError, "glm_moe_dsa", q_lora_rank=None)
    assert "index_topk" in refusal(CheckpointError, "glm_moe_dsa", index_topk=0)


# granitemoe, ernie4_5_moe, gpt_oss


def test_granitemoe_takes_its_multipliers_and_one_where_they_are_absent() -> None:
    found = spec("granitemoe")
    four = found.attention_scale, found.embedding_multiplier, found.residual_multiplier, found.logits_scaling
    assert four == (0.4, 3.0, 0.7, 1.6)
    keys = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    plain = spec("granitemoe", **dict.fromkeys(keys, ...))
    assert (plain.attention_scale, plain.residual_multiplier, plain.logits_scaling) == (1.0, 1.0, 1.0)


def test_ernie_has_sparse_layers_from_start_to_end_at_the_interval() -> None:
    assert spec("ernie4_5_moe").moe_layers == (1, 2)
    assert spec("ernie4_5_moe", moe_layer_end_index=-1, moe_layer_start_index=0).moe_layers == (0, 1, 2)
    assert spec("ernie4_5_moe", moe_layer_interval=2).moe_layers == (1,)
    assert spec("ernie4_5_moe", moe_layer_end_index=1).moe_layers == (1,)


def test_ernie_use_bias_reaches_every_projection_and_the_output() -> None:
    found = spec("ernie4_5_moe", use_bias=True)
    assert (found.qkv_bias, found.o_bias, found.mlp_bias, found.lm_head_bias) == (True,) * 4
    assert found.rope.interleaved
    assert found.shared_expert_intermediate_size == 32


def test_gpt_oss_slides_on_every_other_layer_unless_layer_types_says_otherwise() -> None:
    assert windows(spec("gpt_oss", layer_types=..., num_hidden_layers=4)) == [8, None, 8, None]
    assert windows(spec("gpt_oss", layer_types=["full_attention", "sliding_attention"])) == [None, 8]
    assert windows(spec("gpt_oss", sliding_window=None)) == [None, None]


def test_gpt_oss_yarn_does_not_truncate_its_ramp() -> None:
    found = spec("gpt_oss")
    assert (found.rope.kind, found.rope.truncate, found.rope.factor) == ("yarn", False, 32.0)
    assert (found.sinks, found.router_bias, found.expert_bias, found.swiglu_limit) == (True, True, True, 7.0)
    assert "swiglu_alpha" in refusal(UnsupportedModelError, "gpt_oss", swiglu_alpha=1.5)


# phimoe


def test_phimoe_has_longrope_with_factors_of_both_lengths() -> None:
    found = spec("phimoe")
    assert (found.rope.kind, found.rope.original_max_position_embeddings) == ("longrope", 56)
    assert (found.rope.attention_factor, found.rope.long_attention_factor) == (1.1, 1.3)
    assert len(found.rope.short_factor) == len(found.rope.long_factor) == 6
    assert found.layer_norm
    assert found.scoring_func == "sparsemixer"
    table = config("phimoe")["rope_parameters"]
    assert "long_factor" in refusal(CheckpointError, "phimoe", rope_parameters={**table, "long_factor": [1.0]})


def test_phimoe_routes_to_two_experts_or_not_at_all() -> None:
    assert "num_experts_per_tok" in refusal(UnsupportedModelError, "phimoe", num_experts_per_tok=3)
