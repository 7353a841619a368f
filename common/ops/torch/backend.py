"""The ops in plain torch: the reference that is always there, on every device.

Decode rows are one batched update. Spans are cut into chunks: everything inside a chunk is batched over all chunks of
all spans, only the walk from chunk to chunk is sequential. A save cuts the scan, nothing else. Arithmetic is float32.
"""

from __future__ import annotations

from torch import Tensor

from common.ops.interface import FINAL_STEP_SIZE, Ops, StepSize
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.torch.activation import activation
from common.ops.torch.attention import paged_attention, write_kv
from common.ops.torch.conv import conv1d_varlen
from common.ops.torch.delta import delta_varlen
from common.ops.torch.mamba import mamba1_varlen, mamba2_varlen


class TorchOps(Ops):
    """The functions beside this module as a backend."""

    name = "torch"

    def activation(self, name: str, x: Tensor) -> Tensor:
        return activation(name, x)

    def conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        metadata: AttentionMetadata,
        pool: Tensor,
        *,
        silu: bool = False,
        gates: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        before, behind = gates or (None, None)
        out = conv1d_varlen(x if before is None else x * before, weight, bias, metadata.state, pool)
        out = activation("silu", out) if silu else out
        return out if behind is None else out * behind

    def mamba2(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        metadata: AttentionMetadata,
        pool: Tensor,
        *,
        step_size: StepSize = FINAL_STEP_SIZE,
    ) -> Tensor:
        return mamba2_varlen(x, _final(dt, step_size), a, b, c, d, metadata.state, pool)

    def gated_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        metadata: AttentionMetadata,
        pool: Tensor,
    ) -> Tensor:
        return delta_varlen(query, key, value, decay[..., None], beta, metadata.state, pool)

    def kimi_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        metadata: AttentionMetadata,
        pool: Tensor,
    ) -> Tensor:
        return delta_varlen(query, key, value, decay, beta, metadata.state, pool)

    def mamba1(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        metadata: AttentionMetadata,
        pool: Tensor,
        *,
        step_size: StepSize = FINAL_STEP_SIZE,
    ) -> Tensor:
        return mamba1_varlen(x, _final(dt, step_size), a, b, c, d, metadata.state, pool)

    def write_kv(self, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, metadata: AttentionMetadata) -> None:
        write_kv(key, value, k_pool, v_pool, metadata.paged)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        return paged_attention(query, key, value, k_pool, v_pool, metadata.paged, scale)


def _final(dt: Tensor, step_size: StepSize) -> Tensor:
    """The step size that a scan multiplies with, float32."""
    dt = dt.float()
    if step_size.bias is not None:
        dt = dt + step_size.bias.float()
    if step_size.softplus:
        dt = activation("softplus", dt)
    if (step_size.low, step_size.high) != (FINAL_STEP_SIZE.low, FINAL_STEP_SIZE.high):
        dt = dt.clamp(step_size.low, step_size.high)
    return dt
