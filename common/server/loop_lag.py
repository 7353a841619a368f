"""How late the event loop wakes: how long everything else in the process waits for what it is doing.

A timer is due every ``INTERVAL_S``; by how much it is late is told each time, and how much of that can be the process's
own doing (``own_work_s``), from what Linux tells of its threads: how long each ran, and how long it could have run and
the machine ran others.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

INTERVAL_S = 0.025
"""Seconds between two looks: a loop that is busy for 100 ms is found at least 75 ms late. A dozen threads
cost 0.4 % of a core."""
NOTABLE_S = 0.002
"""Less is not looked into: a timer is that late on any machine."""
_PRESENT = 0.75
"""Share of a time that a thread ran or queued for it to be the one that others waited for; Linux is a tick behind."""


class ThreadTimes(NamedTuple):
    """Seconds that a thread ran, and that it waited for a processor."""

    ran_s: float = 0.0
    queued_s: float = 0.0

    @classmethod
    def between(cls, earlier: bytes, later: bytes) -> ThreadTimes:
        """Of two texts of ``/proc/.../schedstat``: nanoseconds that it ran, that it waited, and how often."""
        ran, queued = (int(b) - int(a) for a, b in zip(earlier.split()[:2], later.split()[:2], strict=True))
        return cls(ran / 1e9, queued / 1e9)


def own_work_s(late_s: float, loop: ThreadTimes, others: Sequence[ThreadTimes], computed_s: float) -> float:
    """How much of the ``late_s`` seconds by which the loop was late can be the process's own work.

    Not the time in which the loop's thread waited for a processor, and not more than all threads computed. The rest of
    the time it waited for the interpreter's lock: whoever held that ran, or waited for a processor itself, all the
    while, and only the time it ran is work. Of several that may have been it the one that ran least is taken.

    Args:
        loop, others: of the loop's thread and of the other threads of Python since the last look; of none where the
            system does not tell.
        computed_s: of all threads, Python's or not, since then.
    """
    own_s = min(late_s - loop.queued_s, computed_s)
    stood_s = late_s - loop.queued_s - loop.ran_s
    holders = [each.ran_s for each in others if each.ran_s + each.queued_s >= _PRESENT * stood_s]
    if stood_s > 0 and holders:
        own_s = min(own_s, loop.ran_s + min(holders))
    return max(0.0, own_s)


@dataclass(slots=True)
class _Threads:
    """Reads what Linux tells of all threads of Python, 1.5 us each: their files stay open."""

    _files: dict[int, int] = field(default_factory=dict)

    def read(self) -> dict[int, bytes]:
        """Texts for ``ThreadTimes.between``, by the threads' native ids."""
        found = {}
        for thread in threading.enumerate():
            number = thread.native_id
            if number is None:
                continue
            try:
                if number not in self._files:
                    self._files[number] = os.open(f"/proc/self/task/{number}/schedstat", os.O_RDONLY)
                found[number] = os.pread(self._files[number], 64, 0)
            except OSError:  # it has ended, or the system does not tell
                continue
        self._close(self._files.keys() - found.keys())
        return found

    def close(self) -> None:
        self._close(set(self._files))

    def _close(self, numbers: set[int]) -> None:
        for number in numbers:
            os.close(self._files.pop(number))


class LoopLag:
    """Runs from ``start`` to ``close``, both on the loop. ``observe`` gets the seconds by which the loop was late, and
    how many of them at most are the process's own work."""

    def __init__(self, observe: Callable[[float, float], None]) -> None:
        self._observe = observe
        self._timer: asyncio.Handle | None = None
        self._due_s = 0.0  # on the loop's clock: a timer that is late already cannot tell
        self._threads = _Threads()
        self._times: dict[int, bytes] = {}
        self._computed_s = 0.0

    def start(self) -> None:
        self._computed_s, self._times = time.process_time(), self._threads.read()
        loop = asyncio.get_running_loop()
        self._look_later(loop)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._threads.close()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        late_s = max(0.0, loop.time() - self._due_s)
        computed_s, times = time.process_time(), self._threads.read()
        own_s = late_s if late_s < NOTABLE_S else self._own_s(late_s, computed_s - self._computed_s, times)
        self._observe(late_s, own_s)
        self._computed_s, self._times = computed_s, times
        self._look_later(loop)

    def _own_s(self, late_s: float, computed_s: float, times: dict[int, bytes]) -> float:
        since = {number: ThreadTimes.between(self._times.get(number, b"0 0"), each) for number, each in times.items()}
        loop = since.pop(threading.get_native_id(), ThreadTimes())
        return own_work_s(late_s, loop, list(since.values()), computed_s)

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s = loop.time() + INTERVAL_S
        self._timer = loop.call_at(self._due_s, self._look, loop)
