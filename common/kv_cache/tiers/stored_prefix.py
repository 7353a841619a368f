"""A prefix as a tier holds it: a checkpoint and the extents of blocks that it needs, its *closure*.

An extent is up to ``EXTENT_TOKENS`` of one attention group's blocks, aligned to that many tokens, so that prefixes with
a common beginning name the same ones; the last extent of a prefix may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common.kv_cache.checkpoints.checkpoint import Checkpoint

EXTENT_TOKENS = 256
"""Tokens of a whole extent: 16 blocks of the default size."""


class Extent(NamedTuple):
    """``num_blocks`` blocks of an attention group from index ``start`` in a block table; ``key``: of the prefix that
    ends with the last one."""

    group_id: int
    start: int
    num_blocks: int
    key: bytes


@dataclass(frozen=True, slots=True, eq=False)
class StoredPrefix:
    """
    Attributes:
        checkpoint: what it resumes, without memory and without its row.
        has_row: whether the last hidden row is stored as well.
        extents: its closure, per group from left to right.
        extent_bytes: of each extent, in the tier.
        own_bytes: of state, tail and row.
    """

    checkpoint: Checkpoint
    has_row: bool
    extents: tuple[Extent, ...]
    extent_bytes: tuple[int, ...]
    own_bytes: int

    @property
    def key(self) -> bytes:
        return self.checkpoint.key

    @property
    def position(self) -> int:
        return self.checkpoint.position


def blocks_per_extent(block_size: int) -> int:
    """Of a whole extent; it starts on a multiple of that, or where the blocks do that are needed."""
    return max(1, EXTENT_TOKENS // block_size)


def extents_of(group_id: int, first_block: int, keys: Sequence[bytes], block_size: int) -> list[Extent]:
    """The extents over the blocks from ``first_block`` on, whose keys are ``keys``."""
    per_extent = blocks_per_extent(block_size)
    extents, index, end = [], first_block, first_block + len(keys)
    while index < end:
        stop = min(end, index // per_extent * per_extent + per_extent)
        extents.append(Extent(group_id, index, stop - index, keys[stop - 1 - first_block]))
        index = stop
    return extents
