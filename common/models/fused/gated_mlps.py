"""Puts one call between the matrix products of gated MLPs, ``down(silu(gate(x)) * up(x))``: tensors there are
the widest of a model, and torch passes over them twice (8 % of a prefill, lfm2 M).

A module is replaced when its layers have known names and its own code gives the same numbers as ours: a module with
another activation, a factor or the halves in the other order does not. Factors near 1 are lost in the rounding of
single numbers: those that a module names are asked for, others show in the size of all numbers together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from common.models.cpu.linears import PackedLinear
from common.models.fused.activations import FusedSilu
from common.models.fused.merged_linears import MergedPart
from common.ops.row_ops import Elementwise

logger = logging.getLogger(__name__)

# Layers of a gated MLP by name: gate, up, down.
_SEPARATE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_TOGETHER = ("input_linear", "output_linear")
"""Gate and up as one layer, then down; the rows of the first are those of the gate, then those of up."""
_FACTORS = ("gate_multiplier", "down_multiplier")
"""Attributes of a gated MLP (falcon_h1) that its gate and its result are multiplied by."""
_TRIAL_ROWS = 3
"""More than one row, so that an MLP that mixes rows does not fit."""
_TRIAL_GATE = 1.0
"""Root mean square of the gate's values in a trial: there SiLU and activations like it differ by a tenth, far from 0
hardly at all."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.0025}
"""Root mean square of the difference, relative to that of the result: bfloat16 rounds by 0.002, three times."""
_SCALE_TOLERANCE = 1 / 4
"""Of that tolerance: how far the size of all numbers together may be from 1. Their roundings cancel out there: 0.003 at
most in bfloat16, of the 192 numbers of 80 MLPs of tests/support/models.py, fewer than any real model has."""

Split = Callable[[Tensor], tuple[Tensor, ...]]
_Linear: TypeAlias = nn.Linear | PackedLinear | MergedPart


class FusedGatedMLP(nn.Module):
    """Stands in for a gated MLP. ``split``: x [..., hidden] -> gate and up, [..., intermediate] each."""

    def __init__(self, ops: Elementwise, split: Split, down: _Linear, mlp: nn.Module) -> None:
        super().__init__()
        self._ops, self._split, self._down = ops, split, down
        self.replaced = mlp  # its layers stay where `modules()` finds them

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        gate, up = self._split(x)
        return self._down(self._ops.silu_mul(gate, up))


@torch.inference_mode()
def fuse_gated_mlps(model: nn.Module, ops: Elementwise) -> None:
    """Replace the gated MLPs of ``model``, whose activations are fused already."""
    places = [(p, n, m) for p in model.modules() for n, m in p.named_children()]
    fused = 0
    for parent, name, mlp in places:
        layers = _layers(mlp)
        if layers is not None and _fits(mlp, *layers, ops):
            setattr(parent, name, FusedGatedMLP(ops, *layers, mlp))
            fused += 1
    logger.info("gated MLPs fused=%d", fused)


def _layers(mlp: nn.Module) -> tuple[Split, _Linear] | None:
    """How ``mlp`` gets gate and up, and what comes last; None: it is no gated MLP."""
    children = {name: child for name, child in mlp.named_children() if not isinstance(child, FusedSilu)}
    linears = {name: child for name, child in children.items() if isinstance(child, _Linear)}
    if len(linears) != len(children):
        return None
    for gate, up, down in _SEPARATE:
        if linears.keys() == {gate, up, down}:
            return _separate(linears[gate], linears[up]), linears[down]
    first, last = _TOGETHER
    if linears.keys() == {first, last}:
        return _together(linears[first]), linears[last]
    return None


def _separate(gate: nn.Module, up: nn.Module) -> Split:
    return lambda x: (gate(x), up(x))


def _together(both: nn.Module) -> Split:
    return lambda x: both(x).chunk(2, dim=-1)


def _fits(mlp: nn.Module, split: Split, down: _Linear, ops: Elementwise) -> bool:
    if any(getattr(mlp, name, 1.0) != 1.0 for name in _FACTORS):
        return False
    dtype = down.weight.dtype
    x = torch.randn(1, _TRIAL_ROWS, down.out_features, generator=torch.Generator().manual_seed(0)).to(
        down.weight.device
    )
    try:
        gate = split(x.to(dtype))[0].float()
        x = (x * (_TRIAL_GATE / gate.square().mean().sqrt())).to(dtype)
        gate, up = split(x)
        expected, found = mlp(x).float(), down(ops.silu_mul(gate, up)).float()
    except (RuntimeError, TypeError):  # other widths, or called in another way
        return False
    if found.shape != expected.shape:
        return False
    power, tolerance = expected.square().mean(), _TOLERANCE[dtype]
    error, scale = (found - expected).square().mean().sqrt() / power.sqrt(), (found * expected).mean() / power
    return bool(error <= tolerance and (scale - 1).abs() <= tolerance * _SCALE_TOLERANCE)
