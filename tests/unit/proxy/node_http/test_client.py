"""The client to nodes: which connections it uses, how each failure is called, and that no way out leaves one open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from proxy.node_http import client as node_client
from proxy.node_http import connections as node_connections
from proxy.node_http.client import NodeClient, NodeStream
from proxy.node_http.errors import NodeBrokenError, NodeRefusedError, NodeTimeoutError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Scenario = Callable[[], Awaitable[None]]
LONG_S = 20.0
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE_BODY = b"x" * 8 * 2**20  # more than a socket's buffers hold


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Runs a scenario on a loop of the given kind: the proxy's is uvloop's, where that is installed."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_one(scenario: Scenario) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(scenario())

    return run_one


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


def test_connection_when_answers_are_read_then_is_used_again(run: Callable[[Scenario], None]) -> None:
    connections, heads = [], []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        while True:
            heads.append((await read_request(reader))[0])
            writer.write(OK)

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            for _ in range(3):
                answer = await client.request("GET", "/ready", headers={"X-A": "b"}, timeout_s=LONG_S)
                assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"ok", "2")
            async with client.stream("POST", "/v1/completions", content=b"{}", timeout_s=LONG_S) as stream:
                assert await stream.read() == b"ok"

    run(scenario)
    assert len(connections) == 1
    names = [line.partition(":")[0].lower() for line in heads[0].splitlines()[1:] if line]
    assert sorted(names) == ["accept-encoding", "host", "user-agent", "x-a"]


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


def test_connection_when_the_node_says_more_than_was_asked_for_then_is_not_used_again() -> None:
    connections = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        await read_request(reader)
        writer.write(OK + OK.replace(b"ok", b"no"))
        await reader.read()

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            for _ in range(2):
                assert (await client.request("GET", "/", timeout_s=LONG_S)).body == b"ok"

    asyncio.run(scenario())
    assert len(connections) == 2


def test_connection_when_idle_for_long_then_is_closed(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_connections, "KEEP_ALIVE_S", 0.05)

    async def scenario() -> None:
        gone = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(OK)
            await reader.read()
            gone.set()

        async with node(handle) as url, client_of(url) as client:
            await client.request("GET", "/", timeout_s=LONG_S)
            await asyncio.wait_for(gone.wait(), LONG_S)

    run(scenario)


def test_request_when_the_client_is_closed_then_broken() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            waiting = asyncio.create_task(client.request("GET", "/", timeout_s=LONG_S))
            await asyncio.sleep(0.05)
            await client.close()
            for work in (waiting, client.request("GET", "/", timeout_s=LONG_S)):
                with pytest.raises(NodeBrokenError, match="the client is closed"):
                    await work

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


def closing_node(num_answers: int, tail: bytes = b"") -> tuple[Handler, list[int]]:
    """Each connection answers ``num_answers`` requests and is closed when the next one comes, with ``tail`` as all that
    is said to it. The list has the number of each connection that got a request."""
    connections = iter(range(1000))
    got: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(connections)
        for _ in range(num_answers):
            await read_request(reader)
            got.append(number)
            writer.write(OK)
        await reader.readuntil(b"\r\n")
        got.append(number)
        writer.write(tail)
        await writer.drain()

    return handle, got


def test_post_when_the_node_closes_the_idle_connection_then_is_sent_on_a_new_one(
    run: Callable[[Scenario], None],
) -> None:
    handle, got = closing_node(1)

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            for _ in range(3):
                assert (await client.request("POST", "/", content=b"{}", timeout_s=LONG_S)).status == 200
            async with client.stream("POST", "/", content=LARGE_BODY, timeout_s=LONG_S) as stream:
                assert await stream.read() == b"ok"

    run(scenario)
    assert got == [0, 0, 1, 1, 2, 2, 3]


def test_post_when_several_idle_connections_are_closed_then_none_of_them_is_taken_again() -> None:
    handle, got = closing_node(1)

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            post = lambda: client.request("POST", "/", content=b"{}", timeout_s=LONG_S)  # noqa: E731
            await asyncio.gather(*(post() for _ in range(4)))
            assert (await post()).status == 200

    asyncio.run(scenario())
    assert len(got) == 4 + 2


def test_post_when_part_of_an_answer_came_then_is_not_sent_again() -> None:
    handle, got = closing_node(1, tail=b"HTTP/1.1 200 OK\r\nContent-Le")

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            await client.request("POST", "/", content=b"{}", timeout_s=LONG_S)
            with pytest.raises(NodeBrokenError):
                await client.request("POST", "/", content=b"{}", timeout_s=LONG_S)

    asyncio.run(scenario())
    assert got == [0, 0]


def test_post_when_the_node_had_it_for_long_then_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_client, "STALE_S", 0.0)
    handle, got = closing_node(1)

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            await client.request("POST", "/", content=b"{}", timeout_s=LONG_S)
            with pytest.raises(NodeBrokenError):
                await client.request("POST", "/", content=b"{}", timeout_s=LONG_S)

    asyncio.run(scenario())
    assert got == [0, 0]


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
        await stream_of(writer, [b"one"] * 6, 0.06)
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async def scenario() -> None:
        num_bytes = 0
        async with streaming(handle, LONG_S) as stream:
            async for chunk in stream.chunks(0.2):
                if num_bytes == 0:
                    await asyncio.sleep(0.3)
                num_bytes += len(chunk)
        assert num_bytes == 18

    asyncio.run(scenario())
