"""Puts the norm of a backend where a loaded model has a root mean square norm of its own.

transformers writes these norms out as seven tensor operations, in several variants: a weight or one plus a weight,
gated before or after, in groups. Which one a module is, is found by trial: ours takes its place when it gives the
module's own numbers on a few random rows. A module that no variant fits stays as it is.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.models.fused.residual import ResidualSum
from common.ops.row_ops import Gate, Norms

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-5
"""Relative and absolute, in float32: sums in another order stay within it, another variant is off by far more."""
_TRIAL_ROWS = 3
"""More than one row, so that a norm that mixes rows does not fit."""


@dataclass(frozen=True, slots=True)
class Variant:
    offset: float
    group: int
    kind: Gate


class FusedNorm(nn.Module):
    """Stands in for an RMSNorm module, gated or not."""

    def __init__(self, ops: Norms, weight: nn.Parameter, epsilon: float, variant: Variant) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, epsilon
        self._ops, self.variant = ops, variant

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """[..., size] -> [..., size] in the same dtype."""
        v = self.variant
        if isinstance(hidden_states, ResidualSum) and v.kind is Gate.NONE and v.group == self.weight.shape[0]:
            return hidden_states.normed(self.weight, self.variance_epsilon, v.offset)
        return self._ops.rms_norm(
            hidden_states,
            self.weight,
            gate,
            epsilon=self.variance_epsilon,
            offset=v.offset,
            group=v.group,
            kind=v.kind,
        )


@torch.inference_mode()
def fuse_norms(model: nn.Module, ops: Norms) -> None:
    """Replace the norms of ``model`` that the compiled one can compute."""
    fused = 0
    norms = [(p, n, m) for p in model.modules() for n, m in p.named_children() if _is_norm(m)]
    for parent, name, norm in norms:
        variant = find_variant(norm, ops)
        if variant is not None:
            setattr(parent, name, FusedNorm(ops, norm.weight, epsilon_of(norm), variant))
            fused += 1
    logger.info("norms fused=%d left=%d", fused, len(norms) - fused)


def find_variant(norm: nn.Module, ops: Norms) -> Variant | None:
    """With which ``ops`` give the numbers of ``norm``, a root mean square norm of transformers'; None: with none."""
    return next((variant for variant in _variants(norm) if _fits(norm, variant, epsilon_of(norm), ops)), None)


def _is_norm(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return (
        "RMSNorm" in type(module).__name__
        and list(parameters) == ["weight"]
        and module.weight.ndim == 1
        and module.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and isinstance(epsilon_of(module), float)
    )


def epsilon_of(norm: nn.Module) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _is_gated(norm: nn.Module) -> bool:
    return "gate" in inspect.signature(norm.forward).parameters


def _variants(norm: nn.Module) -> Iterator[Variant]:
    size = norm.weight.shape[0]
    groups = {size, getattr(norm, "group_size", size), size // getattr(norm, "n_groups", 1)}
    kinds = (Gate.SILU_BEFORE, Gate.SILU_AFTER, Gate.SIGMOID_AFTER) if _is_gated(norm) else (Gate.NONE,)
    for offset, group, kind in itertools.product((0.0, 1.0), sorted(groups, reverse=True), kinds):
        if size % group == 0:
            yield Variant(offset, group, kind)


def _fits(norm: nn.Module, variant: Variant, epsilon: float, ops: Norms) -> bool:
    """In float32, where rounding does not blur the variants; [1, rows, size], which every family's norm takes."""
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 1, _TRIAL_ROWS, norm.weight.shape[0], generator=generator).to(norm.weight.device)
    gate = gate if _is_gated(norm) else None
    found = ops.rms_norm(
        x, norm.weight, gate, epsilon=epsilon, offset=variant.offset, group=variant.group, kind=variant.kind
    )
    expected = norm(x) if gate is None else norm(x, gate)
    if expected.shape != found.shape:
        return False
    return bool(torch.allclose(expected.float(), found, rtol=_TOLERANCE, atol=_TOLERANCE))
