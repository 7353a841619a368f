"""The delta rules (gated delta, arXiv 2412.06464; Kimi delta, arXiv 2510.26692) in Triton.

A decode row is one launch: its state goes through registers once, from its source slot to its destination and save
slots. Spans of a few rows (verified drafts, which save a state after every row) go the same way row after row; longer
ones in chunks (``delta_spans``). Which way a span goes depends on its own length alone.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.step.device_step import DeviceStep
from common.ops.triton.delta_chunks import L2_EPS
from common.ops.triton.delta_spans import long_spans, row_major

_SHORT = range(1, 17)
"""Rows of a span that goes row after row: where a state is written after each row anyway, chunks save no traffic."""
_LONG = range(_SHORT.stop, sys.maxsize)
_CHUNK = 64
"""Most rows of a chunk: products inside a chunk cost its square, the walk over chunks one step each."""
_NUM_PROGRAMS = 1024
"""Enough to fill a GPU of 132 multiprocessors with reads of 16 KiB."""


def delta_varlen(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, step: DeviceStep, pool: Tensor
) -> Tensor:
    """The delta rule over the packed rows of a step.

    Args:
        query, key: [num_tokens, key_heads, key_dim], not normalised; value: [num_tokens, value_heads, value_dim].
        decay: [num_tokens, value_heads] or [num_tokens, value_heads, key_dim] log decay <= 0; beta: [num_tokens,
            value_heads].
        pool: [num_slots, value_heads, key_dim, value_dim] float32.

    Returns: [num_tokens, value_heads, value_dim] in value's dtype; 0 in rows of padding.
    """
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    query, key, value = row_major(query), row_major(key), row_major(value)
    decay = row_major(decay) if decay.dim() == 3 else decay
    rows = (query, key, value, decay, beta)
    if step.num_decode:
        slots = (step.decode_rows, step.decode_src, step.decode_dst, step.decode_save)
        _launch(decode_kernel, step.num_decode, rows, slots, pool, out)
    if any(span.num_rows in _SHORT for span in step.span_rows):
        chunks = step.chunks(1, _SHORT)
        tables = (chunks.span_begin, chunks.row, chunks.load, chunks.store_begin, chunks.store_slot)
        _launch(short_span_kernel, chunks.num_spans, rows, tables, pool, out)
    if any(span.num_rows in _LONG for span in step.span_rows):
        long_spans(*rows, step.chunks(_CHUNK, _LONG), pool, out)
    return out


def _launch(
    kernel: Any, count: int, rows: tuple[Tensor, ...], tables: tuple[Tensor, ...], pool: Tensor, out: Tensor
) -> None:
    """``count``: decode rows or spans."""
    key, value, decay = rows[1:4]
    num_heads, value_dim = value.shape[1:]
    num_key_heads, key_dim = key.shape[1:]
    block = min(32, max(8, triton.next_power_of_2(value_dim)))
    while block > 8 and count * num_heads * triton.cdiv(value_dim, block) < _NUM_PROGRAMS:
        block //= 2
    strides = [stride for x in rows for stride in x.stride()[:2]]
    kernel[triton.cdiv(value_dim, block), num_heads, count](
        *rows, out, pool, *tables, *strides, pool.stride(0),
        HEADS=num_heads, KEY_HEADS=num_key_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, EPS=L2_EPS,
        PER_CHANNEL=decay.dim() == 3, BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=block,
        num_warps=max(1, block // 8),
    )  # fmt: skip


@triton.jit
def _advance(
    state, row, head, value_columns, query, key, value, decay, beta, out,
    query_row, query_head, key_row, key_head, value_row, value_head, decay_row, decay_head, beta_row, beta_head,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, EPS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The state [BLOCK_K, BLOCK_V] after a row, whose output is written.

    What the query reads of the state is read before the row's own correction, which it gets from ``query @ key``: so
    both sums over the state wait for nothing but its arrival.
    """
    channels = tl.arange(0, BLOCK_K)
    in_key = channels < KEY_DIM
    in_value = value_columns < VALUE_DIM
    group = head // (HEADS // KEY_HEADS)
    q = tl.load(query + row * query_row + group * query_head + channels, mask=in_key, other=0.0).to(tl.float32)
    k = tl.load(key + row * key_row + group * key_head + channels, mask=in_key, other=0.0).to(tl.float32)
    v = tl.load(value + row * value_row + head * value_head + value_columns, mask=in_value, other=0.0).to(tl.float32)
    rate = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * (KEY_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    log_decay = decay + row * decay_row + head * decay_head
    if PER_CHANNEL:
        state *= tl.exp(tl.load(log_decay + channels, mask=in_key, other=0.0).to(tl.float32))[:, None]
    else:
        state *= tl.exp(tl.load(log_decay).to(tl.float32))
    delta = (v - tl.sum(k[:, None] * state, 0)) * rate
    result = tl.sum(q[:, None] * state, 0) + tl.sum(q * k, 0) * delta
    place = out + (row * HEADS + head) * VALUE_DIM + value_columns
    tl.store(place, result.to(out.dtype.element_ty), mask=in_value)
    return state + k[:, None] * delta[None, :]


@triton.jit
def decode_kernel(
    query, key, value, decay, beta, out, pool, rows, src, dst, save,
    query_row, query_head, key_row, key_head, value_row, value_head, decay_row, decay_head, beta_row, beta_head,
    slot_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, EPS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program: values' columns x head x decode row."""
    head = tl.program_id(1)
    index = tl.program_id(2)
    row = tl.load(rows + index).to(tl.int64)
    to = tl.load(dst + index).to(tl.int64)
    channels = tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    if to < 0:
        tl.store(
            out + (row * HEADS + head) * VALUE_DIM + columns,
            tl.zeros([BLOCK_V], out.dtype.element_ty),
            mask=columns < VALUE_DIM,
        )
        return
    mask = (channels[:, None] < KEY_DIM) & (columns[None, :] < VALUE_DIM)
    places = pool + head * KEY_DIM * VALUE_DIM + channels[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(places + tl.load(src + index).to(tl.int64) * slot_stride, mask=mask, other=0.0)
    state = _advance(
        state, row, head, columns, query, key, value, decay, beta, out,
        query_row, query_head, key_row, key_head, value_row, value_head, decay_row, decay_head, beta_row, beta_head,
        HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, EPS, PER_CHANNEL, BLOCK_K,
    )  # fmt: skip
    tl.store(places + to * slot_stride, state, mask=mask)
    also = tl.load(save + index).to(tl.int64)
    if also >= 0:
        tl.store(places + also * slot_stride, state, mask=mask)


@triton.jit
def short_span_kernel(
    query, key, value, decay, beta, out, pool, span_begin, rows, load, store_begin, store_slot,
    query_row, query_head, key_row, key_head, value_row, value_head, decay_row, decay_head, beta_row, beta_head,
    slot_stride,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, EPS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Program: values' columns x head x span, row after row; the tables are of chunks of one row."""
    head = tl.program_id(1)
    begin = tl.load(span_begin + tl.program_id(2))
    end = tl.load(span_begin + tl.program_id(2) + 1)
    channels = tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = (channels[:, None] < KEY_DIM) & (columns[None, :] < VALUE_DIM)
    places = pool + head * KEY_DIM * VALUE_DIM + channels[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(places + tl.load(load + begin).to(tl.int64) * slot_stride, mask=mask, other=0.0)
    for index in range(begin, end):
        state = _advance(
            state, tl.load(rows + index).to(tl.int64), head, columns, query, key, value, decay, beta, out,
            query_row, query_head, key_row, key_head, value_row, value_head, decay_row, decay_head, beta_row, beta_head,
            HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, EPS, PER_CHANNEL, BLOCK_K,
        )  # fmt: skip
        for entry in range(tl.load(store_begin + index), tl.load(store_begin + index + 1)):
            tl.store(places + tl.load(store_slot + entry).to(tl.int64) * slot_stride, state, mask=mask)
