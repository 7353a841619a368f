"""Writes a step's keys and values to their blocks, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from common.ops.step.device_step import DeviceStep

_TILE_ELEMENTS = 4096
"""Elements of one head's keys that a program moves: 32 rows of 128."""


def write_kv(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, step: DeviceStep) -> None:
    """Write ``key`` [num_tokens, num_kv_heads, head_size], ``value`` [.., head_size_v] to ``step.write_place``; rows
    without a place are left out. ``head_size_v`` 0: there are only keys.

    Pools: [num_blocks, block_size, num_kv_heads, head_size(_v)], with any strides but 1 of the last dimension."""
    num_tokens, num_kv_heads, head_size = key.shape
    head_size_v = value.shape[-1]
    if not num_tokens:
        return
    key, value = adjacent(key), adjacent(value)
    block_d = triton.next_power_of_2(max(head_size, head_size_v))
    # Few rows: a program each, so that a decode step's writes run side by side.
    block_t = max(1, min(_TILE_ELEMENTS // block_d, triton.next_power_of_2(num_tokens) // 8))
    write_kv_kernel[(triton.cdiv(num_tokens, block_t), num_kv_heads)](
        key,
        value,
        k_pool,
        v_pool,
        step.write_place,
        num_tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        BLOCK_SIZE=k_pool.shape[1],
        D=head_size,
        DV=head_size_v,
        BT=block_t,
        BD=block_d,
        num_warps=4,
    )


def adjacent(x: Tensor) -> Tensor:
    """``x`` with the elements of its last dimension side by side; models give it so."""
    return x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


@triton.jit
def write_kv_kernel(
    key,
    value,
    k_pool,
    v_pool,
    write_place,
    num_tokens,
    key_row,
    key_head,
    value_row,
    value_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Program: BT packed rows x K/V head."""
    rows, head = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1)
    cols = tl.arange(0, BD)[None, :]
    place = tl.load(write_place + rows, mask=rows < num_tokens, other=-1)
    written = (place >= 0)[:, None]
    block, token = (place // BLOCK_SIZE).to(tl.int64), place % BLOCK_SIZE
    rows = rows.to(tl.int64)
    ok = written & (cols < D)
    rows_of_keys = tl.load(key + (rows * key_row + head * key_head)[:, None] + cols, mask=ok)
    to = (block * k_block + token * k_token + head * k_head)[:, None] + cols
    tl.store(k_pool + to, rows_of_keys.to(k_pool.dtype.element_ty), mask=ok)
    if DV > 0:
        ok = written & (cols < DV)
        rows_of_values = tl.load(value + (rows * value_row + head * value_head)[:, None] + cols, mask=ok)
        to = (block * v_block + token * v_token + head * v_head)[:, None] + cols
        tl.store(v_pool + to, rows_of_values.to(v_pool.dtype.element_ty), mask=ok)
