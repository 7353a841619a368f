"""Whether the memory that a step names is there. Compiled kernels and index tensors take block ids and slots as they
are: a wrong one is another sequence's memory, or none at all. So they are looked at once for all layers, before the
first one runs."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import StepMemoryError
from common.ops.step.segment import SegmentLike, TableLike


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Number 0 of each is the null one.

    Attributes:
        num_blocks: of an attention group; 0: there are no attention layers.
        num_slots: 0: no layer keeps a state.
    """

    num_blocks: int
    num_slots: int


def check_slots(segments: Sequence[SegmentLike], num_slots: int) -> None:
    """States are read from slots of the pool, and written to slots other than the null one."""
    for segment in segments:
        if not (0 <= segment.src_slot < num_slots and 0 < segment.dst_slot < num_slots):
            raise StepMemoryError(
                f"sequence {segment.request_id}: its state goes from slot {segment.src_slot} to slot "
                f"{segment.dst_slot}, must be 0 to {num_slots - 1} and 1 to {num_slots - 1}"
            )
        if not segment.save_offsets and not segment.save_slots:
            continue
        places, slots = segment.save_offsets, segment.save_slots
        if len(places) != len(slots) or min(places) < 1 or max(places) > segment.num_tokens:
            raise StepMemoryError(
                f"sequence {segment.request_id}: saves after {places} tokens to slots {slots} in a segment of "
                f"{segment.num_tokens}"
            )
        if min(slots) < 1 or max(slots) >= num_slots:
            raise StepMemoryError(
                f"sequence {segment.request_id}: states are saved to slots {slots}, must be 1 to {num_slots - 1}"
            )


def check_lengths(
    segments: Sequence[SegmentLike], tables: Sequence[TableLike], lengths: Sequence[int], block_size: int
) -> None:
    """``lengths``: of each table's part that the step needs."""
    if len(tables) != len(segments):
        missing = next(segment for segment in segments if not segment.tables)
        raise StepMemoryError(f"sequence {missing.request_id} has no block table")
    for segment, table, length in zip(segments, tables, lengths, strict=True):
        end = segment.start + segment.num_tokens
        if segment.start < 0 or length * block_size < end:
            raise StepMemoryError(
                f"sequence {segment.request_id}: {length} blocks of {block_size} tokens do not cover positions "
                f"{segment.start} to {end - 1}"
            )
        if not 0 <= table.write_from <= len(table.block_ids) * block_size:
            raise StepMemoryError(
                f"sequence {segment.request_id}: K/V are written from position {table.write_from} on, must be 0 to "
                f"{len(table.block_ids) * block_size}, what its blocks hold"
            )


def check_blocks(
    segments: Sequence[SegmentLike],
    block_ids: array[int],
    begins: Sequence[int],
    num_blocks: int,
    block_size: int,
    window: int,
) -> None:
    """``block_ids``: the tables of all segments one after another, each from its place in ``begins`` on. The null block
    may stand for what lies before the window of a segment's first row."""
    ids = torch.frombuffer(block_ids, dtype=torch.long)
    least, largest = (int(x) for x in ids.aminmax())
    firsts = [max(0, segment.start - window + 1) // block_size if window else 0 for segment in segments]
    if largest < num_blocks and (least > 0 or (least == 0 and window and not _num_nulls(ids, begins, firsts))):
        return
    for segment, first, (begin, end) in zip(segments, firsts, itertools.pairwise(begins), strict=True):
        for index, block_id in enumerate(block_ids[begin:end]):
            if not (block_id == 0 and index < first) and not 0 < block_id < num_blocks:
                raise StepMemoryError(
                    f"sequence {segment.request_id}: entry {index} of its block table is {block_id}, must be 1 to "
                    f"{num_blocks - 1}" + (f", or 0 below {first}, before the window" if first else "")
                )


def _num_nulls(ids: Tensor, begins: Sequence[int], firsts: Sequence[int]) -> int:
    """How many null blocks the tables have from their entries ``firsts`` on."""
    is_null = ids == 0
    counts = is_null.cumsum(0)
    own = torch.tensor([begin + first for begin, first in zip(begins, firsts, strict=False)])
    last = torch.tensor(begins[1:]) - 1
    return int((counts[last] - counts[own] + is_null[own]).sum())


def check_whole(segments: Sequence[SegmentLike]) -> None:
    """Raises StepMemoryError where positions that see each other end behind their segment: keys that are not there."""
    for segment in segments:
        end = segment.start + segment.num_tokens
        if segment.whole and segment.whole[-1][1] > end:
            raise StepMemoryError(
                f"request {segment.request_id}: positions up to {segment.whole[-1][1]} see each other, the step ends "
                f"at {end}"
            )
