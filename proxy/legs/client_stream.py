"""The client's side of a generation request: a plain ASGI response that is watched for the client going away.

Life cycle: 1 nothing sent, any outcome is still possible, 2 ``send_whole`` answers at once, or ``start_stream``
commits to a status, 3 chunks, 4 ``finish``. An error before 2 is an OpenAI-shaped body with its own status; after it,
an SSE error event and no ``[DONE]``. When the client goes away, at any point, the work is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.metrics.outcomes import Outcome, outcome_of
from common.server.disconnect import why_gone
from common.wire.headers import LEG_HEADER, REPORT_HEADER, REQUEST_ID_HEADER
from common.wire.json_text import LONG_BYTES
from proxy.dialects.conversion import Conversion
from proxy.metrics.proxy_metrics import RequestRecord
from proxy.metrics.recent_requests import RecentRequest
from proxy.metrics.token_gaps import TokenGaps

logger = logging.getLogger(__name__)

# What a node says about its own connection or process is not for the client.
_DROPPED_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "transfer-encoding",
        "content-length",
        "content-encoding",
        "date",
        "server",
        REQUEST_ID_HEADER.lower(),
        REPORT_HEADER.lower(),
        LEG_HEADER.lower(),
    }
)


class ClientStream:
    """What one request may send to its client. Not thread-safe; one task sends. ``on_start`` gets the status when the
    answer begins, and again when it goes on from another node. ``record`` gets the outcome with the last byte.
    ``gaps``: of its stream, from the first leg on that answers with one. With a ``conversion`` everything that is sent
    here is a chat's, and the client gets what it makes of it."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.status: int | None = None
        self.entry = RecentRequest()
        self.record = RequestRecord()
        self.gaps: TokenGaps | None = None
        self.is_finished = False
        self.on_start: Callable[[int], None] | None = None
        self.conversion: Conversion | None = None

    @property
    def is_started(self) -> bool:
        return self.status is not None

    async def send_whole(self, status: int, headers: Mapping[str, str], body: bytes, outcome: Outcome) -> None:
        self.entry.answered(status, headers)
        own: dict[str, str] = {}
        if self.conversion is not None and body:
            own = {"content-type": "application/json"}
            if len(body) > LONG_BYTES:  # log-probabilities are megabytes
                body = await asyncio.to_thread(self.conversion.whole, status, body)
            else:
                body = self.conversion.whole(status, body)
        await self._start(status, {**relayed_headers(headers), **own, "content-length": str(len(body))})
        await self._finish(body, outcome)

    async def start_stream(self, status: int, headers: Mapping[str, str]) -> None:
        self.entry.answered(status, headers)
        await self._start(status, {**relayed_headers(headers), "cache-control": "no-cache", "x-accel-buffering": "no"})

    def go_on(self) -> None:
        """The answer that has begun comes from another node from here on, whose first byte this is."""
        if self.on_start is not None and self.status is not None:
            self.on_start(self.status)

    async def send_chunk(self, chunk: bytes) -> None:
        for piece in self.conversion.pieces(chunk) if self.conversion is not None else (chunk,):
            if piece:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def finish(self, outcome: Outcome, last: bytes = b"") -> None:
        """``last``: the stream's last chunk."""
        if last and self.conversion is not None:
            await self.send_chunk(last)
            last = b""
        await self._finish(last, outcome)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        assert self.status is None
        self.status = status
        if self.on_start is not None:
            self.on_start(status)
        # Encoded as ``NodeConnection`` decodes them: a node's headers pass through unchanged.
        raw = [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in headers.items()]
        raw.append((b"x-request-id", self._request_id.encode()))
        if self.conversion is not None:
            raw += [(name.encode(), value.encode()) for name, value in self.conversion.headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _finish(self, body: bytes, outcome: Outcome) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        # Only now: until the client has taken what was sent before, it may still leave.
        self.is_finished = True
        self.record.outcome = outcome


class RelayResponse(Response):
    """Runs ``work`` with a stream to the client and cancels it when the client is gone."""

    def __init__(self, work: Callable[[ClientStream], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        client = ClientStream(send, request_id)
        work = asyncio.current_task()
        assert work is not None
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            while (await receive())["type"] != "http.disconnect":
                pass
            # A finished answer also wakes this: what is left then is closing the node's connection.
            if not client.is_finished:
                why = why_gone(scope)
                logger.info("request aborted request_id=%s started=%s: %s", request_id, client.is_started, why)
                client.record.outcome = outcome_of(why)
                is_gone = True
                work.cancel()

        watcher = asyncio.create_task(watch())
        try:
            await self._work(client)
        except asyncio.CancelledError:
            # Somebody else may have cancelled the task too: that cancellation goes on.
            if not is_gone or work.uncancel():
                raise
        finally:
            watcher.cancel()


def relayed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """A node's headers as the client gets them."""
    return {name: value for name, value in headers.items() if name.lower() not in _DROPPED_HEADERS}
