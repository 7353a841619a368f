"""Streams of events, read with as little of the processors as can be: the clients share them with the nodes, and what
one takes for each token (httpx: some 0.2 ms) makes the others' prompts and steps longer. What comes is kept with its
time, and parsed when the answer is whole.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

REQUEST_TIMEOUT_S = 300.0


async def post_stream(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> list[tuple[float, dict[str, Any]]]:
    """The events of the answer, each with the ``time.perf_counter`` of its last byte. On a connection of its own.

    Raises:
        OSError: no connection, another status than 200, an answer without its end, or none in time (TimeoutError).
    """
    where = urlsplit(url)
    content = json.dumps(body).encode()
    lines = [
        f"POST {where.path} HTTP/1.1",
        f"host: {where.netloc}",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(content)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    request = "\r\n".join((*lines, "", "")).encode() + content
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        transport, exchange = await loop.create_connection(lambda: _Exchange(loop), where.hostname, where.port)
        try:
            transport.write(request)
            await exchange.is_over
        finally:
            transport.abort()
    return _Answer(exchange.pieces).events


class _Exchange(asyncio.Protocol):
    """``pieces``: what came, and when."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_over: asyncio.Future[None] = loop.create_future()
        self.pieces: list[tuple[float, bytes]] = []

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)


class _Answer:
    """What httptools makes of the pieces, as it calls these methods."""

    def __init__(self, pieces: list[tuple[float, bytes]]) -> None:
        """Raises ConnectionError."""
        self.events: list[tuple[float, dict[str, Any]]] = []
        self._rest = b""
        self._time_s = 0.0
        self._is_whole = False
        parser = httptools.HttpResponseParser(self)
        try:
            for self._time_s, piece in pieces:
                parser.feed_data(piece)
        except httptools.HttpParserError as exc:
            raise ConnectionError(f"not HTTP: {exc}") from exc
        if pieces and parser.get_status_code() != 200:
            raise ConnectionError(f"status {parser.get_status_code()}: {self._rest.decode(errors='replace')}")
        if not self._is_whole:
            raise ConnectionError("the answer broke off")

    def on_body(self, body: bytes) -> None:
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self.events.append((self._time_s, cast("dict[str, Any]", json.loads(line[len(b"data: ") :]))))

    def on_message_complete(self) -> None:
        self._is_whole = True
