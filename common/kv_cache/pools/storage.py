"""The bytes of the cache: two block-major arenas and strided views into them. The one torch file of this package.

On the CPU an arena is an anonymous memory map: page-aligned, zero, touched only when used (2 MB at a time where there
are large pages), so a large ``--kv-cache-memory`` costs nothing before it is needed. Entry 0 of each arena stays zero
forever: it is the null block and the zero state of a fresh sequence. Arenas live as long as this object, and longer
while a view does.

Two processes of a machine may have the same arenas, each with its own ``KVStorage`` over one ``memfd``: what one writes
is what the other reads.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from common.kv_cache.layout import TensorPlace, make_layout
from common.kv_cache.spec import DTYPE_BYTES, KVCacheConfig

DIGEST_HEX = 16
"""Hex digits of a digest: 64 bits find a wrong or damaged unit; they are no protection against an attacker."""
ARENA_ALIGNMENT = 2 << 20
"""Of arenas in shared memory, in bytes: a large page."""
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KVStorage:
    """``shared_fd``: of a ``memfd``, empty or with another process's storage of the same config, which becomes this
    one's memory; the caller closes it. On the CPU only.

    Attributes:
        block_arenas: per attention group uint8 [num_blocks, block_bytes].
        slot_arena: uint8 [num_slots, slot_bytes].
    """

    def __init__(self, config: KVCacheConfig, device: torch.device, shared_fd: int | None = None) -> None:
        self.config = config
        self.device = device
        self.layout = make_layout(config.geometry, config.block_size)
        sizes = [
            *zip(config.num_blocks, self.layout.group_block_bytes, strict=True),
            (config.num_slots, self.layout.slot_bytes),
        ]
        if shared_fd is None:
            arenas = [_arena(num_units, unit_bytes, device) for num_units, unit_bytes in sizes]
        else:
            arenas = _shared_arenas(sizes, shared_fd)
        *block_arenas, self.slot_arena = arenas
        self.block_arenas = tuple(block_arenas)
        self._attention: dict[int, tuple[Tensor, Tensor]] = {}
        for arena, group in zip(self.block_arenas, config.geometry.attention_groups, strict=True):
            for layer in group.layers:
                # In the order of an op's rows, where the head comes behind the token.
                key, value = (_view(arena, place).transpose(1, 2) for place in self.layout.attention[layer.layer_idx])
                self._attention[layer.layer_idx] = (key, value)
        # Per attention group, each head of each layer's K and V: its first byte, and the bytes of one token in it.
        self._attention_rows = tuple(
            [
                (place.offset_bytes + head * math.prod(place.shape[1:]) * item, place.shape[2] * item)
                for layer in group.layers
                for place in self.layout.attention[layer.layer_idx]
                for item in (DTYPE_BYTES[place.dtype],)
                for head in range(place.shape[0])
            ]
            for group in config.geometry.attention_groups
        )
        self._state = {
            layer_idx: {name: _view(self.slot_arena, place) for name, place in places.items()}
            for layer_idx, places in self.layout.state.items()
        }

    def attention_layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """K [num_blocks, block_size, num_kv_heads, head_size] and V [.., head_size_v] over the pool of its group;
        the rows of a block's head lie side by side."""
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

    def digest_block(self, block_id: int, num_valid: int, group_id: int = 0) -> str:
        """16 hex digits that say what a block's first ``num_valid`` rows of every head hold; a full block's are of all
        its bytes. Rows behind the valid ones may be anything, also be written meanwhile.

        Waits for the device of a device pool; hashes without the GIL.
        """
        content = _content(self.block_arenas[group_id], block_id)
        if num_valid == self.config.block_size:
            return _digest([content])
        valid = [
            content[offset : offset + num_valid * row_bytes] for offset, row_bytes in self._attention_rows[group_id]
        ]
        return _digest(valid)

    def digest_slot(self, slot_id: int) -> str:
        """16 hex digits that say what a slot holds."""
        return _digest([_content(self.slot_arena, slot_id)])

    def copy_rows(self, block_id: int, num_valid: int, group_id: int = 0) -> Tensor:
        """A copy of a block, uint8 [block_bytes], with zeros behind its first ``num_valid`` rows of every head."""
        block = self.block_arenas[group_id][block_id]
        copy = torch.zeros_like(block)
        for offset, row_bytes in self._attention_rows[group_id]:
            rows = slice(offset, offset + num_valid * row_bytes)
            copy[rows] = block[rows]
        return copy

    def zero_block(self, block_id: int, group_id: int = 0) -> None:
        self.block_arenas[group_id][block_id].zero_()
        _settle(self.device)

    def zero_slot(self, slot_id: int) -> None:
        self.slot_arena[slot_id].zero_()
        _settle(self.device)


def _arena(num_units: int, unit_bytes: int, device: torch.device) -> Tensor:
    num_bytes = num_units * unit_bytes
    if num_bytes == 0:
        return torch.zeros((num_units, unit_bytes), dtype=torch.uint8, device=device)
    if device.type != "cpu":
        arena = torch.zeros((num_units, unit_bytes), dtype=torch.uint8, device=device)
        _settle(device)  # a read of a peer is in no order with the zeros
        return arena
    return _mapped(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), num_units, unit_bytes)


def _shared_arenas(sizes: Sequence[tuple[int, int]], shared_fd: int) -> list[Tensor]:
    """One behind the other; of no bytes, none of the memory."""
    starts = [0]
    for num_units, unit_bytes in sizes:
        starts.append(starts[-1] + math.ceil(num_units * unit_bytes / ARENA_ALIGNMENT) * ARENA_ALIGNMENT)
    os.ftruncate(shared_fd, starts[-1])
    return [
        _mapped(mmap.mmap(shared_fd, num_units * unit_bytes, offset=start), num_units, unit_bytes)
        if num_units * unit_bytes
        else torch.zeros((num_units, unit_bytes), dtype=torch.uint8)
        for start, (num_units, unit_bytes) in zip(starts, sizes, strict=False)
    ]


def _mapped(memory: mmap.mmap, num_units: int, unit_bytes: int) -> Tensor:
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; states of a batch are read at 31 GB/s instead of 18 (Zen 4 under KVM)
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_units, unit_bytes)


def _settle(device: torch.device) -> None:
    """Returns when a device has done all that any thread gave it, on whichever stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _content(arena: Tensor, unit_id: int) -> memoryview:
    """One unit's bytes; a copy when the arena is not in host memory."""
    _settle(arena.device)
    return memoryview(arena[unit_id].cpu().numpy())


def _digest(parts: Iterable[memoryview]) -> str:
    # Measured on a CPU with SHA instructions, 64 KiB: sha256 1.73 GB/s, sha1 1.84, blake2b 0.70, md5 0.72, sha3 0.49.
    digest = hashlib.sha256(usedforsecurity=False)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:DIGEST_HEX]


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
