"""Optimizer of the demo model: Muon for the layers' matrices (experts one by one), Adam for everything else.

Each process updates its own share of the parameters with the mean gradient; the shares are whole layers. Muon steps
along the orthogonalized momentum (Newton-Schulz, quintic), scaled so that one rate serves both (RMS 0.2 per entry).
"""

from __future__ import annotations

import torch
from demo_model import Shape, views
from torch import Tensor

MOMENTUM, BETA1, BETA2, EPS, DECAY = 0.95, 0.9, 0.98, 1e-10, 0.05


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """(B, R, C) -> nearest semi-orthogonal matrices, roughly: singular values land in 0.7 .. 1.2."""
    x = matrices if matrices.shape[1] <= matrices.shape[2] else matrices.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + EPS)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x if matrices.shape[1] <= matrices.shape[2] else x.transpose(1, 2)


def as_matrices(name: str, weight: Tensor) -> Tensor | None:
    """The (B, R, C) view Muon works on; None where Adam does."""
    if name.endswith("experts.gate_up"):
        return weight.view(2 * weight.shape[0], weight.shape[1] // 2, weight.shape[2])
    if weight.dim() == 3:
        return weight
    if name.endswith("_proj"):
        return weight.unsqueeze(0)
    return None


class Optimizer:
    """Updates the parameters of `rank` among `processes`; state lives in the given flat tensors."""

    def __init__(self, shape: Shape, rank: int, processes: int, momentum: Tensor, second: Tensor) -> None:
        self.shape = shape
        self.momentum, self.second = views(momentum, shape), views(second, shape)
        self.names = []
        for name in self.momentum:
            owner = int(name.split(".")[2]) if ".layers." in name else 0
            if owner % processes == rank:
                self.names.append(name)

    @torch.no_grad()
    def step(self, flat: Tensor, gradients: Tensor, rate: float, count: int) -> list[str]:
        """One update (count from 1) with the mean over `gradients` (processes, parameters); the names updated."""
        weights = views(flat, self.shape)
        grads = [views(gradient, self.shape) for gradient in gradients]
        for name in self.names:
            weight, momentum = weights[name], self.momentum[name]
            gradient = sum(part[name] for part in grads) / len(grads)
            matrices = as_matrices(name, weight)
            if matrices is None:
                second = self.second[name]
                momentum.lerp_(gradient, 1 - BETA1)
                second.lerp_(gradient.square(), 1 - BETA2)
                scale = (second / (1 - BETA2**count)).sqrt_().add_(EPS)
                weight.addcdiv_(momentum, scale, value=-rate / (1 - BETA1**count))
                continue
            momentum.lerp_(gradient, 1 - MOMENTUM)
            look_ahead = as_matrices(name, gradient.lerp(momentum, MOMENTUM))
            update = orthogonalize(look_ahead)
            matrices.mul_(1 - rate * DECAY)
            matrices.add_(update, alpha=-rate * 0.2 * max(update.shape[1:]) ** 0.5)
        return self.names
