"""GGUF metadata of the architectures granitemoe, ernie4_5-moe and phimoe -> config.json in Hugging Face style.

Where llama.cpp and the model's own class differ (phimoe: RMSNorm for LayerNorm, a softmax for sparsemixer) the class is
followed: the weights were trained with it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gguf.constants import Keys

from coli.convert.gguf_config import (
    ROPE_LONG,
    ROPE_SHORT,
    Metadata,
    RopeVectors,
    Shapes,
    architecture_of,
    refuse_what_changes_the_result,
    rope_config,
    trunk,
    unknown_keys,
    unsupported,
)
from coli.errors import CheckpointError

Config = dict[str, Any]


def _granitemoe(metadata: Metadata, config: Config, shapes: Shapes) -> Config:
    """Multipliers that are absent change nothing; attention's is then 1 / sqrt(head_dim), as in llama.cpp."""
    if shared := metadata.integer(Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, default=0, minimum=0):
        raise unsupported(metadata, Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, f"{shared} (granitemoeshared)")
    if not metadata.flag(Keys.Rope.SCALING_FINETUNED, default=True):  # llama.cpp's switch for a Granite without rope
        raise unsupported(metadata, Keys.Rope.SCALING_FINETUNED, False)
    usual = config["head_dim"] ** -0.5
    return {
        "num_local_experts": metadata.integer(Keys.LLM.EXPERT_COUNT),
        "intermediate_size": metadata.integer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, default=config["intermediate_size"]),
        "attention_multiplier": metadata.optional_number(Keys.Attention.SCALE) or usual,
        "embedding_multiplier": metadata.optional_number(Keys.LLM.EMBEDDING_SCALE) or 1.0,
        "residual_multiplier": metadata.optional_number(Keys.LLM.RESIDUAL_SCALE) or 1.0,
        "logits_scaling": metadata.optional_number(Keys.LLM.LOGIT_SCALE) or 1.0,
    }


def _ernie4_5_moe(metadata: Metadata, config: Config, shapes: Shapes) -> Config:
    """The last sparse layer stands only in the tensors. expert_shared_feed_forward_length, which converters
    take from the number of heads, is not looked at: the count is right."""
    metadata.get(Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH)
    layers = range(config["num_hidden_layers"])
    sparse = [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" in shapes]
    return {
        "moe_num_experts": metadata.integer(Keys.LLM.EXPERT_COUNT),
        "moe_k": metadata.integer(Keys.LLM.EXPERT_USED_COUNT),
        "moe_intermediate_size": metadata.integer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH),
        "moe_num_shared_experts": metadata.integer(Keys.LLM.EXPERT_SHARED_COUNT, default=0, minimum=0),
        "moe_layer_start_index": metadata.integer(Keys.LLM.LEADING_DENSE_BLOCK_COUNT, default=0, minimum=0),
        "moe_layer_end_index": max(sparse, default=-1),
        "moe_layer_interval": metadata.integer(Keys.LLM.INTERLEAVE_MOE_LAYER_STEP, default=1),
        "use_bias": config["qkv_bias"],
    }


def _phimoe(metadata: Metadata, config: Config, shapes: Shapes) -> Config:
    """A window as long as the context is none. The jitter that makes sparsemixer's threshold has no key: it is that of
    the published models, which is the class's default."""
    window = metadata.integer(Keys.Attention.SLIDING_WINDOW, default=0, minimum=0)
    return {
        "num_local_experts": metadata.integer(Keys.LLM.EXPERT_COUNT),
        "intermediate_size": metadata.integer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, default=config["intermediate_size"]),
        "lm_head_bias": "output.bias" in shapes,
        "sliding_window": window if 0 < window < config["max_position_embeddings"] else None,
    }


_OWN: Mapping[str, tuple[Callable[[Metadata, Config, Shapes], Config], tuple[str, ...]]] = {
    # by architecture: its own part of config.json, and the keys it obeys that others refuse
    "granitemoe": (
        _granitemoe,
        (Keys.Attention.SCALE, Keys.LLM.EMBEDDING_SCALE, Keys.LLM.RESIDUAL_SCALE, Keys.LLM.LOGIT_SCALE),
    ),
    "ernie4_5-moe": (_ernie4_5_moe, (Keys.LLM.LEADING_DENSE_BLOCK_COUNT, Keys.LLM.INTERLEAVE_MOE_LAYER_STEP)),
    "phimoe": (_phimoe, (Keys.Rope.SCALING_ATTN_FACTOR,)),
}
GRANITE_ERNIE_PHI = tuple(_OWN)


def granite_ernie_phi_config(metadata: Metadata, shapes: Shapes, rope: RopeVectors) -> tuple[Config, list[str]]:
    """As gguf_config.config_from_metadata."""
    own, followed = _OWN[metadata.architecture]
    refuse_what_changes_the_result(metadata, followed)
    config: Config = {"model_type": architecture_of(metadata).model_type, **trunk(metadata, shapes)}
    config["num_experts_per_tok"] = metadata.integer(Keys.LLM.EXPERT_USED_COUNT)
    config |= rope_config(metadata, config, rope)
    config |= own(metadata, config, shapes)
    if metadata.architecture == "phimoe":
        config["rope_scaling"] = _longrope(metadata, config, rope)
    norm = metadata.flag(Keys.LLM.EXPERT_WEIGHTS_NORM, default=True)
    if not norm:
        raise unsupported(metadata, Keys.LLM.EXPERT_WEIGHTS_NORM, norm)
    return config, unknown_keys(metadata)


def _longrope(metadata: Metadata, config: Config, rope: RopeVectors) -> Config | None:
    """The factors stand in two tensors. That of cos and sin is a key, one for both, where config.json can have two
    (short_mscale, long_mscale)."""
    short, long = rope.get(ROPE_SHORT), rope.get(ROPE_LONG)
    attention_factor = metadata.optional_number(Keys.Rope.SCALING_ATTN_FACTOR)
    if short is None and long is None:
        if attention_factor not in (None, 1.0):
            raise unsupported(metadata, Keys.Rope.SCALING_ATTN_FACTOR, f"{attention_factor} without {ROPE_LONG}")
        scaling: Config | None = config["rope_scaling"]
        return scaling
    if short is None or long is None:
        missing = ROPE_SHORT if short is None else ROPE_LONG
        raise CheckpointError(f"{metadata.path}: tensor {missing} is missing: download the file again")
    original = metadata.integer(Keys.Rope.SCALING_ORIG_CTX_LEN, default=config["max_position_embeddings"])
    # the shortest decimals that are these float32: 1.08 and not 1.0800000429153442
    factors = {"short_factor": short, "long_factor": long}
    found: Config = {name: [float(str(value)) for value in values] for name, values in factors.items()}
    found |= {"rope_type": "longrope", "original_max_position_embeddings": original}
    return found if attention_factor is None else found | {"attention_factor": attention_factor}
