"""A fixed number of equal memory units, blocks or slots, and who may use each.

A unit is in exactly one state: *quarantined* (a read into it may still land), *held* (by sequences), *leased* (only by
leases), *cached* (named content, nobody uses it: evictable, least recently used first) or *free*. Unit 0 is the null
entry: in no state, never counted.

Life cycle: 1 allocate (bumps the generation), 2 held and written, 3 maybe named (content), 4 dropped -> cached or free,
5 evicted by its owner taking the content away -> free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from common.kv_cache.generations import GenerationTables, PoolName


class UnitPool:
    def __init__(self, name: PoolName, num_units: int, generations: GenerationTables) -> None:
        self.name: PoolName = name
        self.num_units = num_units
        self.held = [0] * num_units
        self.leased = [0] * num_units
        self.content = [0] * num_units
        self.quarantined: set[int] = set()
        self._generations = generations
        # A stack of descending ids: runs come out ascending, and what was freed tail first comes back head first, so
        # neighbours in a table tend to be neighbours in memory.
        self._free = list(range(num_units - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_held = 0
        self._num_leased = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Units that can be allocated now, by evicting cached ones if need be."""
        return len(self._free) + len(self._cached)

    def counts(self) -> dict[str, int]:
        return {
            "free": len(self._free),
            "cached": len(self._cached),
            "held": self._num_held,
            "leased": self._num_leased,
            "quarantined": len(self.quarantined),
        }

    def generation(self, unit_id: int) -> int:
        return self._generations.generation(self.name, unit_id)

    def free_ids(self) -> Iterator[int]:
        return iter(self._free)

    def cached_ids(self) -> Iterator[int]:
        """Evictable units, least recently used first."""
        return iter(self._cached)

    def least_recent(self) -> int:
        """The next unit to evict. The owner takes its content away, which frees it."""
        return next(iter(self._cached))

    def allocate(self) -> int:
        """Take a free unit, held once; evict first when none is free."""
        unit_id = self._free.pop()
        self._generations.bump(self.name, unit_id)
        self.held[unit_id] = 1
        self._num_held += 1
        return unit_id

    def hold(self, unit_id: int) -> None:
        """One more user. The unit must not be free."""
        self._cached.pop(unit_id, None)
        if self.held[unit_id] == 0:
            self._num_held += 1
            self._num_leased -= self.leased[unit_id] > 0
        self.held[unit_id] += 1

    def drop(self, unit_id: int) -> None:
        self.held[unit_id] -= 1
        assert self.held[unit_id] >= 0, f"{self.name} {unit_id} dropped more often than held"
        if self.held[unit_id] == 0:
            self._num_held -= 1
            self._num_leased += self.leased[unit_id] > 0
            self._settle(unit_id)

    def lease(self, unit_id: int) -> None:
        self._cached.pop(unit_id, None)
        if self.leased[unit_id] == 0 and self.held[unit_id] == 0:
            self._num_leased += 1
        self.leased[unit_id] += 1

    def end_lease(self, unit_id: int) -> None:
        self.leased[unit_id] -= 1
        assert self.leased[unit_id] >= 0, f"{self.name} {unit_id} released more often than leased"
        if self.leased[unit_id] == 0 and self.held[unit_id] == 0:
            self._num_leased -= 1
            self._settle(unit_id)

    def add_content(self, unit_id: int) -> None:
        """The unit is named by one more key. It is held at that moment, by whoever wrote it."""
        self.content[unit_id] += 1

    def remove_content(self, unit_id: int) -> None:
        self.content[unit_id] -= 1
        assert self.content[unit_id] >= 0, f"{self.name} {unit_id} forgotten more often than named"
        if self.content[unit_id] == 0 and unit_id in self._cached:
            del self._cached[unit_id]
            self._free.append(unit_id)

    def quarantine(self, unit_id: int) -> None:
        """The only holder gives the unit up, but something may still write it."""
        assert (self.held[unit_id], self.leased[unit_id], self.content[unit_id]) == (1, 0, 0)
        self.held[unit_id] = 0
        self._num_held -= 1
        self.quarantined.add(unit_id)

    def release_quarantined(self, unit_id: int) -> None:
        self.quarantined.remove(unit_id)
        self._free.append(unit_id)

    def _settle(self, unit_id: int) -> None:
        if self.held[unit_id] or self.leased[unit_id]:
            return
        if self.content[unit_id]:
            self._cached[unit_id] = None
        else:
            self._free.append(unit_id)
