"""What a model is, in the words of config.json: ModelSpec, RopeSpec, LayerSpec, and the typed reader of config keys.

Specs are frozen values made once by families.spec_from_config and read by the loader, the forward and convert.
They are resolved: no alias, default or derived value is left for a reader to work out.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from coli.errors import CheckpointError, UnsupportedModelError

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
QKNorm = Literal["none", "head", "row"]
ScoringFunc = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["none", "max", "top2"]  # of a group of experts: its best, or its two best added
IndexerRole = Literal["none", "full", "shared"]

_T = TypeVar("_T")

MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one model. Fields of a kind not in use keep their neutral values."""

    theta: float
    rotary_dim: int  # leading dims of a head that rotate
    interleaved: bool  # pairs (2i, 2i+1) instead of (i, i + rotary_dim/2)
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    original_max_position_embeddings: int = 0  # llama3, yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: whole dimensions bound the ramp
    attention_factor: float = 1.0  # multiplies cos and sin
    short_factor: tuple[float, ...] = ()  # longrope: divides the frequency of each pair of dims
    long_factor: tuple[float, ...] = ()  # the same in long sequences (kv_cache.KVCache.expect)
    long_attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What differs from layer to layer."""

    layer_idx: int
    sliding_window: int | None  # positions a row sees, itself included; None: all
    is_moe: bool
    indexer: IndexerRole = "none"  # "full" chooses the positions a row attends, "shared" takes the last full layer's


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """What chooses the positions that latent attention reads: the `index_topk` best, all where there are fewer."""

    index_n_heads: int
    index_head_dim: int
    index_topk: int
    interleaved: bool  # rope pairs, as RopeSpec.interleaved


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads come from one compressed row per position."""

    q_lora_rank: int | None  # None: q_proj straight from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    indexer: IndexerSpec | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model. Names are those of config.json; sizes are unpadded."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    intermediate_size: int  # of dense layers; 0 when every layer is sparse
    rope: RopeSpec
    qk_norm: QKNorm  # "head": over head_dim; "row": over all heads of the row
    clip_qkv: float | None
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    attention_scale: float
    layers: tuple[LayerSpec, ...]
    num_experts: int  # 0 for dense models
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    scoring_func: ScoringFunc
    routed_scaling_factor: float
    shared_expert_intermediate_size: int  # 0: none
    shared_expert_gate: bool
    e_score_correction_bias: bool = False  # added to the scores for the choice only
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = "none"
    layer_norm: bool = False  # with biases, instead of RMSNorm; eps is rms_norm_eps
    router_jitter_noise: float = 0.0  # sparsemixer
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logits_scaling: float = 1.0  # divides the logits
    sinks: bool = False  # each head has a logit of its own in the softmax, which takes weight and gives nothing
    router_bias: bool = False
    expert_bias: bool = False
    lm_head_bias: bool = False
    swiglu_limit: float | None = None  # experts: (up + 1) * gate * sigmoid(1.702 gate), both clamped; None: SwiGLU
    latent: LatentSpec | None = None  # None: keys and values per head, as num_key_value_heads and head_dim say
    mtp: LayerSpec | None = None  # the layer behind the last, which predicts the token after next
    assumed: tuple[str, ...] = ()  # defaults taken for keys that config.json lacks and that change the output

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, ascending."""
        return tuple(layer.layer_idx for layer in self.layers if layer.is_moe)

    @property
    def record_layers(self) -> tuple[int, ...]:
        """Indices of all layers with expert records, the MTP head's included, ascending."""
        return self.moe_layers if self.mtp is None else (*self.moe_layers, self.mtp.layer_idx)

    @property
    def num_stored_layers(self) -> int:
        """num_hidden_layers, and one more with an MTP head."""
        return self.num_hidden_layers + (self.mtp is not None)


class ConfigReader:
    """Typed access to one config.json; every refusal names the file and the key.

    A key that is absent or null takes `default`; without a default it is a CheckpointError. `within` is the key of the
    object that `config` is part of.
    """

    def __init__(self, config: Mapping[str, Any], path: Path, within: str = "") -> None:
        self.config = config
        self.path = path
        self._within = f"{within}." if within else ""

    def integer(self, *keys: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """The whole number under the first of `keys` that is present, within minimum..maximum."""
        key, value = self._find(keys)
        if value is None:
            return self._default(keys, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a whole number", value)
        if not minimum <= value <= maximum:
            raise self.wrong(key, f"{minimum}..{maximum}", value)
        return value

    def number(self, *keys: str, default: float | None = None, above: float = 0.0) -> float:
        """The finite number under the first of `keys` that is present, greater than `above`."""
        key, value = self._find(keys)
        if value is None:
            return self._default(keys, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "a number", value)
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result) or result <= above:
            raise self.wrong(key, f"a finite number above {above:g}", value)
        return result

    def optional_number(self, key: str) -> float | None:
        """The number under `key`, None if absent or null."""
        return None if self.config.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """The boolean under `key`."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def text(self, *keys: str, default: str | None = None) -> str:
        """The string under the first of `keys` that is present."""
        key, value = self._find(keys)
        if value is None:
            return self._default(keys, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """The list of whole numbers under `key`, empty if absent or null."""
        values = self._list(key)
        if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            raise self.wrong(key, "a list of whole numbers", values)
        return tuple(values)

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of strings under `key`, empty if absent or null."""
        values = self._list(key)
        if any(not isinstance(value, str) for value in values):
            raise self.wrong(key, "a list of strings", values)
        return tuple(values)

    def numbers(self, key: str) -> tuple[float, ...]:
        """The list of finite numbers above 0 under `key`, empty if absent or null."""
        values = self._list(key)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
                raise self.wrong(key, "a list of finite numbers above 0", values)
        return tuple(float(value) for value in values)

    def table(self, key: str) -> Mapping[str, Any] | None:
        """The object under `key`, None if absent or null."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object", value)
        return value

    def wrong(self, key: str, expected: str, found: object) -> CheckpointError:
        """The error for a key whose value cannot be."""
        return CheckpointError(f"{self.path}: {self._within}{key}: expected {expected}, found {_shown(found)}")

    def unsupported(self, key: str, found: object, supported: Sequence[str]) -> UnsupportedModelError:
        """The error for a value that is understood but not supported, naming what is."""
        return UnsupportedModelError(
            f"{self.path}: {self._within}{key} {_shown(found)} is not supported; supported: {', '.join(supported)}"
        )

    def _find(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        for key in keys:
            if self.config.get(key) is not None:
                return key, self.config[key]
        return keys[0], None

    def _default(self, keys: tuple[str, ...], default: _T | None) -> _T:
        if default is None:
            named = " or ".join(repr(self._within + key) for key in keys)
            raise CheckpointError(f"{self.path}: key {named} is missing")
        return default

    def _list(self, key: str) -> list[Any]:
        value = self.config.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong(key, "a list", value)
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
