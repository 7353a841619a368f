"""Paged attention: decode rows and spans, each in one launch, or two where keys are shared out to several programs.

How the work is cut depends on numbers of rows, on shapes and on the device, never on what is in the device's tables, so
that a decode step may be recorded as a graph.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from common.ops.step.device_step import DeviceStep
from common.ops.triton.attention_kernels import attend_kernel, combine_kernel
from common.ops.triton.kv import adjacent

_MAX_SPLITS = 64
_MIN_SPLIT_KEYS = 512
"""Spans' keys are not shared out finer than that: it would cost more than the second launch brings."""
_FITS_64_KEYS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Whether 64 keys of 256 columns fit the registers of 9.0: Triton 3.6 spills eight bytes."""


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, step: DeviceStep, scale: float
) -> Tensor:
    """Attention of every packed row over its own sequence, whose keys and values are all in the pools by now.

    Args:
        query: [num_tokens, num_heads, head_size].
        key, value: [num_tokens, num_kv_heads, head_size(_v)]; not read.
        k_pool, v_pool: [num_blocks, block_size, num_kv_heads, head_size(_v)]; ``v_pool`` may be columns of ``k_pool``.
        scale: factor on the scores, above 0.

    Returns: [num_tokens, num_heads, head_size_v] in the query's dtype; zeros in decode rows of padding.
    """
    num_tokens, num_heads, _ = query.shape
    head_size_v = value.shape[-1]
    out = query.new_empty(num_tokens, num_heads, head_size_v)
    shape = Shape.of(query, k_pool, v_pool)
    call = _Call(adjacent(query), k_pool, v_pool, out, step, scale * math.log2(math.e), shape)
    if step.num_decode:
        tiling = choose_tiling(shape, 1)
        splits = _num_splits(step.num_decode * shape.num_groups(tiling), query.device)
        call.attend(tiling, splits, step.decode_rows, None, step.decode_len, step.decode_begin)
    if step.num_spans:
        tiling = choose_tiling(shape, max(span.num_rows for span in step.span_rows))
        tiles = step.tiles(tiling.num_tokens(shape.ratio))
        splits = _num_splits(tiles.num_tiles * shape.num_groups(tiling), query.device)
        most_keys = max(span.start + span.num_rows for span in step.span_rows)
        splits = min(splits, _power_of_2_below(max(1, most_keys // _MIN_SPLIT_KEYS)))
        call.attend(tiling, splits, tiles.row, tiles.length, tiles.start, tiles.table)
    return out


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the heads of a layer. ``is_shared``: values are the first columns of the keys. ``capability``: the device's,
    the major part."""

    dtype: torch.dtype
    num_kv_heads: int
    ratio: int
    head_size: int
    head_size_v: int
    is_shared: bool
    capability: int

    @classmethod
    def of(cls, query: Tensor, k_pool: Tensor, v_pool: Tensor) -> Shape:
        num_kv_heads, head_size = k_pool.shape[2:]
        is_shared = k_pool.data_ptr() == v_pool.data_ptr() and k_pool.stride() == v_pool.stride()
        ratio = query.shape[1] // num_kv_heads
        capability = _device(query.device).capability
        return cls(k_pool.dtype, num_kv_heads, ratio, head_size, v_pool.shape[3], is_shared, capability)

    def num_groups(self, tiling: Tiling) -> int:
        return self.num_kv_heads * int(triton.cdiv(self.ratio, tiling.block_m))


@dataclass(frozen=True, slots=True)
class Tiling:
    """``block_m`` query rows against ``block_n`` keys at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def num_tokens(self, ratio: int) -> int:
        """Of a tile with ``ratio`` query heads to a K/V head."""
        return max(1, self.block_m // ratio)


def split_columns(size: int) -> tuple[int, int]:
    """Two powers of two of at least 16 and 32, or one and 0, which together are at least ``size``. Four warps share 32
    columns evenly, but not 16."""
    whole = max(16, triton.next_power_of_2(size))
    first = max(16, _power_of_2_below(size))
    rest = max(32, triton.next_power_of_2(size - first)) if size > first else 0
    return (first, rest) if first + rest < whole else (whole, 0)


@functools.cache
def choose_tiling(shape: Shape, num_tokens: int) -> Tiling:
    """For tiles of at most ``num_tokens`` of a sequence; 1: decode rows. Chosen by shared memory and registers,
    which may not spill: ``tests/engine/triton/test_compile.py``."""
    widest = max(sum(split_columns(shape.head_size)), sum(split_columns(shape.head_size_v)))
    rows = min(128, max(16, triton.next_power_of_2(min(num_tokens, 128) * shape.ratio)))
    if shape.dtype == torch.float32:  # products of full precision, without tensor cores
        if widest > 256:
            return Tiling(16, 16, 8, 2)
        # Columns in two parts, 64 + 32, leave too few registers for 32 keys on 10.0.
        return Tiling(min(rows, 32 if widest <= 64 else 16), 32 if widest <= 64 or widest == 128 else 16, 8, 1)
    if widest > 256:
        return Tiling(min(rows, 64 if shape.capability >= 9 else 32), 32, 8, 3)
    if rows < 128:
        return Tiling(rows, 64 if widest <= 128 else 32, 4, 3)
    if widest <= 128:
        return Tiling(128, 64 if shape.capability >= 9 or widest <= 64 else 32, 8, 3)
    # Only 9 holds the most of both: 8 multiplies out of registers, 10 moves sums through them.
    most_keys = 64 if shape.capability == 9 and _FITS_64_KEYS else 32
    return Tiling(128 if shape.capability >= 9 else 64, most_keys, 8, 3)


def attend_constants(
    shape: Shape, tiling: Tiling, splits: int, is_decode: bool, has_seen: bool, window: int, block_size: int
) -> dict[str, int]:
    """What ``attend_kernel`` is compiled for."""
    d1, d2 = split_columns(shape.head_size)
    v1, v2 = split_columns(shape.head_size_v)
    num_tokens = 1 if is_decode else tiling.num_tokens(shape.ratio)
    return {
        "DECODE": is_decode,
        "HAS_SEEN": has_seen,
        "WINDOW": window,
        "BLOCK_SIZE": block_size,
        "KV_HEADS": shape.num_kv_heads,
        "RATIO": shape.ratio,
        "D": shape.head_size,
        "DV": shape.head_size_v,
        "D1": d1,
        "D2": d2,
        "V1": v1,
        "V2": v2,
        "SHARED": shape.is_shared and (v1, v2) == (d1, 0),
        "SPLITS": splits,
        "ROWS": min(shape.ratio, tiling.block_m) * num_tokens,
        "BM": tiling.block_m,
        "BN": tiling.block_n,
    }


class _Call:
    def __init__(
        self, query: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, step: DeviceStep, scale: float, shape: Shape
    ) -> None:
        self._query, self._k_pool, self._v_pool, self._out = query, k_pool, v_pool, out
        self._step, self._scale, self._shape = step, scale, shape

    def attend(
        self, tiling: Tiling, splits: int, row: Tensor, length: Tensor | None, start: Tensor, table: Tensor
    ) -> None:
        shape, step, out = self._shape, self._step, self._out
        is_decode = length is None
        has_seen = step.seen is not None and not is_decode
        units = row.shape[0] * shape.num_groups(tiling)
        block_size = self._k_pool.shape[1]
        constants = attend_constants(shape, tiling, splits, is_decode, has_seen, step.window, block_size)
        rows = constants["ROWS"]
        part, part_lse = out, out
        if splits > 1:
            part = out.new_empty(units, splits, rows, shape.head_size_v, dtype=torch.float32)
            part_lse = part.new_empty(units, splits, rows)
        attend_kernel[(units, splits)](
            self._query,
            self._k_pool,
            self._v_pool,
            out,
            part,
            part_lse,
            row,
            row if length is None else length,
            start,
            step.seen if has_seen else row,
            table,
            step.block_ids,
            self._scale,
            *self._query.stride()[:2],
            *self._k_pool.stride()[:3],
            *self._v_pool.stride()[:3],
            **constants,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        if splits > 1:
            block_v = min(128, triton.next_power_of_2(shape.head_size_v))
            combine_kernel[(units, rows, triton.cdiv(shape.head_size_v, block_v))](
                part,
                part_lse,
                out,
                row,
                row if length is None else length,
                DECODE=is_decode,
                KV_HEADS=shape.num_kv_heads,
                RATIO=shape.ratio,
                DV=shape.head_size_v,
                SPLITS=splits,
                ROWS=rows,
                BM=tiling.block_m,
                BV=block_v,
                num_warps=4,
            )


def _power_of_2_below(n: int) -> int:
    """The largest that is at most n."""
    return 1 << (n.bit_length() - 1)


def _num_splits(num_programs: int, device: torch.device) -> int:
    """How many programs share the keys of a tile, so that there are two to four for every multiprocessor."""
    return min(_MAX_SPLITS, _power_of_2_below(max(1, 4 * _device(device).num_multiprocessors // num_programs)))


@dataclass(frozen=True, slots=True)
class _Device:
    num_multiprocessors: int
    capability: int


@functools.cache
def _device(device: torch.device) -> _Device:
    if device.type != "cuda":
        return _Device(8, 9)  # the interpreter: few programs, but both ways
    properties = torch.cuda.get_device_properties(device)
    return _Device(properties.multi_processor_count, properties.major)
