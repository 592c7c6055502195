"""config.json -> ModelSpec, one function per model family; every alias, default and old spelling ends here.

Facts about each family follow the transformers 5 model classes. What is unknown (model_type, rope type, activation,
quantization) is refused by name, never guessed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from coli.errors import UnsupportedModelError
from coli.model.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    ConfigReader,
    GroupScore,
    IndexerRole,
    IndexerSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    QKNorm,
    RopeKind,
    RopeSpec,
    ScoringFunc,
)

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


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
        if method != "fp8":
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
    return _spec(
        reader,
        default_theta=10000.0,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias", False),
        windows=(None,) * _num_layers(reader),
    )


def _qwen3(reader: ConfigReader) -> ModelSpec:
    attention_bias = reader.flag("attention_bias", False)
    first_sliding = reader.integer("max_window_layers", default=28, minimum=0)
    return _spec(
        reader,
        default_theta=10000.0,
        default_head_dim=128,
        qk_norm="head",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=_layer_windows(reader, lambda layer_idx: layer_idx >= first_sliding),
    )


def _mixtral(reader: ConfigReader) -> ModelSpec:
    window = reader.integer("sliding_window", default=0, minimum=0) or None
    return _spec(
        reader,
        default_theta=1000000.0,
        windows=(window,) * _num_layers(reader),
        experts=_experts(reader, "intermediate_size", norm_topk_prob=True),
        sparse=lambda layer_idx: True,
    )


def _olmoe(reader: ConfigReader) -> ModelSpec:
    attention_bias = reader.flag("attention_bias", False)
    return _spec(
        reader,
        default_theta=10000.0,
        qk_norm="row",
        clip_qkv=reader.optional_number("clip_qkv"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=(None,) * _num_layers(reader),
        experts=_experts(reader, "intermediate_size", norm_topk_prob=reader.flag("norm_topk_prob", False)),
        sparse=lambda layer_idx: True,
    )


def _qwen2_moe(reader: ConfigReader) -> ModelSpec:
    window_layers = reader.integer("max_window_layers", default=28, minimum=0)
    experts = _experts(
        reader,
        "moe_intermediate_size",
        norm_topk_prob=reader.flag("norm_topk_prob", False),
        shared_size=reader.integer("shared_expert_intermediate_size", minimum=0),
    )
    return _spec(
        reader,
        default_theta=10000.0,
        qkv_bias=reader.flag("qkv_bias", True),
        windows=_layer_windows(reader, lambda layer_idx: layer_idx % 2 == 0 and layer_idx < window_layers),
        experts=experts,
        sparse=_sparse_step(reader),
    )


def _qwen3_moe(reader: ConfigReader) -> ModelSpec:
    attention_bias = reader.flag("attention_bias", False)
    return _spec(
        reader,
        default_theta=10000.0,
        qk_norm="head",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=(_qwen_window(reader),) * _num_layers(reader),
        experts=_experts(reader, "moe_intermediate_size", norm_topk_prob=reader.flag("norm_topk_prob", False)),
        sparse=_sparse_step(reader),
    )


def _glm4_moe(reader: ConfigReader) -> ModelSpec:
    return _spec(
        reader,
        default_theta=10000.0,
        default_head_dim=128,
        partial_rotary=0.5,
        qk_norm="head" if reader.flag("use_qk_norm", False) else "none",
        qkv_bias=reader.flag("attention_bias", False),
        windows=(None,) * _num_layers(reader),
        experts=_sigmoid_experts(reader),
        sparse=_first_dense(reader),
    )


def _deepseek_v2(reader: ConfigReader) -> ModelSpec:
    """As its transformers class: norm_topk_prob is ignored and the routed scale always applies."""
    _only(reader, "scoring_func", "softmax")
    grouped = _only(reader, "topk_method", "greedy", "group_limited_greedy") != "greedy"
    n_group, topk_group = _groups(reader) if grouped else (1, 1)
    experts = _routed_experts(
        reader,
        norm_topk_prob=False,
        n_group=n_group,
        topk_group=topk_group,
        group_score="max" if grouped else "none",
    )
    return _latent_spec(reader, experts)


def _deepseek_v3(reader: ConfigReader) -> ModelSpec:
    return _latent_spec(reader, _sigmoid_experts(reader))


def _glm_moe_dsa(reader: ConfigReader) -> ModelSpec:
    indexer = IndexerSpec(
        index_n_heads=reader.integer("index_n_heads"),
        index_head_dim=reader.integer("index_head_dim"),
        index_topk=reader.integer("index_topk"),
        interleaved=reader.flag("indexer_rope_interleave", True),
    )
    spec = _latent_spec(reader, _sigmoid_experts(reader), indexer)
    assert spec.latent is not None
    if spec.latent.q_lora_rank is None:
        raise reader.wrong("q_lora_rank", "a number: the indexer reads the compressed queries", None)
    if indexer.index_head_dim < spec.latent.qk_rope_head_dim:
        raise reader.wrong("index_head_dim", "at least qk_rope_head_dim", indexer.index_head_dim)
    roles = _indexer_roles(reader, len(spec.layers))
    layers = tuple(replace(layer, indexer=role) for layer, role in zip(spec.layers, roles, strict=True))
    return replace(spec, layers=layers)


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


FAMILIES: dict[str, Callable[[ConfigReader], ModelSpec]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "glm_moe_dsa": _glm_moe_dsa,
    "llama": _llama,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}


@dataclass(frozen=True, slots=True)
class _Experts:
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    shared_size: int
    shared_gate: bool = False
    scoring_func: ScoringFunc = "softmax"
    correction_bias: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = "none"


_NO_EXPERTS = _Experts(0, 0, 0, False, 0)


def _spec(
    reader: ConfigReader,
    *,
    default_theta: float,
    windows: tuple[int | None, ...],
    default_head_dim: int | None = None,
    qk_norm: QKNorm = "none",
    clip_qkv: float | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    experts: _Experts = _NO_EXPERTS,
    sparse: Callable[[int], bool] = lambda layer_idx: False,
    partial_rotary: float = 1.0,
    latent: LatentSpec | None = None,
    interleaved: bool = False,
) -> ModelSpec:
    """The parts every family shares, checked against each other."""
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise reader.wrong("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}", num_kv_heads)
    assumed: list[str] = []
    if latent is None:
        head_dim = _head_dim(reader, hidden_size, num_heads, default_head_dim)
        rotary_dim = _rotary_dim(reader, head_dim, partial_rotary)
    else:
        head_dim, rotary_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim, latent.qk_rope_head_dim
    rope = replace(_rope(reader, rotary_dim, default_theta, assumed, partial_rotary), interleaved=interleaved)
    layers = tuple(
        LayerSpec(layer_idx, window, experts.num_experts > 0 and sparse(layer_idx))
        for layer_idx, window in enumerate(windows)
    )
    all_sparse = all(layer.is_moe for layer in layers)
    return ModelSpec(
        model_type=reader.text("model_type"),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        num_hidden_layers=len(layers),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps"),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        intermediate_size=0 if all_sparse else reader.integer("intermediate_size"),
        rope=rope,
        qk_norm=qk_norm,
        clip_qkv=clip_qkv,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        attention_scale=1.0 / math.sqrt(head_dim),
        layers=layers,
        num_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
        moe_intermediate_size=experts.moe_intermediate_size,
        norm_topk_prob=experts.norm_topk_prob,
        scoring_func=experts.scoring_func,
        routed_scaling_factor=experts.routed_scaling_factor,
        shared_expert_intermediate_size=experts.shared_size,
        shared_expert_gate=experts.shared_gate,
        e_score_correction_bias=experts.correction_bias,
        n_group=experts.n_group,
        topk_group=experts.topk_group,
        group_score=experts.group_score,
        latent=latent,
        assumed=tuple(assumed),
    )


def _latent_spec(reader: ConfigReader, experts: _Experts, indexer: IndexerSpec | None = None) -> ModelSpec:
    """DeepSeek's attention; a published head_dim means other things and is not read."""
    latent = LatentSpec(
        q_lora_rank=reader.integer("q_lora_rank", default=0, minimum=0) or None,
        kv_lora_rank=reader.integer("kv_lora_rank"),
        qk_nope_head_dim=reader.integer("qk_nope_head_dim"),
        qk_rope_head_dim=reader.integer("qk_rope_head_dim"),
        v_head_dim=reader.integer("v_head_dim"),
        indexer=indexer,
    )
    if latent.qk_rope_head_dim % 2:
        raise reader.wrong("qk_rope_head_dim", "an even number", latent.qk_rope_head_dim)
    attention_bias = reader.flag("attention_bias", False)
    spec = _spec(
        reader,
        default_theta=10000.0,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=(None,) * _num_layers(reader),
        experts=experts,
        sparse=_first_dense(reader),
        latent=latent,
        interleaved=reader.flag("rope_interleave", True),
    )
    if spec.rope.kind == "default":
        return spec
    name = "rope_parameters" if reader.table("rope_parameters") else "rope_scaling"
    table = ConfigReader(reader.table(name) or {}, reader.path, name)
    mscale = _yarn_scale(spec.rope.factor, table.number("mscale_all_dim", default=0.0, above=-1.0))
    return replace(spec, attention_scale=spec.attention_scale * mscale * mscale)


def _num_layers(reader: ConfigReader) -> int:
    return reader.integer("num_hidden_layers", maximum=MAX_LAYERS)


def _head_dim(reader: ConfigReader, hidden_size: int, num_heads: int, default: int | None) -> int:
    if reader.config.get("head_dim") is None and default is None:
        if hidden_size % num_heads:
            raise reader.wrong("num_attention_heads", f"a divisor of hidden_size {hidden_size}", num_heads)
        head_dim = hidden_size // num_heads
    else:
        head_dim = reader.integer("head_dim", default=default)
    if head_dim % 2:
        raise reader.wrong("head_dim", "an even number", head_dim)
    return head_dim


def _experts(reader: ConfigReader, size_key: str, *, norm_topk_prob: bool, shared_size: int = 0) -> _Experts:
    """Expert counts; transformers 5 writes num_experts and num_local_experts for one another."""
    num_experts = reader.integer("num_experts", "num_local_experts", minimum=0, maximum=MAX_EXPERTS)
    if num_experts == 0:
        return _NO_EXPERTS
    per_token = reader.integer("num_experts_per_tok", maximum=num_experts)
    size = reader.integer(size_key)
    return _Experts(num_experts, per_token, size, norm_topk_prob, shared_size, shared_gate=shared_size > 0)


def _routed_experts(reader: ConfigReader, **rules: Any) -> _Experts:
    """Expert counts in the words of DeepSeek and GLM; `rules` are the family's own fields of _Experts."""
    num_experts = reader.integer("n_routed_experts", "num_experts", "num_local_experts", maximum=MAX_EXPERTS)
    size = reader.integer("moe_intermediate_size")
    return _Experts(
        num_experts,
        reader.integer("num_experts_per_tok", maximum=num_experts),
        size,
        shared_size=size * reader.integer("n_shared_experts", default=0, minimum=0),
        routed_scaling_factor=reader.number("routed_scaling_factor", default=1.0),
        **rules,
    )


def _groups(reader: ConfigReader) -> tuple[int, int]:
    """n_group and topk_group, which must divide the experts and leave enough of them."""
    num_experts = reader.integer("n_routed_experts", "num_experts", "num_local_experts", maximum=MAX_EXPERTS)
    n_group = reader.integer("n_group", default=1, maximum=num_experts)
    if num_experts % n_group:
        raise reader.wrong("n_group", f"a divisor of n_routed_experts {num_experts}", n_group)
    topk_group = reader.integer("topk_group", default=1, maximum=n_group)
    if num_experts // n_group * topk_group < reader.integer("num_experts_per_tok", maximum=num_experts):
        raise reader.wrong("topk_group", "groups that hold at least num_experts_per_tok experts", topk_group)
    return n_group, topk_group


def _sigmoid_experts(reader: ConfigReader) -> _Experts:
    """DeepSeek-V3's router: sigmoid scores, a bias for the choice, groups by the sum of their two best."""
    _only(reader, "scoring_func", "sigmoid")
    _only(reader, "topk_method", "noaux_tc")
    n_group, topk_group = _groups(reader)
    return _routed_experts(
        reader,
        norm_topk_prob=reader.flag("norm_topk_prob", True),
        scoring_func="sigmoid",
        correction_bias=True,
        n_group=n_group,
        topk_group=topk_group,
        group_score="top2",
    )


def _only(reader: ConfigReader, key: str, *supported: str) -> str:
    """The word under `key`, the first of `supported` if absent; what is not supported is refused."""
    word = reader.text(key, default=supported[0])
    if word not in supported:
        raise reader.unsupported(key, word, supported)
    return word


def _first_dense(reader: ConfigReader) -> Callable[[int], bool]:
    """DeepSeek's rule: all layers but the first first_k_dense_replace are sparse."""
    if (step := reader.integer("moe_layer_freq", default=1)) != 1:
        raise reader.unsupported("moe_layer_freq", step, ["1"])
    first = reader.integer("first_k_dense_replace", default=0, minimum=0)
    return lambda layer_idx: layer_idx >= first


def _sparse_step(reader: ConfigReader) -> Callable[[int], bool]:
    """Qwen's rule: every decoder_sparse_step-th layer is sparse unless mlp_only_layers lists it."""
    step = reader.integer("decoder_sparse_step", default=1)
    dense = frozenset(reader.integers("mlp_only_layers"))
    return lambda layer_idx: (layer_idx + 1) % step == 0 and layer_idx not in dense


def _qwen_window(reader: ConfigReader) -> int | None:
    """Qwen ignores sliding_window unless use_sliding_window; an absent key is 4096, a null one is no window."""
    if not reader.flag("use_sliding_window", False):
        return None
    return (
        reader.integer("sliding_window", default=4096 if "sliding_window" not in reader.config else 0, minimum=0)
        or None
    )


def _layer_windows(reader: ConfigReader, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Per-layer windows of the Qwen families; layer_types overrides the family's own rule `slides`."""
    num_layers = _num_layers(reader)
    window = _qwen_window(reader)
    layer_types = reader.texts("layer_types")
    if not layer_types:
        return tuple(window if slides(layer_idx) else None for layer_idx in range(num_layers))
    if len(layer_types) != num_layers:
        raise reader.wrong("layer_types", f"one entry for each of {num_layers} layers", len(layer_types))
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise reader.unsupported("layer_types", layer_type, ["full_attention", "sliding_attention"])
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _rotary_dim(reader: ConfigReader, head_dim: int, default: float) -> int:
    """The leading dims of a head that rotate: all of them, but in families that have partial_rotary_factor."""
    if default == 1.0:
        return head_dim
    table = reader.table("rope_parameters") or {}
    where = ConfigReader(table, reader.path, "rope_parameters") if "partial_rotary_factor" in table else reader
    rotary_dim = int(head_dim * where.number("partial_rotary_factor", default=default))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        found = where.config.get("partial_rotary_factor")
        raise where.wrong("partial_rotary_factor", f"an even number of the {head_dim} dims of a head", found)
    return rotary_dim


def _rope(
    reader: ConfigReader, head_dim: int, default_theta: float, assumed: list[str], partial: float = 1.0
) -> RopeSpec:
    """Old style rope_theta + rope_scaling (type or rope_type) or new style rope_parameters, also per attention type."""
    name = "rope_parameters" if reader.table("rope_parameters") else "rope_scaling"
    table = _one_rope(reader, name, reader.table(name) or {})
    rope = ConfigReader(table, reader.path, name)
    kind = rope.text("rope_type", "type", default="default")
    if kind not in ROPE_KINDS:
        raise rope.unsupported("rope_type", kind, ROPE_KINDS)
    theta = rope.optional_number("rope_theta") or reader.optional_number("rope_theta")
    if theta is None:
        theta = default_theta
        assumed.append(f"rope_theta {default_theta:g}")
    for where in (reader, rope):
        if partial == 1.0 and where.number("partial_rotary_factor", default=1.0) != 1.0:
            found = where.config["partial_rotary_factor"]
            raise reader.unsupported("partial_rotary_factor", found, ["1.0 for this model_type"])
    if kind == "linear":
        return RopeSpec(theta, head_dim, False, "linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta,
            head_dim,
            False,
            "llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(reader, rope, theta, head_dim)
    return RopeSpec(theta, head_dim, interleaved=False)


def _one_rope(reader: ConfigReader, name: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope table itself; tables per attention type must agree, since these families have one rope."""
    per_type = {key: value for key, value in table.items() if key.endswith("_attention")}
    if not per_type:
        return table
    tables = [ConfigReader(per_type, reader.path, name).table(key) or {} for key in per_type]
    if any(other != tables[0] for other in tables[1:]):
        raise UnsupportedModelError(f"{reader.path}: {name} differs between attention types, which is not supported")
    return tables[0]


def _yarn(reader: ConfigReader, rope: ConfigReader, theta: float, head_dim: int) -> RopeSpec:
    """Yarn as in transformers 5: the explicit factor, or the ratio of the two context lengths where it is absent."""
    longest = reader.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", default=longest)
    factor = rope.number("factor", default=longest / original)
    mscale = rope.number("mscale", default=0.0, above=-1.0)
    mscale_all_dim = rope.number("mscale_all_dim", default=0.0, above=-1.0)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_scale(factor, 1.0)
    return RopeSpec(
        theta,
        head_dim,
        False,
        "yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=attention_factor,
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, 3.4). Decimal, since libm's log depends on the CPU."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * float(Decimal(factor).ln()) + 1.0
