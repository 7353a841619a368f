"""Root mean square norm with its gate as one compiled call: float32 and bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from array import array

import torch
from torch import Tensor

from common.ops.cpu.launch import DTYPES, find_kernel, launch
from common.ops.row_ops import Gate


class NormOps:
    """Stateless; runs on the caller's thread and torch's number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library  # keeps it loaded
        self._norm = find_kernel(library, "norm")

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
        """``x / sqrt(mean(x * x) + epsilon) * (weight + offset)``, gated.

        Args:
            x: [..., size]; gate: the same shape or None, then ``kind`` does not matter; weight: [size].
            group: channels that share a mean (None: all).

        Returns: [..., size] in x's dtype; computed in float32 and rounded once.
        """
        size = weight.shape[0]
        group = size if group is None else group
        if x.shape[-1] != size or size % group or (gate is not None and gate.shape != x.shape):
            raise RuntimeError(f"rms_norm: {tuple(x.shape)} rows for a weight of {size} in groups of {group}")
        rows = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        gated = (0, 0, 0, 0)
        if gate is not None:
            gates = _rows(gate)
            gated = (gates.data_ptr(), DTYPES[gates.dtype], gates.stride(0), int(kind))
        params = array("f", (epsilon, offset))
        words = [
            *(rows.data_ptr(), DTYPES[rows.dtype], rows.stride(0), *gated),
            *(weight.data_ptr(), DTYPES[weight.dtype], out.data_ptr(), rows.shape[0], size, group),
            *(params.buffer_info()[0], torch.get_num_threads()),
        ]
        launch(self._norm, words, kept=(params,))
        return out


def _rows(x: Tensor) -> Tensor:
    """[..., size] -> [n, size] with the elements of a row side by side."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
