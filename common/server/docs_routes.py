"""``/openapi.json`` and ``/docs``, which are made once: they hold nothing but what the code says."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from common.openai.openapi import ENDPOINTS, Endpoint, docs_page, openapi_document
from common.server.versions import installed_versions
from common.wire.routes import DOCS_ROUTE, OPENAPI_ROUTE

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def add_docs_routes(app: FastAPI, endpoints: Sequence[Endpoint] = ENDPOINTS) -> None:
    """The two routes of ``app``, which serves ``endpoints``."""
    document = orjson.dumps(openapi_document(app.title, installed_versions()["tandem"] or "0", endpoints))
    page = docs_page(app.title, endpoints)

    @app.get(OPENAPI_ROUTE)
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    @app.get(DOCS_ROUTE)
    async def docs() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"})
