"""`coli plan` of the models people stream, from what their config.json publishes: shapes, KV bytes, records, cycles."""

import json
from pathlib import Path
from typing import Any

import pytest

LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "attention_bias": False, "hidden_act": "silu"}
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
DEEPSEEK_V3 = LATENT | {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 3,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1, "vocab_size": 129280, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
DEEPSEEK_V2_LITE = LATENT | {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "first_k_dense_replace": 1,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "moe_layer_freq": 1,
    "vocab_size": 102400, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "max_position_embeddings": 163840,
}  # fmt: skip
GLM_45_AIR = {
    "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "first_k_dense_replace": 1,
    "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5,
    "attention_bias": True, "use_qk_norm": False, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "vocab_size": 151552,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 131072,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
GLM_46 = GLM_45_AIR | {
    "hidden_size": 5120, "num_hidden_layers": 92, "first_k_dense_replace": 3, "use_qk_norm": True,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 202752,
}  # fmt: skip
GLM_5 = LATENT | {
    "model_type": "glm_moe_dsa", "hidden_size": 6144, "num_hidden_layers": 78, "first_k_dense_replace": 3,
    "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "vocab_size": 154880,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "max_position_embeddings": 202752, "tie_word_embeddings": False,
}  # fmt: skip
# config; sparse layers, record, KV of a token in float16: layers with the head's times bytes of one
PUBLISHED = {
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 26, 4_866_048, 27 * 1152),
    "deepseek-v3": (DEEPSEEK_V3, 58, 24_772_608, 62 * 1152),
    "glm-4.5-air": (GLM_45_AIR, 45, 9_732_096, 47 * 4096),
    "glm-4.6": (GLM_46, 89, 13_271_040, 93 * 4096),
    "glm-5": (GLM_5, 75, 21_233_664, 79 * (1152 + 256)),
}


def plan(coli, folder: Path, config: dict[str, Any], *tensors: str) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00163.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    done = coli("plan", "--json", "--no-probe", folder)
    assert done.status == 0, done.err
    facts: dict[str, Any] = json.loads(done.out)
    return facts


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_known_shape(coli, tmp_path, name):
    config, moe_layers, record, kv = PUBLISHED[name]
    facts = plan(coli, tmp_path / "model", config)
    assert (facts["moe_layers"], facts["record_bytes"]) == (moe_layers, record)
    assert facts["bytes_per_token_cycle"] == moe_layers * config["num_experts_per_tok"] * record
    assert facts["kv_bytes_per_token"] == kv
    head = facts["mtp_record_bytes"] * config["n_routed_experts"]
    assert facts["experts_bytes"] == moe_layers * config["n_routed_experts"] * record + head
    assert (head > 0) == (config.get("num_nextn_predict_layers", 0) > 0)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5"])
def test_an_index_says_whether_the_head_is_there(coli, tmp_path, name):
    config, moe_layers, record, kv = PUBLISHED[name]
    prefix = f"model.layers.{config['num_hidden_layers']}."
    alone = plan(coli, tmp_path / "a", config)
    there = plan(coli, tmp_path / "b", config, f"{prefix}eh_proj.weight", f"{prefix}self_attn.indexer.wk.weight")
    absent = plan(coli, tmp_path / "c", config, "model.embed_tokens.weight")
    sizes = ("dense_bytes", "experts_bytes", "mtp_record_bytes", "bytes_per_token_cycle", "kv_bytes_per_token")
    assert {key: there[key] for key in sizes} == {key: alone[key] for key in sizes}
    assert absent["mtp_record_bytes"] == 0
    assert absent["experts_bytes"] == moe_layers * config["n_routed_experts"] * record
    assert absent["kv_bytes_per_token"] * (config["num_hidden_layers"] + 1) == kv * config["num_hidden_layers"]
