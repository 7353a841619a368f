"""Muon for the layers' matrices, AdamW for everything else."""

from __future__ import annotations

from typing import Any

import torch


def build_optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Learning rates are those of the flat part of the schedule."""
    matrices, others = [], []
    for name, p in model.named_parameters():
        (matrices if p.ndim == 2 and "embed_tokens" not in name else others).append(p)
    return [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
