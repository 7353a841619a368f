"""Heads without end, and heads that are too large."""

from __future__ import annotations

import socket
import threading

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from common.server.connection import MAX_HEAD_BYTES, BoundedProtocol
from common.server.gate import install_middleware
from common.server.serve import bind_socket
from tests.support.http_server import wait_for


@pytest.fixture(scope="module")
def port():  # type: ignore[no-untyped-def]
    app = FastAPI()
    install_middleware(app)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {}

    sock = bind_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, log_config=None, ws="none"))
    thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
    thread.start()
    wait_for(lambda: server.started, "the server")
    yield sock.getsockname()[1]
    server.should_exit = True
    thread.join()


def test_head_when_too_large_then_431_and_the_next_request_is_served(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        assert client.get("/health", headers={"x-fill": "a" * (MAX_HEAD_BYTES // 2)}).status_code == 200
        answer = client.get("/health", headers={"x-fill": "a" * (MAX_HEAD_BYTES - 100), "x-more": "b" * 100})
        assert answer.status_code == 431
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("line", [b"x-fill: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
def test_head_when_it_has_no_end_then_the_connection_is_closed(port: int, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n" + (b"x-long: " if b":" not in line else b""))
        sock.settimeout(0.001)
        num_sent, answer = 0, None
        while answer is None and num_sent < 50 * MAX_HEAD_BYTES:
            try:
                num_sent += sock.send(line)
                answer = sock.recv(1000)
            except TimeoutError:
                continue
            except ConnectionError:
                answer = b""
        assert answer is not None, "the connection stayed open"
        assert answer == b"" or answer.split()[1] in (b"431", b"400")


def test_head_when_many_requests_use_one_connection_then_each_is_counted_by_itself(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        for _ in range(5):
            assert client.get("/health", headers={"x-fill": "a" * (MAX_HEAD_BYTES // 2)}).status_code == 200
