"""Spans of the delta rules in chunks, in the UT-transform form of arXiv 2406.06484: with the keys, values and decays of
a chunk alone, the corrections of its rows are ``new_values - read_keys @ state``. All chunks make theirs at once, then
a walk goes over each span's chunks with the state, and the outputs of all chunks follow from the states before them.

Rows wait in scratch by chunk and head, ``[chunks * heads, chunk size, ..]``, normalised, decayed and filled up with
zeros, so that the walk and the outputs read them without masks. Exponents are decays from one row to a later one, never
positive. Products of 16-bit operands are 16-bit with float32 sums; the triangular system is solved in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from common.ops.step.device_spans import DeviceChunks
from common.ops.triton.delta_chunks import BLOCK, L2_EPS, cumulate_kernel, invert_kernel, prepare_kernel, solve_kernel


def row_major(x: Tensor) -> Tensor:
    """x where its last dimension is contiguous, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def long_spans(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunks: DeviceChunks, pool: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """Shapes as :func:`common.ops.triton.delta.delta_varlen`'s; ``chunks``: of a size that is a power of two."""
    num_heads, value_dim = value.shape[1:]
    num_key_heads, key_dim = key.shape[1:]
    is_full = value.dtype == torch.float32
    per_channel = decay.dim() == 3
    size, units = chunks.size, chunks.num_chunks * num_heads
    block_k = max(BLOCK, triton.next_power_of_2(key_dim))
    walk_block = min(16 if is_full else 32, max(BLOCK, triton.next_power_of_2(value_dim)))
    slice_v = min(32 if is_full else 64, max(BLOCK, triton.next_power_of_2(value_dim)))
    slice_k = min(32 if is_full else 64, block_k)
    width = triton.cdiv(value_dim, slice_v) * slice_v
    precision = "bf16x6" if is_full else "ieee"

    keys, read_keys, write_keys, reads = value.new_empty(4, units, size, block_k)
    new_values = value.new_empty(units, size, width)
    scores = value.new_empty(units, size, size)
    systems = scores.new_empty(scores.shape, dtype=torch.float32)
    states = value.new_empty(units, block_k, width)
    channels = block_k if per_channel else 1
    chunk_decay = systems.new_empty(units, channels)
    cumulative = systems.new_empty(units, size, channels) if per_channel else systems
    by_chunk = (num_heads, chunks.num_chunks)
    if per_channel:
        cumulate_kernel[by_chunk](
            decay, cumulative, chunks.row, chunks.length, *decay.stride()[:2],
            HEADS=num_heads, KEY_DIM=key_dim, SIZE=size, BLOCK_K=block_k, num_warps=8,
        )  # fmt: skip
    prepare_kernel[by_chunk](
        query, key, decay, beta, cumulative, keys, write_keys, reads, scores, systems, chunk_decay, chunks.row,
        chunks.length, *(stride for x in (query, key, decay, beta) for stride in x.stride()[:2]),
        HEADS=num_heads, KEY_HEADS=num_key_heads, KEY_DIM=key_dim, EPS=L2_EPS, PER_CHANNEL=per_channel, SIZE=size,
        LEVELS=size.bit_length() - 1, BLOCK_K=block_k, BLOCK_C=min(16 if is_full else 32, block_k),
        PRECISION=precision, num_warps=8, num_stages=1,
    )  # fmt: skip
    invert_kernel[by_chunk](systems, HEADS=num_heads, SIZE=size, BLOCK=BLOCK, PRECISION="bf16x6", num_warps=2)
    solve_kernel[by_chunk](
        value, beta, systems, keys, read_keys, new_values, chunks.row, chunks.length, *value.stride()[:2],
        *beta.stride(),
        HEADS=num_heads, VALUE_DIM=value_dim, WIDTH=width, SIZE=size, BLOCK_K=block_k, BLOCK_C=slice_k,
        BLOCK_V=slice_v, PRECISION=precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    walk_kernel[width // walk_block, num_heads, chunks.num_spans](
        read_keys, write_keys, new_values, chunk_decay, states, pool, chunks.span_begin, chunks.load,
        chunks.store_begin, chunks.store_slot, pool.stride(0),
        HEADS=num_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, WIDTH=width, PER_CHANNEL=per_channel, SIZE=size,
        BLOCK_K=block_k, BLOCK_C=min(32, block_k) if is_full else block_k, BLOCK_V=walk_block, PRECISION=precision,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    output_kernel[width // slice_v, num_heads, chunks.num_chunks](
        reads, scores, states, new_values, out, chunks.row, chunks.length,
        HEADS=num_heads, VALUE_DIM=value_dim, WIDTH=width, SIZE=size, BLOCK_K=block_k, BLOCK_C=slice_k,
        BLOCK_V=slice_v, PRECISION=precision, num_warps=4, num_stages=2,
    )  # fmt: skip


@triton.jit
def walk_kernel(
    read_keys, write_keys, new_values, chunk_decay, states, pool, span_begin, load, store_begin, store_slot,
    slot_stride,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PER_CHANNEL: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: values' columns x head x span. From chunk to chunk with the state, which is kept for the outputs; the
    values of each row are corrected in place by what its key reads of the state."""
    PARTS: tl.constexpr = BLOCK_K // BLOCK_C  # of the state, by channels
    head = tl.program_id(1)
    begin = tl.load(span_begin + tl.program_id(2))
    end = tl.load(span_begin + tl.program_id(2) + 1)
    steps, channels = tl.arange(0, SIZE), tl.arange(0, BLOCK_C)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype = states.dtype.element_ty
    in_slot = head * KEY_DIM * VALUE_DIM + channels[:, None] * VALUE_DIM + columns[None, :]
    source = pool + tl.load(load + begin).to(tl.int64) * slot_stride + in_slot
    state = ()
    for part in tl.static_range(PARTS):
        mask = (channels[:, None] < KEY_DIM - part * BLOCK_C) & (columns[None, :] < VALUE_DIM)
        state += (tl.load(source + part * BLOCK_C * VALUE_DIM, mask=mask, other=0.0),)  # type: ignore[assignment]
    for chunk in range(begin, end):
        unit = tl.cast(chunk, tl.int64) * HEADS + head
        in_state = (unit * BLOCK_K + channels[:, None]) * WIDTH + columns[None, :]
        in_keys = (unit * SIZE + steps[:, None]) * BLOCK_K + channels[None, :]
        in_values = (unit * SIZE + steps[:, None]) * WIDTH + columns[None, :]
        corrected = tl.load(new_values + in_values).to(tl.float32)
        for part in tl.static_range(PARTS):
            known = state[part].to(dtype)  # type: ignore[var-annotated]
            tl.store(states + in_state + part * BLOCK_C * WIDTH, known)
            corrected -= tl.dot(tl.load(read_keys + in_keys + part * BLOCK_C), known, input_precision=PRECISION)
        given = corrected.to(dtype)
        tl.store(new_values + in_values, given)
        after = ()
        for part in tl.static_range(PARTS):
            if PER_CHANNEL:
                kept = state[part] * tl.load(chunk_decay + unit * BLOCK_K + part * BLOCK_C + channels)[:, None]
            else:
                kept = state[part] * tl.load(chunk_decay + unit)
            writing = tl.load(write_keys + in_keys + part * BLOCK_C)
            after += (kept + tl.dot(tl.trans(writing), given, input_precision=PRECISION),)  # type: ignore[assignment]
        state = after
        first, last = tl.load(store_begin + chunk), tl.load(store_begin + chunk + 1)
        if first < last:  # seldom; a loop that always stood here would keep loads from being made ahead
            for entry in range(first, last):
                place = pool + tl.load(store_slot + entry).to(tl.int64) * slot_stride + in_slot
                for part in tl.static_range(PARTS):
                    mask = (channels[:, None] < KEY_DIM - part * BLOCK_C) & (columns[None, :] < VALUE_DIM)
                    tl.store(place + part * BLOCK_C * VALUE_DIM, state[part], mask=mask)


@triton.jit
def output_kernel(
    reads, scores, states, new_values, out, chunk_row, chunk_length,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: values' columns x head x chunk. What queries read of the state before the chunk and of its rows."""
    head, chunk = tl.program_id(1), tl.program_id(2)
    unit = chunk.to(tl.int64) * HEADS + head
    steps = tl.arange(0, SIZE)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    result = tl.zeros([SIZE, BLOCK_V], tl.float32)
    for begin in range(0, BLOCK_K, BLOCK_C):
        channels = begin + tl.arange(0, BLOCK_C)
        q = tl.load(reads + (unit * SIZE + steps[:, None]) * BLOCK_K + channels[None, :])
        state = tl.load(states + (unit * BLOCK_K + channels[:, None]) * WIDTH + columns[None, :])
        result += tl.dot(q, state, input_precision=PRECISION)
    score = tl.load(scores + (unit * SIZE + steps[:, None]) * SIZE + steps[None, :])
    v = tl.load(new_values + (unit * SIZE + steps[:, None]) * WIDTH + columns[None, :])
    result += tl.dot(score, v, input_precision=PRECISION)
    rows = (tl.load(chunk_row + chunk) + steps).to(tl.int64)
    mask = (steps[:, None] < tl.load(chunk_length + chunk)) & (columns[None, :] < VALUE_DIM)
    places = out + (rows[:, None] * HEADS + head) * VALUE_DIM + columns[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=mask)
