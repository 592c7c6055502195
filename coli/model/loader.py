"""Container -> the dense weights in memory, as the layers address them.

Reads every dense tensor of the file into one anonymous arena (so that it cannot be evicted behind our back
and sits on huge pages), and keeps that arena alive. Experts stay in the store. Called once, when a model is opened.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coli.model.config import LayerSpec, ModelSpec
from coli.model.tensors import mtp_prefix
from coli.store.container import Container, ExpertLayout

ALIGNMENT = 64
Read = Callable[[str, NDArray[np.uint8]], None]  # a tensor's name and where its bytes go


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix (rows, cols) in the packed order: addresses of weights, scales and bias (0: none)."""

    kind: int
    rows: int
    cols: int
    tiles: int
    groups: int
    weights: int
    scales: int
    bias: int = 0


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A dense SwiGLU block: gate and up (I, H), down (H, I)."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router and shared expert of one sparse layer; the routed experts are described by `experts`."""

    gate: Linear
    e_score_correction_bias: NDArray[np.float32] | None
    experts: ExpertLayout
    shared_expert: MlpWeights | None
    shared_expert_gate: Linear | None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Grouped-query attention of one layer."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: NDArray[np.float32] | None
    k_norm: NDArray[np.float32] | None
    sinks: NDArray[np.float32] | None = None  # (N,)


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """What scores the positions of a layer whose indexer is its own."""

    wq_b: Linear
    wk: Linear
    k_norm: tuple[NDArray[np.float32], NDArray[np.float32]]  # weight, bias
    weights_proj: Linear


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Latent attention of one layer. k_up and v_up are the halves of kv_b_proj, head by head (tensors.py)."""

    q_proj: Linear  # or q_a_proj, where q_b_proj follows
    q_a_layernorm: NDArray[np.float32] | None
    q_b_proj: Linear | None
    kv_a_proj_with_mqa: Linear
    kv_a_layernorm: NDArray[np.float32]
    k_up: Linear
    v_up: Linear
    o_proj: Linear
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, attributes as the checkpoint names them."""

    spec: LayerSpec
    input_layernorm: NDArray[np.float32]
    post_attention_layernorm: NDArray[np.float32]
    attention: AttentionWeights | LatentWeights
    mlp: MlpWeights | MoeWeights
    input_layernorm_bias: NDArray[np.float32] | None = None
    post_attention_layernorm_bias: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The layer that predicts the token after next, and what stands before and behind it."""

    enorm: NDArray[np.float32]
    hnorm: NDArray[np.float32]
    eh_proj: Linear
    layer: LayerWeights
    shared_head_norm: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything dense. `arena` owns the bytes behind every address."""

    arena: NDArray[np.uint8]
    embed_tokens: Linear
    layers: tuple[LayerWeights, ...]
    norm: NDArray[np.float32]
    lm_head: Linear
    mtp: MtpWeights | None = None
    norm_bias: NDArray[np.float32] | None = None

    @property
    def nbytes(self) -> int:
        return int(self.arena.nbytes)


class _Arena:
    """Hands out aligned pieces of one buffer, which is big enough for the tensors of these sizes, filled by `read`."""

    def __init__(self, sizes: Mapping[str, int], read: Read) -> None:
        total = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()) + ALIGNMENT
        self.buffer = np.empty(total, np.uint8)
        self._sizes, self._read = sizes, read
        self._base = int(self.buffer.ctypes.data)
        self._at = -self._base % ALIGNMENT

    def place(self, name: str) -> tuple[NDArray[np.uint8], int]:
        """The bytes of a tensor, and their address."""
        at, size = self._at, self._sizes[name]
        piece = self.buffer[at : at + size]
        self._read(name, piece)
        self._at += -(-size // ALIGNMENT) * ALIGNMENT
        return piece, self._base + at


class _Loader:
    def __init__(self, container: Container, spec: ModelSpec, read: Read) -> None:
        self._container = container
        self.arena = _Arena({name: container.array(name).nbytes for name in loaded_tensors(container, spec)}, read)

    def linear(self, name: str) -> Linear:
        matrix = self._container.matrix(f"{name}.weight")
        _, weights = self.arena.place(f"{name}.weight")
        scales = 0 if matrix.scales is None else self.arena.place(f"{name}.weight.scales")[1]
        shape = matrix.kind, matrix.rows, matrix.cols, matrix.tiles, matrix.groups
        return Linear(*shape, weights, scales, self._bias(name))

    def tied(self, embed_tokens: Linear) -> Linear:
        """The embedding as output matrix, which may have a bias of its own."""
        bias = self._bias("lm_head")
        return replace(embed_tokens, bias=bias) if bias else embed_tokens

    def _bias(self, name: str) -> int:
        if not self._container.has(f"{name}.bias"):
            return 0
        return self.arena.place(f"{name}.bias")[1]

    def vector(self, name: str) -> NDArray[np.float32]:
        return self.arena.place(name)[0].view(np.float32)

    def optional_vector(self, name: str) -> NDArray[np.float32] | None:
        return self.vector(name) if self._container.has(name) else None

    def mlp(self, prefix: str) -> MlpWeights:
        return MlpWeights(*(self.linear(f"{prefix}.{name}_proj") for name in ("gate", "up", "down")))

    def layer(self, spec: LayerSpec, latent: bool) -> LayerWeights:
        prefix = f"model.layers.{spec.layer_idx}"
        attention = f"{prefix}.self_attn"
        mlp: MlpWeights | MoeWeights
        if spec.is_moe:
            shared = f"{prefix}.mlp.shared_expert"
            has_shared = self._container.has(f"{shared}.gate_proj.weight")
            has_gate = self._container.has(f"{prefix}.mlp.shared_expert_gate.weight")
            mlp = MoeWeights(
                gate=self.linear(f"{prefix}.mlp.gate"),
                e_score_correction_bias=self.optional_vector(f"{prefix}.mlp.gate.e_score_correction_bias"),
                experts=self._container.expert_layout(spec.layer_idx),
                shared_expert=self.mlp(shared) if has_shared else None,
                shared_expert_gate=self.linear(f"{prefix}.mlp.shared_expert_gate") if has_gate else None,
            )
        else:
            mlp = self.mlp(f"{prefix}.mlp")
        return LayerWeights(
            spec=spec,
            input_layernorm=self.vector(f"{prefix}.input_layernorm.weight"),
            post_attention_layernorm=self.vector(f"{prefix}.post_attention_layernorm.weight"),
            attention=self.latent(attention) if latent else self.attention(attention),
            mlp=mlp,
            input_layernorm_bias=self.optional_vector(f"{prefix}.input_layernorm.bias"),
            post_attention_layernorm_bias=self.optional_vector(f"{prefix}.post_attention_layernorm.bias"),
        )

    def attention(self, prefix: str) -> AttentionWeights:
        return AttentionWeights(
            q_proj=self.linear(f"{prefix}.q_proj"),
            k_proj=self.linear(f"{prefix}.k_proj"),
            v_proj=self.linear(f"{prefix}.v_proj"),
            o_proj=self.linear(f"{prefix}.o_proj"),
            q_norm=self.optional_vector(f"{prefix}.q_norm.weight"),
            k_norm=self.optional_vector(f"{prefix}.k_norm.weight"),
            sinks=self.optional_vector(f"{prefix}.sinks"),
        )

    def latent(self, prefix: str) -> LatentWeights:
        compressed = self._container.has(f"{prefix}.q_a_proj.weight")
        return LatentWeights(
            q_proj=self.linear(f"{prefix}.q_a_proj" if compressed else f"{prefix}.q_proj"),
            q_a_layernorm=self.vector(f"{prefix}.q_a_layernorm.weight") if compressed else None,
            q_b_proj=self.linear(f"{prefix}.q_b_proj") if compressed else None,
            kv_a_proj_with_mqa=self.linear(f"{prefix}.kv_a_proj_with_mqa"),
            kv_a_layernorm=self.vector(f"{prefix}.kv_a_layernorm.weight"),
            k_up=self.linear(f"{prefix}.k_up"),
            v_up=self.linear(f"{prefix}.v_up"),
            o_proj=self.linear(f"{prefix}.o_proj"),
            indexer=self.indexer(f"{prefix}.indexer") if self._container.has(f"{prefix}.indexer.wk.weight") else None,
        )

    def mtp(self, spec: ModelSpec, layer: LayerSpec) -> MtpWeights:
        prefix = mtp_prefix(spec)
        return MtpWeights(
            enorm=self.vector(f"{prefix}enorm.weight"),
            hnorm=self.vector(f"{prefix}hnorm.weight"),
            eh_proj=self.linear(f"{prefix}eh_proj"),
            layer=self.layer(layer, spec.latent is not None),
            shared_head_norm=self.vector(f"{prefix}shared_head.norm.weight"),
        )

    def indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(
            wq_b=self.linear(f"{prefix}.wq_b"),
            wk=self.linear(f"{prefix}.wk"),
            k_norm=(self.vector(f"{prefix}.k_norm.weight"), self.vector(f"{prefix}.k_norm.bias")),
            weights_proj=self.linear(f"{prefix}.weights_proj"),
        )


def loaded_tensors(container: Container, spec: ModelSpec) -> list[str]:
    """Names of the dense file's tensors that are loaded: all, without an MTP head that `spec` does not want."""
    names = container.tensor_names()
    return names if spec.mtp is not None else [name for name in names if not name.startswith(mtp_prefix(spec))]


def load_weights(container: Container, spec: ModelSpec) -> ModelWeights:
    """Read all dense tensors. The container was checked when it was opened, so nothing is missing here."""
    with container.reading() as read:
        loader = _Loader(container, spec, read)
        embed_tokens = loader.linear("model.embed_tokens")
        layers = tuple(loader.layer(layer, spec.latent is not None) for layer in spec.layers)
        return ModelWeights(
            arena=loader.arena.buffer,
            embed_tokens=embed_tokens,
            layers=layers,
            norm=loader.vector("model.norm.weight"),
            lm_head=loader.tied(embed_tokens) if spec.tie_word_embeddings else loader.linear("lm_head"),
            mtp=None if spec.mtp is None else loader.mtp(spec, spec.mtp),
            norm_bias=loader.optional_vector("model.norm.bias"),
        )
