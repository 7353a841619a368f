"""What is in front of the proxy's app: its generation routes, in plain ASGI.

Nearly all requests are for those routes. They go through one check of the head (``Gate``), one read of the body and one
call. Through FastAPI they would pass eight layers that each wrap ``send`` once more, and so would every chunk of a
stream. Everything else is FastAPI's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import BodyTimeoutError, BodyTooLargeError
from common.openai.errors import answer_error
from common.server.drain import Drain
from common.server.gate import Gate, read_body, refusal
from common.server.json_body import BODY_KEY
from common.server.pacer import Pacer
from common.wire.headers import REQUEST_ID_HEADER

Handler = Callable[[Request], Awaitable[Response]]
ShapeError = Callable[[Response, str], Response]
"""An error in the shape that its route has, of the one that it has elsewhere and the request id."""


class Front:
    """The generation routes, before ``app``, which has all others. A handler gets a request whose body has been read
    (``read_json_object`` finds it). ``error_shapes`` are of a path and all below it, whether there is a route or not.
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: Gate,
        drain: Drain,
        handlers: Mapping[str, Handler],
        error_shapes: Mapping[str, ShapeError],
    ) -> None:
        self._app = app
        self._gate = gate
        self._drain = drain
        self._handlers = dict(handlers)
        self._error_shapes = dict(error_shapes)
        self._pacer = Pacer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._handlers:
            with self._drain.open():
                response = await self._respond(scope, receive, send)
                await response(scope, receive, send)
        elif scope["type"] == "http" and self._shape_of(scope["path"]) is not None:
            response = self._shaped(await self._refused(scope, receive), scope)
            await response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> Response:
        error = self._gate.check(scope)
        if error is not None:
            return self._shaped(refusal(error, scope["state"]["request_id"]), scope)
        try:
            scope[BODY_KEY] = await read_body(receive, self._gate)
            await self._pacer.turn()
            return await self._handlers[scope["path"]](_Request(scope, receive, send))
        except (BodyTooLargeError, BodyTimeoutError) as exc:
            return self._shaped(refusal(exc, scope["state"]["request_id"]), scope)
        except Exception as exc:  # noqa: BLE001 - answered and logged, as the app does for its other routes
            request_id = scope["state"]["request_id"]
            response = answer_error(exc, request_id=request_id, path=scope["path"])
            response.headers[REQUEST_ID_HEADER] = request_id
            return self._shaped(response, scope)

    async def _refused(self, scope: Scope, receive: Receive) -> Response:
        """The app's answer where it has no route: an error."""
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self._app(scope, receive, keep)
        start, *parts = messages
        response = Response(b"".join(part.get("body", b"") for part in parts), start["status"])
        response.raw_headers = list(start["headers"])
        return response

    def _shape_of(self, path: str) -> ShapeError | None:
        shapes = self._error_shapes.items()
        return next((shape for begin, shape in shapes if path == begin or path.startswith(begin + "/")), None)

    def _shaped(self, response: Response, scope: Scope) -> Response:
        shape = self._shape_of(scope["path"])
        if shape is None or not response.body:
            return response
        return shape(response, scope["state"]["request_id"])


class _Headers(Headers):
    """Starlette's, which goes through all of them each time that one is looked for; a request is asked for a dozen."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__(raw=raw)
        self._first = dict(reversed(raw))

    def get(self, key: str, default: Any = None) -> Any:
        value = self._first.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")


class _Request(Request):
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self._headers = _Headers(scope["headers"])
