"""The demo model in PyTorch: qwen3_moe layout, forward only at the positions asked for, optional fake quantization.

Parameters live in one flat tensor, shared between the training processes; every weight is a view of it, and so is every
gradient. Names of `layout()` are the checkpoint's; experts are stacked per layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
EXPERT_PARTS = ("gate_up", "down")
Weights = dict[str, Tensor]
Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes, with the names of config.json."""

    vocab_size: int = 1024
    hidden_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 32
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


def layout(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape. `experts.gate_up` (E, 2I, H) holds gate rows, then up rows; `experts.down` (E, H, I)."""
    hidden, inter, experts = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
    q_rows, kv_rows = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (shape.vocab_size, hidden), "model.norm": (hidden,)}
    for layer in range(shape.num_hidden_layers):
        name = f"model.layers.{layer}"
        sizes |= {
            f"{name}.input_layernorm": (hidden,),
            f"{name}.post_attention_layernorm": (hidden,),
            f"{name}.self_attn.q_norm": (shape.head_dim,),
            f"{name}.self_attn.k_norm": (shape.head_dim,),
            f"{name}.self_attn.q_proj": (q_rows, hidden),
            f"{name}.self_attn.k_proj": (kv_rows, hidden),
            f"{name}.self_attn.v_proj": (kv_rows, hidden),
            f"{name}.self_attn.o_proj": (hidden, q_rows),
            f"{name}.mlp.gate": (experts, hidden),
            f"{name}.mlp.experts.gate_up": (experts, 2 * inter, hidden),
            f"{name}.mlp.experts.down": (experts, hidden, inter),
        }
    return sizes


def views(flat: Tensor, shape: Shape) -> dict[str, Tensor]:
    """Named views of a flat parameter (or gradient, or momentum) tensor."""
    found, offset = {}, 0
    for name, size in layout(shape).items():
        count = math.prod(size)
        found[name] = flat[offset : offset + count].view(size)
        offset += count
    return found


def parameter_count(shape: Shape) -> int:
    return sum(math.prod(size) for size in layout(shape).values())


def initialize(flat: Tensor, shape: Shape, seed: int) -> None:
    """Norms 1; matrices normal with deviation 1/sqrt(inputs), what writes into the residual stream smaller."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in views(flat, shape).items():
        if weight.dim() == 1:
            weight.fill_(1.0)
            continue
        deviation = 0.05 if name == "model.embed_tokens" else weight.shape[-1] ** -0.5
        if name.endswith(("o_proj", "experts.down")):
            deviation *= 0.3
        weight.normal_(0.0, deviation, generator=generator)


def quantize_q4(weight: Tensor) -> Tensor:
    """Values of symmetric q4: groups of 32 inputs, (nibble - 8) * float16 scale, the largest magnitude at -8."""
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).half().float()
    codes = torch.where(scale == 0, 0.0, groups / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-8, 7)
    return (codes * scale).view_as(weight)


def quantize_q8(weight: Tensor) -> Tensor:
    """Values of q8: int8 in groups of 32 inputs times a float16 scale, the largest magnitude at 127."""
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    codes = torch.where(scale == 0, 0.0, groups / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-127, 127)
    return (codes * scale).view_as(weight)


def quantize_activation(x: Tensor) -> Tensor:
    """Values of an activation row after the engine's int8 groups of 32 (float32 scale = max / 127)."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((groups / scale).round() * scale).view_as(x)


def quantized(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights a default conversion runs: experts q4, other matrices q8, router and norms float32."""
    out = {}
    for name, weight in weights.items():
        if ".experts." in name:
            out[name] = quantize_q4(weight)
        elif weight.dim() == 2 and not name.endswith("mlp.gate"):
            out[name] = quantize_q8(weight)
        else:
            out[name] = weight
    return out


class Experts(torch.autograd.Function):
    """y[t] = sum_a w[t, a] * down[e](silu(gate[e] x) * up[e] x): rows grouped by expert, one matmul per expert."""

    @staticmethod
    def forward(ctx, x, expert_ids, routing_weights, gate_up, down):  # (T, H), (T, A), (T, A), (E, 2I, H), (E, H, I)
        tokens, per_token = expert_ids.shape
        flat = expert_ids.reshape(-1)
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=gate_up.shape[0]).cumsum(0).tolist()
        spans = [(e, a, b) for e, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if b > a]
        rows = order // per_token
        xs = x.index_select(0, rows)  # (TA, H)
        h = torch.empty(xs.shape[0], gate_up.shape[1])
        ys = torch.empty_like(xs)
        for e, a, b in spans:
            torch.mm(xs[a:b], gate_up[e].t(), out=h[a:b])
        act = swiglu(h)  # (TA, I)
        for e, a, b in spans:
            torch.mm(act[a:b], down[e].t(), out=ys[a:b])
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        picked = ys.index_select(0, inverse).view(tokens, per_token, -1)
        ctx.spans, ctx.per_token = spans, per_token
        ctx.save_for_backward(xs, h, act, picked, routing_weights, order, inverse, rows, gate_up, down)
        return torch.bmm(routing_weights.unsqueeze(1), picked).squeeze(1)

    @staticmethod
    def backward(ctx, dy):
        xs, h, act, picked, routing_weights, order, inverse, rows, gate_up, down = ctx.saved_tensors
        tokens = dy.shape[0]
        d_weights = torch.bmm(picked, dy.unsqueeze(2)).squeeze(2)  # (T, A)
        dys = dy.index_select(0, rows) * routing_weights.reshape(-1).index_select(0, order).unsqueeze(1)
        d_act = torch.empty_like(act)
        d_gate_up, d_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        for e, a, b in ctx.spans:
            torch.mm(dys[a:b], down[e], out=d_act[a:b])
            torch.mm(dys[a:b].t(), act[a:b], out=d_down[e])
        dh = swiglu_backward(h, d_act)
        dxs = torch.empty_like(xs)
        for e, a, b in ctx.spans:
            torch.mm(dh[a:b], gate_up[e], out=dxs[a:b])
            torch.mm(dh[a:b].t(), xs[a:b], out=d_gate_up[e])
        dx = dxs.index_select(0, inverse).view(tokens, ctx.per_token, -1).sum(1)
        return dx, None, d_weights, d_gate_up, d_down


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_tables(positions: Tensor, shape: Shape) -> Rope:
    """cos, sin (R, 1, D / 2)."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(positions.double(), shape.rope_theta**-half)
    return angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)


def norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Per-head norm, then rotation of the pairs (i, i + D/2). x (R, N, D); cos, sin (R, 1, D / 2)."""
    first, second = rms_norm(x, weight, eps).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(h: Tensor, d_act: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    sig = gate.sigmoid()
    silu = gate * sig
    return torch.cat((d_act * up * (sig + silu * (1 - sig)), d_act * silu), -1)


class Packed:
    """Ragged causal attention: sequences lie one after the other; similar lengths share one padded call."""

    def __init__(self, lengths: Sequence[int], per_group: int = 8) -> None:
        """`lengths` ascending, in the order of the rows."""
        self.positions = torch.cat([torch.arange(length) for length in lengths])
        self.groups: list[tuple[Tensor, Tensor, int, int]] = []  # row of each padded slot, slot of each row, B, T
        offset = 0
        for first in range(0, len(lengths), per_group):
            part = lengths[first : first + per_group]
            longest, slots, kept = max(part), [], []
            for index, length in enumerate(part):
                steps = torch.arange(longest)
                slots.append(offset + steps.clamp_max(length - 1))
                kept.append(index * longest + steps[:length])
                offset += length
            self.groups.append((torch.cat(slots), torch.cat(kept), len(part), longest))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v (R, N | K, D) -> (R, N * D)."""
        outs, gqa = [], q.shape[1] != k.shape[1]
        for slots, kept, batch, longest in self.groups:
            q1, k1, v1 = (
                x.index_select(0, slots).view(batch, longest, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
            )
            out = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, enable_gqa=gqa)
            outs.append(out.transpose(1, 2).reshape(batch * longest, -1).index_select(0, kept))
        return torch.cat(outs)


class Model:
    """The forward pass over a dict of weights (raw or fake-quantized); holds no parameters of its own."""

    def __init__(self, shape: Shape, int8_activations: bool = False) -> None:
        self.shape = shape
        self.int8 = int8_activations
        self.chosen: list[Tensor] | None = None  # set to [] to record expert_ids (R, A) layer by layer

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(quantize_activation(x) if self.int8 else x, weight)

    def attention(self, weights: Weights, name: str, x: Tensor, rope: Rope, packed: Packed) -> Tensor:
        shape, rows = self.shape, x.shape[0]
        heads, kv, dim, eps = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.rms_norm_eps
        qkv = self.linear(x, torch.cat([weights[f"{name}.{part}_proj"] for part in "qkv"]))
        q, k, v = qkv.view(rows, heads + 2 * kv, dim).split((heads, kv, kv), 1)
        q = norm_rope(q, weights[f"{name}.q_norm"], *rope, eps)
        k = norm_rope(k, weights[f"{name}.k_norm"], *rope, eps)
        return self.linear(packed.attend(q, k, v), weights[f"{name}.o_proj"])

    def moe(self, weights: Weights, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (R, H) -> output (R, H), balance loss (1 when all experts are used alike)."""
        shape = self.shape
        probabilities = F.linear(x, weights[f"{name}.gate"]).softmax(-1)  # (R, E)
        routing_weights, expert_ids = probabilities.topk(shape.num_experts_per_tok, -1)  # (R, A)
        routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True)
        if self.chosen is not None:
            self.chosen.append(expert_ids)
        share = torch.bincount(expert_ids.reshape(-1), minlength=shape.num_experts) / expert_ids.numel()
        balance = shape.num_experts * (share * probabilities.mean(0)).sum()
        gate_up, down = (weights[f"{name}.experts.{part}"] for part in EXPERT_PARTS)
        if self.int8:
            return self.experts_int8(x, expert_ids, routing_weights, gate_up, down), balance
        return Experts.apply(x, expert_ids, routing_weights, gate_up, down), balance

    def experts_int8(
        self, x: Tensor, expert_ids: Tensor, routing_weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        x, out = quantize_activation(x), torch.zeros_like(x)
        for expert in expert_ids.unique().tolist():
            rows, ranks = (expert_ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, -1)
            y = F.linear(quantize_activation(F.silu(gate) * up), down[expert])
            out.index_add_(0, rows, y * routing_weights[rows, ranks].unsqueeze(1))
        return out

    def forward(
        self, weights: Weights, ids: Tensor, packed: Packed, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """ids (R,), sequences laid out as `packed` -> logits (R or len(wanted), V), mean balance loss."""
        shape = self.shape
        rope = rope_tables(packed.positions, shape)
        x = F.embedding(ids, weights["model.embed_tokens"])  # (R, H)
        balances = []
        for layer in range(shape.num_hidden_layers):
            name = f"model.layers.{layer}"
            normed = rms_norm(x, weights[f"{name}.input_layernorm"], shape.rms_norm_eps)
            x = x + self.attention(weights, f"{name}.self_attn", normed, rope, packed)
            normed = rms_norm(x, weights[f"{name}.post_attention_layernorm"], shape.rms_norm_eps)
            y, balance = self.moe(weights, f"{name}.mlp", normed)
            x = x + y
            balances.append(balance)
        if wanted is not None:
            x = x.index_select(0, wanted)
        x = rms_norm(x, weights["model.norm"], shape.rms_norm_eps)
        return self.linear(x, weights["model.embed_tokens"]), torch.stack(balances).mean()
