"""Content digests of a prefix: a second check, for those who trust neither generations nor the transport.

1 a holder digests what it hands out while that is leased, all of it or a sample (``--kv-transfer-verify``), 2 the
digests travel in the manifest, 3 the reader digests the same units of what arrived, before it commits, and compares.
What generations cannot see and this can: bytes that a transport delivered wrong, and memory that was written without
its generation being bumped.

Everything here hashes (about 1.7 GB/s, without the GIL): call it in a thread, neither the event loop's nor the
engine's nor the puller's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from common.kv_cache.pools.storage import KVStorage

VERIFY_OFF, VERIFY_SAMPLE, VERIFY_ALL = "off", "sample", "all"
"""Values of ``--kv-transfer-verify``."""

SAMPLE_STRIDE = 16
"""``sample`` digests one block in this many: the check costs a sixteenth, and a transport that damages blocks again and
again is found within a few prompts."""


@dataclass(frozen=True, slots=True)
class PrefixDigests:
    """``blocks``: per block group, hex per block of its table, None for those without. ``slot``: the state's; None
    without a state. Empty ``blocks`` and no ``slot``: there is nothing to compare."""

    blocks: tuple[tuple[str | None, ...], ...] = ()
    slot: str | None = None

    @property
    def has_any(self) -> bool:
        return bool(self.blocks) or self.slot is not None


def make_digests(
    storage: KVStorage, tables: Sequence[Sequence[int]], num_tokens: int, slot_id: int, verify: str
) -> PrefixDigests:
    """Digests of a prefix of ``num_tokens`` tokens: of every block and the state (``all``), of one block in 16 of each
    group and the state (``sample``, another choice each time), of nothing (``off``).

    ``tables``: block ids per group, from position 0 on, 0 where there is none; ``slot_id`` 0 without a state. The units
    must not be written meanwhile: they are leased, or a running sequence's.
    """
    if verify == VERIFY_OFF:
        return PrefixDigests()
    stride = 1 if verify == VERIFY_ALL else SAMPLE_STRIDE
    blocks: list[tuple[str | None, ...]] = []
    for group_id, table in enumerate(tables):
        first = secrets.randbelow(min(stride, len(table))) if table else 0
        blocks.append(
            tuple(
                storage.digest_block(block_id, _num_valid(storage, index, num_tokens), group_id)
                if block_id and (index - first) % stride == 0
                else None
                for index, block_id in enumerate(table)
            )
        )
    return PrefixDigests(tuple(blocks), storage.digest_slot(slot_id) if slot_id else None)


def find_mismatch(
    storage: KVStorage,
    digests: PrefixDigests,
    pairs: Sequence[Sequence[tuple[int, int]]],
    num_tokens: int,
    slot_id: int,
) -> str | None:
    """What of a pulled prefix is not what its holder digested, in words for people; None when all is well.

    ``pairs``: per block group, (index in the table, local block id) of what was read; ``slot_id``: where the state was
    read to, 0 if it was not. Units without a digest are not compared.
    """
    for group_id, group in enumerate(pairs if digests.blocks else ()):
        for index, block_id in group:
            expected = digests.blocks[group_id][index]
            if expected is None:
                continue
            found = storage.digest_block(block_id, _num_valid(storage, index, num_tokens), group_id)
            if found != expected:
                return f"block {index} of group {group_id} has digest {found}, its holder's was {expected}"
    if slot_id and digests.slot is not None:
        found = storage.digest_slot(slot_id)
        if found != digests.slot:
            return f"the state has digest {found}, its holder's was {digests.slot}"
    return None


def _num_valid(storage: KVStorage, index: int, num_tokens: int) -> int:
    """Rows of the block at ``index`` of a table that hold tokens of the prefix."""
    block_size = storage.config.block_size
    return min(block_size, num_tokens - index * block_size)
