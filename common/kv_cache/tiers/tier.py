"""One tier's decisions: what it takes in, in which order it lets go, what it has of a prompt.

A prefix is taken in when it is likely enough to be asked for again, when the write budget pays, and when it is worth
more per byte than what would have to go. What was not taken in is counted, once, when it leaves the memory above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from common.kv_cache.eviction.base import Outlook
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.tiers.break_even import BreakEven
from common.kv_cache.tiers.index import TierIndex
from common.kv_cache.tiers.stored_prefix import StoredPrefix
from common.kv_cache.tiers.write_budget import WriteBudget

MIN_RETURN = 0.1
"""Probability of a return from which a write pays: production chat trace, 640 GiB, docs/tiers.md."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """
    Attributes:
        kind: host, disk, shared or mooncake.
        min_return: the least probability of a return that is worth a write; host memory does not wear, so it takes
            everything.
        write_rate: bytes per second on average; None: no bound.
    """

    kind: str
    size_bytes: int
    break_even: BreakEven
    min_return: float = MIN_RETURN
    write_rate: float | None = None

    @property
    def wears(self) -> bool:
        """Whether a write costs anything but time: host memory takes everything, so that it all passes there."""
        return self.kind != "host"

    @property
    def is_shared(self) -> bool:
        """Whether other nodes read and write it too: then what is published is written at once, and nobody knows of
        every prefix how likely it is to return, so the longest unused goes first."""
        return self.kind in ("shared", "mooncake")


def tier_settings(
    kind: str, size_bytes: int, break_even: BreakEven, min_return: float, write_rate: float | None
) -> TierSettings:
    """Of a tier as the flags name it."""
    settings = TierSettings(kind, size_bytes, break_even, min_return, write_rate)
    return settings if settings.wears else replace(settings, min_return=0.0, write_rate=None)


class Tier:
    """``outlook``: what the eviction policy expects of a key. ``clock`` in seconds."""

    def __init__(
        self, settings: TierSettings, outlook: Callable[[bytes], Outlook | None], clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.index = TierIndex(settings.size_bytes, self._worth)
        self.skipped: Counter[str] = Counter()
        self.is_fed_by_tier = False
        """Whether what it is offered has waited in a faster tier, and not in memory alone."""
        self.rests_until_s = 0.0
        """Of ``clock``: it takes nothing in before, and lets nothing go for it."""
        self.is_hung = False
        """Its writes do not go on: as above, until they do."""
        self._outlook = outlook
        self._clock = clock
        self._budget = WriteBudget(settings.write_rate, clock)
        self._refused: dict[bytes, str] = {}

    def take(self, prefix: StoredPrefix) -> tuple[int, list[StoredPrefix]] | None:
        """Takes ``prefix`` in. Returns the bytes to be written for it, and the prefixes that went for it; None: it is
        here, or is not to be written (yet)."""
        if self.is_hung or self._clock() < self.rests_until_s or not self.wants(prefix.key):
            return None
        probability = self._probability(prefix.key)
        num_bytes = self.index.missing(prefix)
        if self._refused.get(prefix.key) not in ("rate", "full"):
            self._budget.want(probability, num_bytes)
        if not self._budget.may_spend(probability):
            self._refused[prefix.key] = "rate"
            return None
        dropped = self.index.make_room(prefix, is_choosy=self.settings.wears)
        if dropped is None:
            self._refused[prefix.key] = "full"
            return None
        self._refused.pop(prefix.key, None)
        num_bytes = self.index.missing(prefix)  # what went may have shared extents with it
        self._budget.spend(num_bytes)
        self.index.add(prefix)
        return num_bytes, dropped

    def refuse(self, key: bytes) -> None:
        """The prefix did not fit after all, beside what other nodes have written."""
        self._refused[key] = "full"

    def wants(self, key: bytes) -> bool:
        """Whether it lacks the prefix and would have it, if there were budget and room. O(1)."""
        if key in self.index:
            return False
        if self._probability(key) < self.settings.min_return:
            self._refused[key] = "value"
            return False
        return True

    def evicted(self, key: bytes) -> None:
        """The prefix left the memory above."""
        reason = self._refused.pop(key, "late")
        if key not in self.index:
            self.skipped[reason] += 1

    def candidates(self, keys: PrefixKeys, num_tokens: int, above: int) -> Iterator[StoredPrefix]:
        """What it has of a prompt of ``num_tokens`` beyond ``above`` tokens, deepest first. A state at the prompt's
        very end is of use only with the last row."""
        for prefix in self.index.matching(keys, num_tokens, above):
            if prefix.key not in self.index.unwritten and (prefix.position < num_tokens or prefix.has_row):
                yield prefix

    def _probability(self, key: bytes) -> float:
        outlook = self._outlook(key)
        if outlook is None:
            return 1.0
        return outlook.late_probability if self.is_fed_by_tier else outlook.probability

    def _worth(self, key: bytes) -> float | None:
        if self.settings.is_shared:
            return None
        outlook = self._outlook(key)
        return 0.0 if outlook is None else outlook.tokens_per_wait
