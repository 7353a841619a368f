"""Prefixes that a tier may take in: what will be evicted soon, or was published just now, each with its closure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.coordinator import Coordinator
from common.kv_cache.layout import make_layout
from common.kv_cache.pools.unit_pool import UnitPool
from common.kv_cache.tiers.stored_prefix import Extent, StoredPrefix, extents_of

LOOK_AHEAD = 0.03
"""Part of each pool that is looked at beyond what is wanted: which prefixes go first changes while room is made."""
OVERHEAD_BYTES = 4096
"""Of each object in a tier: its header."""


class LeavingPrefixes:
    """``on_evict``: told of each checkpoint that is evicted. ``own_bytes``: of a checkpoint's state, tail and row in a
    tier; default: an estimate, for there is no row without a model."""

    def __init__(
        self,
        coordinator: Coordinator,
        on_evict: Callable[[Checkpoint], None],
        own_bytes: Callable[[Checkpoint], int] | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._own_bytes = own_bytes if own_bytes is not None else self._estimate
        config = coordinator.config
        self._block_size = config.block_size
        layout = make_layout(config.geometry, config.block_size)
        self._group_block_bytes, self._slot_bytes = layout.group_block_bytes, layout.slot_bytes
        coordinator.on_evict = on_evict

    def next(
        self, num_slots: int, num_blocks: int, is_wanted: Callable[[Checkpoint], bool] = lambda checkpoint: True
    ) -> Iterator[StoredPrefix]:
        """What would be evicted if that many slots, and blocks of the first attention group, were wanted. The closure
        of what is not wanted is not looked for."""
        coordinator = self._coordinator
        blocks = coordinator.groups[0].pool if coordinator.groups else None
        num_evicted = _num_evicted(blocks, num_blocks) if blocks is not None else 0
        first = coordinator.policy.next_checkpoints(_num_evicted(coordinator.slots, num_slots), num_evicted)
        if first is None:  # the policy goes by units: states are as old as the checkpoints, and each has a block
            has_state = coordinator.config.has_state
            first = list(islice(coordinator.state, num_slots if has_state else num_evicted))
        return self._stored(filter(is_wanted, first))

    @property
    def first_needed(self) -> list[Callable[[int], int]]:
        """Per attention group, the index of the first block that resuming at a position reads."""
        return [group.first_needed for group in self._coordinator.groups]

    def fresh(self, is_wanted: Callable[[Checkpoint], bool] = lambda checkpoint: True) -> Iterator[StoredPrefix]:
        """What was published and is still here, each once, oldest first; what the caller does not take stays."""
        fresh = self._coordinator.fresh
        published = (fresh.popleft() for _ in range(len(fresh)))
        return self._stored(each for each in published if each.is_published and is_wanted(each))

    def read_bytes(self, prefix: StoredPrefix, num_local_tokens: int) -> int:
        """Bytes that are read to bring a prefix back when the blocks of its first tokens are here."""
        num_local = num_local_tokens // self._block_size
        return prefix.own_bytes + sum(
            max(0, extent.start + extent.num_blocks - max(num_local, extent.start))
            * self._group_block_bytes[extent.group_id]
            for extent in prefix.extents
        )

    def _stored(self, checkpoints: Iterable[Checkpoint]) -> Iterator[StoredPrefix]:
        for checkpoint in checkpoints:
            extents = self._closure(checkpoint)
            if extents is not None:
                num_bytes = [
                    extent.num_blocks * self._group_block_bytes[extent.group_id] + OVERHEAD_BYTES for extent in extents
                ]
                has_row = checkpoint.output_row is not None
                own_bytes = self._own_bytes(checkpoint)
                kept = replace(checkpoint, slot_id=0, tail_block_ids=(), output_row=None, is_published=False)
                yield StoredPrefix(kept, has_row, tuple(extents), tuple(num_bytes), own_bytes)

    def _estimate(self, checkpoint: Checkpoint) -> int:
        num_bytes = OVERHEAD_BYTES
        if checkpoint.slot_id:
            num_bytes += self._slot_bytes + OVERHEAD_BYTES
        return num_bytes + (sum(self._group_block_bytes) if checkpoint.tail_tokens else 0)

    def _closure(self, checkpoint: Checkpoint) -> list[Extent] | None:
        """Its full blocks, from their names backwards; None when one of them is gone."""
        num_blocks = (checkpoint.position - len(checkpoint.tail_tokens)) // self._block_size
        extents: list[Extent] = []
        for group in self._coordinator.groups:
            first = group.first_needed(checkpoint.position)
            keys = group.chain_to(checkpoint.boundary_key, num_blocks - first)
            if keys is None:
                return None
            extents += extents_of(group.group.group_id, first, keys, self._block_size)
        return extents


def _num_evicted(pool: UnitPool, num_wanted: int) -> int:
    """Units to look at when that many are wanted; none while there is room for them and the margin."""
    return max(0, num_wanted + round(LOOK_AHEAD * pool.num_units) - pool.num_free)
