"""Single-type manager of one sliding-window group: only the last window of positions is ever read.

Going on after p tokens reads positions p - window + 1 .. p - 1. A prefix is therefore found from the right: enough
contiguous blocks to fill the window before p. Table entries before the window are null, and a running sequence gives
its blocks back as the window leaves them.
"""

from __future__ import annotations

from common.kv_cache.groups.single_type import SingleTypeManager
from common.kv_cache.keys import PrefixKeys


class SlidingWindowManager(SingleTypeManager):
    def first_needed(self, position: int) -> int:
        return max(0, position - self.group.window + 1) // self.block_size

    def find(self, keys: PrefixKeys, num_blocks: int, position: int) -> list[int] | None:
        first = min(self.first_needed(position), num_blocks)
        by_key = self._by_key
        table = [0] * num_blocks
        for index in range(num_blocks - 1, first - 1, -1):
            block_id = by_key.get(keys.boundary_key(index + 1))
            if block_id is None:
                return None
            table[index] = block_id
        return table
