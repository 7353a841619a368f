"""What the cache counts: running counters, and one snapshot for metrics, logs and tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class CacheCounters:
    """Totals since start. Reasons come from small fixed sets and become metric labels.

    ``hit_tokens`` by group: attention, mla, window_<tokens> (real cached blocks and tails, null padding never), state
    (position resumed from), joint (tokens nobody computes or moves for the request). ``lost_tokens``: found by one
    group, not by all, by the group that lacked them (no_state, no_window, no_attention).
    """

    query_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    lost_tokens: Counter[str] = field(default_factory=Counter)
    checkpoints_saved: Counter[str] = field(default_factory=Counter)
    checkpoints_skipped: Counter[str] = field(default_factory=Counter)
    checkpoints_evicted: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    leases_expired: int = 0

    def count_query(self, num_tokens: int, hit_tokens: Mapping[str, int]) -> None:
        self.query_tokens += num_tokens
        self.hit_tokens.update(hit_tokens)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """``blocks`` (of all attention groups), ``slots``: units by state (free, cached, held, leased, quarantined),
    without the null entry; ``group_blocks``: those of every attention group, by label."""

    blocks: Mapping[str, int]
    group_blocks: Mapping[str, Mapping[str, int]]
    slots: Mapping[str, int]
    num_cached_prefix_blocks: int
    num_marked_blocks: int
    num_checkpoints: int
    num_sequences: int
    query_tokens: int
    hit_tokens: Mapping[str, int]
    lost_tokens: Mapping[str, int]
    checkpoints_saved: Mapping[str, int]
    checkpoints_skipped: Mapping[str, int]
    checkpoints_evicted: Mapping[str, int]
    evictions: Mapping[str, int]
    leases_active: int
    leases_expired: int
