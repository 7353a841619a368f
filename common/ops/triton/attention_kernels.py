"""Kernels of paged attention: online softmax over the keys of a block table (FlashAttention-2, arXiv 2307.08691), for
tiles of query rows, with the keys of a tile shared out to several programs where there are few tiles.

A tile's BM rows are tokens x query heads of one K/V head (of a part of them where there are more than BM), so that keys
are read once for all of these. The columns of keys and values are held in two parts, powers of two, the second of which
may be absent (0): 576 = 512 + 64, 80 = 64 + 16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _columns(at, ok, start, width: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Columns [start, start + width) of the rows at ``at``; 0 in those that are not ``ok``, if MASKED, and beyond D."""
    cols = start + tl.arange(0, width)[None, :]
    if start + width > D:
        mask = cols < D
        if MASKED:
            mask = mask & ok[:, None]
        x = tl.load(at[:, None] + cols, mask=mask, other=0.0)
    elif MASKED:
        x = tl.load(at[:, None] + cols, mask=ok[:, None], other=0.0)
    else:
        x = tl.load(at[:, None] + cols)
    return x


@triton.jit
def _attend_block(
    acc,
    acc2,
    m,
    total,
    q,
    q2,
    first,
    low,
    high,
    position,
    behind,
    table,
    k_pool,
    v_pool,
    scale,
    k_block,
    k_token,
    v_block,
    v_token,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
):
    """Takes in the keys at positions [first, first + BN). Not MASKED: all rows see all of them. MASKED: nothing outside
    [low, high) is read, and of the rest a row sees those before ``behind`` and within its window."""
    keys = first + tl.arange(0, BN)
    ok = (keys >= low) & (keys < high)
    if MASKED:
        block = tl.load(table + keys // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
    else:
        block = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
    token = keys % BLOCK_SIZE
    at = k_pool + block * k_block + token * k_token
    k = _columns(at, ok, 0, D1, D, MASKED)
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if D2 > 0:
        s = tl.dot(q2, tl.trans(_columns(at, ok, D1, D2, D, MASKED)), s, input_precision="ieee")
    if MASKED:
        seen = ok[None, :] & (keys[None, :] < behind[:, None])
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    base = m_new
    if MASKED:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # the row has seen no key yet
    p = tl.exp2(s * scale - base[:, None])
    factor = tl.exp2(m - base)
    total = total * factor + tl.sum(p, 1)
    acc = acc * factor[:, None]
    at = v_pool + block * v_block + token * v_token
    v = k if SHARED else _columns(at, ok, 0, V1, DV, MASKED)
    p = p.to(v.dtype)
    acc = tl.dot(p, v, acc, input_precision="ieee")
    if V2 > 0:
        acc2 = tl.dot(p, _columns(at, ok, V1, V2, DV, MASKED), acc2 * factor[:, None], input_precision="ieee")
    return acc, acc2, m_new, total


@triton.jit
def attend_kernel(
    query,
    k_pool,
    v_pool,
    out,
    part,
    part_lse,
    tile_row,
    tile_length,
    tile_start,
    seen,
    table_begin,
    block_ids,
    scale,
    q_row,
    q_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    DECODE: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    SHARED: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Program: (tile, K/V head, part of its RATIO query heads) x split of the keys.

    Args:
        tile_row, tile_length, tile_start: as ``DeviceTiles``; DECODE: a tile is a decode row, ``tile_start`` is
            ``decode_len``, ``tile_length`` is not read.
        part, part_lse: [tiles * K/V heads * parts, SPLITS, ROWS, DV] and without DV, float32: results of the splits and
            log2 of their sums, if SPLITS > 1. ROWS <= BM: most rows that a tile has.
        scale: of the scores, times log2(e).
        SHARED: values are the first D1 columns of the keys.
    """
    HEADS: tl.constexpr = min(RATIO, BM)
    PARTS: tl.constexpr = (RATIO + BM - 1) // BM
    unit, i_split = tl.program_id(0), tl.program_id(1)
    i_tile, i_group = unit // (KV_HEADS * PARTS), unit % (KV_HEADS * PARTS)
    i_kv = i_group // PARTS
    row, start = tl.load(tile_row + i_tile), tl.load(tile_start + i_tile)
    if DECODE:
        length, start = tl.minimum(start, 1), tl.maximum(start - 1, 0)
    else:
        length = tl.load(tile_length + i_tile)
    o_r = tl.arange(0, BM)
    head = i_group % PARTS * BM + o_r % HEADS
    token = o_r // HEADS
    ok = (token < length) & (head < RATIO)
    head += i_kv * RATIO
    position = start + token
    behind = position + 1
    high = start + length
    if HAS_SEEN:
        behind = tl.load(seen + row + token, mask=ok, other=0)
        high = tl.max(behind, 0)
    low = tl.maximum(start - WINDOW + 1, 0) if WINDOW > 0 else 0

    begin = low // BN * BN
    end = high
    if SPLITS > 1:
        keys_each = tl.cdiv(tl.cdiv(high - begin, SPLITS), BN) * BN
        begin += i_split * keys_each
        end = tl.minimum(begin + keys_each, high)

    rows = (row + token).to(tl.int64)
    at = query + rows * q_row + head * q_head
    q = _columns(at, ok, 0, D1, D, True).to(k_pool.dtype.element_ty)
    q2 = q
    if D2 > 0:
        q2 = _columns(at, ok, D1, D2, D, True).to(k_pool.dtype.element_ty)
    m = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, V1], tl.float32)
    acc2 = total
    if V2 > 0:
        acc2 = tl.zeros([BM, V2], tl.float32)
    table = block_ids + tl.load(table_begin + i_tile)
    k_pool += i_kv * k_head
    v_pool += i_kv * v_head

    masked_from = begin
    if WINDOW == 0 and not DECODE and not HAS_SEEN and V1 <= 256:
        # Blocks that every row sees whole. A decode row has one block that it does not, too few for a loop of its own;
        # two loops over latents do not fit the registers.
        masked_from = tl.minimum(tl.maximum((start + 1) // BN * BN, begin), end // BN * BN)
        for first in range(begin, masked_from, BN):
            acc, acc2, m, total = _attend_block(
                acc, acc2, m, total, q, q2, first, low, high, position, behind, table, k_pool, v_pool, scale,
                k_block, k_token, v_block, v_token,
                False, BLOCK_SIZE, WINDOW, D, DV, D1, D2, V1, V2, SHARED, BN,
            )  # fmt: skip
    for first in range(masked_from, end, BN):
        acc, acc2, m, total = _attend_block(
            acc, acc2, m, total, q, q2, first, low, high, position, behind, table, k_pool, v_pool, scale,
            k_block, k_token, v_block, v_token,
            True, BLOCK_SIZE, WINDOW, D, DV, D1, D2, V1, V2, SHARED, BN,
        )  # fmt: skip

    share = 1.0 / tl.where(total > 0, total, 1.0)
    acc *= share[:, None]
    cols = tl.arange(0, V1)[None, :]
    if SPLITS == 1:
        if DECODE:
            ok = (token == 0) & (head < (i_kv + 1) * RATIO)  # rows of padding get zeros
        to = out + (rows * (KV_HEADS * RATIO) + head) * DV
        at = to
        tl.store(to[:, None] + cols, acc.to(out.dtype.element_ty), mask=ok[:, None] & (cols < DV))
    else:
        places = (unit.to(tl.int64) * SPLITS + i_split) * ROWS + o_r
        lse = tl.where(total > 0, m + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(part_lse + places, lse, mask=o_r < ROWS)
        ok = ok & (total > 0)
        to = part + places * DV
        tl.store(to[:, None] + cols, acc, mask=ok[:, None] & (cols < DV))
    if V2 > 0:
        cols = V1 + tl.arange(0, V2)[None, :]
        rest = (acc2 * share[:, None]).to(to.dtype.element_ty)
        tl.store(to[:, None] + cols, rest, mask=ok[:, None] & (cols < DV))


@triton.jit
def combine_kernel(
    part,
    part_lse,
    out,
    tile_row,
    tile_length,
    DECODE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    DV: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
):
    """Program: (tile, K/V head, part of its query heads) x row of the tile x BV columns. Sums up the splits, each by
    its share in the whole sum; a split that has seen no key left only its -inf."""
    HEADS: tl.constexpr = min(RATIO, BM)
    PARTS: tl.constexpr = (RATIO + BM - 1) // BM
    unit, o_r = tl.program_id(0), tl.program_id(1)
    i_tile, i_group = unit // (KV_HEADS * PARTS), unit % (KV_HEADS * PARTS)
    token, head = o_r // HEADS, i_group % PARTS * BM + o_r % HEADS
    length = 1 if DECODE else tl.load(tile_length + i_tile)
    if (token >= length) | (head >= RATIO):
        return
    cols = tl.program_id(2) * BV + tl.arange(0, BV)[None, :]
    places = (unit.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)) * ROWS + o_r
    lse = tl.load(part_lse + places)
    most = tl.max(lse, 0)
    shares = tl.exp2(lse - tl.where(most == float("-inf"), 0.0, most))
    mask = (lse > float("-inf"))[:, None] & (cols < DV)
    parts = tl.load(part + places[:, None] * DV + cols, mask=mask, other=0.0)
    total = tl.sum(shares, 0)
    result = tl.sum(parts * shares[:, None], 0) / tl.where(total > 0, total, 1.0)
    row = (tl.load(tile_row + i_tile) + token).to(tl.int64)
    to = out + (row * (KV_HEADS * RATIO) + i_group // PARTS * RATIO + head) * DV + cols
    tl.store(to, result[None, :].to(out.dtype.element_ty), mask=cols < DV)
