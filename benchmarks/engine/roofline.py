"""What the machine can do, measured in the same run, and what a piece of work needs of it at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.engine.contestants import PROMPT_TOKENS
from common.kv_cache.spec import ModelGeometry
from common.ops.cpp.linear import large_pages

_GEMM_SIZE = 2048
_READ_BYTES = 256 << 20
_REPEAT = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """``flops``: of a large square matrix product in the model's dtype, per second. ``bytes_per_s``: memory reads."""

    flops: float
    bytes_per_s: float


def measure_machine(dtype: torch.dtype, clock: Callable[[], float]) -> Machine:
    """Best of some runs, on torch's number of threads. Takes about a second per thread and dtype."""
    x, weight = (torch.randn(_GEMM_SIZE, _GEMM_SIZE).to(dtype) for _ in range(2))
    gemm_s = _best(lambda: F.linear(x, weight), clock)
    data = large_pages(_READ_BYTES // 4).view(torch.float32).fill_(1.0)
    read_s = min(_best(lambda: torch.dot(data, data), clock), _best(lambda: data.sum(), clock))
    return Machine(2 * _GEMM_SIZE**3 / gemm_s, _READ_BYTES / read_s)


def _best(call: Callable[[], object], clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_REPEAT):
        begin_s = clock()
        call()
        seconds.append(clock() - begin_s)
    return min(seconds)


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
