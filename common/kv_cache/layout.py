"""Where each layer's bytes lie inside a block and a slot. Torch-free, one layout for every backend and every node.

A block is one contiguous byte range: for each layer of its attention group in order K then V, each [num_kv_heads,
block_size, head_size] row-major, so that some of its heads are one range too. A slot is one contiguous byte range: for
each recurrent layer in order its tensors.
Every tensor starts on a multiple of ``ALIGNMENT_BYTES``, and slots are padded to one.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv_cache.spec import DTYPE_BYTES, ModelGeometry, ShardPart

LAYOUT_VERSION = 2
"""Part of every key and of a node's fingerprint: raised when the same bytes would mean something else."""
ALIGNMENT_BYTES = 64
"""Start of every tensor in a unit: a cache line, which is enough for any element type."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor inside a unit: byte offset from the unit's start, shape without the unit dimension. Tensor parallelism
    divides the first axis by its ``parts``."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[ShardPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """``attention``: layer_idx -> (K place, V place) within a block of its group (a place of head size 0 has no bytes);
    ``state``: layer_idx -> name -> place. 0 bytes: no such pool. ``group_block_bytes``: per attention group.
    """

    group_block_bytes: tuple[int, ...]
    slot_bytes: int
    attention: dict[int, tuple[TensorPlace, TensorPlace]]
    state: dict[int, dict[str, TensorPlace]]


def make_layout(geometry: ModelGeometry, block_size: int) -> Layout:
    group_block_bytes: list[int] = []
    attention: dict[int, tuple[TensorPlace, TensorPlace]] = {}
    for group in geometry.attention_groups:
        block_bytes = 0
        for layer in group.layers:
            places = []
            for head_size in (layer.head_size, layer.head_size_v):
                shape = (layer.num_kv_heads, block_size, head_size)
                place = TensorPlace(block_bytes, shape, layer.dtype, (layer.kv_heads,))
                num_bytes = block_size * layer.num_kv_heads * head_size * DTYPE_BYTES[layer.dtype]
                block_bytes = _aligned(block_bytes + num_bytes)
                places.append(place)
            attention[layer.layer_idx] = (places[0], places[1])
        group_block_bytes.append(block_bytes)
    slot_bytes = 0
    state: dict[int, dict[str, TensorPlace]] = {}
    for state_layer in geometry.state_layers:
        named = state[state_layer.layer_idx] = {}
        for tensor in state_layer.tensors:
            named[tensor.name] = TensorPlace(slot_bytes, tensor.shape, tensor.dtype, tensor.parts)
            slot_bytes = _aligned(slot_bytes + tensor.num_bytes)
    return Layout(tuple(group_block_bytes), slot_bytes, attention, state)


def transfer_bytes(geometry: ModelGeometry, block_size: int) -> tuple[float, int]:
    """What moves when a node of this geometry takes in a prefix: bytes of K/V a token, and of its state. Of all ranks
    together: each reads what it keeps, heads that others hold as well included. What a window keeps does not grow with
    the prefix, and is not counted."""
    layout = make_layout(geometry, block_size)
    groups = zip(geometry.attention_groups, layout.group_block_bytes, strict=True)
    block_bytes = sum(num_bytes for group, num_bytes in groups if not group.window)
    return geometry.num_ranks * block_bytes / block_size, geometry.num_ranks * layout.slot_bytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
