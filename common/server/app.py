"""The app of every process: FastAPI, with ``/openapi.json`` and ``/docs`` of our own.

Those two are made once: they hold nothing but what the code says.
"""

from __future__ import annotations

import functools
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.openai.openapi import ENDPOINTS, Endpoint, docs_page, openapi_document
from common.server.versions import installed_versions
from common.telemetry.tracing import NO_FRAMEWORK_TELEMETRY
from common.wire.routes import DOCS_ROUTE, INTERNAL_PREFIX, OPENAPI_ROUTE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class ServerApp(FastAPI):
    """FastAPI without its own pages and telemetry. ``entry`` gets each request first: what is put round it sees every
    answer, also those of routing and of the gate."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,  # they lead to http, also behind TLS, and clients drop their key on the way
            telemetry=NO_FRAMEWORK_TELEMETRY,
            **settings,
        )
        self.entry: ASGIApp = super().__call__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self.entry(_as_routed(scope), receive, send)


def _as_routed(scope: Scope) -> Scope:
    """As the routes know it: a path without a slash at its end, and HEAD as the GET that it asks for (uvicorn, whose
    own scope still says HEAD, sends no body). Internal routes stay without HEAD: some of their answers have no end."""
    if scope["type"] != "http":
        return scope
    path, changes = scope["path"], {}
    if path.endswith("/") and path != "/":
        changes["path"] = path[:-1]
    if scope["method"] == "HEAD" and not path.startswith(INTERNAL_PREFIX):
        changes["method"] = "GET"
    return {**scope, **changes} if changes else scope


def add_docs_routes(app: FastAPI, endpoints: tuple[Endpoint, ...] = ENDPOINTS) -> None:
    """The two routes of ``app``, which serves ``endpoints``."""
    document, page = make_docs(app.title, endpoints)

    @app.get(OPENAPI_ROUTE)
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    @app.get(DOCS_ROUTE)
    async def docs() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})


@functools.cache
def make_docs(title: str, endpoints: tuple[Endpoint, ...]) -> tuple[bytes, str]:
    """The document and the page of apps of that name: a third of a second's work, the same for each of a process."""
    document = openapi_document(title, installed_versions()["tandem"] or "0", endpoints)
    return orjson.dumps(document), docs_page(title, endpoints)
