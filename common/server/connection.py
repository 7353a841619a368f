"""One client connection of any of the servers: uvicorn's httptools protocol with bounds where it has none.

A request's head is bounded in bytes, in headers and in time, and the number of connections is bounded. Each refusal is
an error body of this project (431, 408, 503), after which the connection is closed; bytes that are not HTTP get a 400
in the same way. httptools keeps unfinished headers without a bound of its own, so the bytes are counted as they come.
A client that closes only its sending side counts as gone: its request is aborted, also when it had sent the next one.

Whenever no request is worked on, something ends the connection: before the first byte and once anything has come, be it
blank lines or the rest of a body that nobody wants, a head has to be complete in ``HEAD_TIMEOUT_S``; between requests
uvicorn waits for a first byte (``timeout_keep_alive``). While a request is worked on, its body has the gate's deadline,
and its answer's reader that of ``common.server.stall``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from common.errors import (
    HeadTimeoutError,
    HeadTooLargeError,
    InvalidRequestError,
    TandemError,
    TooManyConnectionsError,
)
from common.openai.errors import error_body
from common.server import stall
from common.server.disconnect import note_stall

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10
"""Bytes of a request line with its headers: several times what clients and load balancers send."""
MAX_HEADERS = 128
"""Headers of one request."""
HEAD_TIMEOUT_S = 20.0
"""Seconds from a request's first byte, or from the connection, to the end of its headers; of one that comes before the
last one is answered, from that answer."""
LINGER_S = 5.0
"""Seconds that a client has, when its connection is closed here, to read what was written to it."""
END_S = 1.0
"""Seconds in which connections that are aborted at the end of a server are gone."""


class BoundedProtocol(HttpToolsProtocol):
    """``max_connections``: beyond them a connection is answered 503 and closed."""

    def __init__(self, *args: Any, max_connections: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._is_refused = False
        self._is_in_head = self._is_in_body = False
        self._num_head_bytes = 0
        self._running: RequestResponseCycle | None = None  # ``cycle`` is what came last
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stall = stall.StallTimer(
            self.loop, transport, is_answering=lambda: self._is_working, on_stall=self._on_stall
        )
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            self._refuse(TooManyConnectionsError(f"{self._max_connections} connections are open, which is the limit"))
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stall.close()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.resume()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        was_in_head = self._is_in_head or self.cycle is None
        if not self._is_working:
            self._expect_head()
        super().data_received(data)
        if was_in_head and self._is_in_head and not self._is_refused:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse(_too_large())
        if not self._is_refused:
            self._stop_timer()
            self._is_in_body = True
            super().on_headers_complete()
            if len(self.pipeline) == 1:
                # uvicorn reads nothing until the one before is answered, and would not see that the client leaves.
                self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._stall.end_answer()
        if self._is_in_head and not self._is_working:
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequestError("what came is no HTTP request", code="invalid_http"))

    @property
    def _is_working(self) -> bool:
        """Whether a request waits for its answer or is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_slow_head)

    def _on_slow_head(self) -> None:
        self._timer = None
        if self._is_in_head:
            self._refuse(HeadTimeoutError(f"the headers did not arrive within {HEAD_TIMEOUT_S:g} s"))
        else:
            self._close()

    def _on_stall(self, num_unread: int) -> None:
        logger.info("client disconnected: %d bytes unread for %g s client=%s", num_unread, stall.STALL_S, self.client)
        if self._running is not None and self._is_working:
            note_stall(self._running.scope["state"])
        self.transport.abort()

    def _refuse(self, error: TandemError) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        content = json.dumps(error_body(error)).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content)
        if self._may_answer:
            self.transport.write(STATUS_LINE[error.status] + head + content)
        self._close()

    def _close(self) -> None:
        self._stop_timer()
        self.transport.close()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    @property
    def _may_answer(self) -> bool:
        """Whether what is written now is the answer to what came last; not a part of another request's, nor taken for
        it."""
        if self._is_in_body:
            return not self.pipeline and not self.cycle.response_started
        return not self._is_working

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def end_connections(server: uvicorn.Server) -> None:
    """The last act of a server's shutdown. A connection that is accepted just then is told nothing by uvicorn, and
    whoever keeps it alive keeps it open; what came on it while the loop closes would fail the whole process."""
    connections = server.server_state.connections
    for connection in list(connections):
        connection.transport.abort()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            while connections:  # noqa: ASYNC110 the set is uvicorn's
                await asyncio.sleep(0.001)


def _too_large() -> HeadTooLargeError:
    return HeadTooLargeError(f"the request line and headers may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} lines")
