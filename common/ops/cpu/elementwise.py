"""Element by element operations as a compiled kernel, and runs of kernel calls: replayed steps consist of both."""

from __future__ import annotations

import ctypes
import enum
from array import array
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.cpu.launch import DTYPES, find_kernel, launch

_DIMS = 4
"""Dimensions that the kernel walks (``kDims`` of ``src/replay.cpp``); a call's are merged where strides allow."""


class Elementwise(enum.IntEnum):
    """What is computed, in float32 and rounded once to the dtype of the output: the same numbers as torch's, but for
    SILU, SIGMOID and SOFTPLUS, which are within four units in the last place of float32. SILU_MUL: silu(a) * b. An
    element of the result depends on its own operands alone, wherever in a tensor they are."""

    COPY = 0
    ADD = 1
    SUB = 2
    MUL = 3
    NEG = 4
    SILU = 5
    SILU_MUL = 6
    SIGMOID = 7
    SOFTPLUS = 8


_TORCH: Mapping[Elementwise, Callable[..., Tensor]] = MappingProxyType(
    {
        Elementwise.SILU: F.silu,
        Elementwise.SIGMOID: torch.sigmoid,
        Elementwise.SOFTPLUS: F.softplus,
        Elementwise.SILU_MUL: lambda gate, up: F.silu(gate) * up,
    }
)
"""What computes dtypes that no kernel is for (float64 in a test)."""


class ElementwiseOps:
    """Stateless; runs on the caller's thread and torch's number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library  # keeps it loaded
        self.function = find_kernel(library, "elementwise")
        self._replay = library.tandem_replay
        self._replay.argtypes, self._replay.restype = (ctypes.c_void_p, ctypes.c_int64), None

    def activation(self, name: str, x: Tensor) -> Tensor:
        """As :meth:`common.ops.interface.Ops.activation`."""
        return self._activate(Elementwise[name.upper()], x)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, of one shape and dtype. The product is rounded once; torch rounds the SiLU as well."""
        return self._activate(Elementwise.SILU_MUL, gate, up)

    def _activate(self, kind: Elementwise, *operands: Tensor) -> Tensor:
        out = torch.empty(operands[0].shape, dtype=operands[0].dtype)
        call = self.words(kind, out, *operands) or self.words(kind, out, *(x.contiguous() for x in operands))
        if call is None:
            return _TORCH[kind](*operands)
        launch(self.function, call[0], kept=call[1])
        return out

    def words(
        self, kind: Elementwise, out: Tensor, a: Tensor, b: Tensor | float = 0.0
    ) -> tuple[list[int], tuple[Any, ...]] | None:
        """The kernel's arguments for ``out = kind(a, b)``, and the objects whose addresses they hold; None: the kernel
        cannot compute it. ``a`` and ``b`` are broadcast to the shape of ``out``."""
        tensors = [x for x in (out, a, b) if isinstance(x, Tensor)]
        if any(x.dtype not in DTYPES or x.device.type != "cpu" for x in tensors):
            return None
        shaped = [x.expand(out.shape) for x in tensors]
        dims = _merged(list(out.shape), [list(x.stride()) for x in shaped])
        if len(dims) > _DIMS:
            return None
        dims = [(1, (0,) * len(tensors))] * (_DIMS - len(dims)) + dims
        strides = [[dim[1][i] for dim in dims] for i in range(len(tensors))]
        if not isinstance(b, Tensor):
            strides.append([0] * _DIMS)
        scalar = array("f", (0.0 if isinstance(b, Tensor) else float(b),))
        second = (b.data_ptr(), DTYPES[b.dtype]) if isinstance(b, Tensor) else (0, 0)
        words = [
            *(int(kind), out.data_ptr(), DTYPES[out.dtype], a.data_ptr(), DTYPES[a.dtype], *second),
            *(scalar.buffer_info()[0], *(dim[0] for dim in dims)),
            *(stride for each in strides for stride in each),
            torch.get_num_threads(),
        ]
        return words, (scalar,)

    def replay(self, calls: array[int], count: int) -> None:
        """Run ``count`` kernel calls; ``calls`` holds function, arguments and step of each, as addresses."""
        self._replay(calls.buffer_info()[0], count)


def _merged(shape: list[int], strides: list[list[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """(size, strides) of the fewest dimensions that walk the same elements in the same order."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for d, size in enumerate(shape):
        if size == 1:
            continue
        steps = tuple(each[d] for each in strides)
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1], steps, strict=True)):
            dims[-1] = (dims[-1][0] * size, steps)
        else:
            dims.append((size, steps))
    return dims
