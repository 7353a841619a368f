"""Which objects a prefix is in a tier, and where their bytes are in this node's pools."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.pools.generations import GenerationTables
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.sharing.leases import LeasedClosure
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.kv_cache.tiers.stored_prefix import Extent, StoredPrefix, blocks_per_extent
from common.tiers.object_header import HEADER_BYTES, KEY_BYTES, ObjectHeader, ObjectKind


def tier_fingerprint(layout_fingerprint: str) -> bytes:
    """Of model, dtype, layout and block size, as headers have it."""
    return hashlib.blake2b(layout_fingerprint.encode(), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class WritableObject:
    """``buffers``: read when they are asked for. ``is_unchanged``: whether they still are what they were leased as."""

    header: ObjectHeader
    buffers: Callable[[], list[memoryview]]
    is_unchanged: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class ReadableObject:
    """``deliver``: takes the payload apart: into the pools' memory, which must be the pull's still; returns the output
    row, where there is one."""

    header: ObjectHeader
    deliver: Callable[[torch.Tensor], torch.Tensor | None]


class PrefixObjects:
    """``row_dtype``: of output rows, [hidden_size]."""

    def __init__(
        self, storage: KVStorage, generations: GenerationTables, layout_fingerprint: str, row_dtype: torch.dtype
    ) -> None:
        self.fingerprint = tier_fingerprint(layout_fingerprint)
        self._storage = storage
        self._generations = generations
        self._groups = storage.config.geometry.attention_groups
        self._block_bytes = storage.layout.group_block_bytes
        self._slot_bytes = storage.layout.slot_bytes
        self._row_dtype = row_dtype
        self._row_bytes = storage.config.geometry.hidden_size * row_dtype.itemsize

    # --- headers

    def extent(self, extent: Extent, parent_key: bytes) -> ObjectHeader:
        """``parent_key``: of the prefix before its first block."""
        return ObjectHeader(
            kind=ObjectKind.EXTENT,
            fingerprint=self.fingerprint,
            group_id=extent.group_id,
            key=extent.key,
            parent_key=parent_key,
            position=(extent.start + extent.num_blocks) * self._storage.config.block_size,
            payload_bytes=extent.num_blocks * self._block_bytes[extent.group_id],
            start=extent.start,
            num_blocks=extent.num_blocks,
        )

    def state(self, checkpoint: Checkpoint, *, has_row: bool) -> ObjectHeader:
        row_bytes = self._row_bytes if has_row else 0
        return ObjectHeader(
            kind=ObjectKind.STATE,
            fingerprint=self.fingerprint,
            group_id=0,
            key=checkpoint.key,
            parent_key=checkpoint.boundary_key,
            position=checkpoint.position,
            payload_bytes=self._slot_bytes + row_bytes,
            history=checkpoint.history,
            origin=checkpoint.origin,
            tail_tokens=checkpoint.tail_tokens,
            row_bytes=row_bytes,
        )

    def tail(self, checkpoint: Checkpoint) -> ObjectHeader | None:
        """None: it ends with a block, or the model has no attention."""
        if not (checkpoint.tail_tokens and self._groups):
            return None
        return ObjectHeader(
            kind=ObjectKind.TAIL,
            fingerprint=self.fingerprint,
            group_id=0,
            key=checkpoint.key,
            parent_key=checkpoint.boundary_key,
            position=checkpoint.position,
            payload_bytes=sum(self._block_bytes),
        )

    def own_bytes(self, checkpoint: Checkpoint) -> int:
        """Of its state, tail and row, as files."""
        own = [self.state(checkpoint, has_row=checkpoint.output_row is not None), self.tail(checkpoint)]
        return sum(HEADER_BYTES + header.payload_bytes for header in own if header is not None)

    def unshared(self, prefix: StoredPrefix, extents: Sequence[Extent]) -> list[ObjectHeader]:
        """The names of a prefix's own objects and of ``extents``, to delete them."""
        own = [self.state(prefix.checkpoint, has_row=prefix.has_row), self.tail(prefix.checkpoint)]
        return [header for header in own if header is not None] + [self.extent(each, b"") for each in extents]

    @property
    def largest_bytes(self) -> int:
        """Payload of the largest object."""
        per_extent = blocks_per_extent(self._storage.config.block_size)
        extents = [per_extent * num_bytes for num_bytes in self._block_bytes]
        return int(max([self._slot_bytes + self._row_bytes, sum(self._block_bytes), *extents]))

    # --- to be written

    def writable(self, prefix: StoredPrefix, lease: LeasedClosure) -> Iterator[WritableObject]:
        """The state last: who finds it finds the rest. Units must be leased; where a lease has ended, ``is_unchanged``
        says so."""
        starts = [len(table) - len(chain) + 1 for table, chain in zip(lease.prefix.tables, lease.chains, strict=True)]
        for extent in prefix.extents:
            group_id, begin, end = extent.group_id, extent.start, extent.start + extent.num_blocks
            parent_key = lease.chains[group_id][begin - starts[group_id]]
            block_ids = lease.prefix.tables[group_id][begin:end]
            generations = lease.prefix.generations[group_id][begin:end]
            yield WritableObject(
                self.extent(extent, parent_key),
                lambda block_ids=block_ids, group_id=group_id: self._blocks(group_id, block_ids),  # type: ignore[misc]
                self._unchanged(self._groups[group_id].pool_name, block_ids, generations),
            )
        checkpoint = lease.checkpoint
        tail = self.tail(checkpoint)
        if tail is not None:
            tails = zip(self._groups, checkpoint.tail_block_ids, lease.tail_generations, strict=True)
            same = [self._unchanged(group.pool_name, (unit,), (generation,)) for group, unit, generation in tails]
            yield WritableObject(tail, lambda: self._tails(checkpoint), lambda: all(each() for each in same))
        slot_id, row = lease.prefix.slot_id, lease.prefix.output_row if prefix.has_row else None
        yield WritableObject(
            self.state(checkpoint, has_row=row is not None),
            lambda: self._state(slot_id, row),
            self._unchanged("slots", (slot_id,), (lease.prefix.slot_generation,)) if slot_id else lambda: True,
        )

    def copies(
        self, prefix: StoredPrefix, stored: Callable[[ObjectHeader], tuple[ObjectHeader, memoryview]]
    ) -> list[WritableObject]:
        """Of what another tier has of a prefix (``HostMemory.stored``), the state last. Raises ObjectReadError."""
        state = self.state(prefix.checkpoint, has_row=prefix.has_row)
        named = [*(self.extent(each, b"") for each in prefix.extents), self.tail(prefix.checkpoint), state]
        found = [stored(header) for header in named if header is not None]
        return [
            WritableObject(header, lambda payload=payload: [payload], lambda: True)  # type: ignore[misc]
            for header, payload in found
        ]

    def _unchanged(self, pool_name: str, unit_ids: Sequence[int], generations: Sequence[int]) -> Callable[[], bool]:
        return lambda: self._generations.generations(pool_name, unit_ids) == tuple(generations)

    def _blocks(self, group_id: int, block_ids: Sequence[int]) -> list[memoryview]:
        arena = self._storage.block_arenas[group_id]
        if arena.device.type == "cpu":
            return [memoryview(arena[block_id].numpy()) for block_id in block_ids]
        # One copy for all of them; what was published is there, whatever else runs on the device.
        return [_in_host_memory(arena[torch.tensor(block_ids, device=arena.device)].view(-1))]

    def _tails(self, checkpoint: Checkpoint) -> list[memoryview]:
        """Copies, without the rows behind the tail's: their owner may write them meanwhile."""
        num_valid = len(checkpoint.tail_tokens)
        return [
            _in_host_memory(self._storage.copy_rows(block_id, num_valid, group_id))
            for group_id, block_id in enumerate(checkpoint.tail_block_ids)
        ]

    def _state(self, slot_id: int, row: Any | None) -> list[memoryview]:
        parts = [self._storage.slot_arena[slot_id]] if slot_id else []
        if row is not None:
            parts.append(row.contiguous().view(torch.uint8))
        return [_in_host_memory(part) for part in parts]

    # --- to be read

    def readable(self, prefix: StoredPrefix, chain: Sequence[bytes], plan: PullPlan) -> list[ReadableObject]:
        """What of a prefix a plan wants. ``chain``: keys of the prefix's block boundaries, the root first."""
        wanted = [dict(pairs) for pairs in plan.pairs]
        found = []
        for extent in prefix.extents:
            group_id, indices = extent.group_id, range(extent.start, extent.start + extent.num_blocks)
            places = [
                (number, wanted[group_id][index]) for number, index in enumerate(indices) if index in wanted[group_id]
            ]
            if places:
                header = self.extent(extent, chain[extent.start])
                found.append(ReadableObject(header, self._deliver_blocks(group_id, places)))
        num_full = (prefix.position - len(prefix.checkpoint.tail_tokens)) // self._storage.config.block_size
        tail_ids = [pairs.get(num_full, 0) for pairs in wanted]
        tail = self.tail(prefix.checkpoint)
        if tail is not None and any(tail_ids):
            found.append(ReadableObject(tail, self._deliver_tails(tail_ids)))
        if plan.slot_id or prefix.has_row:
            state = self.state(prefix.checkpoint, has_row=prefix.has_row)
            found.append(ReadableObject(state, self._deliver_state(plan.slot_id, prefix.has_row)))
        return found

    def _deliver_blocks(self, group_id: int, places: Sequence[tuple[int, int]]) -> Callable[[torch.Tensor], None]:
        arena, num_bytes = self._storage.block_arenas[group_id], self._block_bytes[group_id]

        def deliver(payload: torch.Tensor) -> None:
            for number, block_id in places:
                arena[block_id].copy_(payload[number * num_bytes : (number + 1) * num_bytes])

        return deliver

    def _deliver_tails(self, block_ids: Sequence[int]) -> Callable[[torch.Tensor], None]:
        def deliver(payload: torch.Tensor) -> None:
            start = 0
            for arena, block_id, num_bytes in zip(
                self._storage.block_arenas, block_ids, self._block_bytes, strict=True
            ):
                if block_id:
                    arena[block_id].copy_(payload[start : start + num_bytes])
                start += num_bytes

        return deliver

    def _deliver_state(self, slot_id: int, has_row: bool) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def deliver(payload: torch.Tensor) -> torch.Tensor | None:
            if slot_id:
                self._storage.slot_arena[slot_id].copy_(payload[: self._slot_bytes])
            return payload[self._slot_bytes :].clone().view(self._row_dtype) if has_row else None

        return deliver


def _in_host_memory(tensor: torch.Tensor) -> memoryview:
    """The tensor's own bytes on a CPU, else a copy."""
    return memoryview(tensor.cpu().numpy())
