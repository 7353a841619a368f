"""Nodes on loopback that answer with whatever bytes a test writes, or not at all, and clients of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from proxy.node_http.client import NodeClient, NodeStream

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Scenario = Callable[[], Awaitable[None]]
LONG_S = 20.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE_BODY = b"x" * 8 * 2**20  # more than a socket's buffers hold


@contextlib.asynccontextmanager
async def node(handle: Handler) -> AsyncIterator[str]:
    """A server with ``handle`` for each connection; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handle(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.asynccontextmanager
async def client_of(url: str, connect_timeout_s: float = LONG_S) -> AsyncIterator[NodeClient]:
    client = NodeClient(url, connect_timeout_s=connect_timeout_s)
    try:
        yield client
    finally:
        await client.close()
        await asyncio.sleep(0.01)  # transports close in the loop's next turns


@contextlib.contextmanager
def frozen_node(backlog: int = 1024) -> Iterator[str]:
    """What a stopped process is to others: the system accepts for it, up to ``backlog``, and nobody reads."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(backlog)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def full_node() -> Iterator[str]:
    """A frozen node that accepts no more: connections to it stay half made."""
    with frozen_node(0) as url, contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        yield url


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next((int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:")), 0)
    return head, await reader.readexactly(length)


async def answer_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await read_request(reader)
        writer.write(OK)


@contextlib.asynccontextmanager
async def streaming(handle: Handler, timeout_s: float) -> AsyncIterator[NodeStream]:
    """A node's answer to a POST."""
    async with node(handle) as url, client_of(url) as client, client.stream("POST", "/", timeout_s=timeout_s) as stream:
        yield stream


async def stream_of(writer: asyncio.StreamWriter, chunks: list[bytes], pause_s: float) -> None:
    writer.write(STREAM_HEAD)
    for chunk in chunks:
        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        await writer.drain()
        await asyncio.sleep(pause_s)
