"""What the chunks of the delta rules' spans are by themselves, without a state: see ``delta_spans``.

A chunk's keys do not fit into registers beside what is made of them, least of all in float32, whose products take
each operand as three of 16 bits: kernels go over slices of their columns, and invert a chunk's system by quarters.
"""

from __future__ import annotations

import triton
import triton.language as tl

L2_EPS = 1e-6
"""Added to a squared norm before its root, as transformers' own delta rules do."""
BLOCK = 16
"""Rows of the triangular system that are solved one after another, and the least side of a product."""


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
def _inverse(system, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Of 1 + ``system`` [2 * BLOCK, 2 * BLOCK], which is strictly lower triangular: its diagonal blocks D by forward
    substitution, both at once; the rest is -D^-1 @ (what is below the blocks) @ D^-1."""
    NUM: tl.constexpr = 2
    blocks, places = tl.arange(0, NUM), tl.arange(0, BLOCK)
    is_diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]  # [NUM, 1, NUM, 1]
    solved = -tl.sum(tl.where(is_diagonal, tl.reshape(system, [NUM, BLOCK, NUM, BLOCK]), 0.0), 2)
    for place in range(2, BLOCK):
        is_row = (places == place)[None, :, None]
        row = tl.sum(tl.where(is_row, solved, 0.0), 1)
        row += tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(is_row, row[:, None, :], solved)
    solved += tl.where(places[:, None] == places[None, :], 1.0, 0.0)[None]
    inverse = tl.reshape(tl.where(is_diagonal, solved[:, :, None, :], 0.0), [NUM * BLOCK, NUM * BLOCK])
    steps = tl.arange(0, NUM * BLOCK)
    below = tl.where(steps[:, None] // BLOCK > steps[None, :] // BLOCK, system, 0.0)
    nilpotent = tl.dot(inverse, below, input_precision=PRECISION)
    return inverse - tl.dot(nilpotent, inverse, input_precision=PRECISION)


@triton.jit
def invert_kernel(
    systems, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Program: head x chunk. The inverse of 1 + the chunk's system, in its place."""
    HALF: tl.constexpr = SIZE // 2
    tl.static_assert(HALF == 2 * BLOCK)
    unit = tl.program_id(1).to(tl.int64) * HEADS + tl.program_id(0)
    halves = tl.arange(0, HALF)
    upper = systems + unit * SIZE * SIZE + halves[:, None] * SIZE + halves[None, :]
    lower = upper + HALF * SIZE
    first = _inverse(tl.load(upper), BLOCK, PRECISION)
    tl.store(upper, first)
    second = _inverse(tl.load(lower + HALF), BLOCK, PRECISION)
    tl.store(lower + HALF, second)
    between = tl.dot(second, tl.load(lower), input_precision=PRECISION)
    tl.store(lower, -tl.dot(between, first, input_precision=PRECISION))


@triton.jit
def _load(source, rows, row_stride, channels, is_row, DIM: tl.constexpr):
    """Channels of rows in float32; 0 beyond either."""
    mask = is_row[:, None] & (channels[None, :] < DIM)
    return tl.load(source + rows[:, None] * row_stride + channels[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def prepare_kernel(
    query, key, decay, beta, cumulative, keys, write_keys, reads, scores, systems, chunk_decay, chunk_row,
    chunk_length,
    query_row, query_head, key_row, key_head, decay_row, decay_head, beta_row, beta_head,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, EPS: tl.constexpr,
    PER_CHANNEL: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: head x chunk. What the chunk's rows read of one another, and their keys and queries with the decays
    since its begin and until its end."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    unit = chunk.to(tl.int64) * HEADS + head
    dtype = scores.dtype.element_ty
    steps = tl.arange(0, SIZE)
    length = tl.load(chunk_length + chunk)
    is_row = steps < length
    rows = (tl.load(chunk_row + chunk) + steps).to(tl.int64)
    query += head // (HEADS // KEY_HEADS) * query_head
    key += head // (HEADS // KEY_HEADS) * key_head

    k_square, q_square = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for begin in range(0, BLOCK_K, BLOCK_C):
        channels = begin + tl.arange(0, BLOCK_C)
        k = _load(key, rows, key_row, channels, is_row, KEY_DIM)
        q = _load(query, rows, query_row, channels, is_row, KEY_DIM)
        k_square += tl.sum(k * k, 1)
        q_square += tl.sum(q * q, 1)
    k_scale = tl.rsqrt(k_square + EPS)[:, None]
    q_scale = (tl.rsqrt(q_square + EPS) * (KEY_DIM**-0.5))[:, None]

    lower = steps[:, None] > steps[None, :]
    if PER_CHANNEL:
        decays = cumulative + unit * SIZE * BLOCK_K
    else:
        log_decay = tl.load(decay + rows * decay_row + head * decay_head, mask=is_row, other=0.0).to(tl.float32)
        following = decay + (rows + 1) * decay_row + head * decay_head
        later = tl.load(following, mask=steps + 1 < length, other=0.0).to(tl.float32)
        tl.store(chunk_decay + unit, tl.exp(tl.sum(log_decay, 0)))
        since_begin = tl.exp(tl.cumsum(log_decay, 0))[:, None]
        until_end = tl.exp(tl.cumsum(later, 0, reverse=True))[:, None]
    system, read = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    for begin in range(0, BLOCK_K, BLOCK_C):
        channels = begin + tl.arange(0, BLOCK_C)
        k = _load(key, rows, key_row, channels, is_row, KEY_DIM) * k_scale
        q = _load(query, rows, query_row, channels, is_row, KEY_DIM) * q_scale
        if PER_CHANNEL:
            # A pair of rows is decayed by way of the last row before their places differ: j <= between < i, so that
            # both factors are decays. Level by level, half a group of rows reads the other half.
            since = tl.load(decays + steps[:, None] * BLOCK_K + channels[None, :])  # [SIZE, BLOCK_C]
            total = tl.load(decays + (SIZE - 1) * BLOCK_K + channels)
            tl.store(chunk_decay + unit * BLOCK_K + channels, tl.exp(total))
            read += tl.where(steps[:, None] == steps[None, :], tl.sum(q * k, 1)[:, None], 0.0)
            differing = steps[:, None] ^ steps[None, :]
            for level in range(LEVELS):
                between = (steps >> level + 1 << level + 1) + (1 << level) - 1
                middle = tl.load(decays + between[:, None] * BLOCK_K + channels[None, :])
                factor = tl.exp(-tl.abs(since - middle))
                decayed = (k * factor).to(dtype)
                is_pair = lower & (differing >> level == 1)
                system += tl.where(is_pair, tl.dot(decayed, tl.trans(decayed), input_precision=PRECISION), 0.0)
                asked = (q * factor).to(dtype)
                read += tl.where(is_pair, tl.dot(asked, tl.trans(decayed), input_precision=PRECISION), 0.0)
            since_begin = tl.exp(since)
            until_end = tl.exp(total[None, :] - since)
        else:
            columns = tl.trans(k.to(dtype))
            system += tl.dot(k.to(dtype), columns, input_precision=PRECISION)
            read += tl.dot(q.to(dtype), columns, input_precision=PRECISION)
        in_unit = (unit * SIZE + steps[:, None]) * BLOCK_K + channels[None, :]
        tl.store(reads + in_unit, (q * since_begin).to(dtype))
        tl.store(keys + in_unit, (k * since_begin).to(dtype))
        tl.store(write_keys + in_unit, (k * until_end).to(dtype))
    if not PER_CHANNEL:
        # Sums of their own: where decays are strong, a difference of sums since the begin has few digits left.
        factor = tl.exp(tl.cumsum(tl.where(lower, log_decay[:, None], 0.0), 0))
        system = tl.where(lower, system * factor, 0.0)
        read = tl.where(steps[:, None] >= steps[None, :], read * factor, 0.0)
    rate = tl.load(beta + rows * beta_row + head * beta_head, mask=is_row, other=0.0).to(tl.float32)
    pairs = (unit * SIZE + steps[:, None]) * SIZE + steps[None, :]
    tl.store(scores + pairs, read.to(dtype))
    tl.store(systems + pairs, system * rate[:, None])


@triton.jit
def solve_kernel(
    value, beta, inverses, keys, read_keys, new_values, chunk_row, chunk_length,
    value_row, value_head, beta_row, beta_head,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program: head x chunk. Values and keys by which each row corrects the state, the chunk's earlier rows told of."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    unit = chunk.to(tl.int64) * HEADS + head
    dtype = keys.dtype.element_ty
    steps = tl.arange(0, SIZE)
    is_row = steps < tl.load(chunk_length + chunk)
    rows = (tl.load(chunk_row + chunk) + steps).to(tl.int64)
    rate = tl.load(beta + rows * beta_row + head * beta_head, mask=is_row, other=0.0).to(tl.float32)
    inverse = tl.load(inverses + (unit * SIZE + steps[:, None]) * SIZE + steps[None, :])
    solved = (inverse * rate[None, :]).to(dtype)
    for begin in range(0, BLOCK_K, BLOCK_C):
        in_unit = (unit * SIZE + steps[:, None]) * BLOCK_K + begin + tl.arange(0, BLOCK_C)[None, :]
        tl.store(read_keys + in_unit, tl.dot(solved, tl.load(keys + in_unit), input_precision=PRECISION).to(dtype))
    for begin in range(0, WIDTH, BLOCK_V):
        columns = begin + tl.arange(0, BLOCK_V)
        v = _load(value + head * value_head, rows, value_row, columns, is_row, VALUE_DIM).to(dtype)
        corrected = tl.dot(solved, v, input_precision=PRECISION).to(dtype)
        tl.store(new_values + (unit * SIZE + steps[:, None]) * WIDTH + columns[None, :], corrected)
