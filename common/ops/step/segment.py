"""The segment that ops read: consecutive tokens of one sequence, with the memory that they read and write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TableLike(Protocol):
    """A segment's block table in one attention group; ``common.kv_cache.sequences.allocation.BlockTable`` has this
    shape."""

    @property
    def block_ids(self) -> Sequence[int]: ...
    @property
    def write_from(self) -> int: ...


class SegmentLike(Protocol):
    """What an op needs to know of a segment; ``common.engine.plan.Segment`` has this shape."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def tables(self) -> Sequence[TableLike]: ...
    @property
    def src_slot(self) -> int: ...
    @property
    def dst_slot(self) -> int: ...
    @property
    def save_offsets(self) -> tuple[int, ...]: ...
    @property
    def save_slots(self) -> tuple[int, ...]: ...
    @property
    def whole(self) -> tuple[tuple[int, int], ...]: ...
