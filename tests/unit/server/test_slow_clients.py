"""Clients that send slowly, or nothing, or too early: every connection on which no request is worked on has an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from fastapi import FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from common.errors import RequestAbortedError
from common.server import connection
from common.server.disconnect import run_until_disconnect
from common.server.gate import install_middleware
from tests.support.http_server import AppServer, serving

HEAD_TIMEOUT_S, BODY_TIMEOUT_S, WORK_S = 0.5, 0.5, 1.2
WAIT_S = 15.0
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
GET_SLOWLY, GET_STREAM = (GET.replace(b"/health", path) for path in (b"/ready", b"/metrics"))  # open without a key
POST_HEAD = b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
KEY = b"Authorization: Bearer k\r\n\r\n"
REST_OF_HEAD = b"X-A: " + b"b" * 1000


def create_app() -> FastAPI:
    app = FastAPI()
    install_middleware(app, body_timeout_s=BODY_TIMEOUT_S, api_keys=["k"])

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    @app.get("/ready")
    async def slow() -> dict[str, str]:
        await asyncio.sleep(WORK_S)
        return {"slow": "yes"}

    @app.get("/metrics")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b"part"
                await asyncio.sleep(WORK_S / 4)

        return StreamingResponse(parts())

    @app.post("/v1/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    return app


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "HEAD_TIMEOUT_S", HEAD_TIMEOUT_S)
        server = AppServer(create_app(), keep_alive_s=1)
        yield server.port
        server.stop()


@pytest.fixture(params=[0, 2], ids="after {} requests".format)
def sock(request: pytest.FixtureRequest, port: int) -> Iterator[socket.socket]:
    """A connection on which some requests were answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        for _ in range(request.param):
            sock.sendall(GET)
            received = b""
            while not received.endswith(b"\r\n\r\n{}"):
                piece = sock.recv(4096)
                assert piece, received
                received += piece
        yield sock


def until_closed(sock: socket.socket, data: bytes = b"", every_s: float = 0.05) -> bytes:
    """What comes until the server closes the connection, which gets a byte of ``data`` now and then."""
    deadline_s, received = time.monotonic() + WAIT_S, b""
    rest = memoryview(data)
    sock.settimeout(every_s if data else WAIT_S)
    while time.monotonic() < deadline_s:
        try:
            sock.sendall(rest[:1])
            rest = rest[1:]
            piece = sock.recv(65536)
            if not piece:
                return received
            received += piece
        except TimeoutError:
            continue
        except ConnectionError:
            return received
    raise AssertionError(f"the connection is open after {WAIT_S} s; received {received[-500:]!r}")


def refusal_of(received: bytes) -> tuple[int, str]:
    """Status and code of an answer that refuses."""
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def test_head_when_it_comes_a_byte_at_a_time_then_408_and_closed(sock: socket.socket) -> None:
    assert refusal_of(until_closed(sock, GET[:-4] + REST_OF_HEAD)) == (408, "head_timeout")


@pytest.mark.parametrize("part", [b"G", GET[:-2]], ids=["one byte", "all but its last line"])
def test_head_when_part_of_it_came_at_once_and_no_more_then_408_and_closed(sock: socket.socket, part: bytes) -> None:
    sock.sendall(part)
    assert refusal_of(until_closed(sock)) == (408, "head_timeout")


def test_connection_when_only_line_breaks_come_then_closed(sock: socket.socket) -> None:
    assert until_closed(sock, b"\r\n" * 500) == b""


def test_connection_when_nothing_comes_then_closed(sock: socket.socket) -> None:
    assert until_closed(sock) == b""


def test_body_when_it_comes_a_byte_at_a_time_then_408_and_closed(sock: socket.socket) -> None:
    sock.sendall(POST_HEAD + KEY)
    assert refusal_of(until_closed(sock, b"x" * 1000)) == (408, "body_timeout")


def test_body_when_its_request_was_refused_and_it_still_trickles_then_closed(sock: socket.socket) -> None:
    sock.sendall(POST_HEAD + b"\r\n")
    assert refusal_of(until_closed(sock, b"x" * 1000)) == (401, "invalid_api_key")


def test_head_when_it_trickles_behind_a_request_that_is_worked_on_then_that_one_is_answered_first(
    sock: socket.socket,
) -> None:
    sock.sendall(GET_SLOWLY)
    received = until_closed(sock, GET[:-4] + REST_OF_HEAD)
    answer, _, refusal = received.partition(b'{"slow":"yes"}')
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert refusal_of(refusal) == (408, "head_timeout")


def test_garbage_when_it_follows_requests_that_are_not_answered_yet_then_nothing_is_put_into_their_answers(
    sock: socket.socket,
) -> None:
    sock.sendall(GET_STREAM)
    received = sock.recv(4096)
    sock.sendall(GET + b"\x00\x01\x02")
    received += until_closed(sock)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("is_late", [False, True], ids=["with the first", "behind it"])
def test_client_when_it_sends_the_next_request_and_leaves_then_the_one_that_is_worked_on_is_aborted(
    *, is_late: bool
) -> None:
    begun, aborted = threading.Event(), threading.Event()

    async def work(request: Request) -> Response:
        begun.set()
        with contextlib.suppress(RequestAbortedError):
            await run_until_disconnect(request, asyncio.Event().wait())
        aborted.set()
        return Response()

    with serving(Starlette(routes=[Route("/health", work)])) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as sock:
            sock.sendall(GET if is_late else GET + GET)
            assert begun.wait(WAIT_S)
            if is_late:
                sock.sendall(GET)
        assert aborted.wait(WAIT_S)
