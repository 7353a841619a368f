"""Tiers below the pools in a replay: decisions by the nodes' own policy, writes and reads take no time.

Requests run one after the other, so a node's background look, which keeps ahead of evictions while a long prompt is
computed, is one look before each request, as far ahead as that request will allocate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.tiers.break_even import ASSUMED_READS, BreakEven
from common.kv_cache.tiers.leaving import LeavingPrefixes
from common.kv_cache.tiers.stack import TierStack, Write
from common.kv_cache.tiers.tier import Tier, TierSettings, tier_settings

PREFILL_TOKENS_PER_SECOND = 15_000
"""What break-even assumes, beside ``ASSUMED_READS``; a node measures its own. One accelerator."""
SLOTS_PER_REQUEST = 6
"""Slots that one request of a replay may take: the running one, and those of its kept positions."""


class SimulatedTiers:
    """The tiers of some nodes; those of kind ``shared`` are the same for all. ``clock``: of the trace, in seconds."""

    def __init__(self, settings: Sequence[TierSettings], num_nodes: int, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._managers: list[KVCacheManager] = []
        self._leaving: list[LeavingPrefixes] = []
        self._stacks: list[TierStack] = []
        self._current = 0
        shared = {number: self._tier(each) for number, each in enumerate(settings) if each.is_shared}
        self._tiers = [
            [shared.get(number) or self._tier(each) for number, each in enumerate(settings)] for _ in range(num_nodes)
        ]
        self.written: Counter[int] = Counter()
        self.read: Counter[int] = Counter()
        self.hit_tokens: Counter[int] = Counter()

    def _tier(self, settings: TierSettings) -> Tier:
        return Tier(settings, lambda key: self._managers[self._current].outlook(key), self._clock)

    def start(self, managers: Sequence[KVCacheManager]) -> None:
        """Over empty pools: at the beginning, or after a hard stop, which host memory does not survive."""
        is_restart = bool(self._managers)
        self._managers = list(managers)
        if is_restart:
            for tiers in self._tiers:
                for number, tier in enumerate(tiers):
                    if tier.settings.kind == "host":
                        tiers[number] = self._tier(tier.settings)
        self._stacks, self._leaving = [], []
        for manager, tiers in zip(managers, self._tiers, strict=True):
            stack = self._make_stack(manager, tiers)
            for prefix in (prefix for tier in tiers for prefix in tier.index):
                manager.remember(prefix.checkpoint)
            self._stacks.append(stack)

    def _make_stack(self, manager: KVCacheManager, tiers: Sequence[Tier]) -> TierStack:
        leaving = manager.leaving_prefixes(lambda checkpoint: stack.evicted(checkpoint.key))
        stack = TierStack(tiers, leaving.read_bytes)
        self._leaving.append(leaving)
        return stack

    def demote(self, node: int, num_tokens: int) -> None:
        """Before a request of ``num_tokens`` runs on that node: what it will evict."""
        self._current = node
        num_blocks = num_tokens // self._managers[node].config.block_size + SLOTS_PER_REQUEST
        for prefix in self._leaving[node].next(SLOTS_PER_REQUEST, num_blocks):
            self._count(node, self._stacks[node].offer(prefix))

    def publish(self, node: int) -> None:
        """After a request ran there: what is new. A shared tier has it at once, so that other nodes find it."""
        for prefix in self._leaving[node].fresh():
            self._count(node, self._stacks[node].publish(prefix))

    def promote(self, node: int, keys: PrefixKeys, num_tokens: int) -> None:
        """Bring back what memory lacks of a prompt, where that is sooner done than computing it."""
        self._current = node
        manager, stack = self._managers[node], self._stacks[node]
        hit = manager.lookup(keys, num_tokens)
        found = stack.find(keys, num_tokens, hit)
        if found is None or manager.accept_remote("promotion", keys, found.prefix.position) is None:
            return
        manager.commit_remote("promotion", "row" if found.prefix.has_row else None, seal=True)
        manager.free("promotion", donate=True)
        stack.touch(found.prefix.key)
        number = self._tiers[node].index(found.tier)
        self.read[number] += found.num_bytes
        self.hit_tokens[number] += found.prefix.position - hit.num_tokens

    def _count(self, node: int, writes: Sequence[Write]) -> None:
        for write in writes:
            self.written[self._tiers[node].index(write.tier)] += write.num_bytes

    def figures(self, num_requests: int) -> list[dict[str, Any]]:
        """One object per tier; private tiers of several nodes are added up."""
        rows = []
        for number, settings in enumerate(self._settings):
            tiers = list({id(tiers[number]): tiers[number] for tiers in self._tiers}.values())
            written = self.written[number]
            rows.append(
                {
                    "kind": settings.kind,
                    "size_bytes": settings.size_bytes,
                    "used_bytes": sum(tier.index.used_bytes for tier in tiers),
                    "prefixes": sum(len(tier.index) for tier in tiers),
                    "hit_tokens": self.hit_tokens[number],
                    "read_bytes": self.read[number],
                    "written_bytes": written,
                    "written_bytes_per_request": round(written / num_requests) if num_requests else 0,
                    "skipped": dict(sum((tier.skipped for tier in tiers), Counter())),
                }
            )
        return rows


def replay_settings(kind: str, size_bytes: int, min_return: float, write_rate: float | None) -> TierSettings:
    """Of a tier as the flags name it."""
    rates = BreakEven(*ASSUMED_READS[kind], 1 / PREFILL_TOKENS_PER_SECOND)
    return tier_settings(kind, size_bytes, rates, min_return, write_rate)
