"""The Mamba-1 selective scan (arXiv 2312.00752) on the slot pool.

Decode rows and short spans: one kernel each, that takes token after token and reads and writes a state once. Longer
spans are cut into chunks. What a chunk adds to a state does not depend on it, and a chunk decays each element by a
factor of its own: one kernel finds out both, all chunks at once; one walks over the chunks of a span, keeps the state
before each and saves where it should; one goes over all chunks again, from the right states, for the outputs.
Which way a span goes depends on its own length alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.interface import StepSize
from common.ops.step.device_spans import WHOLE_RUN
from common.ops.step.device_step import DeviceStep
from common.ops.triton.mamba2 import step_size_of

SHORT = range(1, 65)
"""Rows of spans that are walked token by token, as decode rows, to the bit: in chunks they would be walked twice."""
LONG = range(65, WHOLE_RUN)
CHUNK = 64
"""Rows that are walked one after another; the more, the fewer states lie between chunks."""
BLOCK = 64
"""Channels of a program: 4 KiB of a state of 16 a channel."""


def mamba1_varlen(
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
    """As :meth:`common.ops.interface.Ops.mamba1`; x, dt, a, b and c of any strides.

    Returns: [num_tokens, channels] float32, contiguous; zeros in rows of padding.
    """
    num_channels, state_size = a.shape
    assert pool.stride()[1:] == (state_size, 1), "a slot's state is contiguous"
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rates = (dt, *dt.stride(), a, *a.stride(), step_size.bias, step_size.low, step_size.high)
    adding = (x, *x.stride(), *rates, b, *b.stride())
    reading = (c, *c.stride(), d, out)
    block = min(BLOCK, triton.next_power_of_2(num_channels))
    shape = (step_size.softplus, num_channels, state_size, triton.next_power_of_2(state_size), block)
    num_blocks = triton.cdiv(num_channels, block)
    if step.num_decode:
        mamba1_step[num_blocks, step.num_decode](
            *adding, *reading, pool, pool.stride(0),
            step.decode_rows, step.decode_src, step.decode_dst, step.decode_save, *shape, num_warps=2,
        )  # fmt: skip
    if not step.num_spans:
        return out
    if (runs := step.chunks(WHOLE_RUN, SHORT)).num_spans:
        tables = (runs.span_begin, runs.row, runs.length, runs.load, runs.store_begin, runs.store_slot)
        mamba1_rows[num_blocks, runs.num_spans](*adding, *reading, pool, pool.stride(0), *tables, *shape, num_warps=2)
    if (chunks := step.chunks(CHUNK, LONG)).num_spans:
        states, totals = out.new_empty(chunks.num_chunks, *a.shape), out.new_empty(chunks.num_chunks, num_channels)
        by_chunk = (num_blocks, chunks.num_chunks)
        mamba1_added[by_chunk](*adding, states, totals, chunks.row, chunks.length, *shape, num_warps=2)
        mamba1_walk[num_blocks, chunks.num_spans](
            a, *a.stride(), states, totals, pool, pool.stride(0),
            chunks.span_begin, chunks.load, chunks.store_begin, chunks.store_slot, *shape[1:], num_warps=2,
        )  # fmt: skip
        mamba1_out[by_chunk](*adding, *reading, states, chunks.row, chunks.length, *shape, num_warps=2)
    return out


@triton.jit
def _places(CHANNELS: tl.constexpr, SIZE: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    """Of a program: its channels, the elements of a channel's state, their places in a state, and which of them are."""
    channel, size = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZES)
    return channel, size, channel[:, None] * SIZE + size[None, :], (channel < CHANNELS)[:, None] & (size < SIZE)[None]


@triton.jit
def _decay_rates(a, a_channel, a_size, channel, size, mask):
    return tl.load(a + channel[:, None] * a_channel + size[None, :] * a_size, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _bias_of(bias, channel, is_channel):
    """float32, 0 without any."""
    return 0.0 if bias is None else tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)


@triton.jit
def _advance(
    state, rate, x, x_row, x_channel, dt, dt_row, dt_channel, bias, low, high, b, b_row, b_size, row,
    channel, size, is_channel, is_size,
    SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """The state [channel, size] after a row; the row's step sizes and inputs."""
    raw = tl.load(dt + row * dt_row + channel * dt_channel, mask=is_channel, other=0.0)
    step = step_size_of(raw, bias, low, high, SOFTPLUS)
    value = tl.load(x + row * x_row + channel * x_channel, mask=is_channel, other=0.0).to(tl.float32)
    key = tl.load(b + row * b_row + size * b_size, mask=is_size, other=0.0).to(tl.float32)
    return state * tl.exp(step[:, None] * rate) + (step * value)[:, None] * key[None, :], step, value


@triton.jit
def _answer(
    state, value, c, c_row, c_size, d, out, row, channel, size, is_channel, is_size, CHANNELS: tl.constexpr
):  # fmt: skip
    """Writes the output of a row, after which the state is ``state``."""
    query = tl.load(c + row * c_row + size * c_size, mask=is_size, other=0.0).to(tl.float32)
    y = tl.sum(state * query[None, :], 1)
    if d is not None:
        y += value * tl.load(d + channel, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(out + row * CHANNELS + channel, y, mask=is_channel)


@triton.jit
def mamba1_step(
    x, x_row, x_channel, dt, dt_row, dt_channel, a, a_channel, a_size, bias, low, high, b, b_row, b_size,
    c, c_row, c_size, d, out, pool, slot_stride, rows, src, dst, save,
    SOFTPLUS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: block of channels x decode row. SIZES: SIZE up to a power of two."""
    index = tl.program_id(1)
    row, target = tl.load(rows + index).to(tl.int64), tl.load(dst + index).to(tl.int64)
    channel, size, at, mask = _places(CHANNELS, SIZE, SIZES, BLOCK)
    is_channel, is_size = channel < CHANNELS, size < SIZE
    if target < 0:
        tl.store(out + row * CHANNELS + channel, tl.zeros([BLOCK], tl.float32), mask=is_channel)
        return
    state = tl.load(pool + tl.load(src + index).to(tl.int64) * slot_stride + at, mask=mask, other=0.0)
    rate, own_bias = _decay_rates(a, a_channel, a_size, channel, size, mask), _bias_of(bias, channel, is_channel)
    state, _, value = _advance(
        state, rate, x, x_row, x_channel, dt, dt_row, dt_channel, own_bias, low, high, b, b_row, b_size, row,
        channel, size, is_channel, is_size, SOFTPLUS,
    )  # fmt: skip
    _answer(state, value, c, c_row, c_size, d, out, row, channel, size, is_channel, is_size, CHANNELS)
    tl.store(pool + target * slot_stride + at, state, mask=mask)
    also = tl.load(save + index).to(tl.int64)
    if also >= 0:
        tl.store(pool + also * slot_stride + at, state, mask=mask)


@triton.jit
def mamba1_rows(
    x, x_row, x_channel, dt, dt_row, dt_channel, a, a_channel, a_size, bias, low, high, b, b_row, b_size,
    c, c_row, c_size, d, out, pool, slot_stride, span_begin, run_row, run_length, run_load, store_begin, store_slot,
    SOFTPLUS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: block of channels x span, row by row."""
    span = tl.program_id(1)
    channel, size, at, mask = _places(CHANNELS, SIZE, SIZES, BLOCK)
    is_channel, is_size = channel < CHANNELS, size < SIZE
    first_run = tl.load(span_begin + span)
    state = tl.load(pool + tl.load(run_load + first_run).to(tl.int64) * slot_stride + at, mask=mask, other=0.0)
    rate, own_bias = _decay_rates(a, a_channel, a_size, channel, size, mask), _bias_of(bias, channel, is_channel)
    for run in range(first_run, tl.load(span_begin + span + 1)):
        begin = tl.load(run_row + run)
        for index in range(begin, begin + tl.load(run_length + run)):
            row = tl.cast(index, tl.int64)
            state, _, value = _advance(
                state, rate, x, x_row, x_channel, dt, dt_row, dt_channel, own_bias, low, high, b, b_row, b_size, row,
                channel, size, is_channel, is_size, SOFTPLUS,
            )  # fmt: skip
            _answer(state, value, c, c_row, c_size, d, out, row, channel, size, is_channel, is_size, CHANNELS)
        for store in range(tl.load(store_begin + run), tl.load(store_begin + run + 1)):
            slot = tl.load(store_slot + store).to(tl.int64)
            tl.store(pool + slot * slot_stride + at, state, mask=mask)


@triton.jit
def mamba1_added(
    x, x_row, x_channel, dt, dt_row, dt_channel, a, a_channel, a_size, bias, low, high, b, b_row, b_size,
    states, totals, chunk_row, chunk_length,
    SOFTPLUS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: block of channels x chunk. What the chunk makes of a state of zeros, and the sum of its step sizes."""
    chunk = tl.program_id(1).to(tl.int64)
    channel, size, at, mask = _places(CHANNELS, SIZE, SIZES, BLOCK)
    is_channel, is_size = channel < CHANNELS, size < SIZE
    rate, own_bias = _decay_rates(a, a_channel, a_size, channel, size, mask), _bias_of(bias, channel, is_channel)
    state, total = tl.zeros([BLOCK, SIZES], tl.float32), tl.zeros([BLOCK], tl.float32)
    begin = tl.load(chunk_row + chunk)
    for index in range(begin, begin + tl.load(chunk_length + chunk)):
        state, step, _ = _advance(
            state, rate, x, x_row, x_channel, dt, dt_row, dt_channel, own_bias, low, high, b, b_row, b_size,
            tl.cast(index, tl.int64), channel, size, is_channel, is_size, SOFTPLUS,
        )  # fmt: skip
        total += step
    tl.store(states + chunk * (CHANNELS * SIZE) + at, state, mask=mask)
    tl.store(totals + chunk * CHANNELS + channel, total, mask=is_channel)


@triton.jit
def mamba1_walk(
    a, a_channel, a_size, states, totals, pool, slot_stride, span_begin, load, store_begin, store_slot,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: block of channels x span. In ``states`` the state before each chunk takes the place of what the chunk
    adds."""
    span = tl.program_id(1)
    channel, size, at, mask = _places(CHANNELS, SIZE, SIZES, BLOCK)
    is_channel = channel < CHANNELS
    begin = tl.load(span_begin + span)
    state = tl.load(pool + tl.load(load + begin).to(tl.int64) * slot_stride + at, mask=mask, other=0.0)
    rate = _decay_rates(a, a_channel, a_size, channel, size, mask)
    for index in range(begin, tl.load(span_begin + span + 1)):
        chunk = tl.cast(index, tl.int64)
        place = states + chunk * (CHANNELS * SIZE) + at
        added = tl.load(place, mask=mask, other=0.0)
        tl.store(place, state, mask=mask)
        total = tl.load(totals + chunk * CHANNELS + channel, mask=is_channel, other=0.0)
        state = state * tl.exp(total[:, None] * rate) + added
        for store in range(tl.load(store_begin + index), tl.load(store_begin + index + 1)):
            slot = tl.load(store_slot + store).to(tl.int64)
            tl.store(pool + slot * slot_stride + at, state, mask=mask)


@triton.jit
def mamba1_out(
    x, x_row, x_channel, dt, dt_row, dt_channel, a, a_channel, a_size, bias, low, high, b, b_row, b_size,
    c, c_row, c_size, d, out, states, chunk_row, chunk_length,
    SOFTPLUS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: block of channels x chunk, row by row."""
    chunk = tl.program_id(1).to(tl.int64)
    channel, size, at, mask = _places(CHANNELS, SIZE, SIZES, BLOCK)
    is_channel, is_size = channel < CHANNELS, size < SIZE
    rate, own_bias = _decay_rates(a, a_channel, a_size, channel, size, mask), _bias_of(bias, channel, is_channel)
    state = tl.load(states + chunk * (CHANNELS * SIZE) + at, mask=mask, other=0.0)
    begin = tl.load(chunk_row + chunk)
    for index in range(begin, begin + tl.load(chunk_length + chunk)):
        row = tl.cast(index, tl.int64)
        state, _, value = _advance(
            state, rate, x, x_row, x_channel, dt, dt_row, dt_channel, own_bias, low, high, b, b_row, b_size, row,
            channel, size, is_channel, is_size, SOFTPLUS,
        )  # fmt: skip
        _answer(state, value, c, c_row, c_size, d, out, row, channel, size, is_channel, is_size, CHANNELS)
