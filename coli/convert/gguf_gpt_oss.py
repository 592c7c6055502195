"""GGUF metadata of the architecture gpt-oss -> config.json in Hugging Face style."""

from typing import Any

from gguf.constants import Keys

from coli.convert.gguf_config import (
    Metadata,
    RopeVectors,
    Shapes,
    refuse_what_changes_the_result,
    rope_config,
    trunk,
    unknown_keys,
)


def gpt_oss_config(metadata: Metadata, shapes: Shapes, rope: RopeVectors) -> tuple[dict[str, Any], list[str]]:
    """As gguf_config.config_from_metadata."""
    refuse_what_changes_the_result(metadata)
    config: dict[str, Any] = {"model_type": "gpt_oss", **trunk(metadata, shapes)}
    config |= rope_config(metadata, config, rope)
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False
    inter = config["intermediate_size"]
    config |= {
        "intermediate_size": metadata.integer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, default=inter),
        "num_local_experts": metadata.integer(Keys.LLM.EXPERT_COUNT),
        "num_experts_per_tok": metadata.integer(Keys.LLM.EXPERT_USED_COUNT),
        "sliding_window": metadata.integer(Keys.Attention.SLIDING_WINDOW, default=128),
    }
    metadata.get(Keys.LLM.EXPERT_WEIGHTS_NORM)
    return config, unknown_keys(metadata)
