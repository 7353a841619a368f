"""Clients that are gone: why, and work that ends when they go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from common.errors import ClientStalledError, RequestAbortedError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_STALLED_KEY = "client_stalled"


def note_stall(state: dict[str, Any]) -> None:
    """The client of the request with this ``state`` in its scope will be disconnected, because it stands still."""
    state[_STALLED_KEY] = True


def why_gone(scope: Scope) -> RequestAbortedError:
    """How the client of this request went away."""
    if scope.get("state", {}).get(_STALLED_KEY):
        return ClientStalledError("the client did not read its answer and was disconnected")
    return RequestAbortedError("the client closed the connection")


async def run_until_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """Run ``work`` for a response that is sent in one piece; cancel it when the client goes away.

    The body must have been read. ``work`` has ended, its clean-up included, when this returns or raises.

    Raises:
        RequestAbortedError: the client went away first. Whatever ``work`` raises passes through.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watcher.result()
        raise why_gone(request.scope)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                logger.warning("aborted work failed in its clean-up", exc_info=task.exception())
        elif not task.cancelled():
            task.exception()  # it is raised above, or failed as its caller was cancelled: then nobody asks for it


async def _wait_for_disconnect(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
