"""What keeps a tier's objects: the same few methods over a folder, host memory, or a store on other machines.

Objects are immutable and named by their headers. Every method blocks: call it on a thread. What a store answers is
believed only after it was compared with what was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.tiers.object_header import ObjectHeader


class ObjectReadError(Exception):
    """``reason``: missing, unreadable (no plain file), short, header (not ours, or damaged), other (whole, but not what
    was asked for), digest, failing (the system cannot read this object), or io: the system refused, which says nothing
    of the object."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ObjectWriteError(Exception):
    """``reason``: full, io, stale (the memory changed while it was read) or others (who write there too have
    filled it). Nothing of the object is left."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ObjectStore(Protocol):
    """``place``: where the objects are, for logs."""

    @property
    def place(self) -> str: ...

    def put(
        self, header: ObjectHeader, buffers: Sequence[memoryview], is_unchanged: Callable[[], bool] = lambda: True
    ) -> int:
        """Write an object; returns its length, header included. ``is_unchanged`` is asked once the bytes were read:
        whether the buffers still held what they should. Raises ObjectWriteError."""

    def get(self, wanted: ObjectHeader, buffers: Sequence[memoryview]) -> ObjectHeader:
        """Read the payload of what ``wanted`` names into ``buffers``, which are as long as it together. When this
        raises ObjectReadError, they hold anything. Of a state, ``history`` and ``origin`` are as stored."""

    def has(self, header: ObjectHeader) -> bool:
        """Whether something of that name is there. Raises OSError."""

    def touch(self, header: ObjectHeader) -> None:
        """It was used: ``age_s`` begins anew. Raises OSError."""

    def age_s(self, header: ObjectHeader) -> float:
        """Since it was written or touched; 0 when it is gone, or that is not known."""

    def delete(self, header: ObjectHeader) -> None:
        """It may be gone already. Raises OSError."""

    def sweep(self, header: ObjectHeader) -> bool:
        """Deletes an object that nothing needs, unless another process may be about to write what does. Returns whether
        it did. Raises OSError."""


@dataclass(slots=True)
class Changes:
    """``useless``: what are no objects of this model's and this secret's, by reason."""

    added: list[ObjectHeader] = field(default_factory=list)
    removed: list[ObjectHeader] = field(default_factory=list)
    useless: Counter[str] = field(default_factory=Counter)


class Watch(Protocol):
    """What appears in a store and what goes, by this process or by others. Used by one thread."""

    def look(self) -> Changes:
        """Since the last look; everything at the first. Raises OSError."""
