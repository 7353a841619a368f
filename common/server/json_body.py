"""Request bodies as JSON objects, and the work on them: off the event loop when a body is long.

What a body of 32 KiB costs to parse and to check is milliseconds, of which the loop can do a few between two requests.
Anything longer goes to the gate's threads, and so does all later work whose cost grows with the body
(``run_for_body``). Threads share the interpreter's lock with the loop: no single call in them may be long either, which
``common.wire.json_text`` sees to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from common.errors import InvalidRequestError, RequestAbortedError
from common.server.gate import BODY_BYTES_KEY, BODY_THREADS_KEY
from common.wire.json_text import LEG_EXTRA, LONG_BYTES, JsonBounds, parse_json

BODY_KEY = "tandem.body"
"""Where a route that has read the body itself leaves it in the scope."""

_T = TypeVar("_T")


async def read_json_object(request: Request, *, is_leg: bool = False) -> dict[str, Any]:
    """The request's body as a JSON object. ``is_leg``: it may come from a proxy, which has added to it.

    Raises:
        InvalidRequestError: as ``parse_json``, or no object.
        RequestAbortedError: the client went away while sending.
    """
    raw = request.scope.pop(BODY_KEY, None)  # the scope stays for as long as the answer takes
    if raw is None:
        try:
            raw = await request.body()
        except ClientDisconnect as exc:
            raise RequestAbortedError("the client closed the connection while sending the body") from exc
    request.scope.setdefault("state", {})[BODY_BYTES_KEY] = len(raw)
    return await run_for_body(request, lambda: parse_json_object(raw, LEG_EXTRA if is_leg else 0))


def body_bytes_of(request: Request) -> int:
    """Length of the body that ``read_json_object`` has read."""
    return int(request.scope["state"][BODY_BYTES_KEY])


async def run_for_body(request: Request, work: Callable[[], _T]) -> _T:
    """``work``, whose cost grows with the body that ``read_json_object`` has read: here, or in a thread when it is
    long."""
    state = request.scope["state"]
    if state[BODY_BYTES_KEY] <= LONG_BYTES:
        return work()
    # Without a gate (a test's bare app): the loop's own threads.
    return await asyncio.get_running_loop().run_in_executor(state.get(BODY_THREADS_KEY), work)


def parse_json_object(raw: bytes, extra: int = 0) -> dict[str, Any]:
    """``raw`` as a JSON object; errors as ``read_json_object``. ``extra``: as of ``JsonBounds``."""
    value = parse_json(raw, JsonBounds(extra))
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    return value


def encode_json(value: object) -> bytes:
    """``value`` as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()
