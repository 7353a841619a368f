"""How kernels on rows find them: rows of strided views without a copy, wherever two strides can tell where they are."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor [..., size] whose row r begins at ``r // inner * outer_stride + r % inner * inner_stride``; the elements
    of a row lie side by side."""

    tensor: Tensor
    inner: int
    outer_stride: int
    inner_stride: int

    @classmethod
    def together(cls, x: Tensor, y: Tensor) -> tuple[Rows, Rows]:
        """Of two tensors of one shape, with one ``inner``."""
        while x.ndim > 2 and x.shape[0] == 1:
            x, y = x[0], y[0]
        inner = x.shape[-2] if x.ndim > 2 else 1
        return cls._of(x, inner), cls._of(y, inner)

    @classmethod
    def _of(cls, x: Tensor, inner: int) -> Rows:
        shape, strides = list(x.shape), list(x.stride())
        outer = [(n, s) for n, s in zip(shape[: -2 if x.ndim > 2 else -1], strides, strict=False) if n != 1]
        if strides[-1] != 1 and shape[-1] != 1:
            return cls._of(x.contiguous(), inner)
        for (_, step), (count, below) in itertools.pairwise(outer):
            if step != count * below:
                return cls._of(x.contiguous(), inner)
        return cls(x, inner, outer[-1][1] if outer else 0, strides[-2] if x.ndim > 2 else 0)


def num_warps(elements: int) -> int:
    """Warps of a program that has so many elements in registers at once: at most 16 a thread."""
    return min(max(elements // 512, 1), 16)
