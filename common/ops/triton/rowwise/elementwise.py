"""Element by element operations of decode steps, one kernel each: activations, gated products, gates of the delta rule.

An element of a result depends on its own operands alone, wherever in a tensor they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from common.ops.triton.rowwise.rows import Rows

_BLOCK = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STOCK = {"sigmoid": torch.sigmoid, "silu": F.silu, "softplus": F.softplus}
"""Of dtypes that no kernel is for."""


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), without losing a small exp(x) in the sum; above 20 it is x."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    y = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, y)


@triton.jit(do_not_specialize=["total"])
def _elementwise_kernel(
    a, b, out, total, size, inner, a_outer, a_inner, b_outer, b_inner, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Program: BLOCK elements of the result, which is contiguous."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < total
    row, column = at // size, at % size
    x = tl.load(a + (row // inner) * a_outer + (row % inner) * a_inner + column, mask=ok, other=0.0).to(tl.float32)
    if KIND == "sigmoid":
        y = _sigmoid(x)
    elif KIND == "silu":
        y = x * _sigmoid(x)
    elif KIND == "softplus":
        y = _softplus(x)
    else:
        z = tl.load(b + (row // inner) * b_outer + (row % inner) * b_inner + column, mask=ok, other=0.0).to(tl.float32)
        y = x * _sigmoid(x) * z if KIND == "silu_mul" else x * _sigmoid(z)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["total"])
def _delta_gates_kernel(
    a, b, a_log, dt_bias, decay, beta, total, a_stride, b_stride, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < total
    row, head = (at // HEADS).to(tl.int64), at % HEADS
    step = tl.load(a + row * a_stride + head, mask=ok, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + head, mask=ok, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head, mask=ok, other=0.0).to(tl.float32))
    tl.store(decay + at, -rate * _softplus(step), mask=ok)
    tl.store(beta + at, _sigmoid(tl.load(b + row * b_stride + head, mask=ok, other=0.0).to(tl.float32)), mask=ok)


class ElementwiseOps:
    """:class:`common.ops.row_ops.FusedElementwise`."""

    def activation(self, name: str, x: Tensor) -> Tensor:
        """As :meth:`common.ops.interface.Ops.activation`."""
        return activation(name, x)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """As :meth:`common.ops.row_ops.Elementwise.silu_mul`."""
        return _launch("silu_mul", gate, up)

    def mul_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """As :meth:`common.ops.row_ops.FusedElementwise.mul_sigmoid`."""
        return _launch("mul_sigmoid", x, gate)

    def delta_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`common.ops.row_ops.FusedElementwise.delta_gates`."""
        num_tokens, heads = a.shape
        if b.shape != a.shape or a_log.shape != (heads,) or dt_bias.shape != (heads,):
            raise RuntimeError(f"delta_gates: {tuple(a.shape)}, {tuple(b.shape)} for {tuple(a_log.shape)} heads")
        decay, beta = torch.empty(2, num_tokens, heads, dtype=torch.float32, device=a.device).unbind()
        a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
        if decay.numel():
            grid = (triton.cdiv(decay.numel(), _BLOCK),)
            _delta_gates_kernel[grid](
                *(a, b, a_log, dt_bias, decay, beta, decay.numel(), a.stride(0), b.stride(0)), HEADS=heads, BLOCK=_BLOCK
            )
        return decay, beta


def activation(name: str, x: Tensor) -> Tensor:
    """As :meth:`common.ops.interface.Ops.activation`."""
    return _launch(name, x, x) if x.dtype in _DTYPES else _STOCK[name](x)


def _launch(kind: str, a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:
        raise RuntimeError(f"{kind}: {tuple(a.shape)} and {tuple(b.shape)}")
    out = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    x, y = Rows.together(*(each if each.ndim else each[None] for each in (a, b)))
    _elementwise_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        *(x.tensor, y.tensor, out, out.numel(), x.tensor.shape[-1], x.inner),
        *(x.outer_stride, x.inner_stride, y.outer_stride, y.inner_stride),
        KIND=kind,
        BLOCK=_BLOCK,
    )
    return out
