"""Puts a backend's SiLU where a loaded model has that activation as a module, so that a step that is replayed and one
that is not have the same bits."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from common.ops.row_ops import Elementwise


class FusedSilu(nn.Module):
    """Stands in for an ``nn.SiLU``."""

    def __init__(self, ops: Elementwise) -> None:
        super().__init__()
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.activation("silu", x)


def fuse_activations(model: nn.Module, ops: Elementwise) -> None:
    """Replace the SiLU modules of ``model``; the experts keep the function that they were packed with."""
    silu = FusedSilu(ops)
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) in (nn.SiLU, SiLUActivation):
                setattr(parent, name, silu)
