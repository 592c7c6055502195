"""Tensors of a GGUF checkpoint under the names and in the row order of Hugging Face checkpoints.

Q4_0 and Q8_0 can be read as they are (nibbles or int8 with their float16 scales); every other type, and these too, as
float32. llama-style q/k rows come back from pairs (2i, 2i+1) to halves (i, i + D/2) while they are read.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from coli.convert.gguf_file import GgufFile, GgufTensorInfo
from coli.convert.source import QuantizedRows, SourceTensor
from coli.errors import CheckpointError, UnsupportedModelError
from coli.store.layout import GROUP_SIZE, Kind

NATIVE_KINDS: Mapping[GGMLQuantizationType, Kind] = {
    GGMLQuantizationType.Q4_0: Kind.Q4,
    GGMLQuantizationType.Q8_0: Kind.Q8,
    GGMLQuantizationType.MXFP4: Kind.MXFP4,
}
FLOAT_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_up",
    "attn_v_b": "self_attn.v_up",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_LAYER = re.compile(r"blk\.(\d{1,4})\.([a-z_.]+)\.(weight|bias)")
_ONE_EXPERT = re.compile(r"blk\.(\d{1,4})\.ffn_(gate|up|down)\.(\d{1,5})\.weight")
_BUFFERS = re.compile(
    r"(blk\.\d+\.)?(rope_freqs|attn_rot_embd|attn_rot_freqs)(\.weight)?"
)  # what the config says anyway


@dataclass(frozen=True, slots=True)
class Heads:
    """What the row order of q and k depends on."""

    query: int  # heads
    key: int
    size: int  # rows of one head
    permuted: bool  # rows 2i, 2i+1 of a head stand for i, i + size/2


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Rows first..first+rows-1 of a tensor in a file; see source.SourceTensor. `permuted_heads`: 0 for none."""

    file: GgufFile
    info: GgufTensorInfo
    shape: tuple[int, ...]
    first: int = 0
    permuted_heads: int = 0

    @property
    def name(self) -> str:
        return f"{self.info.name} in {self.file.header.path}"

    @property
    def row_bytes(self) -> int:
        return self.info.row_bytes * (self._rows if len(self.shape) == 1 else 1)

    @property
    def files(self) -> frozenset[str]:
        return frozenset((self.file.header.path.name,))

    @property
    def native(self) -> "NativeRows | None":
        kind = NATIVE_KINDS.get(self.info.kind)
        return None if kind is None else NativeRows(kind, self)

    def read_rows(self, start: int, stop: int) -> NDArray[np.float32]:
        if len(self.shape) == 1:  # kept as a column
            return self._floats(0, self._rows).reshape(1, -1)
        return self._floats(start, stop)

    @property
    def _rows(self) -> int:
        rows = 1
        for size in self.shape[:-1] or self.shape:
            rows *= size
        return rows

    def _floats(self, start: int, stop: int) -> NDArray[np.float32]:
        return to_float32(self.raw_rows(start, stop), self.info.kind)

    def raw_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes of rows start..stop-1 in Hugging Face's order, (rows, info.row_bytes)."""
        if not self.permuted_heads:
            return self.file.read_rows(self.info, self.first + start, self.first + stop)
        head = self._rows // self.permuted_heads
        low, high = start // head, -(-stop // head)
        block = self.file.read_rows(self.info, self.first + low * head, self.first + high * head)
        block = block.reshape(high - low, head // 2, 2, -1).swapaxes(1, 2).reshape((high - low) * head, -1)
        return block[start - low * head : stop - low * head]


@dataclass(frozen=True, slots=True)
class NativeRows:
    """The rows of a Q4_0, Q8_0 or MXFP4 tensor as they are; see source.NativeRows."""

    kind: Kind
    tensor: GgufTensor

    def read(self, start: int, stop: int) -> QuantizedRows:
        """Blocks are one float16 scale and 32 weights: int8 in order, or nibbles, low ones first, high ones after."""
        raw = self.tensor.raw_rows(start, stop)
        if self.kind is Kind.MXFP4:  # an exponent and 32 codes
            blocks = raw.reshape(stop - start, -1, 1 + GROUP_SIZE // 2)
            codes = np.concatenate([blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4], axis=2)
            return QuantizedRows(codes.reshape(stop - start, -1), blocks[:, :, 0])
        blocks = raw.reshape(stop - start, raw.shape[1] // (2 + GROUP_SIZE // (2 if self.kind is Kind.Q4 else 1)), -1)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
        quants = blocks[:, :, 2:]
        if self.kind is Kind.Q4:
            nibbles = np.concatenate([quants & 15, quants >> 4], axis=2)
            return QuantizedRows(nibbles.reshape(stop - start, -1), scales)
        return QuantizedRows(np.ascontiguousarray(quants).view(np.int8).reshape(stop - start, -1), scales)


def to_float32(raw: NDArray[np.uint8], kind: GGMLQuantizationType) -> NDArray[np.float32]:
    """Raw rows (rows, row_bytes) of type `kind` as float32; exact for F32, F16 and BF16."""
    if kind is GGMLQuantizationType.F64:
        return raw.view("<f8").astype(np.float32)
    with np.errstate(all="ignore"):  # damaged weights become NaN or inf, which the reader of these rows refuses
        floats: NDArray[np.float32] = quants.dequantize(raw, kind)
    return np.ascontiguousarray(floats, np.float32)


def hugging_face_tensors(files: Mapping[str, GgufFile], heads: Heads) -> dict[str, SourceTensor]:
    """Name -> tensor for everything in `files` (tensor name in GGUF -> file); names nobody knows stay as they are."""
    found: dict[str, SourceTensor] = {}
    for name, file in files.items():
        info = file.header.tensors[name]
        if _BUFFERS.fullmatch(name):
            continue
        for renamed, tensor in _translate(GgufTensor(file, info, info.shape), heads):
            _check_type(tensor)
            if renamed in found:
                raise CheckpointError(f"tensors {found[renamed].name} and {tensor.name}: both are {renamed}")
            found[renamed] = tensor
    return found


def gguf_name(name: str) -> str:
    """The usual GGUF name of a canonical tensor name, for messages."""
    for ours, theirs in _WHOLE.items():
        if name == theirs:
            return ours
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, part, suffix = match.groups()
    if expert := re.fullmatch(r"mlp\.experts\.\d+\.(gate|up|down)_proj", part):
        return f"blk.{layer}.ffn_{expert[1]}_exps.weight"
    for ours, theirs in _PER_LAYER.items():
        if part == theirs:
            return f"blk.{layer}.{ours}.{suffix}"
    return name


def _translate(tensor: GgufTensor, heads: Heads) -> Iterator[tuple[str, GgufTensor]]:
    """The tensor, or its parts if it is fused, under Hugging Face's names."""
    name = tensor.info.name
    if len(tensor.shape) == 1 and not name.endswith("ffn_gate_inp_shexp.weight"):
        # Vectors are read as a column, so that their elements can be chosen and permuted as rows are.
        tensor = replace(tensor, info=replace(tensor.info, shape=(tensor.shape[0], 1)))
    if name in _WHOLE:
        yield _WHOLE[name], tensor
    elif match := _ONE_EXPERT.fullmatch(name):
        layer, part, expert = match.groups()
        yield f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", tensor
    elif (match := _LAYER.fullmatch(name)) and match[2] in (*_PER_LAYER, "attn_qkv"):
        layer, part, suffix = match.groups()
        prefix = f"model.layers.{layer}"
        if part == "attn_qkv":
            yield from _split_qkv(tensor, heads, f"{prefix}.self_attn", suffix)
            return
        if part == "ffn_gate_inp_shexp":
            tensor = replace(tensor, shape=(1, tensor.shape[-1]))
        if part in ("attn_k_b", "attn_v_b") and len(tensor.shape) == 3:  # a matrix per head
            tensor = replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))
        if part == "exp_probs_b":
            yield f"{prefix}.mlp.gate.e_score_correction_bias", tensor
            return
        if part == "attn_sinks":
            yield f"{prefix}.self_attn.sinks", tensor
            return
        if part.endswith("_exps") and suffix == "bias":
            yield f"{prefix}.{_PER_LAYER[part]}_bias", tensor
            return
        if heads.permuted and part in ("attn_q", "attn_k"):
            tensor = _permuted(tensor, heads.query if part == "attn_q" else heads.key)
        yield f"{prefix}.{_PER_LAYER[part]}.{suffix}", tensor
    else:
        yield name, tensor


def _split_qkv(tensor: GgufTensor, heads: Heads, prefix: str, suffix: str) -> Iterator[tuple[str, GgufTensor]]:
    first = 0
    expected = (heads.query + 2 * heads.key) * heads.size
    if tensor.shape[0] != expected:
        raise CheckpointError(f"tensor {tensor.name}: {tensor.shape[0]} rows, but the metadata makes it {expected}")
    for part, count in (("q", heads.query), ("k", heads.key), ("v", heads.key)):
        rows = count * heads.size
        piece = replace(tensor, first=first, shape=(rows, *tensor.shape[1:]))
        yield f"{prefix}.{part}_proj.{suffix}", _permuted(piece, count) if heads.permuted and part != "v" else piece
        first += rows


def _permuted(tensor: GgufTensor, count: int) -> GgufTensor:
    if tensor.shape[0] % (2 * count):
        raise CheckpointError(f"tensor {tensor.name}: {tensor.shape[0]} rows do not divide into {count} heads")
    return replace(tensor, permuted_heads=count)


def _check_type(tensor: GgufTensor) -> None:
    kind = tensor.info.kind
    block, nbytes = GGML_QUANT_SIZES[kind]
    if kind is not GGMLQuantizationType.F64:
        try:
            quants.dequantize(np.zeros((1, nbytes), np.uint8), kind)
        except NotImplementedError:
            raise UnsupportedModelError(f"tensor {tensor.name}: type {kind.name} is not supported") from None
    if len(tensor.shape) == 1 and block > 1:
        raise UnsupportedModelError(f"tensor {tensor.name}: a vector of type {kind.name} is not supported")
