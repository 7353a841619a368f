"""How late the event loop wakes: how long everything else in the process waits for what it is doing.

A timer is due every ``INTERVAL_S``; by how much it is late is told each time. A machine that gives the process no time
makes it late too: so much of it can be the process's own doing as it has computed meanwhile (in any thread, because all
share one interpreter's lock with the loop).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

INTERVAL_S = 0.025
"""Seconds between two looks: a loop that is busy for 100 ms is found at least 75 ms late, for 0.2 % of a core."""


class LoopLag:
    """Runs from ``start`` to ``close``. ``observe`` gets the seconds by which the loop was late, and how many of them
    at most are the process's own work."""

    def __init__(self, observe: Callable[[float, float], None]) -> None:
        self._observe = observe
        self._timer: asyncio.TimerHandle | None = None
        self._computed_s = 0.0

    def start(self) -> None:
        self._computed_s = time.process_time()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + INTERVAL_S, self._look, loop)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._timer is not None
        late_s = max(0.0, loop.time() - self._timer.when())
        computed_s = time.process_time()
        self._observe(late_s, min(late_s, computed_s - self._computed_s))
        self._computed_s = computed_s
        self._timer = loop.call_at(loop.time() + INTERVAL_S, self._look, loop)
