"""Prefixes pinned for remote readers, each until a deadline.

Life cycle: 1 the engine thread adds, 2 HTTP threads renew, 3 the engine thread takes it out: on release, or between
steps when its deadline has passed. Only deadlines are shared between threads; what is pinned is the engine's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.kv_cache.checkpoints.checkpoint import Checkpoint

Tables = tuple[tuple[int, ...], ...]
"""Per attention group, one entry per block."""


@dataclass(frozen=True, slots=True)
class LeasedPrefix:
    """A prefix pinned for a remote reader until release or expiry.

    ``tables`` cover ``num_tokens`` positions per attention group, the tail block last, null below a window;
    generations are those at lease time (0 for a null entry). ``output_row``: when the prefix is a whole prompt, in host
    memory.
    """

    num_tokens: int
    tables: Tables
    generations: Tables
    slot_id: int
    slot_generation: int
    key: bytes
    output_row: Any | None


@dataclass(frozen=True, slots=True)
class LeasedClosure:
    """A checkpoint and every block that resuming there reads, pinned for whoever writes them to a tier.

    ``prefix``: the full blocks (null before a window) and the state. ``chains``: per attention group the keys of its
    blocks that are not null, left to right, after the key of the boundary before them. ``tail_generations``: of the
    checkpoint's tail blocks.
    """

    prefix: LeasedPrefix
    checkpoint: Checkpoint
    chains: tuple[tuple[bytes, ...], ...]
    tail_generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixProgress:
    """The full blocks of a prompt that are computed while the rest still is: ``num_tokens`` tokens from the start, a
    whole number of blocks. Not leased: valid as long as the generations stay."""

    num_tokens: int
    tables: Tables
    generations: Tables


@dataclass(frozen=True, slots=True)
class Lease:
    """
    Attributes:
        prefix: what the reader was told.
        key_at: key of the first so many tokens of the leased prefix, at the ends of its blocks.
        tables: per attention group the pinned blocks in table order (null where none was needed): the full blocks,
            and the tail block when it is not the checkpoint's.
        checkpoint: pins the state and its own tail blocks; None for a dense model's block boundary.
    """

    lease_id: str
    prefix: LeasedPrefix
    key_at: Callable[[int], bytes]
    tables: Tables
    checkpoint: Checkpoint | None


class LeaseTable:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[str, float] = {}
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: object) -> bool:
        """Engine thread only."""
        return lease_id in self._leases

    def active(self) -> tuple[Lease, ...]:
        """Engine thread only."""
        return tuple(self._leases.values())

    def add(self, lease: Lease, deadline_s: float) -> None:
        assert lease.lease_id not in self
        with self._lock:
            self._leases[lease.lease_id] = lease
            self._deadlines[lease.lease_id] = deadline_s

    def renew(self, lease_id: str, deadline_s: float) -> bool:
        """Move the deadline out, never in. Any thread. False: released or expired, the reader must not trust it."""
        with self._lock:
            current = self._deadlines.get(lease_id)
            if current is None:
                return False
            self._deadlines[lease_id] = max(current, deadline_s)
            return True

    def take(self, lease_id: str) -> Lease | None:
        with self._lock:
            self._deadlines.pop(lease_id, None)
            return self._leases.pop(lease_id, None)

    def take_expired(self, now_s: float) -> list[Lease]:
        with self._lock:
            expired = [lease_id for lease_id, deadline in self._deadlines.items() if deadline <= now_s]
            for lease_id in expired:
                del self._deadlines[lease_id]
            return [self._leases.pop(lease_id) for lease_id in expired]

    def next_deadline(self) -> float | None:
        with self._lock:
            return min(self._deadlines.values(), default=None)
