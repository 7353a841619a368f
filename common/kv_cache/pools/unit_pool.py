"""A fixed number of equal memory units, blocks or slots, and who may use each.

A unit is in exactly one state: *quarantined* (a read into it may still land), *held* (by sequences), *leased* (only by
leases), *cached* (named content, nobody uses it: evictable, in the order of the eviction policy) or *free*. Unit 0 is
the null entry: in no state, never counted.

Life cycle: 1 allocate (bumps the generation), 2 held and written, 3 maybe named (content), 4 dropped -> cached or free,
5 evicted by its owner taking the content away -> free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from common.kv_cache.eviction.base import EvictionOrder
from common.kv_cache.pools.generations import GenerationTables

UNIT_STATES = ("free", "cached", "held", "leased", "quarantined")
"""As the internal routes name them; in metrics ``held`` is ``used``."""


class UnitPool:
    def __init__(self, name: str, num_units: int, generations: GenerationTables, order: EvictionOrder) -> None:
        self.name = name
        self.num_units = num_units
        self.held = [0] * num_units
        self.leased = [0] * num_units
        self.content = [0] * num_units
        self.quarantined: set[int] = set()
        self._generations = generations
        # A stack of descending ids: runs come out ascending, and what was freed tail first comes back head first, so
        # neighbours in a table tend to be neighbours in memory.
        self._free = list(range(num_units - 1, 0, -1))
        self._cached = order
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
        """Units by state, without the null entry."""
        numbers = (len(self._free), len(self._cached), self._num_held, self._num_leased, len(self.quarantined))
        return dict(zip(UNIT_STATES, numbers, strict=True))

    def generation(self, unit_id: int) -> int:
        return self._generations.generation(self.name, unit_id)

    def generations(self, unit_ids: Sequence[int]) -> tuple[int, ...]:
        """0 of the null entry."""
        return self._generations.generations(self.name, unit_ids)

    def tag(self, unit_id: int) -> int:
        return self._generations.tag(self.name, unit_id)

    def set_tags(self, unit_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Say what the units hold now that it is final, for remote readers; never the null entry."""
        self._generations.set_tags(self.name, unit_ids, keys)

    def free_ids(self) -> Iterator[int]:
        return iter(self._free)

    def cached_ids(self) -> Iterator[int]:
        """Evictable units, next victim first."""
        return iter(self._cached)

    def victim(self) -> int:
        """The next unit to evict. The owner takes its content away, which frees it."""
        return self._cached.victim()

    def victims(self, num_units: int) -> Sequence[int]:
        """The next units to evict: at least one, at most ``num_units``."""
        return self._cached.victims(num_units)

    def allocate(self, num_units: int = 1) -> list[int]:
        """Take free units, held once each; evict first when there are too few."""
        if num_units == 0:
            return []
        unit_ids = self._free[: -num_units - 1 : -1]
        assert len(unit_ids) == num_units, f"{self.name}: {num_units} wanted, {len(self._free)} free"
        del self._free[-num_units:]
        self._generations.bump(self.name, unit_ids)
        held = self.held
        for unit_id in unit_ids:
            held[unit_id] = 1
        self._num_held += num_units
        return unit_ids

    def hold(self, unit_ids: Iterable[int]) -> None:
        """One more user each. The units must not be free."""
        held, leased = self.held, self.leased
        used: list[int] = []
        for unit_id in unit_ids:
            count = held[unit_id]
            if count == 0:
                self._num_held += 1
                if leased[unit_id]:
                    self._num_leased -= 1
                else:
                    used.append(unit_id)
            held[unit_id] = count + 1
        self._cached.discard_all(used)

    def drop(self, unit_ids: Iterable[int]) -> None:
        """One user less each, in this order: what comes first is the older content."""
        held, leased, content = self.held, self.leased, self.content
        unused: list[int] = []
        for unit_id in unit_ids:
            count = held[unit_id] - 1
            assert count >= 0, f"{self.name} {unit_id} dropped more often than held"
            held[unit_id] = count
            if count:
                continue
            self._num_held -= 1
            if leased[unit_id]:
                self._num_leased += 1
            elif content[unit_id]:
                unused.append(unit_id)
            else:
                self._free.append(unit_id)
        self._cached.add_all(unused)

    def lease(self, unit_ids: Iterable[int]) -> None:
        for unit_id in unit_ids:
            if self.leased[unit_id] == 0 and self.held[unit_id] == 0:
                self._cached.discard(unit_id)
                self._num_leased += 1
            self.leased[unit_id] += 1

    def end_lease(self, unit_ids: Iterable[int]) -> None:
        for unit_id in unit_ids:
            self.leased[unit_id] -= 1
            assert self.leased[unit_id] >= 0, f"{self.name} {unit_id} released more often than leased"
            if self.leased[unit_id] == 0 and self.held[unit_id] == 0:
                self._num_leased -= 1
                if self.content[unit_id]:
                    self._cached.add(unit_id)
                else:
                    self._free.append(unit_id)

    def add_content(self, unit_id: int) -> None:
        """The unit is named by one more key. It is held at that moment, by whoever wrote it."""
        self.content[unit_id] += 1

    def remove_content(self, unit_id: int) -> None:
        self.content[unit_id] -= 1
        assert self.content[unit_id] >= 0, f"{self.name} {unit_id} forgotten more often than named"
        if self.content[unit_id] == 0 and self.held[unit_id] == 0 and self.leased[unit_id] == 0:
            self._cached.discard(unit_id)
            self._free.append(unit_id)

    def remove_contents(self, unit_ids: Sequence[int]) -> None:
        """One name less each."""
        held, leased, content = self.held, self.leased, self.content
        unnamed: list[int] = []
        for unit_id in unit_ids:
            content[unit_id] -= 1
            if not (content[unit_id] or held[unit_id] or leased[unit_id]):
                unnamed.append(unit_id)
        self._cached.discard_all(unnamed)
        self._free += unnamed

    def quarantine(self, unit_id: int) -> None:
        """The only holder gives the unit up, but something may still write it."""
        assert (self.held[unit_id], self.leased[unit_id], self.content[unit_id]) == (1, 0, 0)
        self.held[unit_id] = 0
        self._num_held -= 1
        self.quarantined.add(unit_id)

    def release_quarantined(self, unit_id: int) -> None:
        self.quarantined.remove(unit_id)
        self._free.append(unit_id)
