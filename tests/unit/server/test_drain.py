"""Draining by itself: when it waits, when it ends, who is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from common.errors import DrainingError, EndingError, NodeUnavailableError
from common.server.drain import Drain


def test_drain_when_work_is_open_and_then_held_for_others_then_it_waits_for_both() -> None:
    async def scenario() -> None:
        held = 0

        async def count() -> int:
            return held

        drain = Drain("node", 20.0, count_held=count)
        drain.check_admission()
        with contextlib.ExitStack() as stack:
            stack.enter_context(drain.open())
            drain.begin("a test")
            with pytest.raises(DrainingError, match="node is draining"):
                drain.check_admission()
            waiting = asyncio.create_task(drain.wait())
            await asyncio.sleep(0.06)
            held = 1
        await asyncio.sleep(0.06)
        assert not waiting.done()  # nothing is open, but something is held
        held = 0
        assert await waiting

    asyncio.run(scenario())


def test_drain_when_its_time_is_over_then_what_is_left_is_cut_off_once() -> None:
    async def scenario() -> None:
        errors: list[NodeUnavailableError] = []
        drain = Drain("node", 0.1, cut_off=errors.append)
        with drain.open():
            drain.begin("a test")
            started_s = time.monotonic()
            assert not await drain.wait()
            assert time.monotonic() - started_s >= 0.1
        [error] = errors
        assert "--drain-timeout-seconds 0.1" in error.message
        assert error.code == "shutting_down"

    asyncio.run(scenario())


def test_drain_when_begun_twice_then_the_first_deadline_stays() -> None:
    async def scenario() -> None:
        cut_s: list[float] = []
        drain = Drain("node", 2.0, cut_off=lambda error: cut_s.append(time.monotonic()))
        with drain.open():
            drain.begin("an operator")
            await asyncio.sleep(1.8)
            drain.begin("a signal")
            again_s = time.monotonic()
            assert not await drain.wait()
        assert cut_s[0] - again_s < 1.8  # 0.2 s were left

    asyncio.run(scenario())


def test_drain_when_undone_then_it_admits_again_and_the_next_drain_has_all_its_time() -> None:
    async def scenario() -> None:
        drain = Drain("node", 1.0)
        drain.undo("never begun")
        drain.begin("an operator")
        await asyncio.sleep(0.8)
        drain.undo("the operator again")
        assert not drain.is_draining
        drain.check_admission()
        with drain.open():
            drain.begin("an operator")
            started_s = time.monotonic()
            assert not await drain.wait()
        assert time.monotonic() - started_s >= 1.0

    asyncio.run(scenario())


def test_drain_when_a_signal_came_then_it_cannot_be_undone() -> None:
    drain = Drain("node", 1.0)
    drain.begin("an operator")
    drain.begin("SIGTERM", is_end=True)
    with pytest.raises(EndingError, match="node was told to end"):
        drain.undo("an operator")
    assert drain.is_draining


def test_drain_when_the_process_fails_then_what_is_open_is_cut_off_and_peers_hear_of_it_at_once() -> None:
    async def scenario() -> None:
        errors: list[NodeUnavailableError] = []
        drain = Drain("node", 20.0, cut_off=errors.append)
        drain.begin("an operator")
        error = NodeUnavailableError("node ends: the engine stopped")
        for each in (error, NodeUnavailableError("and again")):
            drain.fail(each)
        assert errors == [error]
        assert drain.failed.is_set()
        assert drain.stopped.is_set()
        with pytest.raises(DrainingError):
            drain.check_admission()
        with pytest.raises(EndingError):
            drain.undo("an operator")

    asyncio.run(scenario())
