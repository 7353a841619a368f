"""Per-unit counters which tell a remote reader that memory was reused under it.

One u64 per unit of each pool in host memory, registered with the transfer backend; entry 0 (the null entry) holds the
node's random epoch. A counter is bumped when its unit is allocated for writing, before anything is written. Counters
start at random values, so that no two units agree by chance: a manifest that names the wrong unit is caught as well.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Iterable, Mapping

ENTRY_BYTES = ctypes.sizeof(ctypes.c_uint64)


class GenerationTables:
    """One table per pool; they live as long as this object, their addresses never change."""

    def __init__(self, pool_sizes: Mapping[str, int], epoch: int | None = None) -> None:
        self.epoch = secrets.randbits(63) | 1 if epoch is None else epoch
        self._tables = {name: _random_table(num_units, self.epoch) for name, num_units in pool_sizes.items()}
        # The same memory; items of a memoryview are three times faster than those of a ctypes array.
        self._counters = {name: memoryview(table).cast("B").cast("Q") for name, table in self._tables.items()}

    @property
    def blocks(self) -> ctypes.Array[ctypes.c_uint64]:
        return self._tables["blocks"]

    @property
    def slots(self) -> ctypes.Array[ctypes.c_uint64]:
        return self._tables["slots"]

    def table(self, pool_name: str) -> ctypes.Array[ctypes.c_uint64]:
        return self._tables[pool_name]

    def generation(self, pool_name: str, unit_id: int) -> int:
        return int(self._tables[pool_name][unit_id])

    def bump(self, pool_name: str, unit_ids: Iterable[int]) -> None:
        counters = self._counters[pool_name]
        for unit_id in unit_ids:
            assert unit_id != 0, "the null entry has no generation"
            counters[unit_id] += 1

    def address(self, pool_name: str) -> int:
        """Address of entry 0."""
        return ctypes.addressof(self.table(pool_name))

    def num_bytes(self, pool_name: str) -> int:
        return len(self.table(pool_name)) * ENTRY_BYTES


def _random_table(num_units: int, epoch: int) -> ctypes.Array[ctypes.c_uint64]:
    start = bytearray(os.urandom(num_units * ENTRY_BYTES))
    start[ENTRY_BYTES - 1 :: ENTRY_BYTES] = bytes(num_units)  # the top byte (little-endian) is the room to count up
    table = (ctypes.c_uint64 * num_units).from_buffer_copy(start)
    table[0] = ctypes.c_uint64(epoch)
    return table
