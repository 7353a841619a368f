from __future__ import annotations

import gzip
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Body, FastAPI, Request, Response
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from common.errors import (
    ConfigError,
    NodeUnavailableError,
    QueueFullError,
)
from common.openai.errors import install_error_handlers
from common.server.gate import LEG_ROOM_BYTES, Gate, install_middleware, request_id_of
from common.server.json_body import read_json_object
from common.wire.headers import CLUSTER_KEY_HEADER, PROXY_HEADER
from common.wire.json_text import MAX_DEPTH


class Item(BaseModel):
    count: int


def create_app(**kwargs: Any) -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)
    install_middleware(app, **kwargs)

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.post("/v1/echo")
    async def echo(request: Request) -> dict[str, Any]:
        return await read_json_object(request)

    @app.post("/v1/typed")
    async def typed(item: Annotated[Item, Body()]) -> int:
        return item.count

    @app.get("/v1/id")
    async def request_id(request: Request) -> str:
        return request_id_of(request)

    @app.get("/v1/busy")
    async def busy() -> None:
        raise QueueFullError("queue holds 8 of 8", retry_after_s=7)

    @app.get("/v1/bug")
    async def bug() -> None:
        raise RuntimeError("secret password")

    @app.get("/v1/down")
    async def down() -> None:
        raise NodeUnavailableError("no decode node")

    @app.get("/v1/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"a"
            yield b"b"

        return StreamingResponse(parts())

    @app.post("/internal/v1/pull")
    async def pull() -> Response:
        return Response(status_code=204)

    return app


def client(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def assert_error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert response.headers["X-Request-Id"]
    return error


pytestmark = pytest.mark.asyncio


async def test_errors_have_one_shape_whoever_raised_them(caplog: pytest.LogCaptureFixture) -> None:
    async with client(create_app()) as http:
        busy = await http.get("/v1/busy")
        assert_error(busy, 429, "queue_full")
        assert busy.headers["Retry-After"] == "7"
        assert "/nowhere" in assert_error(await http.get("/nowhere"), 404, "not_found")["message"]
        wrong_method = await http.get("/v1/echo")
        assert_error(wrong_method, 405, "method_not_allowed")
        assert wrong_method.headers["Allow"] == "POST"
        assert_error(await http.get("/v1/down"), 503, "no_node")
        assert assert_error(await http.post("/v1/typed", json={"count": "x"}), 400, "invalid_value")["param"] == "count"
        with caplog.at_level(logging.ERROR):
            bug = await http.get("/v1/bug", headers={"X-Request-Id": "abc"})
        assert_error(bug, 500, "internal_error")
        assert bug.headers["X-Request-Id"] == "abc"
        assert "secret" not in bug.text
        assert "secret password" in caplog.text


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"", "line 1 column 1"),
        (b'{"a": 1,\n "b" 2}', "line 2 column 6"),
        (b"[1]", "list"),
        (b'"x"', "str"),
        (b"null", "NoneType"),
        (b'{"a": "\xff"}', "byte 7"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a":' * 100_000, "nested"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", str(MAX_DEPTH)),
    ],
)
async def test_malformed_body_is_400_and_says_where(body: bytes, shown: str) -> None:
    async with client(create_app()) as http:
        error = assert_error(await http.post("/v1/echo", content=body), 400, "invalid_json")
    assert shown in error["message"]


async def test_body_over_the_limit_is_413_by_header_and_by_count() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 10

    async with client(create_app(max_body_bytes=100)) as http:
        assert (await http.post("/v1/echo", content=b'{"a": 1}'.ljust(100))).json() == {"a": 1}
        assert "101 bytes" in assert_error(
            await http.post("/v1/echo", content=b" " * 101), 413, "body_too_large"
        )["message"]  # fmt: skip
        assert_error(await http.post("/v1/echo", content=chunks()), 413, "body_too_large")
        # The framework reads this route's body itself, and would answer 400.
        assert_error(await http.post("/v1/typed", content=chunks()), 413, "body_too_large")
        lying = {"Content-Length": "5"}
        assert_error(await http.post("/v1/echo", content=chunks(), headers=lying), 413, "body_too_large")
        assert_error(
            await http.post("/v1/echo", content=b"", headers={"Content-Length": "9" * 5000}), 413, "body_too_large"
        )


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "identity, gzip", "x" * 5000])
async def test_body_when_it_is_compressed_then_415_names_header_value_and_bound(encoding: str) -> None:
    headers: Any = {"Content-Encoding": encoding.encode()}
    async with client(create_app()) as http:
        refused = await http.post("/v1/echo", content=gzip.compress(b'{"a": 1}'), headers=headers)
        message = assert_error(refused, 415, "unsupported_encoding")["message"]
        assert message.startswith(f"header Content-Encoding must be absent or identity, got {encoding[:20]!r}"[:-1])
        assert len(message) < 500
        assert refused.headers["Accept-Encoding"] == "identity"
        for plain in ("identity", "Identity", ""):
            assert (await http.post("/v1/echo", json={"a": 1}, headers={"Content-Encoding": plain})).json() == {"a": 1}


async def test_body_when_a_proxy_has_added_to_it_then_has_room_above_the_limit() -> None:
    """With a cluster key only a caller who has it is a proxy."""
    body = b'{"a": 1}'.ljust(100 + LEG_ROOM_BYTES)
    leg = {PROXY_HEADER: "1"}
    async with client(create_app(max_body_bytes=100)) as http:
        assert_error(await http.post("/v1/echo", content=body), 413, "body_too_large")
        assert (await http.post("/v1/echo", content=body, headers=leg)).json() == {"a": 1}
        assert_error(await http.post("/v1/echo", content=body + b" ", headers=leg), 413, "body_too_large")
    async with client(create_app(max_body_bytes=100, cluster_key="secret")) as http:
        assert_error(await http.post("/v1/echo", content=body, headers=leg), 413, "body_too_large")
        leg |= {CLUSTER_KEY_HEADER: "secret"}
        assert (await http.post("/v1/echo", content=body, headers=leg)).json() == {"a": 1}


async def test_api_keys_guard_everything_but_the_probes() -> None:
    async with client(create_app(api_keys={"key-a", "key-b"})) as http:
        assert (await http.get("/health")).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer nope"},
            {"Authorization": "key-a"},
            {"Authorization": "Basic key-a"},
            {"X-Api-Key": "nope"},
        ):
            refused = await http.get("/v1/id", headers=headers)
            assert_error(refused, 401, "invalid_api_key")
            assert refused.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/tokenize", "/detokenize", "/nowhere"):
            assert_error(await http.post(path), 401, "invalid_api_key")
        odd = {"Authorization": b"Bearer \xff\xfe"}
        assert_error(await http.get("/v1/id", headers=odd), 401, "invalid_api_key")  # type: ignore[arg-type]
        for key in ("key-a", "key-b"):
            assert (await http.get("/v1/id", headers={"Authorization": f"bearer {key}"})).status_code == 200
            assert (await http.get("/v1/id", headers={"X-Api-Key": key})).status_code == 200
            both = {"Authorization": "Bearer nope", "X-Api-Key": key}
            assert (await http.get("/v1/id", headers=both)).status_code == 200


async def test_cluster_key_guards_internal_routes_and_lets_a_peer_in() -> None:
    async with client(create_app(api_keys={"key"}, cluster_key="peer")) as http:
        for headers in ({}, {CLUSTER_KEY_HEADER: "wrong"}, {"Authorization": "Bearer key"}):
            assert_error(await http.post("/internal/v1/pull", headers=headers), 401, "invalid_cluster_key")
        peer = {CLUSTER_KEY_HEADER: "peer"}
        assert (await http.post("/internal/v1/pull", headers=peer)).status_code == 204
        assert (await http.get("/v1/id", headers=peer)).status_code == 200
    async with client(create_app(api_keys={"key"})) as http:
        assert (await http.post("/internal/v1/pull")).status_code == 204
        assert_error(await http.get("/v1/id", headers={CLUSTER_KEY_HEADER: ""}), 401, "invalid_api_key")


async def test_empty_key_is_refused_at_start() -> None:
    for bad in ({"api_keys": [""]}, {"cluster_key": ""}):
        with pytest.raises(ConfigError):
            Gate(**bad)  # type: ignore[arg-type]


async def test_request_id_is_taken_when_valid_and_made_otherwise() -> None:
    async with client(create_app()) as http:
        given = await http.get("/v1/id", headers={"X-Request-Id": "abc-1.2:3_4"})
        assert given.json() == given.headers["X-Request-Id"] == "abc-1.2:3_4"
        for bad in ("", "a b", "x" * 129, "a/b", "é"):
            made = await http.get("/v1/id", headers={"X-Request-Id": bad.encode()})  # type: ignore[dict-item]
            assert made.headers["X-Request-Id"] == made.json()
            assert made.json() != bad
            assert len(made.json()) == 32


async def test_stream_passes_through_the_middleware() -> None:
    async with client(create_app(api_keys={"k"})) as http:
        assert (await http.get("/v1/stream", headers={"Authorization": "Bearer k"})).text == "ab"
