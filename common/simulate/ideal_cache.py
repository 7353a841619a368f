"""What a cache without bounds would have: the yardstick of a replay's hits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from common.kv_cache.keys import PrefixKeys


class IdealCache:
    """Keeps every block of every request, and a state at every end: as exact as the real cache, and nothing is evicted.

    Its hits are as deep as the real one's or deeper. Grows with the trace.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: set[bytes] = set()
        self._tails: dict[bytes, set[tuple[int, ...]]] = {}

    def hit_tokens(self, keys: PrefixKeys) -> int:
        """Tokens of the longest known prefix: whole blocks, and from there to an end inside the next one."""
        num_blocks = keys.num_tokens // self._block_size
        found = itertools.takewhile(self._blocks.__contains__, keys.boundary_keys(num_blocks)[1 : num_blocks + 1])
        num_found = sum(1 for _ in found)
        start = num_found * self._block_size
        rest = tuple(keys.token_ids(start, start + self._block_size))
        tails = self._tails.get(keys.boundary_key(num_found), ())
        return start + max((len(tail) for tail in tails if rest[: len(tail)] == tail), default=0)

    def add(self, keys: PrefixKeys, ends: Iterable[int]) -> None:
        """Keep the whole sequence; ``ends``: positions in it where it may be gone on from exactly."""
        num_blocks = keys.num_tokens // self._block_size
        self._blocks.update(keys.boundary_keys(num_blocks)[1 : num_blocks + 1])
        for end in ends:
            if tail := keys.tail_tokens(end):
                self._tails.setdefault(keys.boundary_key(end // self._block_size), set()).add(tail)
