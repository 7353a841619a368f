"""Which connections are used again, and which requests are sent again."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

import pytest

from proxy.node_http import client as node_client
from proxy.node_http import connections as node_connections
from proxy.node_http.connection import PAUSE_BYTES
from proxy.node_http.errors import NodeBrokenError, NodeRefusedError
from tests.support.fake_dns import FakeDns, refuse_loop_threads
from tests.unit.proxy.node_http.rig import (
    LARGE_BODY,
    LONG_S,
    OK,
    STREAM_HEAD,
    Handler,
    Scenario,
    client_of,
    node,
    read_request,
)


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
                assert await stream.read(LONG_S) == b"ok"

    run(scenario)
    assert len(connections) == 1
    names = [line.partition(":")[0].lower() for line in heads[0].splitlines()[1:] if line]
    assert sorted(names) == ["accept-encoding", "host", "user-agent", "x-a"]


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


def test_connection_when_its_answer_was_not_read_then_is_not_used_again(run: Callable[[Scenario], None]) -> None:
    """All of it may be here, and so much that nothing more is taken from the node: the next answer would not come."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            size = PAUSE_BYTES + 2**14
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)

    async def scenario() -> None:
        async with node(handle) as url, client_of(url) as client:
            for _ in range(3):
                async with client.stream("POST", "/", timeout_s=LONG_S):
                    await asyncio.sleep(0.1)
                answer = await client.request("POST", "/", timeout_s=LONG_S)
                assert len(answer.body) == PAUSE_BYTES + 2**14

    run(scenario)


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
                assert await stream.read(LONG_S) == b"ok"

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


@pytest.mark.parametrize("step", [pytest.param(13, id="some bytes"), pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(
    "answer", [OK, STREAM_HEAD + b"2;x=y\r\nok\r\n0\r\nX-Trailer: z\r\n\r\n"], ids=["length", "chunks"]
)
def test_post_when_its_connection_ends_at_any_byte_of_the_answer_then_sent_again_only_if_none_came(
    run: Callable[[Scenario], None], answer: bytes, is_reset: bool, step: int
) -> None:
    num_requests, num_bytes = 0, 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        for data in (OK, answer[:num_bytes]):
            await read_request(reader)
            num_requests += 1
            writer.write(data)
        await asyncio.sleep(0.002)
        if is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def scenario() -> None:
        nonlocal num_bytes, num_requests
        async with node(handle) as url:
            for num_bytes in (*range(0, len(answer), step), len(answer)):
                num_requests = 0
                async with client_of(url) as client:
                    await client.request("POST", "/", content=b"{}", timeout_s=LONG_S)
                    work = client.request("POST", "/", content=b"{}", timeout_s=LONG_S)
                    if 0 < num_bytes < len(answer):
                        with pytest.raises(NodeBrokenError):
                            await work
                    else:
                        assert (await work).body == b"ok"
                assert num_requests == (2 if num_bytes else 3)

    run(scenario)


async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(OK)
    await writer.drain()


def test_connection_when_the_url_has_an_address_then_nothing_is_looked_up(run: Callable[[Scenario], None]) -> None:
    """A lookup takes a thread, and those of the event loop may all be busy."""

    async def scenario() -> None:
        refuse_loop_threads()
        async with node(answer_one) as url, client_of(url) as client:
            assert (await client.request("GET", "/", timeout_s=LONG_S)).body == b"ok"

    run(scenario)


@pytest.mark.parametrize("hangs", [False, True])
def test_connection_when_the_name_is_no_longer_resolved_then_goes_to_the_address_known_before(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(node_connections, "DNS_CACHE_S", -1.0)
    monkeypatch.setattr(node_connections, "LATE_SHARE", 0.0 if hangs else 1.0)
    fake = FakeDns(monkeypatch, node_test=["127.0.0.1"])

    async def scenario() -> None:
        refuse_loop_threads()
        async with node(answer_one) as url, client_of(url.replace("127.0.0.1", "node.test")) as client:
            assert (await client.request("GET", "/", timeout_s=LONG_S)).body == b"ok"
            fake.answers["node.test"] = []
            if hangs:
                fake.hanging.add("node.test")
            for _ in range(3):
                assert (await client.request("GET", "/", timeout_s=LONG_S)).body == b"ok"
        async with client_of("http://node.test:1") as other:  # of which nothing is known
            fake.go_on.set()
            with pytest.raises(NodeRefusedError, match="Temporary failure"):
                await other.request("GET", "/", timeout_s=LONG_S)

    run(scenario)
    assert len(fake.asked) == (3 if hangs else 5)
