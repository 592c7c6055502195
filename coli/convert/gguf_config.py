"""GGUF metadata -> config.json in Hugging Face style, for the architectures whose families coli runs.

Key names are those of the `gguf` package; defaults are llama.cpp's. A key that changes the result and that these
families cannot follow is refused by name; keys nobody here knows are returned so that the caller can tell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf.constants import Keys
from numpy.typing import NDArray

from coli.convert.gguf_file import Value
from coli.errors import CheckpointError, UnsupportedModelError
from coli.model.config import MAX_LAYERS, MAX_SIZE

ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3 = (1.0, 4.0, 8192)  # low and high frequency factor, original context: those of every Llama 3

Shapes = Mapping[str, tuple[int, ...]]
RopeVectors = Mapping[str, NDArray[np.float32]]  # of ROPE_FREQS, ROPE_LONG and ROPE_SHORT those that the file has
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One GGUF architecture: `permuted` says that q/k rows are stored for pairs (2i, 2i+1)."""

    model_type: str  # of config.json, without routed experts
    moe_type: str | None  # with routed experts
    permuted: bool


ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek2": Architecture("deepseek_v3", "deepseek_v3", permuted=False),
    "ernie4_5-moe": Architecture("ernie4_5_moe", "ernie4_5_moe", permuted=False),  # rope on pairs, but in its own rows
    "glm-dsa": Architecture("glm_moe_dsa", "glm_moe_dsa", permuted=False),
    "glm4moe": Architecture("glm4_moe", "glm4_moe", permuted=False),
    "gpt-oss": Architecture("gpt_oss", "gpt_oss", permuted=False),
    "granitemoe": Architecture("granitemoe", "granitemoe", permuted=True),
    "llama": Architecture("llama", "mixtral", permuted=True),
    "olmoe": Architecture("olmoe", "olmoe", permuted=False),
    "phimoe": Architecture("phimoe", "phimoe", permuted=False),
    "qwen2moe": Architecture("qwen2_moe", "qwen2_moe", permuted=False),
    "qwen3": Architecture("qwen3", None, permuted=False),
    "qwen3moe": Architecture("qwen3_moe", "qwen3_moe", permuted=False),
}

# Keys that change the result in other architectures: (key, values under which they change nothing).
_NEUTRAL: tuple[tuple[str, tuple[object, ...]], ...] = (
    (Keys.Attention.CAUSAL, (True,)),
    (Keys.Attention.SCALE, (0.0,)),
    (Keys.Attention.MAX_ALIBI_BIAS, (0.0,)),
    (Keys.LLM.LOGIT_SCALE, (0.0, 1.0)),
    (Keys.LLM.EMBEDDING_SCALE, (0.0, 1.0)),
    (Keys.LLM.RESIDUAL_SCALE, (0.0, 1.0)),
    (Keys.LLM.ATTN_LOGIT_SOFTCAPPING, (0.0,)),
    (Keys.LLM.FINAL_LOGIT_SOFTCAPPING, (0.0,)),
    (Keys.LLM.USE_PARALLEL_RESIDUAL, (False,)),
    (Keys.LLM.EXPERT_GATING_FUNC, (0, 1)),  # not given, softmax
    (Keys.LLM.EXPERT_GROUP_COUNT, (0, 1)),
    (Keys.LLM.EXPERT_GROUP_USED_COUNT, (0, 1)),
    (Keys.LLM.EXPERT_WEIGHTS_SCALE, (0.0, 1.0)),
    (Keys.LLM.LEADING_DENSE_BLOCK_COUNT, (0,)),
    (Keys.LLM.INTERLEAVE_MOE_LAYER_STEP, (1,)),
    ("{arch}.nextn_predict_layers", (0,)),
    (Keys.Rope.DIMENSION_SECTIONS, ([0, 0, 0, 0],)),
    (Keys.Rope.SCALING_ATTN_FACTOR, (1.0,)),
    (Keys.Rope.SCALING_YARN_LOG_MUL, (0.0,)),
    (Keys.Rope.SCALING_YARN_EXT_FACTOR, (1.0, -1.0)),
)
# Keys that say nothing which tensors or other keys do not say.
_REDUNDANT = (
    Keys.LLM.VOCAB_SIZE,
    Keys.LLM.TENSOR_DATA_LAYOUT,
    Keys.LLM.EXPERT_SHARED_COUNT,
    Keys.Rope.SCALING_FINETUNED,
)


class Metadata:
    """Typed access to the metadata of one file; every refusal names file and key. Remembers which keys were asked."""

    def __init__(self, values: Mapping[str, Value], path: Path) -> None:
        self.values = values
        self.path = path
        self.architecture = self.text("general.architecture")
        self.asked: set[str] = set()

    def key(self, name: str) -> str:
        """The key with the architecture filled in."""
        return name.format(arch=self.architecture)

    def get(self, name: str) -> Value | None:
        key = self.key(name)
        self.asked.add(key)
        return self.values.get(key)

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """The whole number under `name`, within minimum..maximum; one value per layer counts when all are equal."""
        value = self.get(name)
        if value is None:
            return self._absent(name, default)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise UnsupportedModelError(
                    f"{self.path}: key {self.key(name)} differs from layer to layer: not supported"
                )
            value = value[0]
        if type(value) is not int or value < minimum:
            raise self.wrong(name, f"a whole number from {minimum} on", value)
        if value > maximum:
            raise self.wrong(name, f"{minimum}..{maximum}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """The number above 0 under `name`."""
        value = self.get(name)
        if value is None:
            return self._absent(name, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):  # type: ignore[operator]
            raise self.wrong(name, "a number above 0", value)
        return float(value)  # type: ignore[arg-type]

    def optional_number(self, name: str) -> float | None:
        """The number above 0 under `name`; None if absent or 0."""
        return None if self.get(name) in (None, 0, 0.0) else self.number(name)

    def text(self, name: str, default: str | None = None) -> str:
        """The string under `name`."""
        value = self.values.get(name) if name == "general.architecture" else self.get(name)
        if value is None:
            return self._absent(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a string", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """The boolean under `name`."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false", value)
        return value

    def wrong(self, name: str, expected: str, found: object) -> CheckpointError:
        """The error for a key whose value cannot be."""
        return CheckpointError(f"{self.path}: key {self._shown(name)}: expected {expected}, found {str(found)[:60]}")

    def _shown(self, name: str) -> str:
        return name if "{" not in name else self.key(name)

    def _absent(self, name: str, default: _T | None) -> _T:
        if default is None:
            raise CheckpointError(f"{self.path}: key {self._shown(name)} is missing")
        return default


def architecture_of(metadata: Metadata) -> Architecture:
    """The architecture of a file; UnsupportedModelError names an unknown one."""
    found = ARCHITECTURES.get(metadata.architecture)
    if found is None:
        raise UnsupportedModelError(
            f"{metadata.path}: general.architecture {metadata.architecture[:60]!r} is not supported;"
            f" supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return found


def config_from_metadata(metadata: Metadata, shapes: Shapes, rope: RopeVectors) -> tuple[dict[str, Any], list[str]]:
    """(config.json, keys of this architecture that nobody here knows) of one file.

    `shapes`: tensor shapes by name in the file, the rows' axis last. `rope`: vectors (head_dim / 2,) by which
    frequencies are divided, Llama 3's and longrope's.
    """
    architecture = architecture_of(metadata)
    refuse_what_changes_the_result(metadata)
    num_experts = metadata.integer(Keys.LLM.EXPERT_COUNT, default=0, minimum=0)
    model_type = architecture.moe_type if num_experts else architecture.model_type
    if model_type is None or (num_experts == 0 and architecture.moe_type == architecture.model_type):
        raise metadata.wrong(Keys.LLM.EXPERT_COUNT, "routed experts" if num_experts == 0 else "none", num_experts)
    config: dict[str, Any] = {"model_type": model_type, **trunk(metadata, shapes)}
    config |= rope_config(metadata, config, rope)
    if num_experts:
        config |= _experts(metadata, model_type, num_experts, config, shapes)
    config |= _window(metadata, model_type, config["max_position_embeddings"])
    clip = metadata.optional_number(Keys.Attention.CLAMP_KQV)
    if clip is not None and model_type != "olmoe":
        raise unsupported(metadata, Keys.Attention.CLAMP_KQV, clip)
    if clip is not None:
        config["clip_qkv"] = clip
    return config, unknown_keys(metadata)


def unknown_keys(metadata: Metadata) -> list[str]:
    """Keys of the architecture that nobody has asked for."""
    for name in _REDUNDANT:
        metadata.get(name)
    prefix = metadata.architecture + "."
    return sorted(key for key in metadata.values if key.startswith(prefix) and key not in metadata.asked)


def trunk(metadata: Metadata, shapes: Shapes) -> dict[str, Any]:
    """The keys that every family has."""
    hidden_size = metadata.integer(Keys.LLM.EMBEDDING_LENGTH)
    num_heads = metadata.integer(Keys.Attention.HEAD_COUNT)
    key_length = metadata.integer(Keys.Attention.KEY_LENGTH, default=max(1, hidden_size // num_heads))
    for name in (Keys.Attention.VALUE_LENGTH, Keys.Rope.DIMENSION_COUNT):
        other = metadata.integer(name, default=key_length)
        if other != key_length:
            raise unsupported(metadata, name, f"{other} (the head size is {key_length})")
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise CheckpointError(f"{metadata.path}: tensor token_embd.weight is missing")
    return {
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer(Keys.LLM.FEED_FORWARD_LENGTH),
        "num_hidden_layers": metadata.integer(Keys.LLM.BLOCK_COUNT, maximum=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer(Keys.Attention.HEAD_COUNT_KV, default=num_heads),
        "head_dim": key_length,
        "max_position_embeddings": metadata.integer(Keys.LLM.CONTEXT_LENGTH),
        "rms_norm_eps": metadata.number(Keys.Attention.LAYERNORM_RMS_EPS),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "qkv_bias": "blk.0.attn_q.bias" in shapes or "blk.0.attn_qkv.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }


def _experts(
    metadata: Metadata, model_type: str, num_experts: int, config: Mapping[str, Any], shapes: Shapes
) -> dict[str, Any]:
    """Expert counts and sizes; the normalization of their weights is the family's unless the file says otherwise."""
    per_token = metadata.integer(Keys.LLM.EXPERT_USED_COUNT)
    norm = metadata.flag(Keys.LLM.EXPERT_WEIGHTS_NORM, default=model_type in ("mixtral", "qwen3_moe"))
    if model_type == "mixtral":
        if not norm:
            raise unsupported(metadata, Keys.LLM.EXPERT_WEIGHTS_NORM, norm)
        if metadata.optional_number(Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH):
            raise unsupported(metadata, Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, "not 0")
        return {"num_local_experts": num_experts, "num_experts_per_tok": per_token}
    found: dict[str, Any] = {"num_experts": num_experts, "num_experts_per_tok": per_token, "norm_topk_prob": norm}
    if model_type == "olmoe":
        return found
    inter = config["intermediate_size"]
    size = metadata.integer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, default=0, minimum=0) or inter // per_token
    found["moe_intermediate_size"] = size
    found["decoder_sparse_step"] = 1
    layers = range(config["num_hidden_layers"])
    found["mlp_only_layers"] = [
        i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in shapes and f"blk.{i}.ffn_up.weight" in shapes
    ]
    if model_type == "qwen2_moe":
        shared = metadata.integer(Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH, default=0, minimum=0)
        found["shared_expert_intermediate_size"] = shared or inter
    return found


def _window(metadata: Metadata, model_type: str, longest: int) -> dict[str, Any]:
    window = metadata.integer(Keys.Attention.SLIDING_WINDOW, default=0, minimum=0)
    if not 0 < window < longest:
        return {}
    if model_type != "mixtral":
        raise unsupported(metadata, Keys.Attention.SLIDING_WINDOW, window)
    return {"sliding_window": window}


def rope_config(metadata: Metadata, config: Mapping[str, Any], rope: RopeVectors) -> dict[str, Any]:
    """rope_theta and rope_scaling. llama.cpp's rule: a factor without a type is linear."""
    theta = metadata.number(Keys.Rope.FREQ_BASE, default=10000.0)
    old_factor = metadata.optional_number("{arch}.rope.scale_linear")
    factor = metadata.optional_number(Keys.Rope.SCALING_FACTOR) or old_factor or 1.0
    kind = metadata.text(Keys.Rope.SCALING_TYPE, default="linear")
    original = metadata.integer(Keys.Rope.SCALING_ORIG_CTX_LEN, default=config["max_position_embeddings"])
    fast = metadata.optional_number(Keys.Rope.SCALING_YARN_BETA_FAST)
    slow = metadata.optional_number(Keys.Rope.SCALING_YARN_BETA_SLOW)
    attention_factor = metadata.optional_number(Keys.Rope.SCALING_YARN_ATTN_FACTOR)
    scaling: dict[str, Any] | None = None
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        named = {"beta_fast": fast, "beta_slow": slow, "attention_factor": attention_factor}
        scaling |= {name: value for name, value in named.items() if value is not None}
    elif kind not in ("linear", "none"):
        raise unsupported(metadata, Keys.Rope.SCALING_TYPE, kind)
    elif kind == "linear" and factor != 1.0:
        scaling = {"rope_type": "linear", "factor": factor}
    rope_freqs = rope.get(ROPE_FREQS)
    if rope_freqs is not None and (rope_freqs != 1).any():
        if scaling is not None:
            raise UnsupportedModelError(
                f"{metadata.path}: tensor {ROPE_FREQS} beside rope scaling {kind}: not supported"
            )
        scaling = _llama3(rope_freqs, theta, config["head_dim"])
        if scaling is None:
            raise UnsupportedModelError(
                f"{metadata.path}: tensor {ROPE_FREQS} is no llama3 rope scaling: not supported"
            )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _llama3(found: NDArray[np.float32], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 parameters whose factors are `found`; None if there are none.

    Dividing 1 by a factor between the ends gives a straight line over 1 / wavelength, from which two parameters follow;
    low_freq_factor is 1, since scaling all three together changes nothing.
    """
    if found.shape != (head_dim // 2,) or not np.isfinite(found).all() or (found < 1).any():
        return None
    factor = float(str(found.max()))
    inverse_wavelength = theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    candidates = [_LLAMA3]
    between = (found > 1) & (found < found.max())
    if between.sum() >= 2:
        smooth = (1 / found[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(inverse_wavelength[between], smooth, 1)
        if intercept < 0 < slope:
            high = round(1 - 1 / intercept, 3)
            candidates.append((1.0, high, round(slope * (high - 1))))
    for low, high, original in candidates:
        smooth = (original * inverse_wavelength - low) / (high - low)
        expected = 1 / ((1 - smooth) / factor + smooth)
        expected = np.where(smooth > 1, 1.0, np.where(smooth < 0, factor, expected))
        if np.allclose(expected, found, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return None


def refuse_what_changes_the_result(metadata: Metadata, followed: Sequence[str] = ()) -> None:
    """Refuse keys that matter elsewhere, but those in `followed`, which the caller obeys."""
    for name, neutral in _NEUTRAL:
        value = metadata.get(name)
        if value is not None and value not in neutral and name not in followed:
            raise unsupported(metadata, name, value)


def unsupported(metadata: Metadata, name: str, found: object) -> UnsupportedModelError:
    """The error for a key that would change the result and cannot be followed."""
    return UnsupportedModelError(f"{metadata.path}: key {metadata.key(name)} {str(found)[:60]} is not supported")
