"""Per-unit counters which tell a remote reader that memory was reused under it.

One u64 per block and per slot in host memory, registered with the transfer backend; entry 0 (the null entry) holds the
node's random epoch. A counter is bumped when its unit is allocated for writing, before anything is written. Counters
start at random values, so that no two units agree by chance: a manifest that names the wrong unit is caught as well.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from typing import Literal

PoolName = Literal["blocks", "slots"]
ENTRY_BYTES = ctypes.sizeof(ctypes.c_uint64)


class GenerationTables:
    """``blocks`` and ``slots`` live as long as this object; their addresses never change."""

    def __init__(self, num_blocks: int, num_slots: int, epoch: int | None = None) -> None:
        self.epoch = secrets.randbits(63) | 1 if epoch is None else epoch
        self.blocks = _random_table(num_blocks, self.epoch)
        self.slots = _random_table(num_slots, self.epoch)

    def table(self, pool: PoolName) -> ctypes.Array[ctypes.c_uint64]:
        return self.blocks if pool == "blocks" else self.slots

    def generation(self, pool: PoolName, unit_id: int) -> int:
        return int(self.table(pool)[unit_id])

    def bump(self, pool: PoolName, unit_id: int) -> None:
        assert unit_id != 0, "the null entry has no generation"
        table = self.table(pool)
        table[unit_id] += 1

    def address(self, pool: PoolName) -> int:
        """Address of entry 0."""
        return ctypes.addressof(self.table(pool))

    def num_bytes(self, pool: PoolName) -> int:
        return len(self.table(pool)) * ENTRY_BYTES


def _random_table(num_units: int, epoch: int) -> ctypes.Array[ctypes.c_uint64]:
    table = (ctypes.c_uint64 * num_units).from_buffer_copy(os.urandom(num_units * ENTRY_BYTES))
    table[0] = ctypes.c_uint64(epoch)
    return table
