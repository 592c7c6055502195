"""Source tensors -> the matrices and vectors a ModelSpec needs, under canonical names.

All spellings end here: prefixes of multimodal checkpoints, Mixtral's w1/w2/w3 and block_sparse_moe, experts as one
tensor per matrix or fused 3-D as transformers 5 keeps them in memory. What is missing, left over or of another shape
is an error that names the first such tensor and says how many there are.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from coli.convert.gpt_oss import with_expert_matrices
from coli.convert.latent import with_head_matrices
from coli.convert.source import Rows, Source, SourceTensor
from coli.errors import CheckpointError
from coli.model.config import MAX_LAYERS, ModelSpec
from coli.model.tensors import TensorSpec, dense_tensors, expert_matrices, mtp_prefix, stored_spec

_PREFIXES = (  # of the text model inside multimodal checkpoints
    (re.compile(r"^model\.language_model\.(?!lm_head)"), "model."),
    (re.compile(r"^language_model\.model\."), "model."),
    (re.compile(r"^(model\.)?language_model\.lm_head\."), "lm_head."),
)
_RENAMED = (
    (".mlp.shared_experts.", ".mlp.shared_expert."),
    (".mlp.moe_statics.", ".mlp.gate."),  # Ernie
    (".mlp.gate.moe_statics.", ".mlp.gate."),
    (".block_sparse_moe.router.layer.", ".mlp.gate."),  # Granite
    (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
    (".mlp.router.", ".mlp.gate."),  # gpt-oss
)
_DRAFT_LAYERS = re.compile(r"^model\.mtp_")  # Ernie's, which nothing here reads yet
_MIXTRAL = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))
MAX_MISSING = 10_000  # names collected: a config.json with absurd counts must not cost minutes
COMPARED_ROWS = 16
_BUFFERS = re.compile(r"rotary_emb\.inv_freq$")  # old checkpoints store what the config says anyway


@dataclass(frozen=True, slots=True)
class Matched:
    """Where everything the model needs lies in the source. `spec`: the model as the source really has it; `note`: a
    line for the user about its MTP head."""

    spec: ModelSpec
    dense: tuple[tuple[TensorSpec, Rows], ...]
    experts: Mapping[int, tuple[Mapping[str, Rows], ...]]  # layer -> expert -> part -> rows
    note: str | None = None


def match(source: Source, spec: ModelSpec) -> Matched:
    """Find every tensor of `spec` in `source`; CheckpointError if one is missing, left over or of another shape.

    Of an MTP head that is absent or incomplete nothing is taken.
    """
    tensors = _canonical(source.tensors)
    if spec.latent is not None:
        tensors = with_head_matrices(tensors, spec, spec.latent)
    if spec.model_type == "gpt_oss":
        tensors = with_expert_matrices(tensors, spec)
    predicts = source.config.get("num_nextn_predict_layers")
    count = min(predicts, MAX_LAYERS) if isinstance(predicts, int) else 0
    heads = range(spec.num_hidden_layers, spec.num_hidden_layers + count)
    extra = tuple(f"model.layers.{layer_idx}." for layer_idx in heads)
    unused = {name for name in tensors if not _ignored(name, extra)}
    announced, spec = spec, stored_spec(spec, tensors)
    missing: list[str] = []
    dense, experts = _found(tensors, spec, unused, missing)
    note = None
    if spec.mtp is not None and missing and all(name.startswith(extra) for name in missing):
        note = f"{source.path.name}: its MTP head lacks {min(missing)} and is left out: no MTP drafts"
        spec, missing = replace(spec, mtp=None), []
        dense, experts = _found(tensors, spec, unused, missing)
    elif announced.mtp is not None and spec.mtp is None:
        note = f"{source.path.name}: config.json names an MTP head, but its tensors are not here: no MTP drafts"
    elif spec.mtp is not None:
        note = _other_copies(source, tensors, spec)
    if spec.tie_word_embeddings:
        unused.discard("lm_head.weight")  # a copy of the embedding
    _refuse(source, missing, "missing")
    _refuse(source, unused, f"not part of a {spec.model_type} with this config.json")
    return Matched(spec, tuple(dense), experts, note)


def _found(
    tensors: Mapping[str, SourceTensor], spec: ModelSpec, unused: set[str], missing: list[str]
) -> tuple[list[tuple[TensorSpec, Rows]], dict[int, tuple[Mapping[str, Rows], ...]]]:
    """Where the dense tensors and the experts lie; takes them out of `unused`, adds what is not there to `missing`."""
    dense: list[tuple[TensorSpec, Rows]] = []
    for wanted in dense_tensors(spec):
        tensor = tensors.get(wanted.name)
        if tensor is None:
            missing.append(wanted.name)
            continue
        unused.discard(wanted.name)
        if tensor.shape != (1, *wanted.shape):  # Ernie's bias of the router has an axis too many
            _expect_shape(tensor, wanted.shape)
        rows = wanted.shape[0] if len(wanted.shape) == 2 else 1
        dense.append((wanted, Rows(tensor, 0, rows)))
    experts: dict[int, tuple[Mapping[str, Rows], ...]] = {}
    for layer_idx in spec.record_layers:
        experts[layer_idx] = _experts(tensors, spec, layer_idx, unused, missing)
        if len(missing) > MAX_MISSING:
            break
    return dense, experts


def _other_copies(source: Source, tensors: Mapping[str, SourceTensor], spec: ModelSpec) -> str | None:
    """Published heads carry copies of embedding and output matrix, which are not stored twice; a line if some rows of
    one differ."""
    output = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    copies = (("embed_tokens.weight", "model.embed_tokens.weight"), ("shared_head.head.weight", output))
    for name, original in copies:
        copy, ours = tensors.get(mtp_prefix(spec) + name), tensors[original]
        if copy is None:
            continue
        _expect_shape(copy, ours.shape)
        for row in range(0, spec.vocab_size, 1 + spec.vocab_size // COMPARED_ROWS):
            if not np.array_equal(copy.read_rows(row, row + 1), ours.read_rows(row, row + 1)):
                copy_name = mtp_prefix(spec) + name
                return f"{source.path.name}: {copy_name} differs from {original}; MTP drafts use the latter"
    return None


def _ignored(name: str, extra: tuple[str, ...]) -> bool:
    return bool(_BUFFERS.search(name) or _DRAFT_LAYERS.search(name)) or name.startswith(extra)


def _canonical(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    renamed: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in _PREFIXES:
            name = pattern.sub(replacement, name)
        for old, new in _RENAMED:
            name = name.replace(old, new)
        if ".block_sparse_moe." in name or ".experts." in name:
            for old, new in _MIXTRAL:
                name = name.replace(old, new)
        if name in renamed:
            raise CheckpointError(f"tensors {renamed[name].name} and {tensor.name}: both are {name}")
        renamed[name] = tensor
    return renamed


def _experts(
    tensors: Mapping[str, SourceTensor], spec: ModelSpec, layer_idx: int, unused: set[str], missing: list[str]
) -> tuple[Mapping[str, Rows], ...]:
    """The matrices of every expert of one layer, whichever way each of them is stored."""
    prefix = f"model.layers.{layer_idx}.mlp.experts"
    fused = _fused(tensors, spec, prefix, unused)
    experts: list[Mapping[str, Rows]] = []
    for expert_id in range(spec.num_experts):
        parts: dict[str, Rows] = {}
        for part, rows, cols in expert_matrices(spec):
            name = f"{prefix}.{expert_id}.{part}_proj.weight"
            if part in fused:
                tensor, per_expert, first = fused[part]
                parts[part] = Rows(tensor, expert_id * per_expert + first, rows)
            elif name in tensors:
                unused.discard(name)
                _expect_shape(tensors[name], (rows, cols))
                parts[part] = Rows(tensors[name], 0, rows)
            else:
                missing.append(name)
            if spec.expert_bias:
                biases = f"{prefix}.{part}_proj_bias"
                if biases in tensors:
                    unused.discard(biases)
                    _expect_shape(tensors[biases], (spec.num_experts, rows))
                    parts[f"{part}.bias"] = Rows(tensors[biases], expert_id, 1)
                else:
                    missing.append(biases)
        experts.append(parts)
        if len(missing) > MAX_MISSING:
            break
    return tuple(experts)


def _fused(
    tensors: Mapping[str, SourceTensor], spec: ModelSpec, prefix: str, unused: set[str]
) -> dict[str, tuple[SourceTensor, int, int]]:
    """part -> (tensor, its rows per expert, first row of the part) for gate_up_proj (E, 2I, H), down_proj (E, H, I)."""
    found: dict[str, tuple[SourceTensor, int, int]] = {}
    sizes = {part: (rows, cols) for part, rows, cols in expert_matrices(spec)}
    holders = {"gate_up_proj": ("gate", "up"), **{f"{part}_proj": (part,) for part in sizes}}
    for holder, parts in holders.items():
        for name in (f"{prefix}.{holder}", f"{prefix}.{holder}.weight"):
            tensor = tensors.get(name)
            if tensor is None:
                continue
            unused.discard(name)
            per_expert = sum(sizes[part][0] for part in parts)
            _expect_shape(tensor, (spec.num_experts, per_expert, sizes[parts[0]][1]))
            first = 0
            for part in parts:
                found[part] = (tensor, per_expert, first)
                first += sizes[part][0]
    return found


def _expect_shape(tensor: SourceTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"tensor {tensor.name}: shape {list(tensor.shape)}, but config.json makes it {list(shape)}"
        )


def _refuse(source: Source, names: Iterable[str], fault: str) -> None:
    found = sorted(names)
    if found:
        count = "1 tensor" if len(found) == 1 else f"{len(found)} tensors"
        if len(found) > MAX_MISSING:
            count = f"more than {MAX_MISSING} tensors"
        raise CheckpointError(f"{source.path}: {count} {fault}, first {found[0]}")
