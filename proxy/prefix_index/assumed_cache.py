"""What one node that sends no events is taken to have: what it was sent, for a while."""

from __future__ import annotations

import itertools
import operator

from proxy.prefix_index.coverage import Coverage
from proxy.prefix_index.prompt_keys import PromptKeys


class AssumedCache:
    """What a node was sent, each block for ``lifetime_s`` after its last use."""

    def __init__(self, block_size: int, lifetime_s: float) -> None:
        self.block_size = block_size
        self._lifetime_s = lifetime_s
        self._ends_s: dict[bytes, float] = {}  # by truncated key; the earliest end first

    def __len__(self) -> int:
        return len(self._ends_s)

    def observe(self, keys: PromptKeys, now_s: float) -> None:
        ends_s = self._ends_s
        for key in reversed(keys.truncated_keys[1:]):
            ends_s.pop(key, None)
            ends_s[key] = now_s + self._lifetime_s
        expired = list(itertools.takewhile(lambda key: ends_s[key] <= now_s, ends_s))
        for key in expired:
            del ends_s[key]

    def forget(self, num_entries: int) -> None:
        for key in list(itertools.islice(self._ends_s, num_entries)):
            del self._ends_s[key]

    def coverage(self, keys: PromptKeys, now_s: float) -> Coverage:
        ends_s = map(self._ends_s.get, itertools.islice(keys.truncated_keys, 1, None), itertools.repeat(0.0))
        run = len(list(itertools.takewhile(bool, map(operator.gt, ends_s, itertools.repeat(now_s)))))
        return Coverage(run * self.block_size, run * self.block_size)
