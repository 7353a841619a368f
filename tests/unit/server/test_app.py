"""What every app of the service does with methods and paths, on a real connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from http.client import HTTPConnection

import pytest
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from common.openai.errors import install_error_handlers
from common.server.app import ServerApp, add_docs_routes
from common.server.gate import install_middleware
from common.wire.routes import DOCS_ROUTE, LIVENESS_ROUTE, OPENAPI_ROUTE
from tests.support.http_server import serving


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    app = ServerApp(title="test")
    install_error_handlers(app)
    install_middleware(app)
    add_docs_routes(app)

    @app.get("/")
    async def page(request: Request) -> Response:
        return Response(f"<p>{request.url.query}</p>")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    @app.get("/parts")
    async def parts() -> Response:
        async def two() -> AsyncIterator[bytes]:
            yield b"a"
            yield b"b"

        return StreamingResponse(two())

    @app.get(LIVENESS_ROUTE)
    async def liveness() -> Response:
        async def beats() -> AsyncIterator[bytes]:
            while True:
                yield b"{}\n"
                await asyncio.sleep(0.05)

        return StreamingResponse(beats())

    with serving(app) as server:
        yield server.port


@pytest.fixture
def connection(port: int) -> Iterator[HTTPConnection]:
    """One that is used again: what an answer left on it would be read as a part of the next."""
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=10)) as made:
        yield made


Answer = tuple[int, dict[str, str], bytes]


def ask(connection: HTTPConnection, method: str, path: str, body: bytes | None = None) -> Answer:
    connection.request(method, path, body, {"X-Request-Id": "same"})
    answer = connection.getresponse()
    headers = {name.lower(): value for name, value in answer.getheaders() if name.lower() != "date"}
    return answer.status, headers, answer.read()


@pytest.mark.parametrize("path", ["/", "/?a=b", "/health", "/parts", "/nowhere", "/v1/echo", DOCS_ROUTE, OPENAPI_ROUTE])
def test_head_when_asked_then_is_what_get_says_without_a_body(connection: HTTPConnection, path: str) -> None:
    status, headers, body = ask(connection, "GET", path)
    sock, of_head = connection.sock, {name: headers[name] for name in headers if name != "transfer-encoding"}
    for _ in range(2):
        assert ask(connection, "HEAD", path) == (status, of_head, b"")
        assert ask(connection, "GET", path) == (status, headers, body)
    assert connection.sock is sock, "the connection was closed"
    assert int(headers.get("content-length", len(body))) == len(body) > 0


def test_head_when_the_answer_has_no_end_then_is_405_at_once(connection: HTTPConnection) -> None:
    for path in (LIVENESS_ROUTE, LIVENESS_ROUTE + "/"):
        assert ask(connection, "HEAD", path)[0] == 405
    assert ask(connection, "GET", "/health")[0] == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_path_when_it_ends_in_a_slash_then_is_the_one_without(connection: HTTPConnection, method: str) -> None:
    for path in ("/health", "/parts", DOCS_ROUTE):
        assert ask(connection, method, path + "/") == ask(connection, method, path)
    assert ask(connection, method, "/health/?a=b")[0] == 200
    for path in ("/nowhere/", "/health//", "/v1/"):
        assert ask(connection, method, path)[0] == 404
    assert ask(connection, "POST", "/v1/echo/", b"whole")[::2] == (200, b"whole")
    assert ask(connection, method, "/v1/echo/")[0] == 405
