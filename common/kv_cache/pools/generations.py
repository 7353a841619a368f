"""How a remote reader finds out that memory no longer holds what it was told: per unit a generation and a tag.

16 bytes per unit of each pool in host memory, registered with the transfer backend: [u64 generation, u64 tag]. Entry 0
(the null entry) holds the node's random epoch and tag 0.

- The *generation* is bumped when its unit is allocated for writing, before anything is written, with a fence between:
  who reads new content and then the generation finds the new one. Generations start at random values, so that no two
  units agree by chance.
- The *tag* says what the unit holds: the first 8 bytes of the key of the prefix that the content ends. It is written
  when the content is final, and stays behind when the unit is allocated again (the generation covers that). A reader
  computes the tags from its own tokens, so a manifest that names the wrong unit is caught, whoever made it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

from common.fence import Fence
from common.kv_cache.keys import KEY_BYTES

TAG_BYTES = 8
"""Bytes of a key that make its tag."""
ENTRY_BYTES = 8 + TAG_BYTES
"""One unit's entry in its table: generation, then tag."""


def content_tag(key: bytes) -> int:
    """The tag of a unit whose content belongs to the prefix with this key."""
    return int.from_bytes(key[:TAG_BYTES], "little")


class GenerationTables:
    """One table per pool; they live as long as this object, their addresses never change. ``bump`` belongs to one
    thread."""

    def __init__(
        self, pool_sizes: Mapping[str, int], epoch: int | None = None, *, fence: Callable[[], None] | None = None
    ) -> None:
        self.epoch = secrets.randbits(63) | 1 if epoch is None else epoch
        self._tables = {name: _new_table(num_units, self.epoch) for name, num_units in pool_sizes.items()}
        # The same memory; items of a memoryview are three times faster than those of a ctypes array.
        words = {name: memoryview(table).cast("B").cast("Q") for name, table in self._tables.items()}
        self._counters = {name: table[::2] for name, table in words.items()}
        self._tags = {name: table[1::2] for name, table in words.items()}
        self._fence = fence or Fence()

    def generation(self, pool_name: str, unit_id: int) -> int:
        return self._counters[pool_name][unit_id]

    def generations(self, pool_name: str, unit_ids: Sequence[int]) -> tuple[int, ...]:
        """Of each unit, 0 of the null entry. The 65,536 blocks of a million tokens take 3 ms; one by one 15, and a
        prompt that is followed asks after each step."""
        counters = self._counters[pool_name]
        return tuple([counters[unit_id] if unit_id else 0 for unit_id in unit_ids])

    def tag(self, pool_name: str, unit_id: int) -> int:
        return self._tags[pool_name][unit_id]

    def bump(self, pool_name: str, unit_ids: Iterable[int]) -> None:
        """When it returns, no reader sees what is written into the units from now on with their old generations."""
        counters = self._counters[pool_name]
        for unit_id in unit_ids:
            assert unit_id != 0, "the null entry has no generation"
            counters[unit_id] += 1
        self._fence()

    def set_tags(self, pool_name: str, unit_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """The content of each unit, that of the key at the same place, is final."""
        tags = self._tags[pool_name]
        # All keys at once: 70 ns per unit, a content_tag each takes 150.
        values = memoryview(b"".join(keys)).cast("B").cast("Q")[:: KEY_BYTES // TAG_BYTES].tolist()
        for unit_id, value in zip(unit_ids, values, strict=True):
            tags[unit_id] = value
        assert tags[0] == 0, "the null entry has no content"

    def address(self, pool_name: str) -> int:
        """Address of entry 0."""
        return ctypes.addressof(self._tables[pool_name])

    def num_bytes(self, pool_name: str) -> int:
        return ctypes.sizeof(self._tables[pool_name])


def _new_table(num_units: int, epoch: int) -> ctypes.Array[ctypes.c_uint64]:
    """Random generations whose top byte (little-endian) is 0, the room to count up; no tags."""
    entries = bytearray(num_units * ENTRY_BYTES)
    random = os.urandom(num_units * (TAG_BYTES - 1))
    for byte in range(TAG_BYTES - 1):
        entries[byte::ENTRY_BYTES] = random[byte * num_units : (byte + 1) * num_units]
    table = (ctypes.c_uint64 * (2 * num_units)).from_buffer_copy(entries)
    table[0] = ctypes.c_uint64(epoch)
    return table
