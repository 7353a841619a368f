"""What every app has round its routes: request ids, keys, a body limit, a JSON reader, and client disconnects.

``install_middleware`` puts the three pure ASGI middlewares round an app, outermost first: request id (so that each
refusal carries one), keys, body limit. They hold their configuration only. Streaming responses pass through untouched.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Collection
from typing import Any, NoReturn, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.api.errors import error_response
from common.errors import (
    AuthenticationError,
    BodyTooLargeError,
    ConfigError,
    InvalidRequestError,
    RequestAbortedError,
)

logger = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES = 16 * 2**20
MAX_JSON_DEPTH = 64
REQUEST_ID_HEADER = "X-Request-Id"
CLUSTER_KEY_HEADER = "X-Tandem-Cluster-Key"
TRACE_HEADER = "X-Tandem-Trace"
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
INTERNAL_PREFIX = "/internal/"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_T = TypeVar("_T")


def install_middleware(
    app: Starlette,
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    api_keys: Collection[str] = (),
    cluster_key: str | None = None,
) -> None:
    """Put request ids, key checks and the body limit round ``app``. No keys: that check is off."""
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=max_body_bytes)
    app.add_middleware(KeyMiddleware, api_keys=tuple(api_keys), cluster_key=cluster_key)
    app.add_middleware(RequestIdMiddleware)


# --- request ids ------------------------------------------------------------------------------------------------------


def new_request_id() -> str:
    return uuid.uuid4().hex


def request_id_of(request: Request) -> str:
    """The id that ``RequestIdMiddleware`` gave to ``request``."""
    return str(request.state.request_id)


def wants_trace(request: Request) -> bool:
    return request.headers.get(TRACE_HEADER) == "1"


def is_peer(request: Request) -> bool:
    """Whether it comes from a process of this service: it has the cluster key, or there is none to have."""
    return bool(getattr(request.state, "is_peer", False))


class RequestIdMiddleware:
    """Takes ``X-Request-Id`` (1-128 of ``A-Za-z0-9._:-``; anything else is replaced) or makes one; echoes it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


# --- keys -------------------------------------------------------------------------------------------------------------


class KeyMiddleware:
    """Who may call what.

    ``OPEN_PATHS`` are open. ``/internal/`` needs the cluster key when one is set. Everything else needs an API key
    (``Authorization: Bearer``) when any is set, or the cluster key, with which the proxy calls its nodes.
    """

    def __init__(self, app: ASGIApp, *, api_keys: Collection[str] = (), cluster_key: str | None = None) -> None:
        if any(not key for key in api_keys) or cluster_key == "":
            raise ConfigError("an API key or cluster key must not be empty")
        self._app = app
        # Digests have one length, so that comparing tells nothing about a key's.
        self._api_digests = tuple(_digest(key.encode()) for key in api_keys)
        self._cluster_digest = None if cluster_key is None else _digest(cluster_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            has_key = self._is_cluster_key(headers.get(CLUSTER_KEY_HEADER))
            scope.setdefault("state", {})["is_peer"] = has_key or self._cluster_digest is None
            error = self._check(str(scope["path"]), headers, has_key=has_key)
            if error is not None:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers, *, has_key: bool) -> AuthenticationError | None:
        if path in OPEN_PATHS:
            return None
        if path.startswith(INTERNAL_PREFIX):
            if self._cluster_digest is None or has_key:
                return None
            return AuthenticationError(f"header {CLUSTER_KEY_HEADER} is missing or wrong", code="invalid_cluster_key")
        if not self._api_digests or has_key:
            return None
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_api_key(key.strip()):
            return None
        return AuthenticationError("the API key is missing or wrong; send it as Authorization: Bearer KEY")

    def _is_cluster_key(self, given: str | None) -> bool:
        if self._cluster_digest is None or given is None:
            return False
        return hmac.compare_digest(_digest(given.encode("latin-1")), self._cluster_digest)

    def _is_api_key(self, given: str) -> bool:
        digest = _digest(given.encode("latin-1"))
        is_known = False
        for known in self._api_digests:
            # No early end: the time must not tell which key came near.
            is_known |= hmac.compare_digest(digest, known)
        return is_known


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


# --- bodies -----------------------------------------------------------------------------------------------------------


class BodyLimitMiddleware:
    """Refuses bodies over ``max_body_bytes`` with 413, by ``Content-Length`` at once, else by the bytes that come."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("Content-Length", "")
        if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > self._max_body_bytes):
            await error_response(self._error(f"{declared} bytes"))(scope, receive, send)
            return
        num_bytes = 0
        is_started = False

        async def counting_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise self._error(f"more than {self._max_body_bytes} bytes")
            return message

        async def guarded_send(message: Message) -> None:
            nonlocal is_started
            # A framework that turned the error into an answer of its own is overruled.
            if num_bytes > self._max_body_bytes and not is_started:
                return
            is_started = True
            await send(message)

        try:
            await self._app(scope, counting_receive, guarded_send)
        except BodyTooLargeError:
            if is_started:
                raise
        if num_bytes > self._max_body_bytes and not is_started:
            error = self._error(f"more than {self._max_body_bytes} bytes")
            await error_response(error)(scope, receive, send)

    def _error(self, got: str) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body must be at most {self._max_body_bytes} bytes, got {got}")


async def read_json_object(request: Request) -> dict[str, Any]:
    """The request's body as a JSON object.

    Raises:
        InvalidRequestError: not UTF-8, not JSON (with the position), not an object, or nested deeper than
            ``MAX_JSON_DEPTH``.
        RequestAbortedError: the client went away while sending.
    """
    try:
        raw = await request.body()
    except ClientDisconnect as exc:
        raise RequestAbortedError("the client closed the connection while sending the body") from exc
    return parse_json_object(raw)


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """``raw`` as a JSON object; errors as ``read_json_object``."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidRequestError(f"the body is not UTF-8: byte {exc.start}", code="invalid_json") from exc
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as exc:
        raise InvalidRequestError(
            f"the body is not JSON: {exc.msg} at line {exc.lineno} column {exc.colno}", code="invalid_json"
        ) from exc
    except RecursionError as exc:
        raise InvalidRequestError(_TOO_DEEP, code="invalid_json") from exc
    except ValueError as exc:
        raise InvalidRequestError("the body holds a number of too many digits", code="invalid_json") from exc
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    # Counting brackets bounds the depth from above; most bodies never need the walk.
    if raw.count(b"[") + raw.count(b"{") > MAX_JSON_DEPTH and _is_too_deep(value):
        raise InvalidRequestError(_TOO_DEEP, code="invalid_json")
    if b"\\u" in raw:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as exc:
            raise InvalidRequestError(
                "the body holds half of a surrogate pair, which is no character", code="invalid_json"
            ) from exc
    return value


_TOO_DEEP = f"the body is nested deeper than {MAX_JSON_DEPTH} levels"


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the body is not JSON: {name} is no JSON number", code="invalid_json")


def _is_too_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH):
        children: list[object] = []
        for item in level:
            items = item.values() if isinstance(item, dict) else item
            children += [child for child in items if isinstance(child, dict | list)]  # type: ignore[attr-defined]
        if not children:
            return False
        level = children
    return True


def encode_json(value: object) -> bytes:
    """``value`` as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


# --- client gone ------------------------------------------------------------------------------------------------------


async def run_until_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """Run ``work`` for a response that is sent in one piece; cancel it when the client goes away.

    The body must have been read. ``work`` has ended, its clean-up included, when this returns or raises.

    Raises:
        RequestAbortedError: the client closed the connection first. Whatever ``work`` raises passes through.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watcher.result()
        raise RequestAbortedError("the client closed the connection")
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                logger.warning("aborted work failed in its clean-up", exc_info=task.exception())


async def _wait_for_disconnect(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
