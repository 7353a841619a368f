"""The ops on rows as plain torch functions (:class:`common.ops.row_ops.FusedOps`): what kernels are compared with, and
what stands for them where there are shapes but no values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.row_ops import Gate
from common.ops.torch.backend import TorchOps


class TorchNorms:
    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        gate: Tensor | None,
        *,
        epsilon: float,
        offset: float = 0.0,
        group: int | None = None,
        kind: Gate = Gate.NONE,
    ) -> Tensor:
        y, size = x.float(), weight.shape[0]
        kind = Gate.NONE if gate is None else kind
        g = torch.zeros(()) if gate is None else gate.float()
        y = y * F.silu(g) if kind is Gate.SILU_BEFORE else y
        y = y.reshape(*x.shape[:-1], size // (group or size), group or size)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)
        y = y.reshape(x.shape) * (weight.float() + offset)
        y = y * F.silu(g) if kind is Gate.SILU_AFTER else y * g.sigmoid() if kind is Gate.SIGMOID_AFTER else y
        return y.to(x.dtype)

    def weighted_sum(self, terms: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        total = terms[0].float() * factors[0]
        for term, factor in zip(terms[1:], factors[1:], strict=True):
            total = total + term.float() * factor
        return total.to(terms[0].dtype)

    def rms_norm_of_sum(
        self, terms: Sequence[Tensor], factors: Sequence[float], weight: Tensor, *, epsilon: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        total = self.weighted_sum(terms, factors)
        return self.rms_norm(total, weight, None, epsilon=epsilon, offset=offset), total


class TorchElementwise:
    def activation(self, name: str, x: Tensor) -> Tensor:
        functions = {"sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus}
        return functions[name](x.float()).to(x.dtype)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)

    def delta_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


class TorchRotary:
    def rotate(
        self,
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        *,
        epsilon: float = 0.0,
        offset: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        def one(x: Tensor, weight: Tensor | None) -> Tensor:
            y, rotated = x.float(), cos.shape[-1]
            if weight is not None:
                y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon) * (weight.float() + offset)
            first, second = y[..., : rotated // 2], y[..., rotated // 2 : rotated]
            turned = y[..., :rotated] * cos.float()[:, None] + torch.cat([-second, first], -1) * sin.float()[:, None]
            return torch.cat([turned, y[..., rotated:]], -1).to(x.dtype)

        return one(query, norms and norms[0]), one(key, norms and norms[1])


class TorchFusedOps(TorchOps):
    """Ops for which a model is fused as for a GPU, computed by torch."""

    def __init__(self) -> None:
        self.norms, self.elementwise, self.rotary = TorchNorms(), TorchElementwise(), TorchRotary()
