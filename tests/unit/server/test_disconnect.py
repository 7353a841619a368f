from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from fastapi import Request

from common.errors import InvalidRequestError, RequestAbortedError
from common.server.disconnect import run_until_disconnect

pytestmark = pytest.mark.asyncio


def connection(gone: asyncio.Event) -> Request:
    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "headers": []}, receive)


async def test_work_is_cancelled_and_cleaned_up_before_the_abort_is_reported() -> None:
    gone, events = asyncio.Event(), []

    async def work() -> None:
        try:
            events.append("started")
            gone.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned")

    with pytest.raises(RequestAbortedError):
        await run_until_disconnect(connection(gone), work())
    assert events == ["started", "cleaned"]


async def test_work_that_ends_first_gives_its_result_or_its_error() -> None:
    async def value() -> int:
        return 3

    async def failure() -> int:
        raise InvalidRequestError("no")

    assert await run_until_disconnect(connection(asyncio.Event()), value()) == 3
    with pytest.raises(InvalidRequestError):
        await run_until_disconnect(connection(asyncio.Event()), failure())
    assert len(asyncio.all_tasks()) <= 2


async def test_cancelling_the_handler_cancels_the_work() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    handler = asyncio.create_task(run_until_disconnect(connection(asyncio.Event()), work()))
    await started.wait()
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler
    assert cancelled.is_set()


async def test_work_that_fails_as_its_handler_is_cancelled_then_its_error_is_taken() -> None:
    untold: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: untold.append(context))
    started, may_fail = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await may_fail.wait()
        raise InvalidRequestError("no")

    handler = asyncio.create_task(run_until_disconnect(connection(asyncio.Event()), work()))
    await started.wait()
    may_fail.set()
    handler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handler
    del handler
    await asyncio.sleep(0)  # the loop lets go of the task
    gc.collect()
    assert untold == []
