"""What different readers make of the same bytes of an answer, which they get piece by piece from memory: ours
(``NodeConnection``), aiohttp's client, and httptools' bare parser, which gets all at once."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httptools
from aiohttp.client_proto import ResponseHandler

from proxy.node_http.connection import NodeConnection
from proxy.node_http.deadlines import Deadlines
from proxy.node_http.errors import NodeClientError

REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
MAX_TURNS = 50
"""Turns of the loop that a reader gets to come to an end after the last byte."""


class End(enum.Enum):
    """What comes after the bytes."""

    NOTHING = "nothing"
    CLOSE = "close"
    RESET = "reset"


class Outcome(enum.Enum):
    WHOLE = "whole"
    BROKEN = "broken"
    WAITS = "waits"


@dataclass(frozen=True)
class Reading:
    """``status``, ``headers`` (of several with one name the last) and ``body``: of a whole answer; ``is_kept``: the
    connection is used again."""

    outcome: Outcome
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_kept: bool = False

    @property
    def answer(self) -> tuple[Outcome, int, dict[str, str], bytes]:
        return self.outcome, self.status, self.headers, self.body


class MemoryTransport(asyncio.Transport):
    """Nowhere. Closing it is told to its protocol in the loop's next turn, as asyncio does."""

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = b""
        self._is_closing = False
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        self.written += b"".join(list_of_data)

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        self.lose(None)

    close = abort

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading

    def lose(self, error: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)


async def _play(transport: MemoryTransport, reader: asyncio.Task[Any], pieces: Sequence[bytes], end: End) -> bool:
    """Whether the reader came to an end."""
    for piece in pieces:
        if piece and not transport.is_closing():
            transport.protocol.data_received(piece)
        await asyncio.sleep(0)
    if end is not End.NOTHING:
        transport.lose(ConnectionResetError("reset") if end is End.RESET else None)
    for _ in range(MAX_TURNS):
        if reader.done():
            return True
        await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait([reader])
    return False


async def ours(pieces: Sequence[bytes], end: End) -> Reading:
    connection = NodeConnection(lambda _: None, Deadlines())
    transport = MemoryTransport(connection)

    async def read() -> tuple[int, dict[str, str], bytes]:
        connection.send(REQUEST, b"")
        await connection.head()
        parts = []
        while part := await connection.read():
            parts.append(part)
        return connection.status, connection.headers, b"".join(parts)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    try:
        if not await _play(transport, reader, pieces, end):
            return Reading(Outcome.WAITS)
        status, headers, body = reader.result()
    except NodeClientError:
        return Reading(Outcome.BROKEN)
    else:
        return Reading(Outcome.WHOLE, status, headers, body, connection.is_reusable)
    finally:
        connection.deadline.close()


class AiohttpReader:
    """To be used in an ``async with``."""

    async def __aenter__(self) -> AiohttpReader:
        self._connector = _MemoryConnector(limit=0)
        self._session = aiohttp.ClientSession(
            connector=self._connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def read(self, pieces: Sequence[bytes], end: End) -> Reading:
        async def read() -> tuple[int, dict[str, str], bytes]:
            # A GET whose connection breaks would be sent a second time.
            async with self._session.post("http://node/", allow_redirects=False) as response:
                headers = {key.lower(): value for key, value in response.headers.items()}
                return response.status, headers, await response.read()

        reader = asyncio.create_task(read())
        while self._connector.transport is None or not self._connector.transport.written:
            await asyncio.sleep(0)
        transport, self._connector.transport = self._connector.transport, None
        try:
            if not await _play(transport, reader, pieces, end):
                return Reading(Outcome.WAITS)
            status, headers, body = reader.result()
        except aiohttp.ClientError:
            return Reading(Outcome.BROKEN)
        else:
            return Reading(Outcome.WHOLE, status, headers, body, bool(self._connector._conns))
        finally:
            transport.lose(None)
            await asyncio.sleep(0)
            self._connector._conns.clear()


class _MemoryConnector(aiohttp.BaseConnector):
    transport: MemoryTransport | None = None

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:
        protocol = ResponseHandler(loop=asyncio.get_running_loop())
        self.transport = MemoryTransport(protocol)
        return protocol


@dataclass
class _Message:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_kept: bool | None = None
    """Of one that is whole."""


class _Messages(list[_Message]):
    """All that httptools finds."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self.append(_Message(-1))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self[-1].status < 0:  # else it is a trailer
            text = value.rstrip(b" \t").decode("utf-8", "surrogateescape")
            self[-1].headers[name.decode("latin-1").lower()] = text

    def on_headers_complete(self) -> None:
        self[-1].status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self[-1].body += body

    def on_message_complete(self) -> None:
        self[-1].is_kept = self.parser.should_keep_alive()


def bare(data: bytes, end: End) -> Reading:
    """httptools' parser, which gets all at once; the first message that is no 1xx."""
    messages, is_wrong = _Messages(), False
    try:
        messages.parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        is_wrong = True
    is_wrong = is_wrong or any(0 <= message.status < 100 for message in messages)
    final = next((message for message in messages if message.status >= 200), None)
    if final is not None and final.is_kept is not None:
        is_kept = final.is_kept and final is messages[-1] and not is_wrong and end is End.NOTHING
        return Reading(Outcome.WHOLE, final.status, final.headers, final.body, is_kept)
    if is_wrong or end is End.RESET:
        return Reading(Outcome.BROKEN)
    if end is End.NOTHING:
        return Reading(Outcome.WAITS)
    if final is None or "content-length" in final.headers or "chunked" in _coding(final):
        return Reading(Outcome.BROKEN)
    return Reading(Outcome.WHOLE, final.status, final.headers, final.body)


def _coding(message: _Message) -> str:
    return message.headers.get("transfer-encoding", "").lower()
