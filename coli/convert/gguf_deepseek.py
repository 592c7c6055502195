"""GGUF metadata of the architectures deepseek2, glm-dsa and glm4moe -> config.json in Hugging Face style.

deepseek2 holds both DeepSeek-V2 (softmax router) and V3 (sigmoid). Layers that predict the token after next stand
behind the others and are left out.
"""

from typing import Any

from gguf.constants import Keys

from coli.convert.gguf_config import (
    Metadata,
    RopeVectors,
    Shapes,
    refuse_what_changes_the_result,
    rope_config,
    unknown_keys,
)
from coli.errors import CheckpointError, UnsupportedModelError
from coli.model.config import MAX_LAYERS

DEEPSEEK = ("deepseek2", "glm-dsa", "glm4moe")
_NEXTN = "{arch}.nextn_predict_layers"
_FOLLOWED = (
    Keys.LLM.EXPERT_GATING_FUNC,
    Keys.LLM.EXPERT_GROUP_COUNT,
    Keys.LLM.EXPERT_GROUP_USED_COUNT,
    Keys.LLM.EXPERT_WEIGHTS_SCALE,
    Keys.LLM.LEADING_DENSE_BLOCK_COUNT,
    Keys.Rope.SCALING_YARN_LOG_MUL,
    _NEXTN,
)
_SOFTMAX, _SIGMOID = 1, 2


def deepseek_config(metadata: Metadata, shapes: Shapes, rope: RopeVectors) -> tuple[dict[str, Any], list[str]]:
    """As gguf_config.config_from_metadata."""
    refuse_what_changes_the_result(metadata, _FOLLOWED)
    architecture = metadata.architecture
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise CheckpointError(f"{metadata.path}: tensor token_embd.weight is missing")
    nextn = metadata.integer(_NEXTN, default=0, minimum=0, maximum=MAX_LAYERS)
    num_heads = metadata.integer(Keys.Attention.HEAD_COUNT)
    config: dict[str, Any] = {
        "vocab_size": embedding[0],
        "hidden_size": metadata.integer(Keys.LLM.EMBEDDING_LENGTH),
        "intermediate_size": metadata.integer(Keys.LLM.FEED_FORWARD_LENGTH),
        "num_hidden_layers": metadata.integer(Keys.LLM.BLOCK_COUNT, minimum=nextn + 1, maximum=nextn + MAX_LAYERS)
        - nextn,
        "num_nextn_predict_layers": nextn,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": metadata.integer(Keys.LLM.CONTEXT_LENGTH),
        "rms_norm_eps": metadata.number(Keys.Attention.LAYERNORM_RMS_EPS),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        **_experts(metadata),
    }
    if architecture == "glm4moe":
        config |= _glm4_moe(metadata, shapes)
    else:
        config |= _latent(metadata, shapes, config["num_hidden_layers"])
    config |= rope_config(metadata, config, rope)
    log_mul = metadata.optional_number(Keys.Rope.SCALING_YARN_LOG_MUL)
    if log_mul is not None and architecture != "glm4moe" and config["rope_scaling"] is not None:
        config["rope_scaling"] |= {"mscale": 10 * log_mul, "mscale_all_dim": 10 * log_mul}
    return config, unknown_keys(metadata)


def _experts(metadata: Metadata) -> dict[str, Any]:
    architecture = metadata.architecture
    usual = _SOFTMAX if architecture == "deepseek2" else _SIGMOID
    gating = metadata.integer(Keys.LLM.EXPERT_GATING_FUNC, default=0, minimum=0) or usual
    if gating not in (_SOFTMAX, _SIGMOID) or (gating == _SOFTMAX and architecture != "deepseek2"):
        raise UnsupportedModelError(
            f"{metadata.path}: key {metadata.key(Keys.LLM.EXPERT_GATING_FUNC)} {gating} is not supported"
        )
    model_type = {"glm4moe": "glm4_moe", "glm-dsa": "glm_moe_dsa"}.get(
        architecture, "deepseek_v3" if gating == _SIGMOID else "deepseek_v2"
    )
    norm = metadata.flag(Keys.LLM.EXPERT_WEIGHTS_NORM, default=False)
    if norm and gating == _SOFTMAX:
        raise UnsupportedModelError(
            f"{metadata.path}: key {metadata.key(Keys.LLM.EXPERT_WEIGHTS_NORM)} true is not supported with softmax"
        )
    groups = metadata.integer(Keys.LLM.EXPERT_GROUP_COUNT, default=0, minimum=0) or 1
    softmax_method = "group_limited_greedy" if groups > 1 else "greedy"
    return {
        "model_type": model_type,
        "n_routed_experts": metadata.integer(Keys.LLM.EXPERT_COUNT),
        "num_experts_per_tok": metadata.integer(Keys.LLM.EXPERT_USED_COUNT),
        "n_shared_experts": metadata.integer(Keys.LLM.EXPERT_SHARED_COUNT, default=0, minimum=0),
        "moe_intermediate_size": metadata.integer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH),
        "first_k_dense_replace": metadata.integer(Keys.LLM.LEADING_DENSE_BLOCK_COUNT, default=0, minimum=0),
        "routed_scaling_factor": metadata.optional_number(Keys.LLM.EXPERT_WEIGHTS_SCALE) or 1.0,
        "norm_topk_prob": norm,
        "scoring_func": "sigmoid" if gating == _SIGMOID else "softmax",
        "topk_method": "noaux_tc" if gating == _SIGMOID else softmax_method,
        "n_group": groups,
        "topk_group": metadata.integer(Keys.LLM.EXPERT_GROUP_USED_COUNT, default=0, minimum=0) or 1,
    }


def _glm4_moe(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    head_dim = metadata.integer(Keys.Attention.KEY_LENGTH)
    if metadata.integer(Keys.Attention.VALUE_LENGTH, default=head_dim) != head_dim:
        raise metadata.wrong(Keys.Attention.VALUE_LENGTH, str(head_dim), metadata.get(Keys.Attention.VALUE_LENGTH))
    return {
        "head_dim": head_dim,
        "num_key_value_heads": metadata.integer(Keys.Attention.HEAD_COUNT_KV),
        "partial_rotary_factor": metadata.integer(Keys.Rope.DIMENSION_COUNT) / head_dim,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }


def _latent(metadata: Metadata, shapes: Shapes, num_layers: int) -> dict[str, Any]:
    """Head sizes stand under *_mla; files from before those keys have them in their place."""
    metadata.get(Keys.Attention.HEAD_COUNT_KV)
    keys = metadata.integer(Keys.Attention.KEY_LENGTH, default=1)
    values = metadata.integer(Keys.Attention.VALUE_LENGTH, default=1)
    rotary = metadata.integer(Keys.Rope.DIMENSION_COUNT)
    config: dict[str, Any] = {
        "q_lora_rank": metadata.integer(Keys.Attention.Q_LORA_RANK, default=0, minimum=0) or None,
        "kv_lora_rank": metadata.integer(Keys.Attention.KV_LORA_RANK),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": metadata.integer(Keys.Attention.KEY_LENGTH_MLA, default=keys) - rotary,
        "v_head_dim": metadata.integer(Keys.Attention.VALUE_LENGTH_MLA, default=values),
    }
    if metadata.architecture == "glm-dsa":
        has = [f"blk.{i}.indexer.attn_k.weight" in shapes for i in range(num_layers)]
        config |= {
            "index_n_heads": metadata.integer(Keys.Attention.Indexer.HEAD_COUNT),
            "index_head_dim": metadata.integer(Keys.Attention.Indexer.KEY_LENGTH),
            "index_topk": metadata.integer(Keys.Attention.Indexer.TOP_K),
            "indexer_types": ["full" if own else "shared" for own in has],
        }
    return config
