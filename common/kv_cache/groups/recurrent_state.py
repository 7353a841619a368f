"""Single-type manager of recurrent states: the checkpoints, found through the block boundary they follow.

boundary key -> up to 8 checkpoints {tail tokens, position}, compared as tokens, longest first. Dense models use the
same index with slot 0 for prompt ends (tail and output row).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeVar

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.eviction.base import EvictionPolicy
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.observe.events import EventLog
from common.kv_cache.pools.unit_pool import UnitPool

MAX_PER_BOUNDARY = 8
"""Checkpoints with different tails that hang on one block boundary: a lookup compares at most that many."""

STATE_LABEL = "state"
"""The group's name in events and metrics."""

_Key = TypeVar("_Key", bytes, tuple[int, int])


class RecurrentStateManager:
    def __init__(
        self, pool: UnitPool, max_checkpoints: int, policy: EvictionPolicy, events: EventLog | None = None
    ) -> None:
        self.pool = pool
        self.max_checkpoints = max_checkpoints
        self._policy = policy
        self._events = events
        self._by_key: OrderedDict[bytes, Checkpoint] = OrderedDict()  # least recently used first
        self._by_boundary: dict[bytes, list[Checkpoint]] = {}
        self._by_tail: dict[tuple[int, int], list[Checkpoint]] = {}  # attention group, block
        self._by_slot: dict[int, Checkpoint] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._by_key.values())

    def get(self, key: bytes) -> Checkpoint | None:
        return self._by_key.get(key)

    def of_slot(self, slot_id: int) -> Checkpoint:
        return self._by_slot[slot_id]

    def at_boundary(self, boundary_key: bytes) -> tuple[Checkpoint, ...]:
        """Checkpoints that hang on the block ending at this boundary, longest tail first."""
        return tuple(self._by_boundary.get(boundary_key, ()))

    def depends_on(self, group_id: int, block_id: int, key: bytes | None) -> bool:
        """Whether a checkpoint hangs on this block, of that key, or has its tail in it."""
        return key in self._by_boundary or (group_id, block_id) in self._by_tail

    def with_tail(self, group_id: int, block_id: int) -> tuple[Checkpoint, ...]:
        return tuple(self._by_tail.get((group_id, block_id), ()))

    def matching(self, keys: PrefixKeys, num_tokens: int) -> Iterator[Checkpoint]:
        """Checkpoints of this prefix at or below ``num_tokens``, deepest first."""
        size = keys.block_size
        chain, by_boundary = keys.boundary_keys(num_tokens // size), self._by_boundary
        for num_blocks in range(num_tokens // size, -1, -1):
            bucket = by_boundary.get(chain[num_blocks])
            if not bucket:
                continue
            start = num_blocks * size
            tail = keys.content(start, min(start + size, num_tokens))
            for checkpoint in bucket:
                if tail[: len(checkpoint.tail_tokens)] == checkpoint.tail_tokens:
                    yield checkpoint

    def touch(self, checkpoint: Checkpoint) -> None:
        self._clock += 1
        checkpoint.last_use = self._clock
        if checkpoint.is_published:
            self._by_key.move_to_end(checkpoint.key)

    def victim_for(self, boundary_key: bytes) -> tuple[bool, Checkpoint | None]:
        """Which checkpoint must go before one more is added at this boundary.

        Returns (possible, victim): (True, None) when there is room, (False, None) when all candidates are pinned.
        """
        bucket = self._by_boundary.get(boundary_key, [])
        if len(bucket) >= MAX_PER_BOUNDARY:
            unpinned = [checkpoint for checkpoint in bucket if not checkpoint.is_pinned]
            victim = min(unpinned, key=lambda checkpoint: checkpoint.last_use, default=None)
            return victim is not None, victim
        if len(self._by_key) >= self.max_checkpoints:
            victim = next((checkpoint for checkpoint in self if not checkpoint.is_pinned), None)
            return victim is not None, victim
        return True, None

    def add(self, checkpoint: Checkpoint, block_id: int) -> None:
        """Publish. ``block_id``: the full block it hangs on (0: none)."""
        assert checkpoint.key not in self._by_key
        checkpoint.is_published = True
        self._by_key[checkpoint.key] = checkpoint
        bucket = self._by_boundary.setdefault(checkpoint.boundary_key, [])
        bucket.append(checkpoint)
        bucket.sort(key=lambda other: -other.position)
        for place in enumerate(checkpoint.tail_block_ids):
            self._by_tail.setdefault(place, []).append(checkpoint)
        if checkpoint.slot_id:
            self._by_slot[checkpoint.slot_id] = checkpoint
            self.pool.add_content(checkpoint.slot_id)
        self.touch(checkpoint)
        self._policy.checkpoint_stored(checkpoint, block_id)
        self._announce(checkpoint)

    def give_row(self, checkpoint: Checkpoint, output_row: Any | None) -> None:
        """The hidden row of a prompt that ends at a checkpoint, for one that has none yet."""
        checkpoint.output_row = output_row
        if checkpoint.is_published and output_row is not None:
            self._announce(checkpoint)

    def _announce(self, checkpoint: Checkpoint) -> None:
        if self._events is not None:
            has_row = checkpoint.output_row is not None
            self._events.checkpoint_stored(
                STATE_LABEL, checkpoint.boundary_key, checkpoint.key, checkpoint.position, has_row=has_row
            )

    def remove(self, checkpoint: Checkpoint) -> None:
        checkpoint.is_published = False
        del self._by_key[checkpoint.key]
        _discard(self._by_boundary, checkpoint.boundary_key, checkpoint)
        for place in enumerate(checkpoint.tail_block_ids):
            _discard(self._by_tail, place, checkpoint)
        if checkpoint.slot_id:
            del self._by_slot[checkpoint.slot_id]
            self.pool.remove_content(checkpoint.slot_id)
        self._policy.checkpoint_removed(checkpoint)
        if self._events is not None:
            self._events.checkpoint_removed(STATE_LABEL, checkpoint.key, checkpoint.position)


def _discard(index: dict[_Key, list[Checkpoint]], key: _Key, checkpoint: Checkpoint) -> None:
    index[key].remove(checkpoint)
    if not index[key]:
        del index[key]
