"""The Mamba-2 scan (SSD, arXiv 2405.21060) on the slot pool.

Decode rows and short spans: one kernel each, that takes token after token and reads and writes a state once. Longer
spans: one kernel walks over the chunks of a span, keeps the state before each and saves where it should; another one
gives the outputs, all chunks at once. Which of them a span takes depends on its own length alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.interface import StepSize
from common.ops.step.device_spans import WHOLE_RUN
from common.ops.step.device_step import DeviceStep

SHORT = range(1, 17)
"""Rows of spans that are walked token by token (verified drafts): as decode rows, to the bit."""
LONG = range(17, WHOLE_RUN)
CHUNK = 64
"""Rows: products inside a chunk cost its square, states before chunks are written and read once for each."""
STEP_DIM, WALK_DIM, OUT_DIM = 16, 32, 32
"""Channels of a head that a program takes at a time."""
FULL_KEYS = 32
"""Elements of a channel's state that are multiplied at a time in float32."""


def mamba2_varlen(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    step: DeviceStep,
    pool: Tensor,
    step_size: StepSize,
) -> Tensor:
    """As :meth:`common.ops.interface.Ops.mamba2`; the last dimensions of x, b and c are contiguous, other strides are
    any.

    Returns: [num_tokens, heads, head_dim] in x's dtype, contiguous; zeros in rows of padding.
    """
    num_heads, head_dim = x.shape[1:]
    num_groups, state_size = b.shape[1:]
    assert x.stride(2) == b.stride(2) == c.stride(2) == 1, "the scan's inputs are contiguous in their last dimension"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rates = (dt, *dt.stride(), a, step_size.bias, step_size.low, step_size.high)
    inputs = (x, x.stride(0), x.stride(1), *rates, b, b.stride(0), b.stride(1), c, c.stride(0), c.stride(1), d, out)
    shape = (step_size.softplus, num_heads, num_heads // num_groups, head_dim, state_size)
    padded = triton.next_power_of_2(state_size)
    block = min(STEP_DIM, triton.next_power_of_2(head_dim))
    num_blocks = triton.cdiv(head_dim, block)
    if step.num_decode:
        mamba2_step[num_blocks, num_heads, step.num_decode](
            *inputs, pool, pool.stride(0), step.decode_rows, step.decode_src, step.decode_dst, step.decode_save,
            *shape, padded, block,
        )  # fmt: skip
    if not step.num_spans:
        return out
    if (runs := step.chunks(WHOLE_RUN, SHORT)).num_spans:
        tables = (runs.span_begin, runs.row, runs.length, runs.load, runs.store_begin, runs.store_slot)
        mamba2_rows[num_blocks, num_heads, runs.num_spans](
            *inputs, pool, pool.stride(0), *tables, *shape, padded, block
        )
    if (runs := step.chunks(WHOLE_RUN, LONG)).num_spans:
        chunks = step.chunks(CHUNK, LONG)
        states = torch.empty(chunks.num_chunks, num_heads, head_dim, state_size, dtype=x.dtype, device=x.device)
        # Without tensor cores a thread holds whole rows of what it multiplies: fewer at a time, and more threads.
        is_full = x.dtype == torch.float32
        keys, stages = (FULL_KEYS, 1) if is_full else (max(16, padded), 3)
        warps = 8 if is_full or padded > 128 else 4  # four have too few registers for a wider state
        padded, room = max(16, padded), max(16, triton.next_power_of_2(head_dim))
        block = min(WALK_DIM, room)
        mamba2_walk[triton.cdiv(head_dim, block), num_heads, runs.num_spans](
            x, x.stride(0), x.stride(1), *rates, b, b.stride(0), b.stride(1), states, pool, pool.stride(0),
            chunks.span_begin, runs.span_begin, runs.row, runs.length, runs.load, runs.store_begin, runs.store_slot,
            *shape, padded, block, CHUNK,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        block = min(OUT_DIM // 2 if is_full else OUT_DIM, room)
        mamba2_out[num_heads, chunks.num_chunks](
            *inputs, states, chunks.row, chunks.length, *shape, keys, block, CHUNK, num_warps=8, num_stages=1
        )
    return out


@triton.jit
def step_size_of(dt, bias, low, high, SOFTPLUS: tl.constexpr):
    """clamp(softplus(dt + bias), low, high), float32."""
    value = dt.to(tl.float32) + bias
    if SOFTPLUS:
        # log(1 + e) of a small e: what rounding took from 1 + e is put back by the quotient.
        e = tl.exp(-tl.abs(value))
        sum_ = 1.0 + e
        value = tl.maximum(value, 0.0) + tl.where(
            sum_ == 1.0, e, tl.log(sum_) * (e / tl.where(sum_ == 1.0, 1.0, sum_ - 1.0))
        )
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def _bias_of(bias, head):
    """float32, 0 without any: in Triton 3.6 a function has no None to return."""
    return 0.0 if bias is None else tl.load(bias + head).to(tl.float32)


@triton.jit
def _advance(
    state, x, x_row, x_head, dt, dt_row, dt_head, a, bias, low, high, b, b_row, b_group, c, c_row, c_group, d, out, row,
    head, dim, size, is_dim, is_size,
    SOFTPLUS: tl.constexpr, HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The state [dim, size] after one row, whose output is written."""
    group = head // PER_GROUP
    step = step_size_of(tl.load(dt + row * dt_row + head * dt_head), _bias_of(bias, head), low, high, SOFTPLUS)
    value = tl.load(x + row * x_row + head * x_head + dim, mask=is_dim, other=0.0).to(tl.float32)
    key = tl.load(b + row * b_row + group * b_group + size, mask=is_size, other=0.0).to(tl.float32)
    query = tl.load(c + row * c_row + group * c_group + size, mask=is_size, other=0.0).to(tl.float32)
    state = state * tl.exp(step * tl.load(a + head).to(tl.float32)) + (step * value)[:, None] * key[None, :]
    y = tl.sum(state * query[None, :], 1)
    if d is not None:
        y += value * tl.load(d + head).to(tl.float32)
    tl.store(out + (row * HEADS + head) * DIM + dim, y.to(out.dtype.element_ty), mask=is_dim)
    return state


@triton.jit
def mamba2_step(
    x, x_row, x_head, dt, dt_row, dt_head, a, bias, low, high, b, b_row, b_group, c, c_row, c_group, d, out,
    pool, slot_stride, rows, src, dst, save,
    SOFTPLUS: tl.constexpr, HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: block of a head's channels x head x decode row. SIZES: SIZE up to a power of two."""
    head, index = tl.program_id(1), tl.program_id(2)
    row, target = tl.load(rows + index).to(tl.int64), tl.load(dst + index).to(tl.int64)
    dim, size = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZES)
    is_dim, is_size = dim < DIM, size < SIZE
    if target < 0:
        tl.store(out + (row * HEADS + head) * DIM + dim, tl.zeros([BLOCK], out.dtype.element_ty), mask=is_dim)
        return
    at = (head * DIM + dim)[:, None] * SIZE + size[None, :]
    mask = is_dim[:, None] & is_size[None, :]
    source = tl.load(src + index).to(tl.int64)
    state = tl.load(pool + source * slot_stride + at, mask=mask, other=0.0)
    state = _advance(
        state, x, x_row, x_head, dt, dt_row, dt_head, a, bias, low, high, b, b_row, b_group, c, c_row, c_group, d, out,
        row, head, dim, size, is_dim, is_size, SOFTPLUS, HEADS, PER_GROUP, DIM,
    )  # fmt: skip
    tl.store(pool + target * slot_stride + at, state, mask=mask)
    also = tl.load(save + index).to(tl.int64)
    if also >= 0:
        tl.store(pool + also * slot_stride + at, state, mask=mask)


@triton.jit
def mamba2_rows(
    x, x_row, x_head, dt, dt_row, dt_head, a, bias, low, high, b, b_row, b_group, c, c_row, c_group, d, out,
    pool, slot_stride, span_begin, run_row, run_length, run_load, store_begin, store_slot,
    SOFTPLUS: tl.constexpr, HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: block of a head's channels x head x span, row by row."""
    head, span = tl.program_id(1), tl.program_id(2)
    dim, size = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZES)
    is_dim, is_size = dim < DIM, size < SIZE
    at = (head * DIM + dim)[:, None] * SIZE + size[None, :]
    mask = is_dim[:, None] & is_size[None, :]
    first_run = tl.load(span_begin + span)
    source = tl.load(run_load + first_run).to(tl.int64)
    state = tl.load(pool + source * slot_stride + at, mask=mask, other=0.0)
    for run in range(first_run, tl.load(span_begin + span + 1)):
        begin = tl.load(run_row + run)
        for row in range(begin, begin + tl.load(run_length + run)):
            state = _advance(
                state, x, x_row, x_head, dt, dt_row, dt_head, a, bias, low, high, b, b_row, b_group, c, c_row, c_group,
                d, out, tl.cast(row, tl.int64), head, dim, size, is_dim, is_size, SOFTPLUS, HEADS, PER_GROUP, DIM,
            )  # fmt: skip
        for store in range(tl.load(store_begin + run), tl.load(store_begin + run + 1)):
            slot = tl.load(store_slot + store).to(tl.int64)
            tl.store(pool + slot * slot_stride + at, state, mask=mask)


@triton.jit
def _rates(dt, dt_row, dt_head, a, bias, low, high, rows, head, is_row, SOFTPLUS: tl.constexpr):
    """Step sizes of rows of a chunk, 0 where there is no row: neither decays nor adds; and the log of the decay since
    the chunk's begin."""
    raw = tl.load(dt + rows * dt_row + head * dt_head, mask=is_row, other=0.0)
    steps = tl.where(is_row, step_size_of(raw, _bias_of(bias, head), low, high, SOFTPLUS), 0.0)
    return steps, tl.cumsum(steps * tl.load(a + head).to(tl.float32), 0)


@triton.jit
def mamba2_walk(
    x, x_row, x_head, dt, dt_row, dt_head, a, bias, low, high, b, b_row, b_group, states, pool, slot_stride,
    chunk_begin, span_begin, run_row, run_length, run_load, store_begin, store_slot,
    SOFTPLUS: tl.constexpr, HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    SIZES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program: block of a head's channels x head x span. Runs end where a state is saved; chunks are counted on from
    the span's first one."""
    head, span = tl.program_id(1), tl.program_id(2)
    dim, size = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZES)
    own = tl.arange(0, CHUNK)
    is_dim, is_size = dim < DIM, size < SIZE
    at = (head * DIM + dim)[:, None] * SIZE + size[None, :]
    mask = is_dim[:, None] & is_size[None, :]
    first_run = tl.load(span_begin + span)
    source = tl.load(run_load + first_run).to(tl.int64)
    state = tl.load(pool + source * slot_stride + at, mask=mask, other=0.0)
    chunk = tl.load(chunk_begin + span).to(tl.int64)
    values, keys = x + head * x_head + dim, b + head // PER_GROUP * b_group + size
    for run in range(first_run, tl.load(span_begin + span + 1)):
        begin, length = tl.load(run_row + run), tl.load(run_length + run)
        for offset in range(0, length, CHUNK):
            tl.store(states + chunk * (HEADS * DIM * SIZE) + at, state.to(states.dtype.element_ty), mask=mask)
            is_row = own < length - offset
            rows = (begin + offset + own).to(tl.int64)
            steps, decay = _rates(dt, dt_row, dt_head, a, bias, low, high, rows, head, is_row, SOFTPLUS)
            total = tl.sum(tl.where(own == CHUNK - 1, decay, 0.0), 0)
            weights = steps * tl.exp(total - decay)
            value = tl.load(values[:, None] + rows[None, :] * x_row, mask=is_dim[:, None] & is_row[None, :], other=0.0)
            key = tl.load(keys[None, :] + rows[:, None] * b_row, mask=is_row[:, None] & is_size[None, :], other=0.0)
            weighted = (value.to(tl.float32) * weights[None, :]).to(key.dtype)
            state = tl.dot(weighted, key, state * tl.exp(total), input_precision="ieee")
            chunk += 1
        for store in range(tl.load(store_begin + run), tl.load(store_begin + run + 1)):
            slot = tl.load(store_slot + store).to(tl.int64)
            tl.store(pool + slot * slot_stride + at, state, mask=mask)


@triton.jit
def mamba2_out(
    x, x_row, x_head, dt, dt_row, dt_head, a, bias, low, high, b, b_row, b_group, c, c_row, c_group, d, out,
    states, chunk_row, chunk_length,
    SOFTPLUS: tl.constexpr, HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program: head x chunk, one block of the head's channels after another; KEYS elements of the state at a time."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = head // PER_GROUP
    own, own_size = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    is_row = own < tl.load(chunk_length + chunk)
    rows = (tl.load(chunk_row + chunk) + own).to(tl.int64)
    steps, decay = _rates(dt, dt_row, dt_head, a, bias, low, high, rows, head, is_row, SOFTPLUS)
    queries, keys = c + rows[:, None] * c_row + group * c_group, b + rows[None, :] * b_row + group * b_group
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    for at in range(0, SIZE, KEYS):
        size = at + own_size
        query = tl.load(queries + size[None, :], mask=is_row[:, None] & (size < SIZE)[None, :], other=0.0)
        key = tl.load(keys + size[:, None], mask=is_row[None, :] & (size < SIZE)[:, None], other=0.0)
        scores = tl.dot(query, key, scores, input_precision="ieee")
    between = tl.exp(tl.minimum(decay[:, None] - decay[None, :], 0.0)) * steps[None, :]
    scores = tl.where(own[:, None] >= own[None, :], scores * between, 0.0).to(x.dtype.element_ty)
    since_begin = tl.exp(decay)[:, None]
    before = states + (chunk * HEADS + head) * (DIM * SIZE)
    for first in range(0, DIM, BLOCK):
        dim = first + tl.arange(0, BLOCK)
        is_dim = dim < DIM
        y = tl.zeros([CHUNK, BLOCK], tl.float32)
        for at in range(0, SIZE, KEYS):
            size = at + own_size
            query = tl.load(queries + size[None, :], mask=is_row[:, None] & (size < SIZE)[None, :], other=0.0)
            ok = (size < SIZE)[:, None] & is_dim[None, :]
            state = tl.load(before + dim[None, :] * SIZE + size[:, None], mask=ok, other=0.0)
            y = tl.dot(query, state.to(query.dtype), y, input_precision="ieee")
        mask = is_row[:, None] & is_dim[None, :]
        value = tl.load(x + rows[:, None] * x_row + head * x_head + dim[None, :], mask=mask, other=0.0)
        y = tl.dot(scores, value, y * since_begin, input_precision="ieee")
        if d is not None:
            y += value.to(tl.float32) * tl.load(d + head).to(tl.float32)
        tl.store(out + (rows[:, None] * HEADS + head) * DIM + dim[None, :], y.to(out.dtype.element_ty), mask=mask)
