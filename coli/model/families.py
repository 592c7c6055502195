"""config.json -> ModelSpec, one function per model family; every alias, default and old spelling ends here.

Facts about each family follow the transformers 5 model classes. What is unknown (model_type, rope type, activation,
quantization) is refused by name, never guessed. What families share is in family_parts.py, ropes in rope_keys.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coli.errors import UnsupportedModelError
from coli.model.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    ConfigReader,
    IndexerRole,
    IndexerSpec,
    LayerSpec,
    ModelSpec,
)
from coli.model.family_parts import (
    ExpertRules,
    common_spec,
    expert_groups,
    expert_rules,
    first_dense,
    latent_spec,
    layer_count,
    mlp_types,
    one_of,
    qwen_window,
    qwen_windows,
    routed_experts,
    sigmoid_experts,
    sparse_step,
    windows_by_type,
)


def spec_from_config(config: Mapping[str, Any], path: Path) -> ModelSpec:
    """The spec of the model that `config` (read from `path`, used in messages only) describes.

    Raises UnsupportedModelError for what this version does not know and CheckpointError for keys that are missing,
    of the wrong type or contradict each other; both name the key.
    """
    reader = ConfigReader(config, path)
    model_type = reader.text("model_type")
    if model_type not in FAMILIES:
        raise reader.unsupported("model_type", model_type, sorted(FAMILIES))
    if reader.table("quantization_config"):
        method = ConfigReader(config["quantization_config"], path, "quantization_config").text(
            "quant_method", default="of unknown method"
        )
        if method != "fp8" and (model_type, method) != ("gpt_oss", "mxfp4"):
            raise UnsupportedModelError(
                f"{path}: quantization_config {method!r} is not supported: use the fp8, float16, bfloat16 or float32"
                " checkpoint"
            )
    hidden_act = reader.text("hidden_act", default="silu")
    if hidden_act not in ("silu", "swish"):
        raise reader.unsupported("hidden_act", hidden_act, ["silu"])
    return FAMILIES[model_type](reader)


def _llama(reader: ConfigReader) -> ModelSpec:
    attention_bias = reader.flag("attention_bias", False)
    return common_spec(
        reader,
        default_theta=10000.0,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias", False),
        windows=(None,) * layer_count(reader),
    )


def _qwen3(reader: ConfigReader) -> ModelSpec:
    attention_bias = reader.flag("attention_bias", False)
    first_sliding = reader.integer("max_window_layers", default=28, minimum=0)
    return common_spec(
        reader,
        default_theta=10000.0,
        default_head_dim=128,
        qk_norm="head",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=qwen_windows(reader, lambda layer_idx: layer_idx >= first_sliding),
    )


def _mixtral(reader: ConfigReader) -> ModelSpec:
    window = reader.integer("sliding_window", default=0, minimum=0) or None
    return common_spec(
        reader,
        default_theta=1000000.0,
        windows=(window,) * layer_count(reader),
        experts=expert_rules(reader, "intermediate_size", norm_topk_prob=True),
        sparse=lambda layer_idx: True,
    )


def _olmoe(reader: ConfigReader) -> ModelSpec:
    attention_bias = reader.flag("attention_bias", False)
    return common_spec(
        reader,
        default_theta=10000.0,
        qk_norm="row",
        clip_qkv=reader.optional_number("clip_qkv"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=(None,) * layer_count(reader),
        experts=expert_rules(reader, "intermediate_size", norm_topk_prob=reader.flag("norm_topk_prob", False)),
        sparse=lambda layer_idx: True,
    )


def _qwen2_moe(reader: ConfigReader) -> ModelSpec:
    window_layers = reader.integer("max_window_layers", default=28, minimum=0)
    experts = expert_rules(
        reader,
        "moe_intermediate_size",
        norm_topk_prob=reader.flag("norm_topk_prob", False),
        shared_size=reader.integer("shared_expert_intermediate_size", minimum=0),
    )
    return common_spec(
        reader,
        default_theta=10000.0,
        qkv_bias=reader.flag("qkv_bias", True),
        windows=qwen_windows(reader, lambda layer_idx: layer_idx % 2 == 0 and layer_idx < window_layers),
        experts=experts,
        sparse=sparse_step(reader),
    )


def _qwen3_moe(reader: ConfigReader) -> ModelSpec:
    attention_bias = reader.flag("attention_bias", False)
    return common_spec(
        reader,
        default_theta=10000.0,
        qk_norm="head",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=(qwen_window(reader),) * layer_count(reader),
        experts=expert_rules(reader, "moe_intermediate_size", norm_topk_prob=reader.flag("norm_topk_prob", False)),
        sparse=sparse_step(reader),
    )


def _glm4_moe(reader: ConfigReader) -> ModelSpec:
    spec = common_spec(
        reader,
        default_theta=10000.0,
        default_head_dim=128,
        partial_rotary=0.5,
        qk_norm="head" if reader.flag("use_qk_norm", False) else "none",
        qkv_bias=reader.flag("attention_bias", False),
        windows=(None,) * layer_count(reader),
        experts=sigmoid_experts(reader),
        sparse=first_dense(reader),
    )
    return _with_mtp(reader, spec)


def _deepseek_v2(reader: ConfigReader) -> ModelSpec:
    """As its transformers class: norm_topk_prob is ignored and the routed scale always applies."""
    one_of(reader, "scoring_func", "softmax")
    grouped = one_of(reader, "topk_method", "greedy", "group_limited_greedy") != "greedy"
    n_group, topk_group = expert_groups(reader) if grouped else (1, 1)
    experts = routed_experts(
        reader,
        norm_topk_prob=False,
        n_group=n_group,
        topk_group=topk_group,
        group_score="max" if grouped else "none",
    )
    return latent_spec(reader, experts)


def _deepseek_v3(reader: ConfigReader) -> ModelSpec:
    return _with_mtp(reader, latent_spec(reader, sigmoid_experts(reader)))


def _glm_moe_dsa(reader: ConfigReader) -> ModelSpec:
    indexer = IndexerSpec(
        index_n_heads=reader.integer("index_n_heads"),
        index_head_dim=reader.integer("index_head_dim"),
        index_topk=reader.integer("index_topk"),
        interleaved=reader.flag("indexer_rope_interleave", True),
    )
    spec = latent_spec(reader, sigmoid_experts(reader), indexer, mlp_types(reader))
    assert spec.latent is not None
    if spec.latent.q_lora_rank is None:
        raise reader.wrong("q_lora_rank", "a number: the indexer reads the compressed queries", None)
    if indexer.index_head_dim < spec.latent.qk_rope_head_dim:
        raise reader.wrong("index_head_dim", "at least qk_rope_head_dim", indexer.index_head_dim)
    roles = _indexer_roles(reader, len(spec.layers))
    layers = tuple(replace(layer, indexer=role) for layer, role in zip(spec.layers, roles, strict=True))
    return _with_mtp(reader, replace(spec, layers=layers), indexer="full")


def _with_mtp(reader: ConfigReader, spec: ModelSpec, indexer: IndexerRole = "none") -> ModelSpec:
    """The layer that predicts the token after next, always sparse; of several the first. Whether it is really there
    the tensors say (tensors.stored_spec)."""
    if reader.integer("num_nextn_predict_layers", default=0, minimum=0, maximum=MAX_LAYERS) == 0:
        return spec
    return replace(spec, mtp=LayerSpec(spec.num_hidden_layers, None, True, indexer))


def _indexer_roles(reader: ConfigReader, num_layers: int) -> list[IndexerRole]:
    """indexer_types, or index_topk_pattern (F and S), or every index_topk_freq-th layer from an offset on."""
    names: dict[str, IndexerRole] = {"full": "full", "shared": "shared", "F": "full", "S": "shared"}
    freq = reader.integer("index_topk_freq", default=1)
    offset = reader.integer("index_skip_topk_offset", default=2, minimum=0)
    key, words = "index_topk_freq", tuple("F" if max(i - offset + 1, 0) % freq == 0 else "S" for i in range(num_layers))
    if isinstance(reader.config.get("index_topk_pattern"), str):
        key, words = "index_topk_pattern", tuple(reader.text("index_topk_pattern"))
    elif reader.texts("index_topk_pattern"):
        key, words = "index_topk_pattern", reader.texts("index_topk_pattern")
    if reader.texts("indexer_types"):
        key, words = "indexer_types", reader.texts("indexer_types")
    for word in words:
        if word not in names:
            raise reader.unsupported(key, word, ["full", "shared"])
    if len(words) != num_layers:
        raise reader.wrong(key, f"one entry for each of {num_layers} layers", len(words))
    if names[words[0]] == "shared":
        raise reader.wrong(key, "a full first layer, whose choice the others can share", words[0])
    return [names[word] for word in words]


def _granitemoe(reader: ConfigReader) -> ModelSpec:
    """Granite: four multipliers in place of 1, 1/sqrt(head_dim), 1 and 1."""
    attention_bias = reader.flag("attention_bias", False)
    return common_spec(
        reader,
        default_theta=10000.0,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=(None,) * layer_count(reader),
        experts=expert_rules(reader, "intermediate_size", norm_topk_prob=True),
        sparse=lambda layer_idx: True,
        attention_scale=reader.number("attention_multiplier", default=1.0),
        embedding_multiplier=reader.number("embedding_multiplier", default=1.0),
        residual_multiplier=reader.number("residual_multiplier", default=1.0),
        logits_scaling=reader.number("logits_scaling", default=1.0),
    )


def _ernie4_5_moe(reader: ConfigReader) -> ModelSpec:
    """Ernie: a bias on the softmax for the choice only; use_bias reaches every projection but the routed experts."""
    num_experts = reader.integer("moe_num_experts", "num_experts", default=64, maximum=MAX_EXPERTS)
    size = reader.integer("moe_intermediate_size")
    start = reader.integer("moe_layer_start_index", default=1, minimum=0)
    end = reader.integer("moe_layer_end_index", default=-1, minimum=-1)
    end = layer_count(reader) - 1 if end == -1 else end
    interval = reader.integer("moe_layer_interval", default=1)
    one_of(reader, "moe_gate", "topk")
    bias = reader.flag("use_bias", False)
    return common_spec(
        reader,
        default_theta=500000.0,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        lm_head_bias=bias,
        windows=(None,) * layer_count(reader),
        experts=ExpertRules(
            num_experts,
            reader.integer("moe_k", "num_experts_per_tok", default=6, maximum=num_experts),
            size,
            norm_topk_prob=True,
            shared_size=size * reader.integer("moe_num_shared_experts", default=2, minimum=0),
            correction_bias=True,
        ),
        sparse=lambda layer_idx: (layer_idx + 1) % interval == 0 and start <= layer_idx <= end,
        interleaved=True,
        tied=True,
    )


def _gpt_oss(reader: ConfigReader) -> ModelSpec:
    """gpt-oss: biases everywhere, sinks, a window on every other layer, clamped SwiGLU in the experts."""
    if (alpha := reader.number("swiglu_alpha", default=1.702)) != 1.702:
        raise reader.unsupported("swiglu_alpha", alpha, ["1.702"])
    attention_bias = reader.flag("attention_bias", True)
    window = reader.integer("sliding_window", default=0 if "sliding_window" in reader.config else 128, minimum=0)
    return common_spec(
        reader,
        default_theta=150000.0,
        default_head_dim=64,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=windows_by_type(reader, window or None, lambda layer_idx: layer_idx % 2 == 0),
        experts=expert_rules(reader, "intermediate_size", norm_topk_prob=True),
        sparse=lambda layer_idx: True,
        sinks=True,
        router_bias=True,
        expert_bias=True,
        swiglu_limit=reader.number("swiglu_limit", default=7.0),
    )


def _phimoe(reader: ConfigReader) -> ModelSpec:
    """Phi-3.5-MoE: LayerNorm with biases, sparsemixer routing of two experts, longrope."""
    attention_bias = reader.flag("attention_bias", False)
    experts = expert_rules(reader, "intermediate_size", norm_topk_prob=False)
    if experts.num_experts_per_tok != 2:
        raise reader.unsupported("num_experts_per_tok", experts.num_experts_per_tok, ["2, which sparsemixer picks"])
    return common_spec(
        reader,
        default_theta=1000000.0,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        lm_head_bias=reader.flag("lm_head_bias", False),
        windows=(reader.integer("sliding_window", default=0, minimum=0) or None,) * layer_count(reader),
        experts=replace(experts, scoring_func="sparsemixer"),
        sparse=lambda layer_idx: True,
        layer_norm=True,
        router_jitter_noise=reader.number("router_jitter_noise", default=0.01, above=-1.0),
    )


FAMILIES: dict[str, Callable[[ConfigReader], ModelSpec]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "ernie4_5_moe": _ernie4_5_moe,
    "glm4_moe": _glm4_moe,
    "glm_moe_dsa": _glm_moe_dsa,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "llama": _llama,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
