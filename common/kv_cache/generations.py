"""Per-unit counters which tell a remote reader that memory was reused under it.

One u64 per unit of each pool in host memory, registered with the transfer backend; entry 0 (the null entry) holds the
node's random epoch. A counter is bumped when its unit is allocated for writing, before anything is written.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Iterable, Mapping

ENTRY_BYTES = ctypes.sizeof(ctypes.c_uint64)


class GenerationTables:
    """One table per pool; they live as long as this object, their addresses never change."""

    def __init__(self, pool_sizes: Mapping[str, int], epoch: int | None = None) -> None:
        self.epoch = secrets.randbits(63) | 1 if epoch is None else epoch
        self._tables = {name: (ctypes.c_uint64 * num_units)() for name, num_units in pool_sizes.items()}
        for table in self._tables.values():
            table[0] = ctypes.c_uint64(self.epoch)
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
