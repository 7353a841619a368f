"""Which processes use a folder of objects now, and what they write together.

By locks that a dead process does not hold. Who comes when nobody else is there may sweep away what an earlier life left
half done; who comes later may not, for it may be another's, just begun.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_FILE = "lock"
USAGE_FILE = "usage"
LOCK_S = 1.0
_USAGE = struct.Struct("<QQ")


class FolderUse:
    """Held from now to ``close`` or the end of the process.

    Attributes:
        alone_until: in ``time.time`` of the filesystem: what is older nobody else is writing. 0 when others are there,
            or the filesystem has no locks.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._descriptor = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.alone_until = 0.0
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(self._descriptor)
            self.alone_until = os.fstat(self._descriptor).st_mtime
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class FolderRoom:
    """A bound on a folder that several processes write. A file there counts bytes put and bytes deleted since its
    beginning, by all of them. What may be there now is what the last look found, and what was put since before it began
    less what was deleted since it ended: never too little, whatever happens meanwhile and whoever dies.

    Without locks on the filesystem there is no bound but each node's own.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Raises OSError."""
        self._size_bytes = size_bytes
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(folder / USAGE_FILE, flags, 0o600)
        self._lock = threading.Lock()  # the file's is this descriptor's
        self._found: tuple[int, int, int] | None = None  # bytes of the last look; put before it, deleted by its end
        self._num_put_before = 0
        self._num_put_at_begin: int | None = None

    def begin_look(self) -> None:
        """What was begun to be put may not be in its place yet, and the look not find it: it counts on from the look
        before, for that long what is found too counts twice."""
        with contextlib.suppress(OSError), self._counts() as counts:
            self._num_put_before = counts[0] if self._num_put_at_begin is None else self._num_put_at_begin
            self._num_put_at_begin = counts[0]

    def end_look(self, num_bytes: int) -> None:
        with contextlib.suppress(OSError), self._counts() as counts:
            self._found = (num_bytes, self._num_put_before, counts[1])

    def take(self, num_bytes: int) -> bool:
        """Whether so many bytes may be put; they count from now on. Before the first look nothing may."""
        try:
            with self._counts() as counts:
                if self._found is None:
                    return False
                found, num_put, num_deleted = self._found
                if found + counts[0] - num_put - (counts[1] - num_deleted) + num_bytes > self._size_bytes:
                    return False
                counts[0] += num_bytes
                return True
        except BlockingIOError:
            return False
        except OSError:
            return True

    def give_back(self, num_bytes: int) -> None:
        """So many bytes were deleted, or not put after all."""
        with contextlib.suppress(OSError), self._counts() as counts:
            counts[1] += num_bytes

    @contextlib.contextmanager
    def _counts(self) -> Iterator[list[int]]:
        """Bytes put and deleted, written back when they were changed. Raises OSError: BlockingIOError when the lock is
        not to be had in time, or this is closed (a thread that a hung folder held up may still come here)."""
        with self._lock:
            if self._descriptor < 0:
                raise BlockingIOError("closed")
            self._wait_for_lock()
            try:
                raw = os.pread(self._descriptor, _USAGE.size, 0)
                counts = list(_USAGE.unpack(raw)) if len(raw) == _USAGE.size else [0, 0]
                before = list(counts)
                yield counts
                if counts != before:
                    os.pwrite(self._descriptor, _USAGE.pack(*counts), 0)
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _wait_for_lock(self) -> None:
        """Held for microseconds, unless its process was stopped there. Raises BlockingIOError after ``LOCK_S``."""
        deadline_s = time.monotonic() + LOCK_S
        while True:
            try:
                return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.001)

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
