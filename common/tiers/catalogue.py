"""From the headers of a folder to what can be resumed from it: checkpoints whose closure is whole.

The last extent of a checkpoint ends with its boundary key; each names the key before it. A state whose tail or one of
whose extents is missing is of no use, and an extent that no state needs neither: both are told, to be deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.tiers.stored_prefix import Extent, StoredPrefix, blocks_per_extent
from common.tiers.object_header import HEADER_BYTES, ObjectHeader, ObjectKind


@dataclass(frozen=True, slots=True)
class Catalogue:
    prefixes: tuple[StoredPrefix, ...]
    useless: tuple[ObjectHeader, ...]


def make_catalogue(
    headers: Iterable[ObjectHeader], block_size: int, first_needed: Sequence[Callable[[int], int]]
) -> Catalogue:
    """``first_needed``: per attention group, the index of the first block that resuming at a position reads."""
    extents: dict[Extent, ObjectHeader] = {}
    tails: dict[bytes, ObjectHeader] = {}
    states: list[ObjectHeader] = []
    for header in headers:
        if header.kind is ObjectKind.EXTENT:
            extents[Extent(header.group_id, header.start, header.num_blocks, header.key)] = header
        elif header.kind is ObjectKind.TAIL:
            tails[header.key] = header
        else:
            states.append(header)
    prefixes: list[StoredPrefix] = []
    used: set[ObjectHeader] = set()
    for state in states:
        closure = _closure(state, extents, block_size, first_needed)
        tail = tails.get(state.key)
        if closure is None or (state.tail_tokens and first_needed and tail is None):
            continue
        own = [state, tail] if tail is not None else [state]
        used.update(own, (extents[extent] for extent in closure))
        prefixes.append(
            StoredPrefix(
                _checkpoint(state),
                state.row_bytes > 0,
                tuple(closure),
                tuple(_file_bytes(extents[extent]) for extent in closure),
                sum(map(_file_bytes, own)),
            )
        )
    all_headers = (*states, *tails.values(), *extents.values())
    return Catalogue(tuple(prefixes), tuple(header for header in all_headers if header not in used))


def _closure(
    state: ObjectHeader,
    extents: dict[Extent, ObjectHeader],
    block_size: int,
    first_needed: Sequence[Callable[[int], int]],
) -> list[Extent] | None:
    per_extent = blocks_per_extent(block_size)
    closure: list[Extent] = []
    for group_id, first_of in enumerate(first_needed):
        first, end = first_of(state.position), (state.position - len(state.tail_tokens)) // block_size
        key, found = state.parent_key, []
        while end > first:
            start = max(first, (end - 1) // per_extent * per_extent)
            extent = Extent(group_id, start, end - start, key)
            header = extents.get(extent)
            if header is None:
                return None
            found.append(extent)
            key, end = header.parent_key, start
        closure += reversed(found)
    return closure


def _checkpoint(state: ObjectHeader) -> Checkpoint:
    return Checkpoint(
        key=state.key,
        position=state.position,
        boundary_key=state.parent_key,
        tail_tokens=state.tail_tokens,
        slot_id=0,
        tail_block_ids=(),
        origin=state.origin,
        history=state.history,
    )


def _file_bytes(header: ObjectHeader) -> int:
    return HEADER_BYTES + header.payload_bytes
