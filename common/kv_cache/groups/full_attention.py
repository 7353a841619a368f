"""Single-type manager of groups that keep every position: full attention and MLA latents.

A prefix is found from the left: the longest run of cached blocks. A block may carry the mark "remote state": when its
prefix was accepted from a peer, the state at its end never was here (a null entry of the state group). The mark lives
and dies with the entry, so marks cannot pile up; it counts for what may be pulled, never for a local resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from common.kv_cache.eviction.base import EvictionPolicy
from common.kv_cache.groups.single_type import SingleTypeManager
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.observe.events import EventLog
from common.kv_cache.pools.unit_pool import UnitPool
from common.kv_cache.spec import KVCacheGroup


class FullAttentionManager(SingleTypeManager):
    def __init__(
        self, group: KVCacheGroup, pool: UnitPool, block_size: int, policy: EvictionPolicy, events: EventLog | None
    ) -> None:
        super().__init__(group, pool, block_size, policy, events)
        self._marked: set[int] = set()

    @property
    def num_marked(self) -> int:
        return len(self._marked)

    def marked_ids(self) -> frozenset[int]:
        return frozenset(self._marked)

    def left_run(self, keys: PrefixKeys, num_tokens: int) -> list[int]:
        """Longest run of cached full blocks from the left within ``num_tokens``."""
        run: list[int] = []
        by_key = self._by_key
        num_blocks = num_tokens // self.block_size
        # What is not found will be computed and published: all keys are wanted anyway.
        for key in islice(keys.boundary_keys(num_blocks), 1, num_blocks + 1):
            block_id = by_key.get(key)
            if block_id is None:
                break
            run.append(block_id)
        return run

    def first_needed(self, position: int) -> int:
        return 0

    def find(self, keys: PrefixKeys, num_blocks: int, position: int) -> list[int] | None:
        run = self.left_run(keys, num_blocks * self.block_size)
        return run if len(run) == num_blocks else None

    def forget(self, block_ids: Sequence[int]) -> None:
        self._marked.difference_update(block_ids)
        super().forget(block_ids)

    def mark_remote(self, key: bytes) -> None:
        """Register the null entry of the state group for this key, if its K/V is here."""
        block_id = self._by_key.get(key)
        if block_id is not None:
            self._marked.add(block_id)

    def unmark(self, key: bytes) -> None:
        """A real state for this key replaces the null entry."""
        self._marked.discard(self._by_key.get(key, 0))

    def is_marked(self, block_id: int) -> bool:
        return block_id in self._marked
