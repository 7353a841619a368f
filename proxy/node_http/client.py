"""The proxy's HTTP client to one node.

Life of a request: 1 a connection, idle or new, never waited for, 2 the request is written, 3 the answer's head is
awaited, 4 its body is read whole, or passed on chunk by chunk as it comes, 5 a connection whose answer was read to its
end is kept for the next request (``proxy.node_http.connections``). Every other way out aborts it.

A node may close an idle connection at the very moment it is taken. Such a request is sent once more, on a new
connection, if nothing of an answer came: legs may be repeated, a node that gets one twice computes it once more at
worst.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import orjson

from proxy.node_http.connection import NodeConnection
from proxy.node_http.connections import NodeConnections
from proxy.node_http.deadlines import Deadlines
from proxy.node_http.errors import NodeBrokenError, NodeTimeoutError

STALE_S = 1.0
"""Seconds. A connection that is lost sooner after it was taken from the idle ones was already closed by the node."""
MAX_ANSWER_BYTES = 256 * 2**20
"""The largest answer that is held whole, unless a request gives another limit."""
NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """A whole answer, whatever its status. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Raises ValueError."""
        return orjson.loads(self.body)


class NodeStream:
    """A request, and its answer whose body is still to come. As ``async with``: entering gives the answer's head,
    leaving before its body was read to the end closes the connection."""

    status: int
    headers: Mapping[str, str]

    def __init__(self, client: NodeClient, head: bytes, content: bytes, timeout_s: float) -> None:
        self._client = client
        self._head = head
        self._content = content
        self._timeout_s = timeout_s

    async def __aenter__(self) -> NodeStream:
        """Raises as ``NodeClient.request``."""
        self._connection = await self._client.open(self._head, self._content, self._timeout_s)
        self._head = self._content = b""  # the answer may take long
        self.status, self.headers = self._connection.status, self._connection.headers
        self._connection.deadline.end()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.leave(self._connection)

    async def read(self, timeout_s: float) -> bytes:
        """The whole body, within ``timeout_s``. Raises as ``NodeClient.request``."""
        self._connection.deadline.begin(timeout_s)
        return await self._client.read_all(self._connection, MAX_ANSWER_BYTES)

    @property
    def is_read(self) -> bool:
        """Whether the body was read to its end."""
        return self._connection.is_read

    def chunks(self, idle_s: float) -> AsyncIterator[bytes]:
        """The body's bytes as they come. The first may take as long as the head; silence for more than ``idle_s`` after
        that is a NodeTimeoutError. Time that the caller spends on a chunk does not count."""
        return _Chunks(self._connection, self._timeout_s, idle_s)


class _Chunks:
    """``NodeStream.chunks``. A class: event loops keep a list of all generators, which costs more than this does."""

    def __init__(self, connection: NodeConnection, first_s: float, idle_s: float) -> None:
        self._connection = connection
        self._limit_s = first_s
        self._idle_s = idle_s

    def __aiter__(self) -> _Chunks:
        return self

    async def __anext__(self) -> bytes:
        connection = self._connection
        connection.deadline.begin(self._limit_s)
        chunk = await connection.read()
        connection.deadline.end()
        if not chunk:
            raise StopAsyncIteration
        self._limit_s = self._idle_s
        return chunk


class NodeClient:
    """Talks to the node at ``url``. Made anywhere, used and closed on one event loop."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self._path = parts.path.rstrip("/")
        # Bytes pass through as the node made them, so it must not compress.
        host = parts.netloc.rpartition("@")[2]
        self._own_lines = f"Host: {host}\r\nAccept-Encoding: identity\r\nUser-Agent: tandem-proxy\r\n"
        self._deadlines = Deadlines()
        self._connections = NodeConnections(url, self._deadlines, connect_timeout_s=connect_timeout_s)

    @property
    def heard_s(self) -> float:
        """When the node last sent anything, on the event loop's clock; -inf: never."""
        return self._deadlines.heard_s

    def give_up(self, silent_s: float) -> None:
        """Whatever has heard nothing from the node for ``silent_s`` fails now, with NodeSilentError."""
        before_s = asyncio.get_running_loop().time() - silent_s
        for deadline in list(self._deadlines):
            deadline.give_up(before_s)

    async def request(
        self,
        method: str,
        route: str,
        *,
        content: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> NodeAnswer:
        """A whole answer within ``timeout_s``.

        Raises:
            NodeRefusedError, NodeTimeoutError, NodeSilentError, NodeBrokenError: there is none; the latter also when it
                has more than ``max_bytes``.
        """
        connection = await self.open(self._request_head(method, route, headers, content), content, timeout_s)
        try:
            return NodeAnswer(connection.status, connection.headers, await self.read_all(connection, max_bytes))
        finally:
            self.leave(connection)

    def stream(
        self,
        method: str,
        route: str,
        *,
        content: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float,
    ) -> NodeStream:
        """An answer whose head comes within ``timeout_s``."""
        return NodeStream(self, self._request_head(method, route, headers, content), content, timeout_s)

    async def close(self) -> None:
        """End all connections. The client cannot be used again."""
        await self._connections.close()

    async def open(self, head: bytes, content: bytes, timeout_s: float) -> NodeConnection:
        """A connection on which the answer's head has come, still waiting for the rest of ``timeout_s``. To be given
        to ``leave``."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        connection = self._connections.take()
        if connection is not None:
            try:
                return await self._send(connection, head, content, timeout_s)
            except NodeBrokenError:
                if connection.has_heard or loop.time() - started_s > STALE_S:
                    raise
        try:
            connection = await self._connections.connect(timeout_s - (loop.time() - started_s))
        except TimeoutError as exc:
            raise NodeTimeoutError(f"no connection within {timeout_s:g} s") from exc
        return await self._send(connection, head, content, timeout_s - (loop.time() - started_s))

    async def read_all(self, connection: NodeConnection, max_bytes: int) -> bytes:
        """The body of the answer that ``open`` began."""
        pieces, num_bytes = [], 0
        while piece := await connection.read():
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise NodeBrokenError(f"the answer has more than {max_bytes} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def leave(self, connection: NodeConnection) -> None:
        self._connections.leave(connection)

    async def _send(self, connection: NodeConnection, head: bytes, content: bytes, timeout_s: float) -> NodeConnection:
        try:
            connection.deadline.begin(timeout_s)
            connection.send(head, content)
            await connection.head()
        except BaseException:
            connection.deadline.end()
            connection.abort()
            raise
        return connection

    def _request_head(self, method: str, route: str, headers: Mapping[str, str], content: bytes) -> bytes:
        """Raises ValueError for what would end a line."""
        assert method != "HEAD", "an answer with a length and no body looks unfinished to the parser"
        lines = [
            f"{method} {self._path}{route} HTTP/1.1\r\n",
            *(f"{key}: {value}\r\n" for key, value in headers.items()),
        ]
        if content or method != "GET":
            lines.append(f"Content-Length: {len(content)}\r\n")
        text = "".join(lines)
        if not (text.count("\n") == text.count("\r") == len(lines)) or "\0" in text:
            raise ValueError(f"a line break or a null in a header for {self._path}{route}")
        return f"{text}{self._own_lines}\r\n".encode()
