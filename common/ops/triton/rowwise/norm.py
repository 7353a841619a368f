"""Root mean square norms with what stands around them as one kernel: a gate, groups, the sum that is normed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.row_ops import MAX_TERMS, Gate
from common.ops.triton.rowwise.rows import Rows, num_warps

_TILE = 1024
"""Elements of a program, where several rows fit in one."""


@triton.jit(do_not_specialize=["num_units"])
def _norm_kernel(
    x,
    gate,
    weight,
    out,
    epsilon,
    offset,
    num_units,
    inner,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: UNITS groups of channels, all those of a row one after another."""
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    column = tl.arange(0, BLOCK)
    row = (unit // GROUPS).to(tl.int64)
    channel = (unit % GROUPS)[:, None] * GROUP + column[None, :]
    ok = (unit < num_units)[:, None] & (column < GROUP)[None, :]
    at = (row // inner) * x_outer + (row % inner) * x_inner
    y = tl.load(x + at[:, None] + channel, mask=ok, other=0.0).to(tl.float32)
    if KIND != 0:
        gate_at = (row // inner) * gate_outer + (row % inner) * gate_inner
        g = tl.load(gate + gate_at[:, None] + channel, mask=ok, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-g))
    if KIND == 1:
        y = y * (g * sigmoid)
    y = y * tl.rsqrt(tl.sum(y * y, 1) / GROUP + epsilon)[:, None]
    y = y * (tl.load(weight + channel, mask=ok, other=0.0).to(tl.float32) + offset)
    if KIND == 2:
        y = y * (g * sigmoid)
    if KIND == 3:
        y = y * sigmoid
    tl.store(out + row[:, None] * (GROUP * GROUPS) + channel, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _sum_kernel(
    a,
    b,
    c,
    a_factor,
    b_factor,
    c_factor,
    weight,
    total,
    out,
    epsilon,
    offset,
    a_stride,
    b_stride,
    c_stride,
    SIZE: tl.constexpr,
    TERMS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok = column < SIZE
    y = tl.load(a + row * a_stride + column, mask=ok, other=0.0).to(tl.float32) * a_factor
    if TERMS > 1:
        y += tl.load(b + row * b_stride + column, mask=ok, other=0.0).to(tl.float32) * b_factor
    if TERMS > 2:
        y += tl.load(c + row * c_stride + column, mask=ok, other=0.0).to(tl.float32) * c_factor
    rounded = y.to(total.dtype.element_ty)
    tl.store(total + row * SIZE + column, rounded, mask=ok)
    if HAS_NORM:
        y = rounded.to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / SIZE + epsilon)
        y = y * (tl.load(weight + column, mask=ok, other=0.0).to(tl.float32) + offset)
        tl.store(out + row * SIZE + column, y.to(out.dtype.element_ty), mask=ok)


class NormOps:
    """:class:`common.ops.row_ops.FusedNorms`."""

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
        """As :meth:`common.ops.row_ops.Norms.rms_norm`."""
        size = weight.shape[0]
        group = size if group is None else group
        if x.shape[-1] != size or size % group or (gate is not None and gate.shape != x.shape):
            raise RuntimeError(f"rms_norm: {tuple(x.shape)} rows for a weight of {size} in groups of {group}")
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, gates = Rows.together(x, x if gate is None else gate)
        num_units = x.numel() // group
        if num_units == 0:
            return out
        block = triton.next_power_of_2(group)
        units = max(1, _TILE // block)
        _norm_kernel[(triton.cdiv(num_units, units),)](
            rows.tensor,
            gates.tensor,
            weight,
            out,
            epsilon,
            offset,
            num_units,
            rows.inner,
            rows.outer_stride,
            rows.inner_stride,
            gates.outer_stride,
            gates.inner_stride,
            GROUP=group,
            GROUPS=size // group,
            KIND=int(Gate.NONE if gate is None else kind),
            UNITS=units,
            BLOCK=block,
            num_warps=num_warps(units * block),
        )
        return out

    def weighted_sum(self, terms: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        """As :meth:`common.ops.row_ops.FusedNorms.weighted_sum`."""
        total = torch.empty(terms[0].shape, dtype=terms[0].dtype, device=terms[0].device)
        self._sum(terms, factors, total, None, total, 0.0, 0.0)
        return total

    def rms_norm_of_sum(
        self, terms: Sequence[Tensor], factors: Sequence[float], weight: Tensor, *, epsilon: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`common.ops.row_ops.FusedNorms.rms_norm_of_sum`."""
        if weight.shape != terms[0].shape[-1:]:
            raise RuntimeError(f"rms_norm_of_sum: {tuple(terms[0].shape)} rows for a weight of {tuple(weight.shape)}")
        total = torch.empty(terms[0].shape, dtype=terms[0].dtype, device=terms[0].device)
        out = torch.empty_like(total)
        self._sum(terms, factors, total, weight, out, epsilon, offset)
        return out, total

    def _sum(
        self,
        terms: Sequence[Tensor],
        factors: Sequence[float],
        total: Tensor,
        weight: Tensor | None,
        out: Tensor,
        epsilon: float,
        offset: float,
    ) -> None:
        size = total.shape[-1]
        if not 1 <= len(terms) == len(factors) <= MAX_TERMS or any(x.shape != total.shape for x in terms):
            raise RuntimeError(f"weighted_sum: {[tuple(x.shape) for x in terms]} with {len(factors)} factors")
        if total.numel() == 0:
            return
        rows = [x.reshape(-1, size) for x in terms]
        rows = [x if x.stride(1) == 1 else x.contiguous() for x in rows]
        rows += [rows[0]] * (MAX_TERMS - len(rows))
        padded: list[Any] = [*factors, *(0.0,) * (MAX_TERMS - len(factors))]
        block = triton.next_power_of_2(size)
        _sum_kernel[(rows[0].shape[0],)](
            *rows,
            *(float(factor) for factor in padded),
            total if weight is None else weight,
            total,
            out,
            epsilon,
            offset,
            *(x.stride(0) for x in rows),
            SIZE=size,
            TERMS=len(terms),
            HAS_NORM=weight is not None,
            BLOCK=block,
            num_warps=num_warps(block),
        )
