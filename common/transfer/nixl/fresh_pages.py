"""Touches memory before a read goes into it.

The first write to a page makes the kernel find and clear one, which takes longer than the copy itself (in a virtual
machine, which may have to ask its host for it, twenty times as long). Within a post over shared memory it would happen
under the lock of UCX's worker, and the progress thread spins for that lock: where cores are few, the same time once
more, taken from the engine's step.
"""

from __future__ import annotations

import ctypes
import os
import sys

import numpy as np

from common.transfer.reads import RunArray
from common.transfer.regions import Region

MADV_POPULATE_WRITE = 23
"""``madvise`` advice that writes to pages so that they exist; Linux 5.14 and later. Python has no name for it."""
CHUNK_BYTES = 2 << 20
"""Bytes that are touched together: a large page, which the first write makes the kernel clear as a whole anyway."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class FreshPages:
    """The chunks of a region that no read has gone into. Not for two threads at once."""

    def __init__(self, region: Region) -> None:
        """``region``: in main memory."""
        self._begin = region.address // _PAGE_BYTES * _PAGE_BYTES
        self._end = region.address + region.num_bytes
        self._address = region.address
        self._first_chunk = self._begin // CHUNK_BYTES
        self._is_fresh = np.ones((self._end - 1) // CHUNK_BYTES - self._first_chunk + 1, dtype=bool)

    def touch(self, runs: RunArray) -> None:
        """Makes the kernel provide the pages under the local bytes of ``runs`` that no read has gone into. Blocks,
        without the interpreter's lock. Where the kernel cannot do it, the read itself will."""
        if not self._is_fresh.any():
            return
        begin = self._address + runs[:, 0]
        end = begin + runs[:, 2]
        edges = np.zeros(len(self._is_fresh) + 1, dtype=np.int64)
        np.add.at(edges, begin // CHUNK_BYTES - self._first_chunk, 1)
        np.add.at(edges, (end - 1) // CHUNK_BYTES - self._first_chunk + 1, -1)
        wanted = (np.cumsum(edges[:-1]) > 0) & self._is_fresh
        self._is_fresh &= ~wanted
        # Chunks [first, last) that lie side by side, with one call.
        bounds = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).reshape(-1, 2)
        for first, last in (bounds + self._first_chunk).tolist():
            _populate(max(first * CHUNK_BYTES, self._begin), min(last * CHUNK_BYTES, self._end))


def _populate(begin: int, end: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(MADV_POPULATE_WRITE)
        )
