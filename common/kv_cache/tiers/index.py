"""What one tier holds, within its size: prefixes with their closures, each extent once however many need it.

1 ``missing`` says what a prefix would add, 2 ``make_room`` drops what is worth least, 3 ``add`` once it is written,
4 ``touch`` when it is read, 5 dropped: its state, and the extents that no other prefix needs.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

from common.kv_cache.keys import PrefixKeys
from common.kv_cache.tiers.stored_prefix import Extent, StoredPrefix

NEWCOMERS_FACTOR = 2.0
"""A newcomer is let in when it is worth more than half, per byte, of what would have to go: its estimate is the less
certain one. Production chat trace, 160 GiB, 3,000 requests: 22.0 % and 221 MB a request with 1."""
SAMPLE = 64
"""Prefixes that are compared when one must go: the longest unused ones. Among 64 of some thousand the worst is close to
the worst of all, and a drop costs the same however large the tier is."""


class TierIndex:
    """``worth``: tokens expected of a prefix (by its key) per request waited; None: nothing is known, and the longest
    unused goes first."""

    def __init__(self, size_bytes: int, worth: Callable[[bytes], float | None]) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self.pinned: Counter[bytes] = Counter()
        """Keys of prefixes that are being written or read: they stay."""
        self.on_change: Callable[[StoredPrefix, bool], None] = lambda prefix, is_stored: None
        """Told of each prefix that is added, and of each that is dropped."""
        self.unwritten: set[bytes] = set()
        """Keys of those that are being written: not to be read yet."""
        self._worth = worth
        self._prefixes: OrderedDict[bytes, StoredPrefix] = OrderedDict()  # longest unused first
        self._positions: dict[bytes, Counter[int]] = {}  # of the prefixes behind each block boundary
        self._users: dict[Extent, int] = {}

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[StoredPrefix]:
        """Longest unused first."""
        return iter(tuple(self._prefixes.values()))

    def __contains__(self, key: object) -> bool:
        return key in self._prefixes

    def get(self, key: bytes) -> StoredPrefix | None:
        return self._prefixes.get(key)

    @property
    def num_extents(self) -> int:
        return len(self._users)

    def has_extent(self, extent: Extent) -> bool:
        return extent in self._users

    def matching(self, keys: PrefixKeys, num_tokens: int, above: int) -> Iterator[StoredPrefix]:
        """Prefixes of these tokens that end above ``above`` and at or below ``num_tokens``, deepest first."""
        size = keys.block_size
        chain = keys.boundary_keys(num_tokens // size)
        for num_blocks in range(num_tokens // size, above // size - 1, -1):
            # Many prefixes may differ behind one boundary, at few positions.
            for position in sorted(self._positions.get(chain[num_blocks], ()), reverse=True):
                if above < position <= num_tokens and (prefix := self.get(keys.key_at(position))) is not None:
                    yield prefix

    def missing(self, prefix: StoredPrefix) -> int:
        """Bytes that storing it would write."""
        users = self._users
        return prefix.own_bytes + sum(
            num_bytes
            for extent, num_bytes in zip(prefix.extents, prefix.extent_bytes, strict=True)
            if extent not in users
        )

    def make_room(self, prefix: StoredPrefix, *, is_choosy: bool = True) -> list[StoredPrefix] | None:
        """Drops what must go before ``prefix`` fits, and returns it. None, and nothing goes: it is larger than the
        tier, or, where that ``is_choosy``, worth less per byte than what would have to go."""
        dropped: list[StoredPrefix] = []
        worth = self._worth(prefix.key)
        density = None if worth is None or not is_choosy else NEWCOMERS_FACTOR * worth / self.missing(prefix)
        while self.used_bytes + self.missing(prefix) > self.size_bytes:
            victim = self._victim(density)
            if victim is None:
                for other in reversed(dropped):
                    self.add(other, is_oldest=True)
                return None
            self.drop(victim)
            dropped.append(victim)
        return dropped

    def add(self, prefix: StoredPrefix, *, is_oldest: bool = False) -> None:
        """``is_oldest``: it is the longest unused one from now on."""
        assert prefix.key not in self._prefixes
        self.used_bytes += self.missing(prefix)
        self._prefixes[prefix.key] = prefix
        if is_oldest:
            self._prefixes.move_to_end(prefix.key, last=False)
        self._positions.setdefault(prefix.checkpoint.boundary_key, Counter())[prefix.position] += 1
        for extent in prefix.extents:
            self._users[extent] = self._users.get(extent, 0) + 1
        self.on_change(prefix, True)

    def touch(self, prefix: StoredPrefix) -> None:
        self._prefixes.move_to_end(prefix.key)

    def pin(self, key: bytes) -> None:
        self.pinned[key] += 1

    def unpin(self, key: bytes) -> None:
        self.pinned[key] -= 1
        if not self.pinned[key]:
            del self.pinned[key]

    def users_of(self, extent: Extent) -> list[StoredPrefix]:
        """O(prefixes)."""
        return [prefix for prefix in self._prefixes.values() if extent in prefix.extents]

    def drop(self, prefix: StoredPrefix) -> list[Extent]:
        """Returns the extents that no other prefix needs."""
        del self._prefixes[prefix.key]
        self.on_change(prefix, False)
        boundary_key = prefix.checkpoint.boundary_key
        positions = self._positions[boundary_key]
        positions -= Counter((prefix.position,))
        if not positions:
            del self._positions[boundary_key]
        self.used_bytes -= prefix.own_bytes
        unused = []
        for extent, num_bytes in zip(prefix.extents, prefix.extent_bytes, strict=True):
            self._users[extent] -= 1
            if not self._users[extent]:
                del self._users[extent]
                self.used_bytes -= num_bytes
                unused.append(extent)
        return unused

    def _victim(self, limit: float | None) -> StoredPrefix | None:
        """Of the longest unused ones, the one that is worth least per byte that its going sets free, if that is below
        ``limit``."""
        best, least = None, math.inf if limit is None else limit
        unpinned = (prefix for prefix in self._prefixes.values() if prefix.key not in self.pinned)
        for prefix in islice(unpinned, SAMPLE):
            worth = self._worth(prefix.key)
            if worth is None:
                return prefix
            density = worth / self._freed_bytes(prefix)
            if density <= least:
                best, least = prefix, density
        return best

    def _freed_bytes(self, prefix: StoredPrefix) -> int:
        users = self._users
        return max(1, prefix.own_bytes) + sum(
            num_bytes
            for extent, num_bytes in zip(prefix.extents, prefix.extent_bytes, strict=True)
            if users[extent] == 1
        )
