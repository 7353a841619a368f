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

L2_EPS = 1e-6
"""Added to a squared norm before its root, as transformers' own delta rules do."""
_BLOCK = 16
"""Rows of the triangular system that are solved one after another, and the least side of a product."""


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
    block_k = max(_BLOCK, triton.next_power_of_2(key_dim))
    walk_block = min(16 if is_full else 32, max(_BLOCK, triton.next_power_of_2(value_dim)))
    wide_block = min(64, max(_BLOCK, triton.next_power_of_2(value_dim)))
    width = triton.cdiv(value_dim, wide_block) * wide_block
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
        LEVELS=size.bit_length() - 1, BLOCK_K=block_k, PRECISION=precision, num_warps=8, num_stages=1,
    )  # fmt: skip
    solve_kernel[by_chunk](
        value, beta, systems, keys, read_keys, new_values, chunks.row, chunks.length, *value.stride()[:2],
        *beta.stride(),
        HEADS=num_heads, VALUE_DIM=value_dim, WIDTH=width, SIZE=size, BLOCK=_BLOCK, BLOCK_K=block_k,
        BLOCK_V=wide_block, SOLVE="bf16x6", PRECISION=precision, num_warps=4,
    )  # fmt: skip
    walk_kernel[triton.cdiv(value_dim, walk_block), num_heads, chunks.num_spans](
        read_keys, write_keys, new_values, chunk_decay, states, pool, chunks.span_begin, chunks.load,
        chunks.store_begin, chunks.store_slot, pool.stride(0),
        HEADS=num_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, WIDTH=width, PER_CHANNEL=per_channel, SIZE=size,
        BLOCK_K=block_k, BLOCK_V=walk_block, PRECISION=precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    output_kernel[width // wide_block, num_heads, chunks.num_chunks](
        reads, scores, states, new_values, out, chunks.row, chunks.length,
        HEADS=num_heads, VALUE_DIM=value_dim, WIDTH=width, SIZE=size, BLOCK_K=block_k, BLOCK_V=wide_block,
        PRECISION=precision, num_warps=8 if is_full else 4,
    )  # fmt: skip


@triton.jit
def cumulate_kernel(
    decay, cumulative, chunk_row, chunk_length, decay_row, decay_head,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program: head x chunk. Sums of the decays of each channel, from the chunk's begin to each row."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    steps, channels = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    rows = (tl.load(chunk_row + chunk) + steps).to(tl.int64)
    mask = (steps[:, None] < tl.load(chunk_length + chunk)) & (channels[None, :] < KEY_DIM)
    places = decay + rows[:, None] * decay_row + head * decay_head + channels[None, :]
    sums = tl.cumsum(tl.load(places, mask=mask, other=0.0).to(tl.float32), 0)
    unit = chunk.to(tl.int64) * HEADS + head
    tl.store(cumulative + (unit * SIZE + steps[:, None]) * BLOCK_K + channels[None, :], sums)


@triton.jit
def _inverse(system, SIZE: tl.constexpr, BLOCK: tl.constexpr, SOLVE: tl.constexpr):
    """Of 1 + ``system`` [SIZE, SIZE], which is strictly lower triangular.

    Its diagonal blocks D by forward substitution, all at once; the rest from M = D^-1 @ (what is below the blocks):
    (1 + M)^-1 = (1 - M) (1 + M^2), as M^4 = 0 where there are four blocks.
    """
    NUM: tl.constexpr = SIZE // BLOCK
    tl.static_assert(NUM <= 4)
    blocks, places = tl.arange(0, NUM), tl.arange(0, BLOCK)
    is_diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]  # [NUM, 1, NUM, 1]
    solved = -tl.sum(tl.where(is_diagonal, tl.reshape(system, [NUM, BLOCK, NUM, BLOCK]), 0.0), 2)
    for place in range(2, BLOCK):
        is_row = (places == place)[None, :, None]
        row = tl.sum(tl.where(is_row, solved, 0.0), 1)
        row += tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(is_row, row[:, None, :], solved)
    solved += tl.where(places[:, None] == places[None, :], 1.0, 0.0)[None]
    inverse = tl.reshape(tl.where(is_diagonal, solved[:, :, None, :], 0.0), [SIZE, SIZE])
    if NUM > 1:
        steps = tl.arange(0, SIZE)
        below = tl.where(steps[:, None] // BLOCK > steps[None, :] // BLOCK, system, 0.0)
        nilpotent = tl.dot(inverse, below, input_precision=SOLVE)
        square = tl.dot(nilpotent, nilpotent, input_precision=SOLVE)
        inverse += tl.dot(square, inverse, input_precision=SOLVE)
        inverse -= tl.dot(nilpotent, inverse, input_precision=SOLVE)
    return inverse


@triton.jit
def prepare_kernel(
    query, key, decay, beta, cumulative, keys, write_keys, reads, scores, systems, chunk_decay, chunk_row,
    chunk_length,
    query_row, query_head, key_row, key_head, decay_row, decay_head, beta_row, beta_head,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, EPS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: head x chunk. What the chunk's rows read of one another, and their keys and queries with the decays
    since its begin and until its end."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    group = head // (HEADS // KEY_HEADS)
    unit = chunk.to(tl.int64) * HEADS + head
    dtype = scores.dtype.element_ty
    steps, channels = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    is_row = steps < tl.load(chunk_length + chunk)
    rows = (tl.load(chunk_row + chunk) + steps).to(tl.int64)
    mask = is_row[:, None] & (channels[None, :] < KEY_DIM)
    places = key + rows[:, None] * key_row + group * key_head + channels[None, :]
    k = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    places = query + rows[:, None] * query_row + group * query_head + channels[None, :]
    q = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, 1) + EPS)[:, None]
    q *= (tl.rsqrt(tl.sum(q * q, 1) + EPS) * (KEY_DIM**-0.5))[:, None]
    rate = tl.load(beta + rows * beta_row + head * beta_head, mask=is_row, other=0.0).to(tl.float32)

    lower = steps[:, None] > steps[None, :]
    in_unit = (unit * SIZE + steps[:, None]) * BLOCK_K + channels[None, :]
    if PER_CHANNEL:
        # A pair of rows is decayed by way of the last row before their places differ: j <= between < i, so that both
        # factors are decays. Level by level, half a group of rows reads the other half.
        since = tl.load(cumulative + in_unit)  # [SIZE, BLOCK_K]
        total = tl.load(cumulative + (unit * SIZE + SIZE - 1) * BLOCK_K + channels)
        tl.store(chunk_decay + unit * BLOCK_K + channels, tl.exp(total))
        system = tl.zeros([SIZE, SIZE], tl.float32)
        read = tl.where(steps[:, None] == steps[None, :], tl.sum(q * k, 1)[:, None], 0.0)
        differing = steps[:, None] ^ steps[None, :]
        for level in range(LEVELS):
            between = (steps >> level + 1 << level + 1) + (1 << level) - 1
            middle = tl.load(cumulative + (unit * SIZE + between[:, None]) * BLOCK_K + channels[None, :])
            factor = tl.exp(-tl.abs(since - middle))
            decayed = (k * factor).to(dtype)
            is_pair = lower & (differing >> level == 1)
            system = tl.where(is_pair, tl.dot(decayed, tl.trans(decayed), input_precision=PRECISION), system)
            asked = (q * factor).to(dtype)
            read = tl.where(is_pair, tl.dot(asked, tl.trans(decayed), input_precision=PRECISION), read)
        since_begin = tl.exp(since)
        until_end = tl.exp(total[None, :] - since)
    else:
        log_decay = tl.load(decay + rows * decay_row + head * decay_head, mask=is_row, other=0.0).to(tl.float32)
        since = tl.cumsum(log_decay, 0)
        total = tl.sum(log_decay, 0)
        tl.store(chunk_decay + unit, tl.exp(total))
        factor = tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0))
        columns = tl.trans(k.to(dtype))
        system = tl.where(lower, tl.dot(k.to(dtype), columns, input_precision=PRECISION) * factor, 0.0)
        read = tl.dot(q.to(dtype), columns, input_precision=PRECISION) * factor
        read = tl.where(steps[:, None] >= steps[None, :], read, 0.0)
        since_begin = tl.exp(since)[:, None]
        until_end = tl.exp(tl.minimum(total - since, 0.0))[:, None]
    tl.store(scores + (unit * SIZE + steps[:, None]) * SIZE + steps[None, :], read.to(dtype))
    tl.store(reads + in_unit, (q * since_begin).to(dtype))
    tl.store(keys + in_unit, (k * since_begin).to(dtype))
    tl.store(write_keys + in_unit, (k * until_end).to(dtype))

    tl.store(systems + (unit * SIZE + steps[:, None]) * SIZE + steps[None, :], system * rate[:, None])


@triton.jit
def solve_kernel(
    value, beta, systems, keys, read_keys, new_values, chunk_row, chunk_length,
    value_row, value_head, beta_row, beta_head,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SOLVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: head x chunk. Values and keys by which each row corrects the state, the chunk's earlier rows told of."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    unit = chunk.to(tl.int64) * HEADS + head
    dtype = keys.dtype.element_ty
    steps, channels = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    is_row = steps < tl.load(chunk_length + chunk)
    rows = (tl.load(chunk_row + chunk) + steps).to(tl.int64)
    rate = tl.load(beta + rows * beta_row + head * beta_head, mask=is_row, other=0.0).to(tl.float32)
    system = tl.load(systems + (unit * SIZE + steps[:, None]) * SIZE + steps[None, :])
    solved = (_inverse(system, SIZE, BLOCK, SOLVE) * rate[None, :]).to(dtype)
    in_unit = (unit * SIZE + steps[:, None]) * BLOCK_K + channels[None, :]
    tl.store(read_keys + in_unit, tl.dot(solved, tl.load(keys + in_unit), input_precision=PRECISION).to(dtype))
    for begin in range(0, WIDTH, BLOCK_V):
        columns = begin + tl.arange(0, BLOCK_V)
        source = value + rows[:, None] * value_row + head * value_head + columns[None, :]
        v = tl.load(source, mask=is_row[:, None] & (columns[None, :] < VALUE_DIM), other=0.0)
        corrected = tl.dot(solved, v.to(dtype), input_precision=PRECISION).to(dtype)
        tl.store(new_values + (unit * SIZE + steps[:, None]) * WIDTH + columns[None, :], corrected)


@triton.jit
def walk_kernel(
    read_keys, write_keys, new_values, chunk_decay, states, pool, span_begin, load, store_begin, store_slot,
    slot_stride,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr,
    PER_CHANNEL: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: values' columns x head x span. From chunk to chunk with the state, which is kept for the outputs; the
    values of each row are corrected in place by what its key reads of the state."""
    head = tl.program_id(1)
    begin = tl.load(span_begin + tl.program_id(2))
    end = tl.load(span_begin + tl.program_id(2) + 1)
    steps, channels = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype = states.dtype.element_ty
    mask = (channels[:, None] < KEY_DIM) & (columns[None, :] < VALUE_DIM)
    places = pool + head * KEY_DIM * VALUE_DIM + channels[:, None] * VALUE_DIM + columns[None, :]
    state = tl.load(places + tl.load(load + begin).to(tl.int64) * slot_stride, mask=mask, other=0.0)
    in_rows = steps[:, None] * WIDTH + columns[None, :]
    for chunk in range(begin, end):
        unit = tl.cast(chunk, tl.int64) * HEADS + head
        known = state.to(dtype)
        tl.store(states + (unit * BLOCK_K + channels[:, None]) * WIDTH + columns[None, :], known)
        reading = tl.load(read_keys + (unit * SIZE + steps[:, None]) * BLOCK_K + channels[None, :])
        writing = tl.load(write_keys + (unit * SIZE + steps[:, None]) * BLOCK_K + channels[None, :])
        given = tl.load(new_values + unit * SIZE * WIDTH + in_rows).to(tl.float32)
        corrected = (given - tl.dot(reading, known, input_precision=PRECISION)).to(dtype)
        tl.store(new_values + unit * SIZE * WIDTH + in_rows, corrected)
        if PER_CHANNEL:
            state *= tl.load(chunk_decay + unit * BLOCK_K + channels)[:, None]
        else:
            state *= tl.load(chunk_decay + unit)
        state += tl.dot(tl.trans(writing), corrected, input_precision=PRECISION)
        first, last = tl.load(store_begin + chunk), tl.load(store_begin + chunk + 1)
        if first < last:  # seldom; a loop that always stood here would keep loads from being made ahead
            for entry in range(first, last):
                tl.store(places + tl.load(store_slot + entry).to(tl.int64) * slot_stride, state, mask=mask)


@triton.jit
def output_kernel(
    reads, scores, states, new_values, out, chunk_row, chunk_length,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: values' columns x head x chunk. What queries read of the state before the chunk and of its rows."""
    head, chunk = tl.program_id(1), tl.program_id(2)
    unit = chunk.to(tl.int64) * HEADS + head
    steps, channels = tl.arange(0, SIZE), tl.arange(0, BLOCK_K)
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    q = tl.load(reads + (unit * SIZE + steps[:, None]) * BLOCK_K + channels[None, :])
    state = tl.load(states + (unit * BLOCK_K + channels[:, None]) * WIDTH + columns[None, :])
    result = tl.dot(q, state, input_precision=PRECISION)
    score = tl.load(scores + (unit * SIZE + steps[:, None]) * SIZE + steps[None, :])
    v = tl.load(new_values + (unit * SIZE + steps[:, None]) * WIDTH + columns[None, :])
    result += tl.dot(score, v, input_precision=PRECISION)
    rows = (tl.load(chunk_row + chunk) + steps).to(tl.int64)
    mask = (steps[:, None] < tl.load(chunk_length + chunk)) & (columns[None, :] < VALUE_DIM)
    places = out + (rows[:, None] * HEADS + head) * VALUE_DIM + columns[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=mask)
