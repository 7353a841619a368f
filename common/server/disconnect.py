"""Work for a response in one piece, ended when its client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

from common.errors import RequestAbortedError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


async def run_until_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """Run ``work`` for a response that is sent in one piece; cancel it when the client goes away.

    The body must have been read. ``work`` has ended, its clean-up included, when this returns or raises.

    Raises:
        RequestAbortedError: the client closed the connection first. Whatever ``work`` raises passes through.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watcher.result()
        raise RequestAbortedError("the client closed the connection")
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                logger.warning("aborted work failed in its clean-up", exc_info=task.exception())


async def _wait_for_disconnect(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
