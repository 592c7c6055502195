"""Which tensors a ModelSpec needs, by canonical name and shape: what convert stores and what opening expects.

Canonical names are those of the checkpoints (`model.layers.0.self_attn.q_proj.weight`), with every routed expert left
out: experts are records, described by `expert_matrices`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from coli.errors import CheckpointError
from coli.model.config import LatentSpec, LayerSpec, ModelSpec
from coli.model.families import spec_from_config
from coli.store.container import Container
from coli.store.layout import TILE_ROWS, MatrixShape, RecordPart, round_up

# "dense" matrices take the dense quantization, "router" matrices stay float32; "bias" vectors are padded to the tile.
Role = Literal["dense", "router", "vector", "bias"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that must exist: (rows, cols) for matrices, (n,) for vectors."""

    name: str
    shape: tuple[int, ...]
    role: Role


def dense_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """Every tensor of the model but the routed experts, in the order of the forward."""
    yield TensorSpec("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size), "dense")
    for layer in spec.layers:
        yield from _layer_tensors(spec, layer)
    yield from _norm(spec, "model.norm")
    if not spec.tie_word_embeddings:
        yield TensorSpec("lm_head.weight", (spec.vocab_size, spec.hidden_size), "dense")
    if spec.lm_head_bias:
        yield TensorSpec("lm_head.bias", (spec.vocab_size,), "bias")
    yield from mtp_tensors(spec)


def mtp_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """The part of `dense_tensors` that is the MTP head's; embedding and output matrix are the model's own."""
    if spec.mtp is None:
        return
    prefix, hidden = mtp_prefix(spec), spec.hidden_size
    yield TensorSpec(f"{prefix}enorm.weight", (hidden,), "vector")
    yield TensorSpec(f"{prefix}hnorm.weight", (hidden,), "vector")
    yield TensorSpec(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), "dense")
    yield from _layer_tensors(spec, spec.mtp)
    yield TensorSpec(f"{prefix}shared_head.norm.weight", (hidden,), "vector")


def mtp_prefix(spec: ModelSpec) -> str:
    """What the names of the head's tensors begin with."""
    return f"model.layers.{spec.num_hidden_layers}."


def stored_spec(spec: ModelSpec, names: Collection[str]) -> ModelSpec:
    """`spec` without the MTP head, or its indexer, that `names` do not have: configs announce what is not there."""
    if spec.mtp is None or f"{mtp_prefix(spec)}eh_proj.weight" not in names:
        return replace(spec, mtp=None)
    if f"{mtp_prefix(spec)}self_attn.indexer.wk.weight" not in names:
        return replace(spec, mtp=replace(spec.mtp, indexer="none"))
    return spec


def expert_matrices(spec: ModelSpec) -> tuple[tuple[str, int, int], ...]:
    """(part, rows, cols) of the matrices of one routed expert, in record order."""
    inter, hidden = spec.moe_intermediate_size, spec.hidden_size
    return (("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter))


def container_spec(container: Container) -> ModelSpec:
    """The spec of an open container, after checking that its tensors and experts are the ones the spec needs."""
    spec = spec_from_config(container.config, container.path / "config.json")
    spec = stored_spec(spec, container.manifest.tensors)
    needed = {tensor.name: tensor for tensor in dense_tensors(spec)}
    found = container.manifest.tensors
    for name in sorted(needed.keys() ^ found.keys()):
        what = "is missing" if name in needed else f"does not belong to a {spec.model_type} of this config.json"
        raise CheckpointError(f"{container.path}: tensor {name} {what}: convert the model again")
    for name, tensor in needed.items():
        _expect_shape(container, name, _manifest_shape(tensor), _stored_shape(found[name]))
    num_experts = container.manifest.num_experts
    if (container.moe_layers, num_experts) != (spec.record_layers, spec.num_experts):
        raise CheckpointError(
            f"{container.path}: config.json needs {spec.num_experts} experts in {len(spec.record_layers)} layers, found"
            f" {num_experts} in {len(container.moe_layers)}: convert the model again"
        )
    for layer_idx in spec.record_layers:
        parts = container.expert_layout(layer_idx).parts
        for part, rows, cols in expert_matrices(spec):
            _expect_shape(container, f"layers.{layer_idx}.experts.{part}", (rows, cols), _stored_shape(parts[part]))
            if (parts[part].bias_offset is not None) != spec.expert_bias:
                raise CheckpointError(
                    f"{container.path}: layers.{layer_idx}.experts.{part}: a bias is"
                    f" {'missing' if spec.expert_bias else 'not expected'}: convert the model again"
                )
    return spec


def _layer_tensors(spec: ModelSpec, layer: LayerSpec) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{layer.layer_idx}"
    attention = f"{prefix}.self_attn"
    hidden = spec.hidden_size
    yield from _norm(spec, f"{prefix}.input_layernorm")
    if spec.latent is not None:
        yield from _latent(spec, spec.latent, attention, layer.indexer == "full")
    else:
        yield from _attention(spec, attention)
    yield from _norm(spec, f"{prefix}.post_attention_layernorm")
    if not layer.is_moe:
        yield from _mlp(f"{prefix}.mlp", spec.intermediate_size, hidden, spec.mlp_bias)
        return
    yield TensorSpec(f"{prefix}.mlp.gate.weight", (spec.num_experts, hidden), "router")
    if spec.router_bias:
        yield TensorSpec(f"{prefix}.mlp.gate.bias", (spec.num_experts,), "bias")
    if spec.e_score_correction_bias:
        yield TensorSpec(f"{prefix}.mlp.gate.e_score_correction_bias", (spec.num_experts,), "vector")
    if spec.shared_expert_intermediate_size:
        yield from _mlp(f"{prefix}.mlp.shared_expert", spec.shared_expert_intermediate_size, hidden, spec.mlp_bias)
    if spec.shared_expert_gate:
        yield TensorSpec(f"{prefix}.mlp.shared_expert_gate.weight", (1, hidden), "router")


def _norm(spec: ModelSpec, name: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (spec.hidden_size,), "vector")
    if spec.layer_norm:
        yield TensorSpec(f"{name}.bias", (spec.hidden_size,), "vector")


def _attention(spec: ModelSpec, prefix: str) -> Iterator[TensorSpec]:
    query = spec.num_attention_heads * spec.head_dim
    key = spec.num_key_value_heads * spec.head_dim
    yield from _linear(f"{prefix}.q_proj", query, spec.hidden_size, spec.qkv_bias)
    yield from _linear(f"{prefix}.k_proj", key, spec.hidden_size, spec.qkv_bias)
    yield from _linear(f"{prefix}.v_proj", key, spec.hidden_size, spec.qkv_bias)
    yield from _linear(f"{prefix}.o_proj", spec.hidden_size, query, spec.o_bias)
    if spec.sinks:
        yield TensorSpec(f"{prefix}.sinks", (spec.num_attention_heads,), "vector")
    if spec.qk_norm != "none":
        per_head = spec.qk_norm == "head"
        yield TensorSpec(f"{prefix}.q_norm.weight", (spec.head_dim if per_head else query,), "vector")
        yield TensorSpec(f"{prefix}.k_norm.weight", (spec.head_dim if per_head else key,), "vector")


def _latent(spec: ModelSpec, latent: LatentSpec, prefix: str, indexes: bool) -> Iterator[TensorSpec]:
    """kv_b_proj is stored as k_up and v_up: per head the key part transposed and the value part, rows padded to 16."""
    hidden, heads, rank = spec.hidden_size, spec.num_attention_heads, latent.kv_lora_rank
    query = heads * spec.head_dim
    if latent.q_lora_rank is None:
        yield from _linear(f"{prefix}.q_proj", query, hidden, False)
    else:
        yield from _linear(f"{prefix}.q_a_proj", latent.q_lora_rank, hidden, spec.qkv_bias)
        yield TensorSpec(f"{prefix}.q_a_layernorm.weight", (latent.q_lora_rank,), "vector")
        yield from _linear(f"{prefix}.q_b_proj", query, latent.q_lora_rank, False)
    yield from _linear(f"{prefix}.kv_a_proj_with_mqa", rank + latent.qk_rope_head_dim, hidden, spec.qkv_bias)
    yield TensorSpec(f"{prefix}.kv_a_layernorm.weight", (rank,), "vector")
    key_rows, value_rows = (heads * round_up(rows, TILE_ROWS) for rows in (rank, latent.v_head_dim))
    yield TensorSpec(f"{prefix}.k_up.weight", (key_rows, latent.qk_nope_head_dim), "dense")
    yield TensorSpec(f"{prefix}.v_up.weight", (value_rows, rank), "dense")
    yield from _linear(f"{prefix}.o_proj", hidden, heads * latent.v_head_dim, spec.o_bias)
    if indexes and latent.indexer is not None and latent.q_lora_rank is not None:
        count, dim = latent.indexer.index_n_heads, latent.indexer.index_head_dim
        yield from _linear(f"{prefix}.indexer.wq_b", count * dim, latent.q_lora_rank, False)
        yield from _linear(f"{prefix}.indexer.wk", dim, hidden, False)
        yield TensorSpec(f"{prefix}.indexer.k_norm.weight", (dim,), "vector")
        yield TensorSpec(f"{prefix}.indexer.k_norm.bias", (dim,), "vector")
        yield TensorSpec(f"{prefix}.indexer.weights_proj.weight", (count, hidden), "router")


def _mlp(prefix: str, inter: int, hidden: int, bias: bool) -> Iterator[TensorSpec]:
    yield from _linear(f"{prefix}.gate_proj", inter, hidden, bias)
    yield from _linear(f"{prefix}.up_proj", inter, hidden, bias)
    yield from _linear(f"{prefix}.down_proj", hidden, inter, bias)


def _linear(name: str, rows: int, cols: int, bias: bool) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", (rows, cols), "dense")
    if bias:
        yield TensorSpec(f"{name}.bias", (rows,), "bias")


def _manifest_shape(tensor: TensorSpec) -> tuple[int, ...]:
    return (round_up(tensor.shape[0], TILE_ROWS),) if tensor.role == "bias" else tensor.shape


def _stored_shape(stored: MatrixShape | RecordPart | int) -> tuple[int, ...]:
    return (stored,) if isinstance(stored, int) else (stored.rows, stored.cols)


def _expect_shape(container: Container, name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if expected != found:
        raise CheckpointError(
            f"{container.path}: tensor {name}: config.json needs {list(expected)}, found {list(found)}:"
            " convert the model again"
        )
