"""What the machine can do, measured in the same run, and what a piece of work needs of it at least."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.engine.contestants import PROMPT_TOKENS
from common.kv_cache.spec import ModelGeometry
from common.ops.cpu.linear import large_pages

_GEMM_SIZE = 2048
_READ_BYTES = 256 << 20


class Machine:
    """What the machine can do at this moment: on shared ones that changes by a factor of three between seconds, so it
    is asked right before and right after each piece of work that is held against it."""

    def __init__(self, dtype: torch.dtype, clock: Callable[[], float]) -> None:
        self._clock = clock
        # A CPU without instructions for bfloat16 multiplies it slower than float32, which products may be done in.
        self._x, self._weight = (torch.randn(_GEMM_SIZE, _GEMM_SIZE) for _ in range(2))
        in_float32 = self.flops()
        self._x, self._weight = self._x.to(dtype), self._weight.to(dtype)
        if self.flops() < in_float32:
            self._x, self._weight = self._x.float(), self._weight.float()
        self._data = large_pages(_READ_BYTES // 4).view(torch.float32).fill_(1.0)

    def flops(self) -> float:
        """Of a large square matrix product on torch's number of threads, per second: in the model's dtype, or in
        float32 where that is faster."""
        return self._rate(2.0 * _GEMM_SIZE**3, lambda: F.linear(self._x, self._weight))

    def bytes_per_s(self) -> float:
        """Of memory that is read once."""
        return self._rate(float(_READ_BYTES), self._data.sum)

    def _rate(self, amount: float, call: Callable[[], object]) -> float:
        """The better of two."""
        seconds = []
        for _ in range(2):
            begin_s = self._clock()
            call()
            seconds.append(self._clock() - begin_s)
        return amount / min(seconds)


def prefill_flops(num_parameters: int, num_tokens: int) -> float:
    """Two for each parameter and token; scans and attention come on top and are not counted."""
    return 2.0 * num_parameters * num_tokens


def decode_bytes(weight_bytes: int, geometry: ModelGeometry, dtype: torch.dtype, batch: int) -> float:
    """All weights once; the states of each sequence read and written; K and V of its context read."""
    state = sum(
        getattr(torch, tensor.dtype).itemsize * torch.Size(tensor.shape).numel()
        for layer in geometry.state_layers
        for tensor in layer.tensors
    )
    kv = sum(layer.num_kv_heads * (layer.head_size + layer.head_size_v) for layer in geometry.attention_layers)
    return weight_bytes + batch * (2.0 * state + kv * dtype.itemsize * PROMPT_TOKENS)
