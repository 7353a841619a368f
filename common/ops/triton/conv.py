"""The causal depthwise convolution on the slot pool.

Decode rows: one kernel shifts each row's window in place and gives its output. Spans: one kernel gives the outputs,
tile by tile; only then another one writes the states, for a state may go to where it came from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.step.device_spans import WHOLE_RUN
from common.ops.step.device_step import DeviceStep

STEP_CHANNELS = 256
"""Channels of a program: rows' states are some 6 bytes a channel, so programs are wide."""
TILE_ROWS, TILE_CHANNELS = 32, 128


def conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    step: DeviceStep,
    pool: Tensor,
    *,
    silu: bool = False,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As :meth:`common.ops.interface.Ops.conv1d`; x, gates and weight of any strides.

    Returns: [num_tokens, channels] in x's dtype, contiguous; zeros in rows of padding.
    """
    num_channels, kernel = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    before, behind = gates or (None, None)
    rows = (x, *x.stride(), before, *_strides(before))
    state = (pool, pool.stride(0), num_channels)
    width = kernel - 1
    taps = triton.next_power_of_2(width)
    if step.num_decode:
        block = min(STEP_CHANNELS, triton.next_power_of_2(num_channels))
        conv_step[triton.cdiv(num_channels, block), step.num_decode](
            *rows, behind, *_strides(behind), weight, *weight.stride(), bias, out,
            *state, step.decode_rows, step.decode_src, step.decode_dst, step.decode_save,
            silu, width, taps, block,
        )  # fmt: skip
    if step.num_spans:
        block = min(TILE_CHANNELS, triton.next_power_of_2(num_channels))
        num_blocks = triton.cdiv(num_channels, block)
        tiles, runs = step.tiles(TILE_ROWS), step.chunks(WHOLE_RUN)
        conv_tiles[num_blocks, tiles.num_tiles](
            *rows, behind, *_strides(behind), weight, *weight.stride(), bias, out,
            *state, tiles.row, tiles.length, tiles.begin, tiles.src,
            silu, width, TILE_ROWS, block, num_warps=8,
        )  # fmt: skip
        conv_states[num_blocks, runs.num_spans](
            *rows, *state, runs.span_begin, runs.row, runs.length, runs.load, runs.store_begin, runs.store_slot,
            width, taps, block,
        )  # fmt: skip
    return out


def _strides(gate: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if gate is None else gate.stride()


@triton.jit
def _input(x, x_row, x_channel, before, before_row, before_channel, row, channel, mask):
    """What enters the convolution, float32, as the pool keeps it: a gated input is rounded to x's dtype."""
    value = tl.load(x + row * x_row + channel * x_channel, mask=mask, other=0.0)
    if before is not None:
        gate = tl.load(before + row * before_row + channel * before_channel, mask=mask, other=0.0)
        value = (value.to(tl.float32) * gate.to(tl.float32)).to(x.dtype.element_ty)
    return value.to(tl.float32)


@triton.jit
def _finish(y, behind, at, mask, SILU: tl.constexpr):
    if SILU:
        y *= tl.sigmoid(y)
    if behind is not None:
        y *= tl.load(behind + at, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def conv_step(
    x, x_row, x_channel, before, before_row, before_channel, behind, behind_row, behind_channel,
    weight, weight_channel, weight_tap, bias, out, pool, slot_stride, num_channels, rows, src, dst, save,
    SILU: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: block of channels x decode row. TAPS: WIDTH up to a power of two."""
    index = tl.program_id(1)
    row, target = tl.load(rows + index).to(tl.int64), tl.load(dst + index).to(tl.int64)
    channel, tap = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TAPS)
    mask = channel < num_channels
    own = out + row * num_channels + channel
    if target < 0:
        tl.store(own, tl.zeros([BLOCK], out.dtype.element_ty), mask=mask)
        return
    at = channel[:, None] * WIDTH + tap[None, :]
    is_tap = mask[:, None] & (tap < WIDTH)[None, :]
    source = pool + tl.load(src + index).to(tl.int64) * slot_stride + at
    window = tl.load(source, mask=is_tap, other=0.0)
    shifted = tl.load(source + 1, mask=is_tap & (tap < WIDTH - 1)[None, :], other=0.0)
    value = _input(x, x_row, x_channel, before, before_row, before_channel, row, channel, mask)
    weights = weight + channel * weight_channel
    y = tl.load(weights + WIDTH * weight_tap, mask=mask, other=0.0).to(tl.float32) * value
    factors = tl.load(weights[:, None] + tap[None, :] * weight_tap, mask=is_tap, other=0.0)
    y += tl.sum(factors.to(tl.float32) * window.to(tl.float32), 1)
    if bias is not None:
        y += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    y = _finish(y, behind, row * behind_row + channel * behind_channel, mask, SILU)
    tl.store(own, y.to(out.dtype.element_ty), mask=mask)
    state = tl.where(tap[None, :] == WIDTH - 1, value[:, None], shifted.to(tl.float32)).to(pool.dtype.element_ty)
    tl.debug_barrier()  # a thread's place may be one that another has yet to read
    tl.store(pool + target * slot_stride + at, state, mask=is_tap)
    also = tl.load(save + index).to(tl.int64)
    if also >= 0:
        tl.store(pool + also * slot_stride + at, state, mask=is_tap)


@triton.jit
def conv_tiles(
    x, x_row, x_channel, before, before_row, before_channel, behind, behind_row, behind_channel,
    weight, weight_channel, weight_tap, bias, out, pool, slot_stride, num_channels, tile_row, tile_length, begin, src,
    SILU: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: block of channels x tile of rows."""
    index = tl.program_id(1)
    first, own = tl.load(tile_row + index), tl.arange(0, ROWS)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < num_channels
    mask = (own < tl.load(tile_length + index))[:, None] & is_channel[None, :]
    row = (first + own).to(tl.int64)[:, None]
    offset = first - tl.load(begin + index) + own  # of each row in its span
    state = pool + tl.load(src + index).to(tl.int64) * slot_stride + channel[None, :] * WIDTH
    y = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH + 1):
        is_past = (offset + tap < WIDTH)[:, None]
        value = _input(
            x, x_row, x_channel, before, before_row, before_channel,
            row + (tap - WIDTH), channel[None, :], mask & ~is_past,
        )  # fmt: skip
        if tap < WIDTH:
            value += tl.load(state + (offset + tap)[:, None], mask=mask & is_past, other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * weight_channel + tap * weight_tap, mask=is_channel, other=0.0)
        y += value * factor.to(tl.float32)[None, :]
    if bias is not None:
        y += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    y = _finish(y, behind, row * behind_row + channel[None, :] * behind_channel, mask, SILU)
    tl.store(out + row * num_channels + channel[None, :], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def conv_states(
    x, x_row, x_channel, before, before_row, before_channel, pool, slot_stride, num_channels,
    span_begin, run_row, run_length, run_load, store_begin, store_slot,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program: block of channels x span. Writes the state at the end of each run between saves."""
    span = tl.program_id(1)
    first_run = tl.load(span_begin + span)
    begin = tl.load(run_row + first_run)
    channel, tap = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None], tl.arange(0, TAPS)[None, :]
    mask = (channel < num_channels) & (tap < WIDTH)
    at = channel * WIDTH + tap
    source = pool + tl.load(run_load + first_run).to(tl.int64) * slot_stride + at
    for run in range(first_run, tl.load(span_begin + span + 1)):
        offset = tl.load(run_row + run) + tl.load(run_length + run) - begin  # rows of the span up to here
        is_past = offset + tap < WIDTH
        row = (begin + offset + tap - WIDTH).to(tl.int64)
        state = _input(
            x, x_row, x_channel, before, before_row, before_channel, row, channel, mask & ~is_past
        ).to(pool.dtype.element_ty)  # fmt: skip
        state = tl.where(is_past, tl.load(source + offset, mask=mask & is_past, other=0.0), state)
        tl.debug_barrier()  # as above: the last of them may go to where it came from
        for store in range(tl.load(store_begin + run), tl.load(store_begin + run + 1)):
            slot = tl.load(store_slot + store).to(tl.int64)
            tl.store(pool + slot * slot_stride + at, state, mask=mask)
