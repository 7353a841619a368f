"""Which processes use a folder of objects now: by locks that a dead process does not hold.

Who comes when nobody else is there may sweep away what an earlier life left half done; who comes later may not, for it
may be another's, just begun.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

LOCK_FILE = "lock"


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
