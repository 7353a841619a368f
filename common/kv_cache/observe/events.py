"""What became findable and what no longer is, for those who place requests by cached prefixes.

Life cycle of an event: 1 a group manager reports it, 2 it gets the next sequence number and is kept for a while,
3 readers ask for what came after the last number they saw; whoever is too late starts again from a snapshot. Reported
by the engine thread, read by any.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

DEFAULT_CAPACITY = 16_384
"""Events that are kept for readers; one that has missed more starts from a snapshot."""
DEFAULT_MAX_KEYS = 262_144
"""Keys in them together: some 25 MB, where nobody else has these keys any more."""
MAX_REMOVED_KEYS = 1024
"""Keys of one event of removed blocks."""


class EventKind(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """
    Attributes:
        group: label of the group: attention, mla, window_<tokens>, state.
        keys: the prefixes concerned: consecutive block boundaries, removed blocks in any order, or one checkpoint.
        parent: key of the block boundary before the first of ``keys``; b"" for a removal.
        position: token position of the last of ``keys``; 0 for removed blocks.
        is_checkpoint: a local request can resume there (as far as the attention groups reach too).
        has_row: a checkpoint from which a prompt that ends exactly there can go on; told again when it becomes true.
    """

    sequence_number: int
    kind: EventKind
    group: str
    keys: tuple[bytes, ...]
    parent: bytes
    position: int
    is_checkpoint: bool = False
    has_row: bool = False


@dataclass(frozen=True, slots=True)
class GroupEntries:
    """One attention group's published blocks: block by key; by block the key of the boundary before it and the
    position of its end."""

    label: str
    block_of: Mapping[bytes, int]
    parents: Sequence[bytes]
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Everything findable after the event ``sequence_number``.

    Taken by copying tables, because the engine waits meanwhile; ``events`` may be listed later, by another thread.
    """

    sequence_number: int
    groups: tuple[GroupEntries, ...]
    checkpoints: tuple[CacheEvent, ...]

    @property
    def events(self) -> tuple[CacheEvent, ...]:
        """As stored events of that number, shallow positions first."""
        return tuple(sorted((*self._blocks(), *self.checkpoints), key=lambda event: event.position))

    def _blocks(self) -> Iterator[CacheEvent]:
        for group in self.groups:
            for key, block_id in group.block_of.items():
                parent, position = group.parents[block_id], group.positions[block_id]
                yield CacheEvent(self.sequence_number, EventKind.STORED, group.label, (key,), parent, position)


class EventLog:
    """Keeps the last ``capacity`` events, or fewer that have ``max_keys`` keys together."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY, max_keys: int = DEFAULT_MAX_KEYS) -> None:
        self._lock = threading.Lock()
        self._capacity = capacity
        self._max_keys = max_keys
        self._events: deque[CacheEvent] = deque()
        self._num_keys = 0
        self._last = 0

    @property
    def last_sequence_number(self) -> int:
        return self._last

    def stored(self, group: str, parent: bytes, keys: Sequence[bytes], position: int) -> None:
        self._append(EventKind.STORED, group, tuple(keys), parent, position)

    def checkpoint_stored(self, group: str, parent: bytes, key: bytes, position: int, *, has_row: bool) -> None:
        self._append(EventKind.STORED, group, (key,), parent, position, True, has_row)

    def removed(self, group: str, keys: Sequence[bytes]) -> None:
        """Blocks, in any order. So many of them are several events that what is sent of them stays bounded."""
        for start in range(0, len(keys), MAX_REMOVED_KEYS):
            self._append(EventKind.REMOVED, group, tuple(keys[start : start + MAX_REMOVED_KEYS]), b"", 0)

    def checkpoint_removed(self, group: str, key: bytes, position: int) -> None:
        self._append(EventKind.REMOVED, group, (key,), b"", position, True)

    def since(self, sequence_number: int) -> list[CacheEvent] | None:
        """Events after that one, oldest first. None: some of them are gone, start from a snapshot."""
        with self._lock:
            num_new = self._last - sequence_number
            if not 0 <= num_new <= len(self._events):
                return None
            return list(self._events)[len(self._events) - num_new :]

    def _append(
        self,
        kind: EventKind,
        group: str,
        keys: tuple[bytes, ...],
        parent: bytes,
        position: int,
        is_checkpoint: bool = False,
        has_row: bool = False,
    ) -> None:
        with self._lock:
            self._last += 1
            self._events.append(CacheEvent(self._last, kind, group, keys, parent, position, is_checkpoint, has_row))
            self._num_keys += len(keys)
            while self._events and (len(self._events) > self._capacity or self._num_keys > self._max_keys):
                self._num_keys -= len(self._events.popleft().keys)
