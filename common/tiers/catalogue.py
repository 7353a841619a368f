"""From the headers of a folder to what can be resumed from it: checkpoints whose closure is whole.

The last extent of a checkpoint ends with its boundary key; each names the key before it. A state whose tail or one of
whose extents is missing is of no use (yet: its writer may be slower than whoever looks), and an extent that no state
needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.tiers.stored_prefix import Extent, StoredPrefix, blocks_per_extent
from common.tiers.object_header import ObjectHeader, ObjectKind, file_bytes


class Catalogue:
    """``first_needed``: per attention group, the index of the first block that resuming at a position reads."""

    def __init__(self, block_size: int, first_needed: Sequence[Callable[[int], int]]) -> None:
        self._block_size = block_size
        self._first_needed = first_needed
        self._extents: dict[Extent, ObjectHeader] = {}
        self._tails: dict[bytes, ObjectHeader] = {}
        self._states: dict[tuple[bytes, bool], ObjectHeader] = {}  # and whether it has its row: both may be there
        self._prefixes: dict[bytes, StoredPrefix] = {}
        self._has_lost = False

    def add(self, headers: Iterable[ObjectHeader]) -> list[StoredPrefix]:
        """Takes in what is new; returns the prefixes that are whole with it, or that ``remove`` told as gone and are
        there otherwise: a state with its row goes before the same one without."""
        headers = list(headers)
        if not headers and not self._has_lost:
            return []
        self._has_lost = False
        for header in headers:
            if header.kind is ObjectKind.EXTENT:
                self._extents[Extent(header.group_id, header.start, header.num_blocks, header.key)] = header
            elif header.kind is ObjectKind.TAIL:
                self._tails[header.key] = header
            else:
                self._states[_place(header)] = header
        waiting = [
            state
            for (key, has_row), state in self._states.items()
            if key not in self._prefixes and (has_row or (key, True) not in self._states)
        ]
        whole = [prefix for prefix in map(self._prefix, waiting) if prefix is not None]
        self._prefixes.update((prefix.key, prefix) for prefix in whole)
        return whole

    def remove(self, headers: Iterable[ObjectHeader]) -> list[bytes]:
        """Takes out what is gone; returns the keys of the prefixes that are whole no longer, or not as they were told:
        ``add`` tells these again."""
        keys: set[bytes] = set()
        extents: set[Extent] = set()
        for header in headers:
            if header.kind is ObjectKind.EXTENT:
                extent = Extent(header.group_id, header.start, header.num_blocks, header.key)
                self._extents.pop(extent, None)
                extents.add(extent)
            else:
                if header.kind is ObjectKind.TAIL:
                    self._tails.pop(header.key, None)
                else:
                    self._states.pop(_place(header), None)
                keys.add(header.key)
        if extents:
            keys.update(prefix.key for prefix in self._prefixes.values() if not extents.isdisjoint(prefix.extents))
        gone = [key for key in keys if self._prefixes.pop(key, None) is not None]
        self._has_lost = self._has_lost or bool(gone)
        return gone

    def useless(self) -> list[ObjectHeader]:
        """What no prefix needs that is whole."""
        used: set[Extent] = set()
        for prefix in self._prefixes.values():
            used.update(prefix.extents)
        left = [header for extent, header in self._extents.items() if extent not in used]
        left += [header for key, header in self._tails.items() if key not in self._prefixes]
        left += [header for (key, _), header in self._states.items() if key not in self._prefixes]
        return left

    def _prefix(self, state: ObjectHeader) -> StoredPrefix | None:
        closure = self._closure(state)
        tail = self._tails.get(state.key)
        if closure is None or (state.tail_tokens and self._first_needed and tail is None):
            return None
        own = [state, tail] if tail is not None else [state]
        sizes = tuple(file_bytes(self._extents[extent]) for extent in closure)
        checkpoint, has_row = _checkpoint(state), state.row_bytes > 0
        return StoredPrefix(checkpoint, has_row, tuple(closure), sizes, sum(map(file_bytes, own)))

    def _closure(self, state: ObjectHeader) -> list[Extent] | None:
        per_extent = blocks_per_extent(self._block_size)
        closure: list[Extent] = []
        for group_id, first_of in enumerate(self._first_needed):
            first, end = first_of(state.position), (state.position - len(state.tail_tokens)) // self._block_size
            key, found = state.parent_key, []
            while end > first:
                start = max(first, (end - 1) // per_extent * per_extent)
                extent = Extent(group_id, start, end - start, key)
                header = self._extents.get(extent)
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


def _place(state: ObjectHeader) -> tuple[bytes, bool]:
    return state.key, state.row_bytes > 0
