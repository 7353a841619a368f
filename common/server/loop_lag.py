"""How late the event loop wakes: how long everything else in the process waits for what it is doing.

A timer is due every ``INTERVAL_S``; by how much it is late is told each time, and how much of that can be the process's
own doing: not the time in which the loop's thread could have run and the machine ran others (Linux tells), and not more
than the process has computed meanwhile (in any thread, because all share one interpreter's lock with the loop).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

INTERVAL_S = 0.025
"""Seconds between two looks: a loop that is busy for 100 ms is found at least 75 ms late, for 0.2 % of a core."""
SCHEDSTAT = "/proc/thread-self/schedstat"
"""Of a thread: nanoseconds that it ran, that it waited for a processor, and how often."""


class LoopLag:
    """Runs from ``start`` to ``close``, both on the loop. ``observe`` gets the seconds by which the loop was late, and
    how many of them at most are the process's own work."""

    def __init__(self, observe: Callable[[float, float], None]) -> None:
        self._observe = observe
        self._timer: asyncio.Handle | None = None
        self._due_s = 0.0  # on the loop's clock: a timer that is late already cannot tell
        self._schedstat: int | None = None
        self._computed_s = self._queued_s = 0.0

    def start(self) -> None:
        with contextlib.suppress(OSError):  # a system that does not tell
            self._schedstat = os.open(SCHEDSTAT, os.O_RDONLY)
        self._computed_s, self._queued_s = time.process_time(), self._read_queued_s()
        loop = asyncio.get_running_loop()
        self._look_later(loop)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        late_s = max(0.0, loop.time() - self._due_s)
        computed_s, queued_s = time.process_time(), self._read_queued_s()
        own_s = min(late_s - (queued_s - self._queued_s), computed_s - self._computed_s)
        self._observe(late_s, max(0.0, own_s))
        self._computed_s, self._queued_s = computed_s, queued_s
        self._look_later(loop)

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = loop.time() + INTERVAL_S
        self._timer = loop.call_at(self._due_s, self._look, loop)

    def _read_queued_s(self) -> float:
        """Seconds that the loop's thread has waited for a processor so far."""
        if self._schedstat is None:
            return 0.0
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
