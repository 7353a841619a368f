from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
import time

import pytest
import uvloop

from common.server import loop_lag
from common.server.loop_lag import INTERVAL_S, LoopLag, ThreadTimes, own_work_s


@pytest.mark.asyncio
@pytest.mark.parametrize("is_own", [True, False])
async def test_lag_when_the_loop_is_held_up_then_told_with_what_of_it_was_computed_here(is_own: bool) -> None:
    seen: list[tuple[float, float]] = []
    lag = LoopLag(lambda late_s, own_s: seen.append((late_s, own_s)))
    lag.start()
    await asyncio.sleep(4 * INTERVAL_S)
    assert seen
    seen.clear()
    if is_own:
        until_s = time.process_time() + 0.5
        while time.process_time() < until_s:
            pass
    else:
        time.sleep(0.5)  # noqa: ASYNC251 - as a machine that gives the process no time
    while not seen:
        await asyncio.sleep(INTERVAL_S)
    late_s, own_s = seen[0]
    assert late_s > 0.4
    assert own_s > 0.4 if is_own else own_s < 0.2
    lag.close()
    seen.clear()
    await asyncio.sleep(4 * INTERVAL_S)
    assert seen == []


@pytest.mark.asyncio
async def test_lag_when_another_thread_keeps_the_interpreter_then_what_that_computed_is_the_processs_own() -> None:
    seen: list[tuple[float, float]] = []
    lag = LoopLag(lambda late_s, own_s: seen.append((late_s, own_s)))
    lag.start()
    await asyncio.sleep(4 * INTERVAL_S)
    seen.clear()

    def keep() -> float:
        started_s = time.thread_time()
        sum(range(60_000_000))  # one call, in which the interpreter's lock is not given up
        return time.thread_time() - started_s

    kept_s = await asyncio.to_thread(keep)
    await asyncio.sleep(2 * INTERVAL_S)
    lag.close()
    late_s, own_s = max(seen)
    assert late_s > own_s - INTERVAL_S
    assert 0.7 * kept_s - INTERVAL_S < own_s < 1.3 * kept_s + INTERVAL_S


@pytest.mark.asyncio
async def test_lag_when_who_keeps_the_interpreter_gets_no_processor_then_only_what_it_computed_is_own() -> None:
    seen: list[tuple[float, float]] = []
    lag = LoopLag(lambda late_s, own_s: seen.append((late_s, own_s)))
    processor = min(os.sched_getaffinity(0))
    is_kept = threading.Event()

    def keep() -> float:
        os.sched_setaffinity(0, {processor})
        number = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, number, os.getpriority(os.PRIO_PROCESS, number) + 10)
        started_s = time.thread_time()
        sum(range(4_000_000))
        is_kept.set()
        return time.thread_time() - started_s

    def compute() -> None:
        while not is_kept.wait(0):
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock

    busy = [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"]
    with subprocess.Popen(busy) as other:  # noqa: ASYNC220 - nothing else runs yet
        try:
            computing = asyncio.create_task(asyncio.to_thread(compute))
            lag.start()
            await asyncio.sleep(0.3)
            seen.clear()
            kept_s = await asyncio.to_thread(keep)
            await computing
            await asyncio.sleep(2 * INTERVAL_S)
        finally:
            lag.close()
            other.kill()
    # Mostly several times as late as what was computed; how late is the machine's choice.
    assert all(own_s < 1.3 * kept_s + INTERVAL_S for _, own_s in seen)


IDLE = ThreadTimes(0.001, 0.002)


@pytest.mark.parametrize(
    ("late_s", "loop", "others", "computed_s", "own_s"),
    [
        (0.3, ThreadTimes(0.3), [IDLE], 0.31, 0.3),  # its own work
        (0.5, ThreadTimes(0.3, 0.2), [IDLE], 0.31, 0.3),  # on a crowded machine
        (0.3, ThreadTimes(0.01, 0.28), [IDLE], 0.02, 0.02),  # the machine alone
        (0.3, ThreadTimes(0.01), [IDLE, ThreadTimes(0.29)], 0.3, 0.3),  # another's, that kept the lock
        (0.3, ThreadTimes(0.01), [IDLE, ThreadTimes(0.04, 0.25)], 0.05, 0.05),  # and was given no processor
        # A third computes without the lock meanwhile, or waits for a processor for a shorter time.
        (0.3, ThreadTimes(0.01), [ThreadTimes(0.32), ThreadTimes(0.04, 0.25)], 0.37, 0.05),
        (0.3, ThreadTimes(0.01), [ThreadTimes(0.15, 0.14), ThreadTimes(0.01, 0.1)], 0.17, 0.16),
        (0.3, ThreadTimes(), [], 0.2, 0.2),  # nothing is told of threads
        (0.0, ThreadTimes(0.001, 0.004), [IDLE], 0.002, 0.0),
    ],
)
def test_own_work_when_threads_ran_or_queued_then_only_what_ran_counts(
    late_s: float, loop: ThreadTimes, others: list[ThreadTimes], computed_s: float, own_s: float
) -> None:
    assert own_work_s(late_s, loop, others, computed_s) == pytest.approx(own_s)


def test_lag_when_the_next_look_is_due_at_once_then_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that stood still between reading the clock and setting the timer."""
    monkeypatch.setattr(loop_lag, "INTERVAL_S", 0.0)
    seen: list[float] = []

    async def look() -> None:
        lag = LoopLag(lambda late_s, own_s: seen.append(late_s))
        lag.start()
        await asyncio.sleep(0.01)
        lag.close()

    uvloop.run(look())
    assert len(seen) > 2
