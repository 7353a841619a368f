"""The functions beside this module as a backend."""

from __future__ import annotations

from torch import Tensor

from common.ops.interface import FINAL_STEP_SIZE, Ops, StepSize
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.triton.attention import paged_attention
from common.ops.triton.conv import conv1d_varlen
from common.ops.triton.delta import delta_varlen
from common.ops.triton.kv import write_kv
from common.ops.triton.mamba1 import mamba1_varlen
from common.ops.triton.mamba2 import mamba2_varlen
from common.ops.triton.rowwise.elementwise import ElementwiseOps, activation
from common.ops.triton.rowwise.norm import NormOps
from common.ops.triton.rowwise.rotary import RotaryOps


class TritonOps(Ops):
    """``norms``, ``elementwise``, ``rotary``: :class:`common.ops.row_ops.FusedOps`."""

    name = "triton"

    def __init__(self) -> None:
        self.norms, self.elementwise, self.rotary = NormOps(), ElementwiseOps(), RotaryOps()

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
        return conv1d_varlen(x, weight, bias, metadata.on_device, pool, silu=silu, gates=gates)

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
        return mamba2_varlen(x, dt, a, b, c, d, metadata.on_device, pool, step_size)

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
        return delta_varlen(query, key, value, decay, beta, metadata.on_device, pool)

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
        return delta_varlen(query, key, value, decay, beta, metadata.on_device, pool)

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
        return mamba1_varlen(x, dt, a, b, c, d, metadata.on_device, pool, step_size)

    def write_kv(self, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, metadata: AttentionMetadata) -> None:
        write_kv(key, value, k_pool, v_pool, metadata.on_device)

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
        return paged_attention(query, key, value, k_pool, v_pool, metadata.on_device, scale)
