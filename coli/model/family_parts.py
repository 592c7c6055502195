"""What model families share on the way from config.json to ModelSpec: sizes, experts, windows, latent attention.

Called by families.py only; every refusal names the file and the key.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from coli.model.config import (
    MAX_EXPERTS,
    MAX_LAYERS,
    ConfigReader,
    GroupScore,
    IndexerSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    QKNorm,
    ScoringFunc,
)
from coli.model.rope_keys import rope_of, rotary_dim_of, yarn_scale


@dataclass(frozen=True, slots=True)
class ExpertRules:
    """What a family's sparse layers are made of; names and meanings are the fields of `ModelSpec`.

    shared_size: inner width of the shared expert, 0 without one; shared_gate: whether a gate scales its output.
    """

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


NO_EXPERTS = ExpertRules(0, 0, 0, False, 0)


def common_spec(
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
    experts: ExpertRules = NO_EXPERTS,
    sparse: Callable[[int], bool] = lambda layer_idx: False,
    partial_rotary: float = 1.0,
    latent: LatentSpec | None = None,
    interleaved: bool = False,
    tied: bool = False,
    **own: Any,
) -> ModelSpec:
    """The parts every family shares, checked against each other; `own` are fields of ModelSpec few families have."""
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise reader.wrong("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}", num_kv_heads)
    assumed: list[str] = []
    if latent is None:
        head_dim = _head_dim(reader, hidden_size, num_heads, default_head_dim)
        rotary_dim = rotary_dim_of(reader, head_dim, partial_rotary)
    else:
        head_dim, rotary_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim, latent.qk_rope_head_dim
    rope = replace(rope_of(reader, rotary_dim, default_theta, assumed, partial_rotary), interleaved=interleaved)
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
        tie_word_embeddings=reader.flag("tie_word_embeddings", tied),
        max_position_embeddings=reader.integer("max_position_embeddings"),
        intermediate_size=0 if all_sparse else reader.integer("intermediate_size"),
        rope=rope,
        qk_norm=qk_norm,
        clip_qkv=clip_qkv,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        attention_scale=own.pop("attention_scale", 1.0 / math.sqrt(head_dim)),
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
        **own,
    )


def latent_spec(
    reader: ConfigReader,
    experts: ExpertRules,
    indexer: IndexerSpec | None = None,
    sparse: Callable[[int], bool] | None = None,
) -> ModelSpec:
    """DeepSeek's attention; a published head_dim means other things and is not read. sparse: None is its own rule."""
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
    spec = common_spec(
        reader,
        default_theta=10000.0,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        windows=(None,) * layer_count(reader),
        experts=experts,
        sparse=sparse or first_dense(reader),
        latent=latent,
        interleaved=reader.flag("rope_interleave", True),
    )
    if spec.rope.kind == "default":
        return spec
    name = "rope_parameters" if reader.table("rope_parameters") else "rope_scaling"
    table = ConfigReader(reader.table(name) or {}, reader.path, name)
    mscale = yarn_scale(spec.rope.factor, table.number("mscale_all_dim", default=0.0, above=-1.0))
    return replace(spec, attention_scale=spec.attention_scale * mscale * mscale)


def layer_count(reader: ConfigReader) -> int:
    """num_hidden_layers. Raises CheckpointError beyond MAX_LAYERS."""
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


def expert_rules(reader: ConfigReader, size_key: str, *, norm_topk_prob: bool, shared_size: int = 0) -> ExpertRules:
    """Expert counts; transformers 5 writes num_experts and num_local_experts for one another."""
    num_experts = reader.integer("num_experts", "num_local_experts", minimum=0, maximum=MAX_EXPERTS)
    if num_experts == 0:
        return NO_EXPERTS
    per_token = reader.integer("num_experts_per_tok", maximum=num_experts)
    size = reader.integer(size_key)
    return ExpertRules(num_experts, per_token, size, norm_topk_prob, shared_size, shared_gate=shared_size > 0)


def routed_experts(reader: ConfigReader, **rules: Any) -> ExpertRules:
    """Expert counts in the words of DeepSeek and GLM; `rules` are the family's own fields of ExpertRules."""
    num_experts = reader.integer("n_routed_experts", "num_experts", "num_local_experts", maximum=MAX_EXPERTS)
    size = reader.integer("moe_intermediate_size")
    return ExpertRules(
        num_experts,
        reader.integer("num_experts_per_tok", maximum=num_experts),
        size,
        shared_size=size * reader.integer("n_shared_experts", default=0, minimum=0),
        routed_scaling_factor=reader.number("routed_scaling_factor", default=1.0),
        **rules,
    )


def expert_groups(reader: ConfigReader) -> tuple[int, int]:
    """n_group and topk_group, which must divide the experts and leave enough of them."""
    num_experts = reader.integer("n_routed_experts", "num_experts", "num_local_experts", maximum=MAX_EXPERTS)
    n_group = reader.integer("n_group", default=1, maximum=num_experts)
    if num_experts % n_group:
        raise reader.wrong("n_group", f"a divisor of n_routed_experts {num_experts}", n_group)
    topk_group = reader.integer("topk_group", default=1, maximum=n_group)
    if num_experts // n_group * topk_group < reader.integer("num_experts_per_tok", maximum=num_experts):
        raise reader.wrong("topk_group", "groups that hold at least num_experts_per_tok experts", topk_group)
    return n_group, topk_group


def sigmoid_experts(reader: ConfigReader) -> ExpertRules:
    """DeepSeek-V3's router: sigmoid scores, a bias for the choice, groups by the sum of their two best."""
    one_of(reader, "scoring_func", "sigmoid")
    one_of(reader, "topk_method", "noaux_tc")
    n_group, topk_group = expert_groups(reader)
    return routed_experts(
        reader,
        norm_topk_prob=reader.flag("norm_topk_prob", True),
        scoring_func="sigmoid",
        correction_bias=True,
        n_group=n_group,
        topk_group=topk_group,
        group_score="top2",
    )


def one_of(reader: ConfigReader, key: str, *supported: str) -> str:
    """The word under `key`, the first of `supported` if absent; what is not supported is refused."""
    word = reader.text(key, default=supported[0])
    if word not in supported:
        raise reader.unsupported(key, word, supported)
    return word


def first_dense(reader: ConfigReader, default: int = 0) -> Callable[[int], bool]:
    """DeepSeek's rule: all layers but the first first_k_dense_replace are sparse."""
    if (step := reader.integer("moe_layer_freq", default=1)) != 1:
        raise reader.unsupported("moe_layer_freq", step, ["1"])
    first = reader.integer("first_k_dense_replace", default=default, minimum=0)
    return lambda layer_idx: layer_idx >= first


def mlp_types(reader: ConfigReader) -> Callable[[int], bool]:
    """GLM-5's rule: mlp_layer_types beats DeepSeek's, which leaves the first three layers dense."""
    words, num_layers = reader.texts("mlp_layer_types"), layer_count(reader)
    if not words:
        return first_dense(reader, default=3)
    if len(words) != num_layers:
        raise reader.wrong("mlp_layer_types", f"one entry for each of {num_layers} layers", len(words))
    for word in words:
        if word not in ("dense", "sparse"):
            raise reader.unsupported("mlp_layer_types", word, ["dense", "sparse"])
    return lambda layer_idx: words[layer_idx] == "sparse"


def sparse_step(reader: ConfigReader) -> Callable[[int], bool]:
    """Qwen's rule: every decoder_sparse_step-th layer is sparse unless mlp_only_layers lists it."""
    step = reader.integer("decoder_sparse_step", default=1)
    dense = frozenset(reader.integers("mlp_only_layers"))
    return lambda layer_idx: (layer_idx + 1) % step == 0 and layer_idx not in dense


def qwen_window(reader: ConfigReader) -> int | None:
    """Qwen ignores sliding_window unless use_sliding_window; an absent key is 4096, a null one is no window."""
    if not reader.flag("use_sliding_window", False):
        return None
    return (
        reader.integer("sliding_window", default=4096 if "sliding_window" not in reader.config else 0, minimum=0)
        or None
    )


def qwen_windows(reader: ConfigReader, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Per-layer windows of the Qwen families; layer_types overrides the family's own rule `slides`."""
    return windows_by_type(reader, qwen_window(reader), slides)


def windows_by_type(reader: ConfigReader, window: int | None, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """`window` for the layers that layer_types calls sliding, or that `slides` says where the key is absent."""
    num_layers = layer_count(reader)
    layer_types = reader.texts("layer_types")
    if not layer_types:
        return tuple(window if slides(layer_idx) else None for layer_idx in range(num_layers))
    if len(layer_types) != num_layers:
        raise reader.wrong("layer_types", f"one entry for each of {num_layers} layers", len(layer_types))
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise reader.unsupported("layer_types", layer_type, ["full_attention", "sliding_attention"])
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)
