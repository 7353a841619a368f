"""Block copies to run before the next forward: a published tail continued in a fresh block.

Sources stay held until the copies are drained, so nothing can be evicted under them. No source is itself a pending
destination (callers copy from ``origin``), so the pairs may run in any order or at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from common.kv_cache.pools.unit_pool import UnitPool


class CopyQueue:
    def __init__(self, pool: UnitPool) -> None:
        self._pool = pool
        self._source_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._source_of)

    def __contains__(self, destination: int) -> bool:
        return destination in self._source_of

    def origin(self, block_id: int) -> int:
        """Where the block's bytes are right now: the pending source, else the block itself."""
        return self._source_of.get(block_id, block_id)

    def sources(self) -> Iterator[int]:
        return iter(self._source_of.values())

    def push(self, source: int, destination: int) -> None:
        assert source not in self._source_of, "copy from where the bytes are (origin)"
        self._pool.hold((source,))
        self._source_of[destination] = source

    def cancel(self, block_ids: Collection[int]) -> None:
        """Forget copies into these blocks: their owner is gone before the copy ran."""
        if self._source_of:
            for destination in self._source_of.keys() & set(block_ids):
                self._pool.drop((self._source_of.pop(destination),))

    def pairs(self) -> list[tuple[int, int]]:
        """What ``drain`` would give; it stays queued."""
        return [(source, destination) for destination, source in self._source_of.items()]

    def drain(self) -> list[tuple[int, int]]:
        pairs = self.pairs()
        self._source_of.clear()
        self._pool.drop(source for source, _ in pairs)
        return pairs
