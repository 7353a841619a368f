"""Blocking reads on threads, each with a deadline: a disk that hangs costs the reads on it, and nobody else.

1 ``submit``, 2 a thread reads into memory of its own, 3 in time: it delivers what it read, 4 the outcome, exactly once:
empty when all is well, the reason why not, or "deadline". After a deadline nothing is delivered, so a read that hangs
for ever holds nothing but its thread. While every thread is stuck, new reads are refused at once.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

from common.tiers.store import ObjectReadError

logger = logging.getLogger(__name__)

NUM_THREADS = 4


class _TimedRead:
    def __init__(self, read: Callable[[], Callable[[], None]], on_outcome: Callable[[str], None]) -> None:
        self.read = read
        self.on_outcome = on_outcome
        self.is_started = False
        self.is_over = False


class TimedReads:
    """``close`` waits for no stuck thread: they are daemons."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._lock = threading.Condition()
        self._waiting: queue.SimpleQueue[_TimedRead | None] = queue.SimpleQueue()
        self._deadlines: list[tuple[float, int, _TimedRead]] = []
        self._numbers = itertools.count()
        self._num_stuck = 0
        self._num_threads = num_threads
        self._is_closed = False
        threads = [threading.Thread(target=self._work, name=f"tier-{n}", daemon=True) for n in range(num_threads)]
        threads.append(threading.Thread(target=self._watch, name="tier-deadlines", daemon=True))
        for thread in threads:
            thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether every thread is in a read that is past its deadline."""
        return self._num_stuck >= self._num_threads

    def submit(
        self,
        read: Callable[[], Callable[[], None]],
        timeout_s: float,
        on_outcome: Callable[[str], None],
    ) -> None:
        """``read`` returns what delivers what it read; that must not block, and is called only in time. It raises
        ObjectReadError. ``on_outcome`` comes on a thread of this pool, or on the caller's."""
        job = _TimedRead(read, on_outcome)
        with self._lock:
            is_refused = self._is_closed or self.is_stuck
            if not is_refused:
                heapq.heappush(self._deadlines, (time.monotonic() + timeout_s, next(self._numbers), job))
                self._lock.notify()
        if is_refused:
            on_outcome("stuck")
        else:
            self._waiting.put(job)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._lock.notify()
        for _ in range(self._num_threads):
            self._waiting.put(None)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            with self._lock:
                if job.is_over:
                    continue  # its deadline passed in the queue
                job.is_started = True
            reason, deliver = "", None
            try:
                deliver = job.read()
            except ObjectReadError as exc:
                reason = exc.reason
            except Exception:
                # Whatever went wrong: the reader must hear of it, and the thread go on.
                logger.exception("a read raised")
                reason = "io"
            with self._lock:
                was_over, job.is_over = job.is_over, True
                self._num_stuck -= was_over
            if was_over:
                continue
            if deliver is not None:
                try:
                    deliver()
                except Exception:
                    # As above; nobody else would end the wait any more.
                    logger.exception("delivering a read raised")
                    reason = "io"
            job.on_outcome(reason)

    def _watch(self) -> None:
        while True:
            with self._lock:
                while not self._deadlines and not self._is_closed:
                    self._lock.wait()
                if self._is_closed and not self._deadlines:
                    return
                left_s = self._deadlines[0][0] - time.monotonic()
                if left_s > 0 and not self._deadlines[0][2].is_over:
                    self._lock.wait(left_s)
                    continue
                job = heapq.heappop(self._deadlines)[2]
                if job.is_over:
                    continue
                job.is_over = True
                is_started = job.is_started
                self._num_stuck += is_started
            job.on_outcome("deadline")
