"""Memory is touched before a read goes into it: what lies under the read, once, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from common.transfer.nixl import fresh_pages
from common.transfer.nixl.fresh_pages import CHUNK_BYTES, FreshPages
from common.transfer.reads import RunArray
from common.transfer.regions import Region

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NUM_BYTES = 8 * CHUNK_BYTES
UNIT_BYTES = 100_000
"""No part of a page or a chunk: units lie across their borders."""
OFFSET = 8

# Elsewhere touching does nothing, by design; what is asked of the kernel is tested everywhere.
needs_populate = pytest.mark.skipif(
    sys.platform != "linux" or tuple(int(part) for part in os.uname().release.split(".")[:2]) < (5, 14),
    reason="MADV_POPULATE_WRITE takes Linux 5.14",
)


@dataclass(frozen=True)
class Memory:
    """Anonymous memory that nobody has touched, and a region in it that begins in the middle of a page."""

    address: int
    region: Region

    def resident(self) -> set[int]:
        """Chunks of which a page is there, numbered as addresses are."""
        pages = (ctypes.c_ubyte * (NUM_BYTES // PAGE_BYTES))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(self.address), ctypes.c_size_t(NUM_BYTES), pages) == 0
        return {(self.address + i * PAGE_BYTES) // CHUNK_BYTES for i, flags in enumerate(pages) if flags & 1}

    def chunks(self, first_unit: int, count: int) -> set[int]:
        begin = self.region.address + first_unit * UNIT_BYTES
        return set(range(begin // CHUNK_BYTES, (begin + count * UNIT_BYTES - 1) // CHUNK_BYTES + 1))


@pytest.fixture
def memory() -> Iterator[Memory]:
    mapped = mmap.mmap(-1, NUM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = ctypes.c_char.from_buffer(mapped)
    address = ctypes.addressof(view)
    yield Memory(address, Region("kv", address + OFFSET, (NUM_BYTES - OFFSET) // UNIT_BYTES, UNIT_BYTES))
    del view
    mapped.close()


def runs(*pairs: tuple[int, int]) -> RunArray:
    """Of (first local unit, length)."""
    return np.array([(first, 0, length) for first, length in pairs], dtype=np.int64).reshape(-1, 3) * UNIT_BYTES


@needs_populate
def test_touch_when_units_are_fresh_then_what_lies_under_them_is_brought_in_and_no_more(memory: Memory) -> None:
    fresh = FreshPages(memory.region)
    assert memory.resident() == set()
    fresh.touch(runs((50, 1), (70, 25), (20, 2)))
    wanted = memory.chunks(20, 2) | memory.chunks(50, 1) | memory.chunks(70, 25)
    assert memory.resident() == wanted
    assert len(wanted) < NUM_BYTES // CHUNK_BYTES


@needs_populate
def test_touch_when_the_region_is_read_whole_then_all_of_it_is_there_and_its_bytes_are_kept(memory: Memory) -> None:
    last = memory.region.address + memory.region.num_bytes - 1
    ctypes.memset(last, 7, 1)
    FreshPages(memory.region).touch(runs((0, memory.region.num_units)))
    assert memory.resident() == memory.chunks(0, memory.region.num_units)
    assert ctypes.string_at(last, 1) == b"\x07"


def test_touch_when_nothing_is_fresh_then_the_kernel_is_not_asked(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(fresh_pages, "_populate", lambda begin, end: asked.append((begin, end)))
    fresh = FreshPages(memory.region)
    fresh.touch(runs())
    assert asked == []
    fresh.touch(runs((30, 20)))
    fresh.touch(runs((35, 1), (49, 1)))
    assert len(asked) == 1
    fresh.touch(runs((0, memory.region.num_units)))
    # Before and behind what was there; every byte of the region once, from the start of its first page.
    assert len(asked) == 3
    begin, end = memory.region.address // PAGE_BYTES * PAGE_BYTES, memory.region.address + memory.region.num_bytes
    assert sorted(asked)[0][0] == begin
    assert sorted(asked)[-1][1] == end
    assert sum(upper - lower for lower, upper in asked) == end - begin
    fresh.touch(runs((0, memory.region.num_units)))
    assert len(asked) == 3
