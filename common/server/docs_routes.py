"""``/openapi.json`` and ``/docs``, which are made once: they hold nothing but what the code says."""

from __future__ import annotations

import functools

import orjson
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from common.openai.openapi import ENDPOINTS, Endpoint, docs_page, openapi_document
from common.server.versions import installed_versions
from common.wire.routes import DOCS_ROUTE, OPENAPI_ROUTE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


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
