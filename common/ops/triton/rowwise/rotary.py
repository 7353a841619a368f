"""Rotary position embedding of query and key as one kernel, with the norms of their heads where a model has them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.triton.rowwise.rows import num_warps

_TILE = 2048
"""Elements of a program: so many heads of a token."""


@triton.jit
def _rotate_heads(
    x, out, weight, cos, sin, head, ok, epsilon, offset, stride, HEAD: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads of one token: ``x``, ``out`` point to its first. Columns: the two halves that are pairs, and the rest."""
    i = tl.arange(0, HALF_BLOCK)
    pair = ok[:, None] & (i < HALF)[None, :]
    source, target = x + (head * stride)[:, None], out + (head * HEAD)[:, None]
    first = tl.load(source + i[None, :], mask=pair, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + i[None, :], mask=pair, other=0.0).to(tl.float32)
    if HEAD > 2 * HALF:
        j = 2 * HALF + tl.arange(0, REST_BLOCK)
        left = ok[:, None] & (j < HEAD)[None, :]
        rest = tl.load(source + j[None, :], mask=left, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if HEAD > 2 * HALF:
            squares += tl.sum(rest * rest, 1)
            rest_weight = tl.load(weight + j, mask=j < HEAD, other=0.0).to(tl.float32) + offset
        scale = tl.rsqrt(squares / HEAD + epsilon)[:, None]
        first = first * scale * (tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32) + offset)[None, :]
        second = (
            second * scale * (tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32) + offset)[None, :]
        )
        if HEAD > 2 * HALF:
            rest = rest * scale * rest_weight[None, :]
    low_cos, low_sin = tl.load(cos + i, mask=i < HALF, other=0.0), tl.load(sin + i, mask=i < HALF, other=0.0)
    high_cos = tl.load(cos + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    high_sin = tl.load(sin + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    low = first * low_cos.to(tl.float32)[None, :] - second * low_sin.to(tl.float32)[None, :]
    high = second * high_cos[None, :] + first * high_sin[None, :]
    tl.store(target + i[None, :], low.to(out.dtype.element_ty), mask=pair)
    tl.store(target + HALF + i[None, :], high.to(out.dtype.element_ty), mask=pair)
    if HEAD > 2 * HALF:
        tl.store(target + j[None, :], rest.to(out.dtype.element_ty), mask=left)


@triton.jit
def _rotary_kernel(
    query, key, cos, sin, query_weight, key_weight, query_out, key_out, epsilon, offset,
    query_row, query_head, key_row, key_head,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: a token x HEADS heads, first those of the query."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_parts: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    cos += row * (2 * HALF)
    sin += row * (2 * HALF)
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        _rotate_heads(
            query + row * query_row, query_out + row * (QUERY_HEADS * HEAD), query_weight, cos, sin, head,
            head < QUERY_HEADS, epsilon, offset, query_head, HEAD, HALF, HAS_NORM, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        head = (part - query_parts) * HEADS + tl.arange(0, HEADS)
        _rotate_heads(
            key + row * key_row, key_out + row * (KEY_HEADS * HEAD), key_weight, cos, sin, head,
            head < KEY_HEADS, epsilon, offset, key_head, HEAD, HALF, HAS_NORM, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip


class RotaryOps:
    """:class:`common.ops.row_ops.Rotary`."""

    def rotate(
        self,
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        *,
        epsilon: float = 0.0,
        offset: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`common.ops.row_ops.Rotary.rotate`."""
        num_tokens, query_heads, size = query.shape
        key_heads, rotated = key.shape[1], cos.shape[-1]
        if key.shape != (num_tokens, key_heads, size) or rotated > size or rotated % 2:
            raise RuntimeError(f"rotate: {tuple(query.shape)} and {tuple(key.shape)} by {rotated} columns")
        if cos.shape != (num_tokens, rotated) or sin.shape != cos.shape:
            raise RuntimeError(f"rotate: {num_tokens} tokens by {tuple(cos.shape)} and {tuple(sin.shape)}")
        outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key)]
        if num_tokens == 0:
            return outs[0], outs[1]
        query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
        cos, sin = cos.contiguous(), sin.contiguous()
        half_block = triton.next_power_of_2(rotated // 2)
        heads = min(triton.next_power_of_2(query_heads), max(1, _TILE // (2 * half_block)))
        grid = (num_tokens, triton.cdiv(query_heads, heads) + triton.cdiv(key_heads, heads))
        _rotary_kernel[grid](
            *(query, key, cos, sin, *(norms or (query, key)), *outs, epsilon, offset),
            *(query.stride(0), query.stride(1), key.stride(0), key.stride(1)),
            QUERY_HEADS=query_heads,
            KEY_HEADS=key_heads,
            HEAD=size,
            HALF=rotated // 2,
            HAS_NORM=norms is not None,
            HEADS=heads,
            HALF_BLOCK=half_block,
            REST_BLOCK=triton.next_power_of_2(max(1, size - rotated)),
            num_warps=num_warps(heads * triton.next_power_of_2(size)),
        )
        return outs[0], outs[1]
