"""Memory of one transfer endpoint in tests: a pool of blocks, a pool of slots and their generation tables.

Blocks and slots get contents that depend on the seed and the position, so that a wrong unit, a wrong offset or a stale
copy shows. ``memory`` is a plain bytearray per region, addressed through ctypes.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

from common.transfer.regions import Region

BLOCKS = "blocks"
SLOTS = "slots"
BLOCK_GENERATIONS = "block_generations"
SLOT_GENERATIONS = "slot_generations"
ENTRY_BYTES = 16


class EndpointMemory:
    enter_thread: Callable[[], None] | None = None
    """What a backend with this memory calls once on each thread."""

    def __init__(
        self,
        *,
        epoch: int,
        seed: int,
        num_blocks: int = 64,
        block_bytes: int = 4096,
        num_slots: int = 8,
        slot_bytes: int = 16384,
    ) -> None:
        self.epoch = epoch
        self._memory = {
            BLOCKS: bytearray(num_blocks * block_bytes),
            SLOTS: bytearray(num_slots * slot_bytes),
            BLOCK_GENERATIONS: bytearray(num_blocks * ENTRY_BYTES),
            SLOT_GENERATIONS: bytearray(num_slots * ENTRY_BYTES),
        }
        sizes = {
            BLOCKS: (num_blocks, block_bytes),
            SLOTS: (num_slots, slot_bytes),
            BLOCK_GENERATIONS: (num_blocks, ENTRY_BYTES),
            SLOT_GENERATIONS: (num_slots, ENTRY_BYTES),
        }
        self.regions = {
            name: Region(
                name=name,
                address=ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory)),
                num_units=sizes[name][0],
                unit_bytes=sizes[name][1],
                null_unit=name in (BLOCKS, SLOTS),
            )
            for name, memory in self._memory.items()
        }
        for name in (BLOCKS, SLOTS):
            for unit in range(1, sizes[name][0]):
                self.write(name, unit, self.pattern(seed, name, unit))
        for name in (BLOCK_GENERATIONS, SLOT_GENERATIONS):
            self.set_generation(name, 0, epoch, tag=0)
            for unit in range(1, sizes[name][0]):
                self.set_generation(name, unit, self.first_generation(unit), tag=self.first_tag(unit))

    @staticmethod
    def first_generation(unit: int) -> int:
        return 1000 + unit

    @staticmethod
    def first_tag(unit: int) -> int:
        return (1 << 64) - unit

    def pattern(self, seed: int, name: str, unit: int) -> bytes:
        rng = random.Random(f"{seed}/{name}/{unit}")
        word = rng.randbytes(256)
        return (word * (self.regions[name].unit_bytes // len(word) + 1))[: self.regions[name].unit_bytes]

    def read(self, name: str, unit: int) -> bytes:
        size = self.regions[name].unit_bytes
        return bytes(self._memory[name][unit * size : (unit + 1) * size])

    def peek(self, name: str, unit: int, num_bytes: int) -> bytes:
        """The first bytes of a unit."""
        start = unit * self.regions[name].unit_bytes
        return bytes(self._memory[name][start : start + num_bytes])

    def write(self, name: str, unit: int, data: bytes) -> None:
        size = self.regions[name].unit_bytes
        assert len(data) == size
        self._memory[name][unit * size : (unit + 1) * size] = data

    def set_generation(self, name: str, unit: int, value: int, tag: int | None = None) -> None:
        """Write an entry; the tag stays as it is unless given, as when a holder takes a unit for other content."""
        old_tag = self.read(name, unit)[8:]
        self.write(name, unit, value.to_bytes(8, "little") + (old_tag if tag is None else tag.to_bytes(8, "little")))
