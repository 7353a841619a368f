"""Tensors, and whole units, cut among ranks by hand: what the planner of slices is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from common.geometry.families import FAMILIES
from common.geometry.geometry import model_geometry
from common.geometry.parts import with_mtp
from common.kv_cache.layout import TensorPlace, make_layout
from common.kv_cache.spec import DTYPE_BYTES, ModelGeometry, ShardPart
from tests.support.published import MODELS

LINE_BYTES = 64
"""On a multiple of which each tensor of a unit starts."""


def geometry_of(name: str) -> ModelGeometry:
    geometry = model_geometry(MODELS[name], "bfloat16")
    return with_mtp(geometry) if FAMILIES[geometry.model_type].has_mtp else geometry


def narrow(geometry: ModelGeometry) -> ModelGeometry:
    """With the published heads, groups and channels, and short axes behind the divided one."""
    return replace(
        geometry,
        attention_layers=tuple(
            replace(layer, head_size=min(layer.head_size, 3), head_size_v=min(layer.head_size_v, 5))
            for layer in geometry.attention_layers
        ),
        state_layers=tuple(
            replace(
                layer,
                tensors=tuple(
                    replace(tensor, shape=(tensor.shape[0], *(min(size, 3) for size in tensor.shape[1:])))
                    for tensor in layer.tensors
                ),
            )
            for layer in geometry.state_layers
        ),
    )


def held_by_hand(part: ShardPart, rank: int, tp: int) -> list[int]:
    """Of all heads dealt out in order; of each head's copies, those of neighbouring ranks."""
    if tp <= part.num_heads:
        return [head for head in range(part.num_heads) if head * tp // part.num_heads == rank]
    num_copies = tp // part.num_heads
    return [head for head in range(part.num_heads) for copy in range(num_copies) if rank == head * num_copies + copy]


def cut_by_hand(full: NDArray[np.int64], tensor: TensorPlace, rank: int, tp: int) -> NDArray[np.int64]:
    rows: list[int] = []
    start = 0
    for part in tensor.parts:
        for head in held_by_hand(part, rank, tp):
            rows += range(start + head * part.head_rows, start + (head + 1) * part.head_rows)
        start += part.num_rows
    return np.take(full, rows, axis=0)


def units_of(geometry: ModelGeometry, block_size: int) -> list[list[TensorPlace]]:
    """The tensors of a block of each group, and of a slot, in their order; where they lie is not looked at."""
    layout = make_layout(geometry, block_size)
    groups = [
        [tensor for layer in group.layers for tensor in layout.attention[layer.layer_idx]]
        for group in geometry.attention_groups
    ]
    return [*groups, [tensor for named in layout.state.values() for tensor in named.values()]]


def unit_by_hand(tensors: Sequence[TensorPlace], rank: int, tp: int) -> NDArray[np.int64]:
    """[bytes of the rank's unit]: the number that each byte has in the whole model; -1 between the tensors."""
    lines: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    start = 0
    for tensor in tensors:
        size = DTYPE_BYTES[tensor.dtype]
        num_elements = math.prod(tensor.shape)
        elements = start + size * np.arange(num_elements).reshape(tensor.shape)
        mine = (cut_by_hand(elements, tensor, rank, tp).reshape(-1, 1) + np.arange(size)).ravel()
        lines += [mine, np.full(-mine.size % LINE_BYTES, -1)]
        start += num_elements * size
    return np.concatenate(lines)
