"""What every single-type manager of an attention group does: which published block holds which prefix's rows.

One block per key, first publisher wins; blocks that lose, or that the retention interval declines, stay private. How a
prefix is looked up is the kind's own business (``FullAttentionManager``, ``SlidingWindowManager``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice

from common.kv_cache.eviction.base import EvictionPolicy
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.observe.events import EventLog, GroupEntries
from common.kv_cache.pools.unit_pool import UnitPool
from common.kv_cache.spec import KVCacheGroup


class SingleTypeManager(ABC):
    def __init__(
        self, group: KVCacheGroup, pool: UnitPool, block_size: int, policy: EvictionPolicy, events: EventLog | None
    ) -> None:
        self.group = group
        self.pool = pool
        self.block_size = block_size
        self._policy = policy
        self._events = events
        self._by_key: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = [None] * pool.num_units
        self._parent_key: list[bytes] = [b""] * pool.num_units
        self._position = [0] * pool.num_units

    def __len__(self) -> int:
        return len(self._by_key)

    def items(self) -> Iterator[tuple[bytes, int]]:
        return iter(self._by_key.items())

    def get(self, key: bytes) -> int:
        """Block with that key's rows; 0 when there is none."""
        return self._by_key.get(key, 0)

    def is_current(self, keys: PrefixKeys, table: Sequence[int]) -> bool:
        """Whether each block of the table (null entries apart) still has its key."""
        found = map(self._by_key.get, islice(keys.boundary_keys(len(table)), 1, None))
        return all(block_id in (0, other) for block_id, other in zip(table, found, strict=False))

    def key_of(self, block_id: int) -> bytes | None:
        return self._key_of[block_id]

    def parent_key(self, block_id: int) -> bytes:
        """Key of the boundary before a published block."""
        return self._parent_key[block_id]

    def chain_to(self, key: bytes, num_blocks: int) -> list[bytes] | None:
        """Keys of the ``num_blocks`` consecutive blocks of which the last has that key; None: one is not published."""
        keys: list[bytes] = []
        for _ in range(num_blocks):
            block_id = self._by_key.get(key)
            if block_id is None:
                return None
            keys.append(key)
            key = self._parent_key[block_id]
        keys.reverse()
        return keys

    def entries(self) -> GroupEntries:
        """A copy of what is published."""
        return GroupEntries(self.group.label, self._by_key.copy(), self._parent_key[:], self._position[:])

    @abstractmethod
    def first_needed(self, position: int) -> int:
        """Index of the first block that computing the token after ``position`` tokens reads."""

    @abstractmethod
    def find(self, keys: PrefixKeys, num_blocks: int, position: int) -> list[int] | None:
        """The table of ``num_blocks`` blocks from which a sequence can go on at ``position``, null where no block is
        needed; None when a needed one is not cached. ``position`` may lie in the last block or behind it."""

    def publish_run(self, keys: PrefixKeys, block_ids: Sequence[int], start: int, end: int) -> None:
        """Name the complete blocks at table indices [start, end). Skipped: null entries, keys that another block has
        already, blocks that have a name."""
        if end <= start:
            return
        chain = keys.boundary_keys(end)
        if self._publish_at_once(chain, block_ids, start, end):
            return
        by_key, key_of, content = self._by_key, self._key_of, self.pool.content
        parent_key, position, size = self._parent_key, self._position, self.block_size
        run: list[int] = []
        run_start = start
        for index in range(start, end):
            block_id, key = block_ids[index], chain[index + 1]
            if key in by_key or not block_id or key_of[block_id] is not None:
                self._announce(chain, run_start, run)
                run = []
                continue
            if not run:
                run_start = index
            by_key[key] = block_id
            key_of[block_id] = key
            parent_key[block_id] = chain[index]
            position[block_id] = (index + 1) * size
            content[block_id] += 1
            run.append(block_id)
        self._announce(chain, run_start, run)

    def _publish_at_once(self, chain: Sequence[bytes], block_ids: Sequence[int], start: int, end: int) -> bool:
        """The common cases: all blocks are named already, or all keys new and no block named. False: it is another
        case, nothing was done."""
        names, run = chain[start + 1 : end + 1], list(block_ids[start:end])
        by_key, key_of, content = self._by_key, self._key_of, self.pool.content
        if None not in map(key_of.__getitem__, run):
            return True
        if any(map(by_key.__contains__, names)) or 0 in run or any(map(content.__getitem__, run)):
            return False
        by_key.update(zip(names, run, strict=True))
        parent_key, position, size = self._parent_key, self._position, self.block_size
        end_position, parent = start * size, chain[start]
        for block_id, key in zip(run, names, strict=True):
            end_position += size
            key_of[block_id] = key
            parent_key[block_id] = parent
            position[block_id] = end_position
            content[block_id] = 1
            parent = key
        self._announce(chain, start, run)
        return True

    def _announce(self, chain: Sequence[bytes], start: int, run: list[int]) -> None:
        if not run:
            return
        # The block before them that is known by name: a sequence's own may be a copy that came later.
        self._policy.blocks_stored(self.pool.name, self._by_key.get(chain[start], 0), run)
        if self._events is not None:
            end = start + len(run)
            self._events.stored(self.group.label, chain[start], chain[start + 1 : end + 1], end * self.block_size)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Evict: their keys find nothing from now on."""
        by_key, key_of = self._by_key, self._key_of
        removed: list[bytes] = []
        for block_id in block_ids:
            key = key_of[block_id]
            assert key is not None, f"{self.pool.name} {block_id} has no name"
            key_of[block_id] = None
            del by_key[key]
            removed.append(key)
        if self._events is not None:
            self._events.removed(self.group.label, removed)
        self.pool.remove_contents(block_ids)
        self._policy.blocks_removed(self.pool.name, block_ids)
