"""Single-type manager of full attention: which published block holds which prefix's K/V.

One block per key, first publisher wins. A block may carry the mark "remote state": when its prefix was accepted from a
peer, the state at its end never was here (a null entry of the state group). The mark lives and dies with the entry, so
marks cannot pile up; it counts for what may be pulled, never for a local resume.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.kv_cache.keys import PrefixKeys
from common.kv_cache.unit_pool import UnitPool


class FullAttentionManager:
    def __init__(self, pool: UnitPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._marked: set[int] = set()

    def __len__(self) -> int:
        return len(self._by_key)

    def items(self) -> Iterator[tuple[bytes, int]]:
        return iter(self._by_key.items())

    @property
    def num_marked(self) -> int:
        return len(self._marked)

    def marked_ids(self) -> frozenset[int]:
        return frozenset(self._marked)

    def get(self, key: bytes) -> int:
        """Block with that key's K/V; 0 when there is none."""
        return self._by_key.get(key, 0)

    def key_of(self, block_id: int) -> bytes | None:
        return self._key_of.get(block_id)

    def left_run(self, keys: PrefixKeys, num_tokens: int) -> list[int]:
        """Longest run of cached full blocks from the left within ``num_tokens``."""
        run: list[int] = []
        by_key = self._by_key
        for index in range(num_tokens // self.block_size):
            block_id = by_key.get(keys.boundary_key(index + 1))
            if block_id is None:
                break
            run.append(block_id)
        return run

    def publish(self, key: bytes, block_id: int) -> bool:
        """Name a complete block. False: another block has that key already, or this one another name."""
        if key in self._by_key or block_id in self._key_of:
            return False
        self._by_key[key] = block_id
        self._key_of[block_id] = key
        self.pool.add_content(block_id)
        return True

    def forget(self, block_id: int) -> None:
        """Evict: the key finds nothing from now on."""
        del self._by_key[self._key_of.pop(block_id)]
        self._marked.discard(block_id)
        self.pool.remove_content(block_id)

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
