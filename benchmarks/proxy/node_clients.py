"""The proxy's client to nodes made of aiohttp, and of httpx, behind the same interface: what ``proxy.node_http`` is
measured against (``benchmarks.proxy.node_http``).

aiohttp's is whole: deadlines, nodes that are given up, connections that are aborted, requests that are sent again when
an idle connection was closed (also, for aiohttp does not tell, when one was reset after part of an answer). httpx's has
the deadlines only, so it is flattered.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import httpx
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from proxy.node_http.client import MAX_ANSWER_BYTES, NO_HEADERS, STALE_S, NodeAnswer, NodeClient
from proxy.node_http.connections import DNS_CACHE_S, KEEP_ALIVE_S
from proxy.node_http.deadlines import ConnectDeadline, Deadline, Deadlines
from proxy.node_http.errors import NodeBrokenError, NodeClientError, NodeRefusedError, NodeTimeoutError

LARGE_BODY_BYTES = 256 * 2**10
"""A larger body is sent in pieces: aiohttp warns of the time that one big write takes."""
OWN_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "tandem-proxy"}


class _LibraryClient:
    """What both have in common."""

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        self._deadlines = Deadlines()

    @property
    def heard_s(self) -> float:
        return self._deadlines.heard_s

    def has_heard(self) -> None:
        self._deadlines.heard_s = asyncio.get_running_loop().time()

    def give_up(self, silent_s: float) -> None:
        before_s = asyncio.get_running_loop().time() - silent_s
        for deadline in list(self._deadlines):
            deadline.give_up(before_s)

    def limit(self, timeout_s: float) -> ConnectDeadline:
        return ConnectDeadline(timeout_s, self._deadlines)


# --- aiohttp


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
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=int(DNS_CACHE_S))
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


class AiohttpNodeClient(_LibraryClient):
    _session: aiohttp.ClientSession | None = None
    _is_closed = False

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        super().__init__(url, connect_timeout_s=connect_timeout_s)
        self._urls: dict[str, URL] = {}  # parsing one costs more than sending a request

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
        with _translated():
            async with self.limit(timeout_s):
                response = await self.open(method, route, content, headers)
                try:
                    body = await _read_all(response.content, max_bytes)
                finally:
                    _leave(response)
        return NodeAnswer(response.status, response.headers, body)

    def stream(
        self,
        method: str,
        route: str,
        *,
        content: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float,
    ) -> _AiohttpStream:
        return _AiohttpStream(self, method, route, content, headers, timeout_s)

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def open(self, method: str, route: str, content: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        attempt = _Attempt(needs_new=False)
        try:
            return await self._try(attempt, method, route, content, headers)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError) as exc:
            if not _was_stale(attempt, exc):
                raise
        return await self._try(_Attempt(needs_new=True), method, route, content, headers)

    async def _try(
        self, attempt: _Attempt, method: str, route: str, content: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        session = self._get_session()
        data = io.BytesIO(content) if len(content) > LARGE_BODY_BYTES else content or None
        token = _ATTEMPT.set(attempt)
        try:
            url = self._full_url(route)
            response = await session.request(method, url, data=data, headers=headers, allow_redirects=False)
            self.has_heard()
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
                headers=OWN_HEADERS,
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


class _AiohttpStream:
    def __init__(
        self,
        client: AiohttpNodeClient,
        method: str,
        route: str,
        content: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._client = client
        self._request = (method, route, content, headers)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> _AiohttpStream:
        with _translated():
            async with self._client.limit(self._timeout_s):
                self._response = await self._client.open(*self._request)
        self.status, self.headers = self._response.status, self._response.headers
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _leave(self._response)

    @property
    def is_read(self) -> bool:
        return self._response.content.at_eof()

    async def read(self) -> bytes:
        with _translated():
            async with self._client.limit(self._timeout_s):
                return await _read_all(self._response.content, MAX_ANSWER_BYTES)

    async def chunks(self, idle_s: float) -> AsyncIterator[bytes]:
        content = self._response.content
        deadline, limit_s = Deadline(content.set_exception), self._timeout_s
        self._client._deadlines.add(deadline)
        try:
            with _translated():
                while True:
                    deadline.begin(limit_s)
                    chunk = await content.readany()
                    deadline.end()
                    self._client.has_heard()
                    if not chunk:
                        return
                    limit_s = idle_s
                    yield chunk
        finally:
            self._client._deadlines.discard(deadline)
            deadline.close()


async def _read_all(content: aiohttp.StreamReader, max_bytes: int) -> bytes:
    pieces, num_bytes = [], 0
    while piece := await content.readany():
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise NodeBrokenError(f"the answer has more than {max_bytes} bytes")
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


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except NodeClientError:
        raise
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as exc:
        raise NodeRefusedError(str(exc) or type(exc).__name__) from exc
    except TimeoutError as exc:
        raise NodeTimeoutError("no answer in time") from exc
    except (aiohttp.ClientError, OSError) as exc:
        raise NodeBrokenError(str(exc) or type(exc).__name__) from exc


# --- httpx


class HttpxNodeClient(_LibraryClient):
    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        super().__init__(url, connect_timeout_s=connect_timeout_s)
        self._client: httpx.AsyncClient | None = None

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
        async with self.stream(method, route, content=content, headers=headers, timeout_s=timeout_s) as answer:
            return NodeAnswer(answer.status, answer.headers, await answer.read())

    def stream(
        self,
        method: str,
        route: str,
        *,
        content: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        timeout_s: float,
    ) -> _HttpxStream:
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self._url,
                headers=OWN_HEADERS,
                limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
                timeout=httpx.Timeout(None, connect=self._connect_timeout_s),
                trust_env=False,
            )
        return _HttpxStream(self, self._client.stream(method, route, content=content, headers=dict(headers)), timeout_s)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


class _HttpxStream:
    def __init__(
        self, client: HttpxNodeClient, opening: contextlib.AbstractAsyncContextManager[httpx.Response], timeout_s: float
    ) -> None:
        self._client = client
        self._opening = opening
        self._timeout_s = timeout_s

    async def __aenter__(self) -> _HttpxStream:
        with _httpx_translated():
            async with self._client.limit(self._timeout_s):
                self._response = await self._opening.__aenter__()
        self._client.has_heard()
        self.status, self.headers = self._response.status_code, self._response.headers
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._opening.__aexit__(kind, error, traceback)

    @property
    def is_read(self) -> bool:
        return self._response.is_stream_consumed

    async def read(self) -> bytes:
        with _httpx_translated():
            async with self._client.limit(self._timeout_s):
                return await self._response.aread()

    async def chunks(self, idle_s: float) -> AsyncIterator[bytes]:
        with _httpx_translated():
            async for chunk in self._response.aiter_raw():
                self._client.has_heard()
                yield chunk


@contextlib.contextmanager
def _httpx_translated() -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as exc:
        raise NodeRefusedError(str(exc)) from exc
    except TimeoutError as exc:
        raise NodeTimeoutError("no answer in time") from exc
    except (httpx.HTTPError, OSError) as exc:
        raise NodeBrokenError(str(exc)) from exc


CLIENTS: dict[str, Any] = {"own": NodeClient, "aiohttp": AiohttpNodeClient, "httpx": HttpxNodeClient}
