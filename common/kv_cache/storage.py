"""The bytes of the cache: two block-major arenas and strided views into them. The one torch file of this package.

On the CPU an arena is an anonymous memory map: page-aligned, zero, touched only when used, so a large
``--kv-cache-memory`` costs nothing before it is needed. Entry 0 of each arena stays zero forever: it is the null block
and the zero state of a fresh sequence. Arenas live as long as this object, and longer while a view does.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from common.kv_cache.layout import TensorPlace, make_layout
from common.kv_cache.spec import KVCacheConfig

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVStorage:
    """
    Attributes:
        block_arenas: per attention group uint8 [num_blocks, block_bytes].
        slot_arena: uint8 [num_slots, slot_bytes].
    """

    def __init__(self, config: KVCacheConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.layout = make_layout(config.geometry, config.block_size)
        self.block_arenas = tuple(
            _arena(num_blocks, block_bytes, device)
            for num_blocks, block_bytes in zip(
                (config.num_blocks, *config.extra_num_blocks), self.layout.group_block_bytes or (0,), strict=True
            )
        )
        self.slot_arena = _arena(config.num_slots, self.layout.slot_bytes, device)
        self._attention: dict[int, tuple[Tensor, Tensor]] = {}
        for arena, group in zip(self.block_arenas, config.geometry.attention_groups, strict=False):
            for layer in group.layers:
                key, value = self.layout.attention[layer.layer_idx]
                self._attention[layer.layer_idx] = (_view(arena, key), _view(arena, value))
        self._state = {
            layer_idx: {name: _view(self.slot_arena, place) for name, place in places.items()}
            for layer_idx, places in self.layout.state.items()
        }

    @property
    def block_arena(self) -> Tensor:
        """The first attention group's."""
        return self.block_arenas[0]

    def attention_layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """K [num_blocks, block_size, num_kv_heads, head_size] and V [.., head_size_v] over the pool of its group."""
        return self._attention[layer_idx]

    def state_layer(self, layer_idx: int) -> dict[str, Tensor]:
        """name -> [num_slots, *shape]."""
        return self._state[layer_idx]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], group_id: int = 0) -> None:
        """Copy whole blocks (source, destination) of an attention group; all sources are read before any destination
        is written."""
        if not pairs:
            return
        sources, destinations = zip(*pairs, strict=True)
        index = torch.tensor([sources, destinations], dtype=torch.int64, device=self.device)
        arena = self.block_arenas[group_id]
        arena[index[1]] = arena[index[0]]

    def zero_block(self, block_id: int) -> None:
        self.block_arena[block_id].zero_()

    def zero_slot(self, slot_id: int) -> None:
        self.slot_arena[slot_id].zero_()


def _arena(num_units: int, unit_bytes: int, device: torch.device) -> Tensor:
    num_bytes = num_units * unit_bytes
    if num_bytes == 0:
        return torch.zeros((num_units, unit_bytes), dtype=torch.uint8, device=device)
    if device.type != "cpu":
        return torch.zeros((num_units, unit_bytes), dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_units, unit_bytes)


def _view(arena: Tensor, place: TensorPlace) -> Tensor:
    """The same tensor of every unit, [num_units, *shape], strided over the arena."""
    dtype = _TORCH_DTYPES[place.dtype]
    num_units, unit_bytes = arena.shape
    strides = [1]
    for size in reversed(place.shape[1:]):
        strides.insert(0, strides[0] * size)
    typed = arena.view(-1).view(dtype)
    return typed.as_strided(
        (num_units, *place.shape), (unit_bytes // dtype.itemsize, *strides), place.offset_bytes // dtype.itemsize
    )
