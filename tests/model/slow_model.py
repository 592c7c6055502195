"""The families gpt_oss, granitemoe, ernie4_5_moe and phimoe in plain float64 numpy, a row and an expert at a time.

From config.json and the checkpoint's own tensors; nothing here uses the code under test."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def softmax(x: Array) -> Array:
    p = np.exp(x - x.max())
    return p / p.sum()


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


class SlowModel:
    """`config`: old-style rope keys, all of the keys that the family reads; `tensors` in the checkpoint's names."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self.config, self.family = config, config["model_type"]
        self.tensors = {name: np.asarray(values, np.float64) for name, values in tensors.items()}
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim") or config["hidden_size"] // self.heads

    def logits(self, ids: list[int]) -> Array:
        """(T, V) of every position, `ids` being the whole prompt."""
        config = self.config
        branch = config.get("residual_multiplier", 1.0)
        x = self.tensors["model.embed_tokens.weight"][ids] * config.get("embedding_multiplier", 1.0)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            x = x + branch * self.attention(layer, self.norm(prefix + "input_layernorm", x))
            mixed = self.norm(prefix + "post_attention_layernorm", x)
            x = x + branch * np.stack([self.mlp(layer, row) for row in mixed])
        x = self.norm("model.norm", x)
        head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
        out = x @ self.tensors[head].T + self.tensors.get("lm_head.bias", 0.0)
        return out / config.get("logits_scaling", 1.0)

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: Array) -> Array:
        if self.family == "phimoe":
            x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self.config["rms_norm_eps"])
        return x * self.tensors[f"{name}.weight"] + self.tensors.get(f"{name}.bias", 0.0)

    def attention(self, layer: int, x: Array) -> Array:
        prefix, count = f"model.layers.{layer}.self_attn.", len(x)
        q, k, v = (
            self.linear(f"{prefix}{part}_proj", x).reshape(count, heads, self.size)
            for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        q, k = self.turned(q), self.turned(k)
        window = self.config.get("sliding_window") or count
        if self.family == "gpt_oss" and self.config["layer_types"][layer] == "full_attention":
            window = count
        scale = self.config.get("attention_multiplier", self.size**-0.5)
        out = np.zeros((count, self.heads, self.size))
        for t in range(count):
            first = max(0, t - window + 1)
            for head in range(self.heads):
                group = head * self.kv_heads // self.heads
                scores = k[first : t + 1, group] @ q[t, head] * scale
                if f"{prefix}sinks" in self.tensors:
                    scores = np.append(scores, self.tensors[f"{prefix}sinks"][head])
                out[t, head] = softmax(scores)[: t + 1 - first] @ v[first : t + 1, group]
        return self.linear(f"{prefix}o_proj", out.reshape(count, -1))

    def turned(self, x: Array) -> Array:
        """Rope of (T, heads, size) at positions 0, 1, ..."""
        freqs, factor = self.frequencies(len(x))
        angles = np.arange(len(x))[:, None, None] * freqs
        cosine, sine = np.cos(angles) * factor, np.sin(angles) * factor
        pairs = self.family == "ernie4_5_moe"
        a, b = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., : self.size // 2], x[..., self.size // 2 :])
        parts = (a * cosine - b * sine, b * cosine + a * sine)
        return np.stack(parts, axis=-1).reshape(x.shape) if pairs else np.concatenate(parts, axis=-1)

    def frequencies(self, length: int) -> tuple[Array, float]:
        scaling, theta, dims = self.config.get("rope_scaling") or {}, self.config["rope_theta"], self.size
        freqs = theta ** (-np.arange(0, dims, 2) / dims)
        if scaling.get("type") == "longrope":
            which = "long" if length > scaling["original_max_position_embeddings"] else "short"
            return freqs / np.array(scaling[f"{which}_factor"]), scaling[f"{which}_mscale"]
        if scaling.get("type") == "yarn":
            original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
            low, high = (
                dims * np.log(original / (scaling[f"beta_{end}"] * 2 * np.pi)) / (2 * np.log(theta))
                for end in ("fast", "slow")
            )
            ramp = np.clip((np.arange(dims // 2) - max(low, 0)) / (min(high, dims - 1) - max(low, 0)), 0, 1)
            return freqs * (1 - ramp) + freqs / factor * ramp, 0.1 * np.log(factor) + 1
        return freqs, 1.0

    def mlp(self, layer: int, x: Array) -> Array:
        """Of one row (H,)."""
        prefix = f"model.layers.{layer}."
        if self.family == "gpt_oss":
            scores = self.linear(f"{prefix}mlp.router", x)
            return self.weighed(scores, lambda e: self.clamped(prefix + "mlp.experts.", e, x))
        if self.family == "granitemoe":
            scores = self.linear(f"{prefix}block_sparse_moe.router.layer", x)
            return self.weighed(scores, lambda e: self.fused(prefix + "block_sparse_moe.", e, x))
        if self.family == "phimoe":
            scores = self.linear(f"{prefix}block_sparse_moe.gate", x)
            experts = f"{prefix}block_sparse_moe.experts."
            picks = self.sparse_mixed(scores)
            return np.sum([w * self.gated(f"{experts}{e}.", x, ("w1", "w3", "w2")) for e, w in picks.items()], axis=0)
        if f"{prefix}mlp.gate.weight" not in self.tensors:
            return self.gated(f"{prefix}mlp.", x)
        p = softmax(self.linear(f"{prefix}mlp.gate", x))
        ranks = p + self.tensors[f"{prefix}mlp.moe_statics.e_score_correction_bias"][0]
        chosen = np.argsort(-ranks)[: self.config["moe_k"]]
        out = np.sum([p[e] * self.gated(f"{prefix}mlp.experts.{e}.", x) for e in chosen], axis=0) / p[chosen].sum()
        return out + (self.gated(f"{prefix}mlp.shared_experts.", x) if self.config["moe_num_shared_experts"] else 0)

    def weighed(self, scores: Array, expert: Any) -> Array:
        """A softmax over the best scores alone."""
        chosen = np.argsort(-scores)[: self.config["num_experts_per_tok"]]
        return np.sum([w * expert(e) for e, w in zip(chosen, softmax(scores[chosen]), strict=True)], axis=0)

    def gated(
        self, prefix: str, x: Array, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> Array:
        gate, up, down = (prefix + part for part in parts)
        return self.linear(down, silu(self.linear(gate, x)) * self.linear(up, x))

    def fused(self, prefix: str, e: int, x: Array) -> Array:
        gate, up = np.split(self.tensors[f"{prefix}input_linear.weight"][e] @ x, 2)
        return self.tensors[f"{prefix}output_linear.weight"][e] @ (silu(gate) * up)

    def clamped(self, prefix: str, e: int, x: Array) -> Array:
        both = x @ self.tensors[f"{prefix}gate_up_proj"][e] + self.tensors[f"{prefix}gate_up_proj_bias"][e]
        limit = self.config["swiglu_limit"]
        gate, up = np.minimum(both[::2], limit), np.clip(both[1::2], -limit, limit)
        inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        return inner @ self.tensors[f"{prefix}down_proj"][e] + self.tensors[f"{prefix}down_proj_bias"][e]

    def sparse_mixed(self, scores: Array) -> dict[int, float]:
        """Each pick has a softmax of its own over the scores that are close to it."""
        picks: dict[int, float] = {}
        left = scores.copy()
        for _ in range(2):
            best = int(left.argmax())
            far = (left[best] - scores) / np.maximum(np.abs(scores), left[best]) > 2 * self.config[
                "router_jitter_noise"
            ]
            picks[best] = float(softmax(np.where(far, -np.inf, left))[best])
            left[best] = -np.inf
        return picks
