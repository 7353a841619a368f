"""Sums of the residual stream that are computed by the norm which comes next.

Decoder layers add a mixer's output, some times a factor, to the residual stream and norm the sum; all families write it
in their own way. What their mixers and MLPs give is handed on as a ``ResidualSum``: adding to one, or multiplying it by
a number, only notes terms and factors. A norm of ours computes sum and norm in one kernel, across layers too; anything
else that asks for the values gets the sum by a kernel of its own. A sum is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from common.ops.row_ops import MAX_TERMS, FusedNorms

_ADD, _MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor


class ResidualSum(Tensor):
    """The sum of ``terms``, tensors of one shape and dtype, each times its factor. The terms must not change."""

    _terms: list[Tensor]
    _factors: list[float]
    _norms: FusedNorms

    @staticmethod
    def __new__(cls, terms: Sequence[Tensor], factors: Sequence[float], norms: FusedNorms) -> ResidualSum:
        first = terms[0]
        total: ResidualSum = Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device
        )
        total._terms, total._factors, total._norms = list(terms), list(factors), norms
        return total

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and func in (_ADD, _MUL):
            result = _added(*args) if func is _ADD else _scaled(*args)
            if result is not None:
                return result
        args, kwargs = tree_map_only(cls, cls.value, (args, kwargs or {}))
        return func(*args, **kwargs)

    def value(self) -> Tensor:
        """The sum as a plain tensor."""
        if self._factors != [1.0]:
            self._terms, self._factors = [self._norms.weighted_sum(self._terms, self._factors)], [1.0]
        return self._terms[0]

    def normed(self, weight: Tensor, epsilon: float, offset: float) -> Tensor:
        """The root mean square norm of the sum, which is computed with it."""
        if self._factors == [1.0]:
            return self._norms.rms_norm(self._terms[0], weight, None, epsilon=epsilon, offset=offset)
        out, total = self._norms.rms_norm_of_sum(self._terms, self._factors, weight, epsilon=epsilon, offset=offset)
        self._terms, self._factors = [total], [1.0]
        return out


def _added(a: Any, b: Any) -> ResidualSum | None:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return None
    sums = [x if isinstance(x, ResidualSum) else None for x in (a, b)]
    norms = next(x._norms for x in sums if x is not None)
    terms = [term for x, plain in zip(sums, (a, b), strict=True) for term in (x._terms if x is not None else [plain])]
    factors = [factor for x in sums for factor in (x._factors if x is not None else [1.0])]
    return ResidualSum(terms, factors, norms) if len(terms) <= MAX_TERMS else None


def _scaled(a: Any, b: Any) -> ResidualSum | None:
    x, factor = (a, b) if isinstance(a, ResidualSum) else (b, a)
    if not isinstance(factor, int | float):
        return None
    return ResidualSum(x._terms, [each * factor for each in x._factors], x._norms)


def sum_in_norms(model: Any, ops: FusedNorms, is_norm: type[nn.Module]) -> None:
    """Hand on what the mixers and MLPs of ``model``'s decoder layers give as a :class:`ResidualSum`. ``is_norm``: the
    class of norms that compute it."""

    def hand_on(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return hand_on(module, args, output[0]), *output[1:]
        return output if isinstance(output, ResidualSum) else ResidualSum([output], [1.0], ops)

    done: set[int] = set()  # layers may share modules
    for layers in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
        for parent in [p for layer in layers for p in layer.modules()]:
            children = list(parent.children())
            if id(parent) in done or not any(isinstance(child, is_norm) for child in children):
                continue
            done.add(id(parent))
            for child in children:
                if not isinstance(child, is_norm | nn.Linear):
                    child.register_forward_hook(hand_on)
