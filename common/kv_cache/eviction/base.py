"""Which cached unit goes first when memory is short, behind one small interface.

A *policy* gives each pool an *order* of its evictable units, worst first, and is told what happens (admissions,
publications, removals) so that it can value them. The pools call the order; the coordinator evicts what it names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.keys import PrefixKeys

EVICTION_POLICIES = ("value", "lru")
"""The first is the default."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a prefix that leaves the pools, or left them.

    Attributes:
        probability: that it is asked for again within a few thousand admissions.
        tokens_per_wait: tokens it saves per admission waited.
        late_probability: as ``probability``, with less hope for ages that nobody has come to yet: of what has waited
            in a tier before, and was not asked for.
    """

    probability: float
    tokens_per_wait: float
    late_probability: float = 1.0


class EvictionOrder(ABC):
    """Evictable units of one pool: named content that nobody uses. Every method is O(1) or close to it."""

    @abstractmethod
    def add(self, unit_id: int) -> None:
        """The unit became evictable. The units of one request come tail first."""

    @abstractmethod
    def discard(self, unit_id: int) -> None:
        """The unit is used again, or was forgotten. It may be absent."""

    def add_all(self, unit_ids: Iterable[int]) -> None:
        for unit_id in unit_ids:
            self.add(unit_id)

    def discard_all(self, unit_ids: Iterable[int]) -> None:
        for unit_id in unit_ids:
            self.discard(unit_id)

    @abstractmethod
    def victim(self) -> int:
        """The unit to evict next; it stays until ``discard``."""

    def victims(self, num_units: int) -> Sequence[int]:
        """The units to evict next, at least one, at most ``num_units``; they stay until ``discard``."""
        return (self.victim(),)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Worst first."""

    @abstractmethod
    def __contains__(self, unit_id: object) -> bool: ...


class EvictionPolicy:
    """One per cache manager. Plain least recently used; others give other orders and listen."""

    def order(self, pool_name: str) -> EvictionOrder:
        """The order of one pool; called once for each: "slots" of states, whose units are slots; "blocks" of the first
        attention group, "blocks_1" of the next and so on (``KVCacheGroup.pool_name``), whose units are blocks."""
        return LruOrder()

    def admitted(self, keys: PrefixKeys, num_tokens: int) -> None:
        """A prompt of ``num_tokens`` was admitted: what it found is in use, and it has allocated nothing yet."""

    def blocks_stored(self, pool_name: str, parent_id: int, block_ids: Sequence[int]) -> None:
        """Consecutive blocks of one table were published; the first follows ``parent_id`` (0: none)."""

    def blocks_removed(self, pool_name: str, block_ids: Sequence[int]) -> None:
        """The blocks' keys find nothing from now on."""

    def checkpoint_stored(self, checkpoint: Checkpoint, block_id: int) -> None:
        """A checkpoint was published; it hangs on that full block (0: none)."""

    def checkpoint_removed(self, checkpoint: Checkpoint) -> None:
        """The checkpoint can no longer be found."""

    def next_checkpoints(self, num_slots: int, num_blocks: int) -> Sequence[Checkpoint] | None:
        """The checkpoints that go first when that many slots, and blocks of the first attention group, are wanted from
        what is cached. None: this policy does not tell."""
        return None

    def outlook(self, key: bytes) -> Outlook | None:
        """Of a checkpoint that is here, or was. None: nothing is known of it."""
        return None

    def remember(self, checkpoint: Checkpoint) -> None:
        """A checkpoint that is not here, and was kept by an earlier life of this node."""


class LruOrder(EvictionOrder):
    """Least recently used first."""

    def __init__(self) -> None:
        self._units: OrderedDict[int, None] = OrderedDict()

    def add(self, unit_id: int) -> None:
        self._units[unit_id] = None

    def discard(self, unit_id: int) -> None:
        self._units.pop(unit_id, None)

    def victim(self) -> int:
        return next(iter(self._units))

    def victims(self, num_units: int) -> Sequence[int]:
        return list(islice(self._units, num_units))

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[int]:
        return iter(self._units)

    def __contains__(self, unit_id: object) -> bool:
        return unit_id in self._units
