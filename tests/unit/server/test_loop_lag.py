from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from common.server import loop_lag
from common.server.loop_lag import INTERVAL_S, LoopLag


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
