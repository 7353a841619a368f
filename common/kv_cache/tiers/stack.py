"""The tiers of one node, fastest first: what leaves one is offered to the next, and a prompt asks all of them.

What other nodes share is written when it is published, and is no part of that chain.

Each tier keeps the closure of what it holds by itself, so that one that is lost or emptied takes nothing from another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.kv_cache.keys import PrefixKeys
from common.kv_cache.prefix.hits import PrefixHit
from common.kv_cache.tiers.stored_prefix import StoredPrefix
from common.kv_cache.tiers.tier import Tier

MAX_COMPARED = 4
"""Prefixes of one prompt in one tier whose reading is weighed against computing, deepest first."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """``prefix`` is to be read from ``tier``: ``num_bytes`` that are not in memory."""

    tier: Tier
    prefix: StoredPrefix
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Write:
    """``prefix`` is to be written to ``tier``, which let go what was ``dropped`` for it."""

    tier: Tier
    prefix: StoredPrefix
    num_bytes: int
    dropped: tuple[StoredPrefix, ...] = ()


class TierStack:
    """``read_bytes``: of a prefix, when the blocks of so many of its first tokens are in memory."""

    def __init__(self, tiers: Sequence[Tier], read_bytes: Callable[[StoredPrefix, int], int]) -> None:
        self.tiers = tuple(tiers)
        self._own = [tier for tier in tiers if not tier.settings.is_shared]
        for tier in self._own[1:]:
            tier.is_fed_by_tier = True
        self._shared = [tier for tier in tiers if tier.settings.is_shared]
        self._read_bytes = read_bytes

    def find(self, keys: PrefixKeys, num_tokens: int, hit: PrefixHit) -> Promotion | None:
        """What saves most time over computing what the memory's ``hit`` lacks; None when nothing saves any."""
        best, most_s = None, 0.0
        for tier in self.tiers:
            for number, prefix in enumerate(tier.candidates(keys, num_tokens, hit.num_tokens), start=1):
                num_local = min(hit.num_attention_tokens, prefix.position)
                num_bytes = self._read_bytes(prefix, num_local)
                saved_s = tier.settings.break_even.saved_s(prefix.position - hit.num_tokens, num_bytes)
                if saved_s > most_s:
                    best, most_s = Promotion(tier, prefix, num_bytes), saved_s
                if number == MAX_COMPARED:
                    break
        return best

    def touch(self, key: bytes) -> None:
        """The prefix was read, or would have been had it not been in memory."""
        for tier in self.tiers:
            prefix = tier.index.get(key)
            if prefix is not None:
                tier.index.touch(prefix)

    @property
    def has_own(self) -> bool:
        """Whether a tier takes in what leaves memory."""
        return bool(self._own)

    @property
    def has_shared(self) -> bool:
        """Whether a tier takes in what is published."""
        return bool(self._shared)

    def wants(self, key: bytes) -> bool:
        """Whether ``offer`` of that prefix may write anything. O(1)."""
        return any(tier.wants(key) for tier in self._own[:1])

    def above(self, tier: Tier) -> Tier | None:
        """The own tier that lets go what ``tier`` takes in; None: memory does."""
        return next((above for above, below in pairwise(self._own) if below is tier), None)

    def offer(self, prefix: StoredPrefix) -> list[Write]:
        """A prefix that leaves memory: what is to be written of it, and of what each own tier lets go for it."""
        return self._offer(prefix, 0)

    def publish(self, prefix: StoredPrefix) -> list[Write]:
        """A prefix that is new: what a shared tier wants of it at once, so that other nodes find it."""
        taken = ((tier, tier.take(prefix)) for tier in self._shared)
        return [Write(tier, prefix, result[0], tuple(result[1])) for tier, result in taken if result is not None]

    def sink(self) -> Iterator[Write]:
        """What an own tier has and the next one wants: of host memory before it is lost."""
        for above, below in pairwise(self._own):
            for prefix in above.index:
                if prefix.key not in above.index.unwritten and (taken := below.take(prefix)) is not None:
                    yield Write(below, prefix, taken[0], tuple(taken[1]))

    def _offer(self, prefix: StoredPrefix, number: int) -> list[Write]:
        if number == len(self._own):
            return []
        tier = self._own[number]
        taken = tier.take(prefix)
        if taken is None:  # what does not fit into one may fit into the next
            return [] if prefix.key in tier.index else self._offer(prefix, number + 1)
        num_bytes, dropped = taken
        writes = [Write(tier, prefix, num_bytes, tuple(dropped))]
        for other in dropped:
            writes += self._offer(other, number + 1)
            if number + 1 < len(self._own):
                self._own[number + 1].evicted(other.key)
        return writes

    def evicted(self, key: bytes) -> None:
        """A checkpoint left memory."""
        for tier in (*self._own[:1], *self._shared):
            tier.evicted(key)
