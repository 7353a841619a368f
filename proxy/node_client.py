"""The proxy's HTTP client to one node.

Life of a request: 1 a connection, idle or new, never waited for, 2 the request is written, 3 the answer's head is
awaited, 4 its body is read whole, or passed on chunk by chunk as it comes, 5 a connection whose answer was read to its
end is kept for the next request. Every other way out aborts it: a node takes a closed connection as "nobody wants this
any more", and closing it politely would wait for a frozen node to read what was sent, one open file per request.

A node may close an idle connection at the very moment it is taken. Such a request is sent once more, on a new
connection, if nothing of an answer came: legs may be repeated, a node that gets one twice computes it once more at
worst.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import json
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from proxy.node_errors import NodeBrokenError, translated
from proxy.node_waits import Limit, Silence, Waits

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which a plain uvicorn closes an idle connection."""
STALE_S = 1.0
"""A connection lost sooner than this after it was taken from the idle ones was already closed at the other end."""
MAX_ANSWER_BYTES = 256 * 2**20
"""The largest answer that is held whole."""
LARGE_BODY_BYTES = 256 * 2**10
DNS_CACHE_S = 5


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """A whole answer, whatever its status. Header names are compared without case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Raises ValueError."""
        return json.loads(self.body)


@dataclass(slots=True)
class _Attempt:
    """One try of a request: what the connector is told, and what it says about the connection it gave."""

    needs_new: bool
    is_reused: bool = False
    taken_s: float = 0.0
    transport: asyncio.Transport | None = None


_ATTEMPT: contextvars.ContextVar[_Attempt] = contextvars.ContextVar("attempt")


class _Connector(aiohttp.TCPConnector):
    """Connections of one node; knows which of them were used before."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=DNS_CACHE_S)
        self._used: weakref.WeakSet[ResponseHandler] = weakref.WeakSet()

    async def connect(self, *args: Any, **kwargs: Any) -> Any:
        attempt = _ATTEMPT.get()
        while True:
            connection = await super().connect(*args, **kwargs)
            protocol = connection.protocol
            assert protocol is not None
            attempt.is_reused = protocol in self._used
            if not (attempt.is_reused and attempt.needs_new):
                break
            connection.close()  # as idle as the one that was found closed
        self._used.add(protocol)
        attempt.taken_s = self._loop.time()
        attempt.transport = protocol.transport
        return connection


class NodeStream:
    """An answer whose body is still to come. Valid inside ``NodeClient.stream``."""

    def __init__(self, response: aiohttp.ClientResponse, timeout_s: float, waits: Waits) -> None:
        self._waits = waits
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self._content = response.content
        self._timeout_s = timeout_s

    async def read(self) -> bytes:
        """The whole body. Raises NodeTimeoutError, NodeBrokenError; the latter also when it is too large."""
        with translated():
            async with Limit(self._timeout_s, self._waits):
                return await _read_all(self._content)

    async def chunks(self, idle_s: float) -> AsyncIterator[bytes]:
        """The body's bytes as they come. The first may take as long as the head; silence for more than ``idle_s`` after
        that is a NodeTimeoutError. Time that the caller spends on a chunk does not count."""
        silence = Silence(self._content, self._timeout_s)
        self._waits.add(silence)
        try:
            with translated():
                while True:
                    silence.begin()
                    chunk = await self._content.readany()
                    self._waits.heard_s = silence.end(idle_s)
                    if not chunk:
                        return
                    yield chunk
        finally:
            self._waits.discard(silence)
            silence.close()


class NodeClient:
    """Talks to the node at ``url``. Made anywhere, used and closed on one event loop."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        self._urls: dict[str, URL] = {}  # parsing one costs more than sending a request
        self._session: aiohttp.ClientSession | None = None
        self._waits = Waits()
        self._is_closed = False

    @property
    def heard_s(self) -> float:
        """When the node last sent anything, on the event loop's clock; -inf: never."""
        return self._waits.heard_s

    def give_up(self, silent_s: float) -> None:
        """Whatever has heard nothing from the node for ``silent_s`` fails now, with NodeSilentError."""
        before_s = asyncio.get_running_loop().time() - silent_s
        for wait in list(self._waits):
            wait.give_up(before_s)

    async def request(
        self,
        method: str,
        route: str,
        *,
        content: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> NodeAnswer:
        """A whole answer within ``timeout_s``.

        Raises:
            NodeRefusedError, NodeTimeoutError, NodeSilentError, NodeBrokenError: there is none; the latter also when it
                is too large.
        """
        with translated():
            async with Limit(timeout_s, self._waits):
                response = await self._open(method, route, content, headers)
                try:
                    body = await _read_all(response.content)
                finally:
                    _leave(response)
        return NodeAnswer(response.status, response.headers, body)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        route: str,
        *,
        content: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> AsyncIterator[NodeStream]:
        """An answer whose head came within ``timeout_s``. Leaving before its body was read to the end closes the
        connection. Raises as ``request``."""
        with translated():
            async with Limit(timeout_s, self._waits):
                response = await self._open(method, route, content, headers)
        try:
            yield NodeStream(response, timeout_s, self._waits)
        finally:
            _leave(response)

    async def close(self) -> None:
        """End all connections. The client cannot be used again."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def _open(
        self, method: str, route: str, content: bytes, headers: Mapping[str, str] | None
    ) -> aiohttp.ClientResponse:
        attempt = _Attempt(needs_new=False)
        try:
            return await self._try_open(attempt, method, route, content, headers)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError) as exc:
            if not _was_stale(attempt, exc):
                raise
        return await self._try_open(_Attempt(needs_new=True), method, route, content, headers)

    async def _try_open(
        self, attempt: _Attempt, method: str, route: str, content: bytes, headers: Mapping[str, str] | None
    ) -> aiohttp.ClientResponse:
        session = self._get_session()
        # In pieces when it is large: aiohttp warns of the time that one big write takes.
        data = io.BytesIO(content) if len(content) > LARGE_BODY_BYTES else content or None
        token = _ATTEMPT.set(attempt)
        try:
            response = await session.request(
                method, self._full_url(route), data=data, headers=headers, allow_redirects=False
            )
            self._waits.heard_s = asyncio.get_running_loop().time()
            return response
        except BaseException:
            if attempt.transport is not None:
                attempt.transport.abort()
            raise
        finally:
            _ATTEMPT.reset(token)

    def _get_session(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise NodeBrokenError("the client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_Connector(),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Bytes pass through as the node made them, so it must not compress.
                headers={"Accept-Encoding": "identity", "User-Agent": "tandem-proxy"},
                skip_auto_headers=("Accept", "Content-Type"),
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None, connect=self._connect_timeout_s),
            )
        return self._session

    def _full_url(self, route: str) -> URL:
        url = self._urls.get(route)
        if url is None:
            url = URL(self._url + route, encoded=True)
            if "?" not in route:  # routes are few, queries are not
                self._urls[route] = url
        return url


async def _read_all(content: aiohttp.StreamReader) -> bytes:
    pieces, num_bytes = [], 0
    while piece := await content.readany():
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > MAX_ANSWER_BYTES:
            raise NodeBrokenError(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _leave(response: aiohttp.ClientResponse) -> None:
    """Nothing is to be done for an answer read to its end: its connection has gone back to the idle ones."""
    connection = response.connection
    if connection is None:
        return
    transport = connection.transport
    response.close()
    if transport is not None:
        transport.abort()


def _was_stale(attempt: _Attempt, error: Exception) -> bool:
    """Whether a request was lost because its connection had been closed before it came."""
    if not attempt.is_reused or asyncio.get_running_loop().time() - attempt.taken_s > STALE_S:
        return False
    # aiohttp puts what it had read of an answer's head there.
    return not isinstance(error, aiohttp.ServerDisconnectedError) or isinstance(error.message, str)
