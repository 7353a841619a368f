"""The client to nodes: what it makes of answers, how each failure is called, and that no way out leaves a file open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.node_http.client import NodeClient
from proxy.node_http.errors import NodeBrokenError, NodeRefusedError, NodeTimeoutError
from tests.unit.proxy.node_http.rig import (
    LARGE_BODY,
    LONG_S,
    OK,
    STREAM_HEAD,
    Scenario,
    answer_each,
    client_of,
    frozen_node,
    full_node,
    node,
    read_request,
    stream_of,
    streaming,
)


def num_sockets() -> int:
    """This process's sockets. Not all of its files: uvloop opens one of its own when it pleases."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += str(path.readlink()).startswith("socket:")
    return count


async def settled_sockets(at_most: int) -> int:
    """Open sockets when they are down to ``at_most``, or after a second."""
    for _ in range(100):
        if num_sockets() <= at_most:
            break
        await asyncio.sleep(0.01)
    return num_sockets()


async def cancelled(work: Awaitable[object], after_s: float) -> None:
    task = asyncio.ensure_future(work)
    await asyncio.sleep(after_s)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def first_chunk(client: NodeClient, content: bytes = b"") -> None:
    async with client.stream("POST", "/v1/completions", content=content, timeout_s=LONG_S) as answer:
        async for _ in answer.chunks(LONG_S):
            pass


def check_no_file_is_left(run: Callable[[Scenario], None], url: str, content: bytes, delays_s: list[float]) -> None:
    async def scenario() -> None:
        async with client_of(url) as client:
            await cancelled(first_chunk(client, content), 0.01)  # what stays for good is there
            await asyncio.sleep(0.05)
            before = num_sockets()
            for delay_s in delays_s:
                await asyncio.gather(*(cancelled(first_chunk(client, content), delay_s) for _ in range(10)))
            assert await settled_sockets(before) <= before

    run(scenario)


def test_cancel_when_connecting_then_no_file_is_left(run: Callable[[Scenario], None]) -> None:
    with full_node() as url:
        check_no_file_is_left(run, url, b"", [0.0, 0.001, 0.002, 0.005, 0.01] * 3)


def test_cancel_when_connection_was_just_made_then_no_file_is_left(run: Callable[[Scenario], None]) -> None:
    with frozen_node() as url:
        check_no_file_is_left(run, url, b"", [index * 0.0002 for index in range(15)])


def test_cancel_when_node_is_frozen_and_reads_nothing_then_no_file_is_left(run: Callable[[Scenario], None]) -> None:
    with frozen_node() as url:
        check_no_file_is_left(run, url, LARGE_BODY, [0.01, 0.1, 0.2])


def test_timeout_when_node_is_frozen_then_is_named_and_no_file_is_left(run: Callable[[Scenario], None]) -> None:
    async def scenario() -> None:
        with frozen_node() as url:
            async with client_of(url) as client:
                await cancelled(first_chunk(client), 0.01)
                await asyncio.sleep(0.05)
                before = num_sockets()
                for _ in range(5):
                    with pytest.raises(NodeTimeoutError):
                        await client.request("POST", "/", content=LARGE_BODY, timeout_s=0.02)
                assert await settled_sockets(before) <= before

    run(scenario)


def test_connections_when_hundreds_are_needed_then_none_waits() -> None:
    """A pool that hands out a limited number makes requests wait for each other."""
    arrived = []

    async def scenario() -> None:
        everybody = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            arrived.append(1)
            if len(arrived) == 300:
                everybody.set()
            await everybody.wait()
            writer.write(OK)
            await writer.drain()

        async with node(handle) as url, client_of(url) as client:
            await asyncio.gather(*(client.request("POST", "/", timeout_s=LONG_S) for _ in range(300)))

    asyncio.run(scenario())


def test_node_when_not_listening_then_refused(run: Callable[[Scenario], None]) -> None:
    async def scenario() -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            async with client_of(f"http://127.0.0.1:{sock.getsockname()[1]}") as client:
                with pytest.raises(NodeRefusedError):
                    await client.request("GET", "/ready", timeout_s=LONG_S)

    run(scenario)


def test_node_when_not_accepting_then_refused_after_the_connect_timeout(run: Callable[[Scenario], None]) -> None:
    async def scenario() -> None:
        with full_node() as url:
            async with client_of(url, connect_timeout_s=0.05) as client:
                before = num_sockets()
                with pytest.raises(NodeRefusedError):
                    await client.request("GET", "/ready", timeout_s=LONG_S)
                assert await settled_sockets(before) <= before

    run(scenario)


@pytest.mark.parametrize(
    "answer",
    [
        b"no HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        STREAM_HEAD + b"5\r\nabc",
        STREAM_HEAD + b"nonsense\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200",
        b"",
    ],
    ids=["garbage", "short", "cut-chunk", "no-chunk", "huge-header", "cut-head", "nothing"],
)
def test_answer_when_unusable_then_broken_without_a_second_try(answer: bytes) -> None:
    tries = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        tries.append(1)
        writer.write(answer)
        await writer.drain()
        await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            with pytest.raises(NodeBrokenError):
                await client.request("POST", "/", content=b"{}", timeout_s=LONG_S)

    asyncio.run(scenario())
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: identity\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\nX: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + OK, b"ok"),
        (STREAM_HEAD + b"2;x=y\r\nok\r\n0\r\nX-Trailer: z\r\n\r\n", b"ok"),
    ],
    ids=["no length", "identity", "told to go on", "trailers"],
)
def test_answer_when_unusual_then_read(run: Callable[[Scenario], None], answer: bytes, body: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for index in range(len(answer)):  # a byte at a time
            writer.write(answer[index : index + 1])
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            got = await client.request("POST", "/", content=b"{}", timeout_s=LONG_S)
            assert (got.status, got.body) == (200, body)
            assert not got.headers.keys() & {"x", "x-trailer"}

    run(scenario)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        STREAM_HEAD + b"2\r\nok\r\n0\r\n" + b"X: y\r\n" * 200_000,
    ],
    ids=["another protocol", "endless trailers"],
)
def test_answer_when_it_never_comes_to_an_end_then_broken(answer: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await reader.read()

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            with pytest.raises(NodeBrokenError):
                await client.request("POST", "/", content=b"{}", timeout_s=LONG_S)

    asyncio.run(scenario())


@pytest.mark.parametrize("after_s", [0.0, 0.05], ids=["while it connects", "while it waits"])
def test_request_when_the_client_is_closed_then_broken(after_s: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            waiting = asyncio.create_task(client.request("GET", "/", timeout_s=LONG_S))
            await asyncio.sleep(after_s)
            await client.close()
            for work in (waiting, client.request("GET", "/", timeout_s=LONG_S)):
                with pytest.raises(NodeBrokenError, match="the client is closed"):
                    await work

    asyncio.run(scenario())


def test_stream_when_the_client_is_closed_then_what_came_is_not_taken_for_the_whole() -> None:
    """Its end would be that of the connection: who closed that must be told apart."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\npart")
        await reader.read()

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client, client.stream("GET", "/", timeout_s=LONG_S) as stream:
            chunks = stream.chunks(LONG_S)
            assert await anext(chunks) == b"part"
            await client.close()
            await asyncio.sleep(0.05)
            with pytest.raises(NodeBrokenError, match="the client is closed"):
                await anext(chunks)

    asyncio.run(scenario())


@pytest.mark.parametrize("value", ["a\r\nX-B: c", "a\nb", "a\rb", "a\0b"])
def test_header_when_it_would_end_its_line_then_nothing_is_sent(value: str) -> None:
    async def scenario() -> None:
        async with client_of("http://127.0.0.1:9") as client:
            with pytest.raises(ValueError, match="a line break or a null in a header for /ready"):
                await client.request("GET", "/ready", headers={"X-A": value}, timeout_s=LONG_S)

    asyncio.run(scenario())


def test_stream_when_nobody_reads_it_then_the_node_cannot_write_without_end(run: Callable[[Scenario], None]) -> None:
    written = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM_HEAD)
        for _ in range(64):
            writer.write(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
            await writer.drain()
            written.append(1)
        writer.write(b"0\r\n\r\n")
        writer.close()  # what is still in its buffer goes out first
        await writer.wait_closed()

    async def scenario() -> None:
        async with streaming(handle, LONG_S) as stream:
            await asyncio.sleep(0.3)
            assert len(written) < 32
            num_bytes = 0
            async for chunk in stream.chunks(LONG_S):
                num_bytes += len(chunk)
            assert num_bytes == 64 * 2**20

    run(scenario)


def test_answer_when_too_large_then_broken() -> None:
    async def scenario() -> None:
        async with node(answer_each) as url, client_of(url) as client:
            with pytest.raises(NodeBrokenError, match="more than 1 bytes"):
                await client.request("POST", "/", timeout_s=LONG_S, max_bytes=1)

    asyncio.run(scenario())


def test_chunks_when_they_come_then_are_passed_on_at_once(run: Callable[[Scenario], None]) -> None:
    async def scenario() -> None:
        may_go_on = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            await stream_of(writer, [b"one"], 0)
            await may_go_on.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
            await reader.read()

        got = []
        async with streaming(handle, LONG_S) as stream:
            async for chunk in stream.chunks(LONG_S):
                got.append(chunk)
                may_go_on.set()
        assert got == [b"one", b"two"]

    run(scenario)


def test_stream_when_left_early_then_the_node_sees_its_connection_closed(run: Callable[[Scenario], None]) -> None:
    async def scenario() -> None:
        gone = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            await stream_of(writer, [b"one"], 0)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            gone.set()

        async with node(handle) as url, client_of(url) as client:
            async with client.stream("POST", "/", timeout_s=LONG_S) as stream:
                async for _ in stream.chunks(LONG_S):
                    break
            await asyncio.wait_for(gone.wait(), LONG_S)

    run(scenario)


@pytest.mark.parametrize(("num_chunks", "timeout_s", "idle_s"), [(0, 0.1, LONG_S), (1, LONG_S, 0.1)])
def test_chunks_when_the_node_falls_silent_then_timeout(num_chunks: int, timeout_s: float, idle_s: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await stream_of(writer, [b"one"] * num_chunks, 0)
        await reader.read()

    async def scenario() -> None:
        got: list[Any] = []
        async with streaming(handle, timeout_s) as stream:
            chunks = stream.chunks(idle_s)
            for _ in range(num_chunks):
                got.append(await anext(chunks))
            with pytest.raises(NodeTimeoutError, match=r"silent for more than 0\.1 s"):
                await anext(chunks)
        assert got == [b"one"] * num_chunks

    asyncio.run(scenario())


def test_chunks_when_slower_than_half_the_limit_or_the_reader_is_slow_then_no_timeout() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await stream_of(writer, [b"one"] * 6, 0.3)
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async def scenario() -> None:
        num_bytes = 0
        async with streaming(handle, LONG_S) as stream:
            async for chunk in stream.chunks(1.2):
                if num_bytes == 0:
                    await asyncio.sleep(1.5)
                num_bytes += len(chunk)
        assert num_bytes == 18

    asyncio.run(scenario())
