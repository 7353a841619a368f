"""Who may come in, and how much: request ids, keys, and the body's limits, round every app.

``install_middleware`` puts a ``Gate`` round an app, as one pure ASGI middleware. The gate checks each request's head
once: its id (so that each refusal carries one), its key, its declared length and encoding. Streaming responses pass
through untouched. The functions after it say what it found out about a request.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import (
    AuthenticationError,
    BodyEncodingError,
    BodyTimeoutError,
    BodyTooLargeError,
    ConfigError,
    RequestAbortedError,
    TandemError,
)
from common.openai.errors import error_response
from common.telemetry.context import enter_request
from common.wire.fields import shown
from common.wire.headers import API_KEY_HEADER, CLUSTER_KEY_HEADER, PROXY_HEADER, REQUEST_ID_HEADER, TRACE_HEADER
from common.wire.routes import (
    DOCS_ROUTE,
    HEALTH_ROUTE,
    INTERNAL_PREFIX,
    METRICS_ROUTE,
    OPENAPI_ROUTE,
    READY_ROUTE,
    VERSION_ROUTE,
)

DEFAULT_MAX_BODY_BYTES = 16 * 2**20
"""Bytes of the longest body, where the caller does not say."""
DEFAULT_BODY_TIMEOUT_S = 60.0
"""Seconds from the headers to the end of the body, where the caller does not say."""
OPEN_PATHS = frozenset({HEALTH_ROUTE, READY_ROUTE, METRICS_ROUTE, VERSION_ROUTE, OPENAPI_ROUTE, DOCS_ROUTE})
"""Routes without a key: probes and scrapers have none, and what the API is like is no secret."""
BODY_THREADS = 2
"""Threads of an app that parse and check long bodies. They share one interpreter's lock with the event loop: more would
only take turns."""
BODY_THREADS_KEY = "body_threads"
"""Under which name they are in a request's state (``common.server.json_body``)."""
BODY_BYTES_KEY = "body_bytes"
"""Under which name a body's length is there, once it was read."""

_REQUEST_ID_NAME = REQUEST_ID_HEADER.lower().encode()
_API_KEY_NAME = API_KEY_HEADER.lower().encode()
_CLUSTER_KEY_NAME = CLUSTER_KEY_HEADER.lower().encode()
_PROXY_NAME = PROXY_HEADER.lower().encode()
LEG_ROOM_BYTES = 1 << 20
"""What a proxy may add to a body of the largest size: parameters of the handoff and sources, of 2,048 prompts at most.
"""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def install_middleware(
    app: Starlette,
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    body_timeout_s: float = DEFAULT_BODY_TIMEOUT_S,
    api_keys: Collection[str] = (),
    cluster_key: str | None = None,
) -> None:
    """Put request ids, key checks and the body's limits round ``app``. No keys: that check is off."""
    gate = Gate(
        max_body_bytes=max_body_bytes, body_timeout_s=body_timeout_s, api_keys=api_keys, cluster_key=cluster_key
    )
    app.add_middleware(GateMiddleware, gate=gate)


class Gate:
    """Decides who may come in, from a request's head, before anything else is done for it.

    ``open_paths`` are open. ``/internal/`` needs the cluster key when one is set. Everything else needs an API key
    (``Authorization: Bearer`` or ``X-Api-Key``) when any is set, or the cluster key, with which the proxy calls its
    nodes.
    ``X-Request-Id`` is taken (1-128 of ``A-Za-z0-9._:-``; anything else is replaced) or made, and named in the log
    lines of all that the request's task does. Bodies that say of themselves that they are too large or compressed are
    refused here, others while they come (``read_body``).
    """

    def __init__(
        self,
        *,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
        body_timeout_s: float = DEFAULT_BODY_TIMEOUT_S,
        api_keys: Collection[str] = (),
        cluster_key: str | None = None,
        open_paths: Collection[str] = OPEN_PATHS,
    ) -> None:
        if any(not key for key in api_keys) or cluster_key == "":
            raise ConfigError("an API key or cluster key must not be empty")
        self._open_paths = frozenset(open_paths)
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s
        self._body_threads = ThreadPoolExecutor(BODY_THREADS, thread_name_prefix="bodies")
        # Digests have one length, so that comparing tells nothing about a key's.
        self._api_digests = tuple(_digest(key.encode()) for key in api_keys)
        self._cluster_digest = None if cluster_key is None else _digest(cluster_key.encode())

    def check(self, scope: Scope) -> TandemError | None:
        """Why the request is refused, or None. Puts ``request_id``, ``is_peer``, ``max_body_bytes``, the threads for
        bodies and, with an API key, its digest into the request's state."""
        headers = dict(reversed(scope["headers"]))  # the first of each name
        state = scope.setdefault("state", {})
        given = headers.get(_REQUEST_ID_NAME, b"").decode("latin-1")
        state["request_id"] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        enter_request(state["request_id"])  # each request has a task of its own, which ends with it
        has_key = self._is_cluster_key(headers.get(_CLUSTER_KEY_NAME))
        state[BODY_THREADS_KEY] = self._body_threads
        state["is_peer"] = has_key or self._cluster_digest is None
        is_leg = state["is_peer"] and _PROXY_NAME in headers
        state["max_body_bytes"] = self.max_body_bytes + (LEG_ROOM_BYTES if is_leg else 0)
        error = self._check_key(str(scope["path"]), headers, state, has_key=has_key)
        return error or self._check_length(headers, state["max_body_bytes"]) or _check_encoding(headers)

    def _check_key(
        self, path: str, headers: Mapping[bytes, bytes], state: dict[str, Any], *, has_key: bool
    ) -> AuthenticationError | None:
        if path in self._open_paths:
            return None
        if path.startswith(INTERNAL_PREFIX):
            if self._cluster_digest is None or has_key:
                return None
            return AuthenticationError(f"header {CLUSTER_KEY_HEADER} is missing or wrong", code="invalid_cluster_key")
        if not self._api_digests or has_key:
            return None
        for key in _given_keys(headers):
            digest = _digest(key)
            if self._is_api_key(digest):
                # The digest identifies the client, for limits per key; the key itself goes no further.
                state["api_key_digest"] = digest.hex()
                return None
        return AuthenticationError(
            f"the API key is missing or wrong; send it as Authorization: Bearer KEY, or {API_KEY_HEADER}: KEY"
        )

    def _check_length(self, headers: Mapping[bytes, bytes], most: int) -> BodyTooLargeError | None:
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
            return self.too_large(f"{declared.decode()} bytes")
        return None

    def too_large(self, got: str) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body must be at most {self.max_body_bytes} bytes, got {got}")

    def too_slow(self) -> BodyTimeoutError:
        return BodyTimeoutError(f"the body did not arrive within {self.body_timeout_s:g} s of the headers")

    def _is_cluster_key(self, given: bytes | None) -> bool:
        if self._cluster_digest is None or given is None:
            return False
        return hmac.compare_digest(_digest(given), self._cluster_digest)

    def _is_api_key(self, digest: bytes) -> bool:
        is_known = False
        for known in self._api_digests:
            # No early end: the time must not tell which key came near.
            is_known |= hmac.compare_digest(digest, known)
        return is_known


def _check_encoding(headers: Mapping[bytes, bytes]) -> BodyEncodingError | None:
    # Not undone: a body's bound is of bytes as they come, and a few of them can become any number.
    given = headers.get(b"content-encoding", b"identity").strip().decode("latin-1")
    if given.lower() in ("identity", ""):
        return None
    return BodyEncodingError(f"header Content-Encoding must be absent or identity, got {shown(given)}")


def _given_keys(headers: Mapping[bytes, bytes]) -> list[bytes]:
    """As OpenAI's clients send theirs, and as Anthropic's do."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    keys = [key.strip()] if scheme.lower() == b"bearer" else []
    return [*keys, headers[_API_KEY_NAME].strip()] if _API_KEY_NAME in headers else keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class GateMiddleware:
    """A gate round an app: its refusals, the request id on every answer, and bodies of bounded size and time."""

    def __init__(self, app: ASGIApp, *, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gate, error = self._gate, self._gate.check(scope)
        num_bytes, is_started, is_whole = 0, False, False
        deadline_s = asyncio.get_running_loop().time() + gate.body_timeout_s

        async def bounded_receive() -> Message:
            nonlocal num_bytes, error, is_whole
            if is_whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                error = gate.too_slow()
                raise error from None
            is_whole = message["type"] != "http.request" or not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > scope["state"]["max_body_bytes"]:
                error = gate.too_large(f"more than {scope['state']['max_body_bytes']} bytes")
                raise error
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            # A framework that turned the error into an answer of its own is overruled.
            if error is not None and not is_started:
                return
            is_started = True
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = scope["state"]["request_id"]
            await send(message)

        if error is None:
            try:
                await self._app(scope, bounded_receive, send_with_id)
            except (BodyTooLargeError, BodyTimeoutError):
                if is_started:
                    raise
        if error is not None and not is_started:
            await refusal(error, scope["state"]["request_id"])(scope, receive, send)


def refusal(error: TandemError, request_id: str) -> Response:
    """What a gate says. The connection ends with it when a body was to come that nobody reads."""
    response = error_response(error)
    response.headers[REQUEST_ID_HEADER] = request_id
    if isinstance(error, BodyTooLargeError | BodyTimeoutError):
        response.headers["Connection"] = "close"
    return response


async def read_body(receive: Receive, gate: Gate) -> bytes:
    """A request's whole body.

    Raises:
        BodyTooLargeError, BodyTimeoutError: it passes the gate's limits.
        RequestAbortedError: the client went away while sending.
    """
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(gate.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestAbortedError("the client closed the connection while sending the body")
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > gate.max_body_bytes:
                    raise gate.too_large(f"more than {gate.max_body_bytes} bytes")
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise gate.too_slow() from None


# --- what the gate found out ------------------------------------------------------------------------------------------


def request_id_of(request: Request) -> str:
    """The id that the ``Gate`` gave to ``request``."""
    return str(request.scope["state"]["request_id"])


def take_request_id(request: Request, given: str | None) -> None:
    """``given``, which the body has, becomes the id of a request whose head gave none."""
    if given is not None and REQUEST_ID_HEADER not in request.headers and _REQUEST_ID.fullmatch(given):
        request.scope["state"]["request_id"] = given
        enter_request(given)


def wants_trace(request: Request) -> bool:
    return request.headers.get(TRACE_HEADER) == "1"


def is_peer(request: Request) -> bool:
    """Whether it comes from a process of this service: it has the cluster key, or there is none to have."""
    return bool(getattr(request.state, "is_peer", False))


def api_key_digest_of(request: Request) -> str | None:
    """SHA-256 in hex of the API key that ``request`` was let in with; None when it needed none."""
    digest: str | None = request.scope.get("state", {}).get("api_key_digest")
    return digest


def was_let_in_by(request: Request, key: str) -> bool:
    """Whether ``key``, of a header, is the API key that ``request`` was let in with."""
    return api_key_digest_of(request) == _digest(key.strip().encode("latin-1")).hex()
