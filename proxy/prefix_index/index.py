"""Which node has how much of a prompt: a guess for placement, fed by the nodes' events
(``proxy.prefix_index.event_feed``).

A wrong or missing entry costs time, never an answer: nodes look up again what they have. Memory is bounded over all
nodes together; beyond it the node with the most entries lets its least recently used ones go. Called from the event
loop only; nothing here waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common.wire.cache_events import CacheChange
from proxy.prefix_index.assumed_cache import AssumedCache
from proxy.prefix_index.coverage import NO_COVERAGE, Coverage
from proxy.prefix_index.node_cache import NodeCache
from proxy.prefix_index.prompt_keys import PromptKeys

ASSUMED_LIFETIME_S = 300.0
"""Seconds for which a node that sends no events is taken to have what it was sent."""
_FORGET_SHARE = 8
"""When the index is full, its largest cache forgets one entry in so many."""


class PrefixIndex:
    """
    Args:
        max_entries: blocks and checkpoints of all nodes together.
        lifetime_s: for how long a node that sends no events is taken to have what it was sent.
    """

    def __init__(
        self,
        max_entries: int,
        *,
        lifetime_s: float = ASSUMED_LIFETIME_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_entries = max_entries
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._reported: dict[str, NodeCache] = {}
        self._assumed: dict[str, AssumedCache] = {}
        self._num_entries = 0

    def lookup(self, keys: PromptKeys) -> dict[str, Coverage]:
        """Coverage by node URL; nodes that have nothing of the prompt are left out."""
        found: dict[str, Coverage] = {}
        for url, cache in self._reported.items():
            if cache.block_size != keys.block_size:
                continue
            coverage = cache.coverage(keys)
            if coverage != NO_COVERAGE:
                found[url] = coverage
        if self._assumed:
            now_s = self._clock()
            for url, assumed in self._assumed.items():
                if assumed.block_size == keys.block_size:
                    coverage = assumed.coverage(keys, now_s)
                    if coverage.attention_tokens:
                        found[url] = coverage
        return found

    def observe(self, url: str, keys: PromptKeys) -> None:
        """A node computes this prompt now. Of a node that sends events, only they say what it has; what it has of the
        prompt is used."""
        cache = self._reported.get(url)
        if cache is not None:
            if self._num_entries > self.max_entries // 2 and cache.block_size == keys.block_size:
                cache.touch(keys.truncated_keys[1:])
            return
        assumed = self._assumed.get(url)
        if assumed is None or assumed.block_size != keys.block_size:
            self._forget_assumed(url)
            assumed = self._assumed[url] = AssumedCache(keys.block_size, self._lifetime_s)
        before = len(assumed)
        assumed.observe(keys, self._clock())
        self._grew(len(assumed) - before)

    def drop(self, url: str) -> None:
        """Forget a node."""
        cache = self._reported.pop(url, None)
        self._num_entries -= len(cache) if cache is not None else 0
        self._forget_assumed(url)

    def _forget_assumed(self, url: str) -> None:
        assumed = self._assumed.pop(url, None)
        self._num_entries -= len(assumed) if assumed is not None else 0

    # --- what events say

    def start(self, url: str, cache: NodeCache) -> None:
        """From now on ``cache``, empty to begin with or not, is what is known of a node."""
        self.drop(url)
        self._reported[url] = cache
        self._grew(len(cache))

    def apply(self, url: str, change: CacheChange) -> bool:
        """A change at a node. False: the node was not started, or was dropped since."""
        cache = self._reported.get(url)
        if cache is None:
            return False
        before = len(cache)
        cache.apply(change)
        self._grew(len(cache) - before)
        return True

    def num_entries(self, url: str) -> int:
        """Blocks and checkpoints known of a node."""
        return sum(len(caches[url]) for caches in (self._reported, self._assumed) if url in caches)

    def _grew(self, num_entries: int) -> None:
        self._num_entries += num_entries
        while self._num_entries > self.max_entries:
            caches: list[NodeCache | AssumedCache] = [*self._reported.values(), *self._assumed.values()]
            largest = max(caches, key=len)
            before = len(largest)
            # Many at a time: finding the oldest passes over the places of those that went before it.
            excess = self._num_entries - self.max_entries
            largest.forget(min(before, max(excess, before // _FORGET_SHARE, 1)))
            self._num_entries -= before - len(largest)
