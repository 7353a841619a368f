"""One HTTP/1.1 connection to a node: requests one after the other, their answers parsed as they come (httptools).

Life cycle: 1 made by a loop's ``create_connection``, 2 ``send`` a request, 3 ``head`` waits for the answer's status and
headers, 4 ``read`` gives the body, what has come of it at a time, 5 ``is_reusable`` once its end is here: back to 2.
Leaves by ``abort``, or the node ends it. Every wait is bounded by ``wait``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from proxy.node_http.deadlines import Deadline, Deadlines
from proxy.node_http.errors import NodeBrokenError, NodeClientError

MAX_HEAD_BYTES = 64 * 2**10
"""Bytes of an answer's head, and of what is not its body (chunk sizes, trailers) between two pieces of that."""
PAUSE_BYTES = 256 * 2**10
"""Bytes of a body that nobody has read yet, beyond which no more is taken from the node."""


class NodeConnection(asyncio.Protocol):
    """``status``, ``headers`` (lower-case names; of several with one name the last): valid after ``head``.
    ``has_heard``: whether anything of the answer has come."""

    def __init__(self, on_lost: Callable[[NodeConnection], None], deadlines: Deadlines) -> None:
        """``deadlines``: of its node, which hear whatever comes."""
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._deadlines = deadlines
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._error: NodeClientError | None = None
        self._is_paused = False
        self._is_complete = True
        self._ends_with_connection = False
        self._may_be_reused = True
        self.deadline = Deadline(self.fail)

    def send(self, head: bytes, content: bytes) -> None:
        """Write a request. What is left of the answer before is forgotten."""
        self.status, self.headers = 0, dict[str, str]()
        self.has_heard = False
        self._is_complete = self._ends_with_connection = False
        self._pieces: list[bytes] = []
        self._num_unread = self._num_head_bytes = 0
        self._transport.writelines((head, content) if content else (head,))

    async def head(self) -> None:
        """Raises NodeClientError."""
        while not self.status:
            await self._more()

    async def read(self) -> bytes:
        """What has come of the body since the last call, at least a byte; empty: that was all. Raises
        NodeClientError."""
        while not self._pieces:
            if self._is_complete:
                return b""
            await self._more()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._num_unread = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    @property
    def is_read(self) -> bool:
        """Whether its answer was read to the end."""
        return self._is_complete and not self._pieces

    @property
    def is_reusable(self) -> bool:
        """Whether its answer was read to the end, and the node takes another request. With part of an answer unread,
        nothing more may be taken from the node (``PAUSE_BYTES``)."""
        return self.is_read and self._may_be_reused and self._error is None and not self._transport.is_closing()

    def fail(self, error: NodeClientError) -> None:
        """Nothing more is waited for: ``error`` is raised instead. The first one counts."""
        if self._error is None:
            self._error = error
        self._wake()

    def abort(self) -> None:
        """A node takes a closed connection as "nobody wants this any more". Closing it politely would wait for a frozen
        node to read what was sent, one open file per request."""
        self._transport.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.deadline.close()
        self._on_lost(self)
        if exc is None and self._error is None and self._ends_with_connection:
            self._is_complete = True
        self.fail(NodeBrokenError(str(exc) if exc is not None else "the node closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        self.has_heard = True
        self._deadlines.heard_s = self._loop.time()
        num_unread = self._num_unread
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break("it changes the protocol")
        except httptools.HttpParserError as exc:
            self._break(f"no HTTP: {exc}")
        if self._num_unread == num_unread and not self._is_complete:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._break(f"more than {MAX_HEAD_BYTES} bytes of headers")
        if self._num_unread > PAUSE_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        if self.status:
            self._wake()

    def _break(self, problem: str) -> None:
        self.fail(NodeBrokenError(problem))
        self._transport.abort()

    # --- the parser's side

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._may_be_reused = False  # an answer that nobody has asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # else it is a trailer
            self.headers[name.decode("latin-1").lower()] = value.rstrip(b" \t").decode("utf-8", "surrogateescape")

    def on_headers_complete(self) -> None:
        if self._is_complete:
            return
        status = self._parser.get_status_code()
        if status < 100:
            self._break(f"no HTTP: status {status}")
        elif status < 200:  # the answer is still to come
            self.headers.clear()
        else:
            self.status = status
            has_end = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "").lower()
            self._ends_with_connection = not has_end

    def on_body(self, body: bytes) -> None:
        if not self._is_complete:
            self._pieces.append(body)
            self._num_unread += len(body)
            self._num_head_bytes = 0

    def on_message_complete(self) -> None:
        if self.status:
            self._is_complete = True
            self._may_be_reused = self._may_be_reused and self._parser.should_keep_alive()
