"""Muon for the layers' matrices, AdamW for everything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.demo_model.products import product_dtype


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by the nearest semi-orthogonal matrix (Jordan et al. 2024)."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalise(gradient: Tensor) -> Tensor:
    """``U V^T`` of the singular value decomposition of ``gradient``, roughly: five Newton-Schulz steps."""
    is_tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.T if is_tall else gradient
    x = (x / (x.norm() + 1e-7)).to(product_dtype())
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
    return (x.T if is_tall else x).to(gradient.dtype)


def build_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Learning rates are those of the flat part of the schedule."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        (matrices if p.ndim == 2 and "embed_tokens" not in name else others).append(p)
    return [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)]
