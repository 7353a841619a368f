"""Reading a holder's generations and comparing them with what was promised.

An entry of a generations region is 16 bytes: u64 generation, u64 content tag; entry 0 is (epoch, 0). Entries are read
into scratch memory of the reader, a segment at a time, and compared there.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from common.transfer.jobs import ExpectedGeneration, PullJob, PullReason
from common.transfer.reads import Read
from common.transfer.regions import Region

GENERATION_BYTES = 16
"""Bytes of an entry."""
WORDS_PER_ENTRY = 2
"""64-bit words of an entry."""
SCRATCH_SEGMENTS = 32
"""Reads of generations that can be in flight at a time; further pulls wait for a segment. All of scratch is 1 MiB."""
SEGMENT_ENTRIES = 2048
"""Entries that one read brings: the generations of 2,048 blocks or states are checked at once."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first entry that differs; ``reason`` of a pull's outcome, and the same for people."""

    reason: str
    message: str


class ScratchMemory:
    """Where generations arrive: ``SCRATCH_SEGMENTS`` segments of ``SEGMENT_ENTRIES`` entries. Not thread-safe.

    A segment belongs to a read from ``take`` until that read is terminal; then it is given back with ``put_back``.
    """

    def __init__(self, name: str) -> None:
        self._memory = (ctypes.c_uint64 * (SCRATCH_SEGMENTS * SEGMENT_ENTRIES * WORDS_PER_ENTRY))()
        self._words = memoryview(self._memory).cast("B").cast("Q")
        self._free = list(range(SCRATCH_SEGMENTS))
        self.region = Region(
            name=name,
            address=ctypes.addressof(self._memory),
            num_units=SCRATCH_SEGMENTS * SEGMENT_ENTRIES,
            unit_bytes=GENERATION_BYTES,
            exported=False,
            owner=self._memory,
        )

    def take(self) -> int | None:
        """A free segment; None when all are in use."""
        return self._free.pop() if self._free else None

    def put_back(self, segment: int) -> None:
        self._free.append(segment)

    def words(self, segment: int, num_entries: int) -> list[int]:
        """[2 * num_entries]: generation, tag, generation, tag, ..."""
        first = segment * SEGMENT_ENTRIES * WORDS_PER_ENTRY
        return self._words[first : first + num_entries * WORDS_PER_ENTRY].tolist()


class GenerationCheck:
    """What of a pull is still to be verified, in segments: ``reads`` of the first one, then ``compare``.

    Every rank that is read from has to prove all of it, out of its own tables; where nothing is read, every rank of the
    peer. The epoch comes first in each table, units ascend, so that neighbours merge into one descriptor.
    """

    def __init__(self, job: PullJob) -> None:
        by_region: dict[str, list[ExpectedGeneration]] = {}
        for expected in job.generations:
            entries = by_region.get(expected.region)
            if entries is None:
                entries = by_region[expected.region] = [ExpectedGeneration(expected.region, 0, job.epoch, 0)]
            entries.append(expected)
        checks = [entry for entries in by_region.values() for entry in sorted(entries, key=attrgetter("unit"))]
        ranks = sorted({read.rank for read in job.reads if len(read.pairs)}) or range(len(job.peer.ranks))
        self._segments = deque(
            (rank, checks[start : start + SEGMENT_ENTRIES])
            for rank in ranks
            for start in range(0, len(checks), SEGMENT_ENTRIES)
        )

    @property
    def is_complete(self) -> bool:
        return not self._segments

    def reads(self, scratch: ScratchMemory, segment: int) -> list[Read]:
        """Reads of the first remaining segment's entries into a segment of scratch memory."""
        rank, checks = self._segments[0]
        pairs: dict[str, list[tuple[int, int]]] = {}
        for unit, check in enumerate(checks, start=segment * SEGMENT_ENTRIES):
            pairs.setdefault(check.region, []).append((unit, check.unit))
        return [Read(scratch.region.name, region, region_pairs, rank=rank) for region, region_pairs in pairs.items()]

    def compare(self, scratch: ScratchMemory, segment: int) -> Mismatch | None:
        """Takes the first remaining segment off the list. Returns the first of its entries that is not as expected."""
        rank, checks = self._segments.popleft()
        found = scratch.words(segment, len(checks))
        if found == [word for check in checks for word in (check.value, check.tag)]:
            return None
        for check, value, tag in zip(checks, found[::2], found[1::2], strict=True):
            where = f"{check.region}[{check.unit}]" + (f" of rank {rank}" if rank else "")
            if value != check.value:
                what, reason = (
                    ("epoch", PullReason.STALE_EPOCH)
                    if check.unit == 0
                    else ("generation", PullReason.STALE_GENERATION)
                )
                return Mismatch(reason, f"{what} of {where} is {value}, promised was {check.value}")
            if tag != check.tag:
                message = f"content of {where} has tag {tag:#018x}, this prompt's is {check.tag:#018x}"
                return Mismatch(PullReason.WRONG_CONTENT, message)
        raise AssertionError("lists differ, but none of their entries do")
