"""The status page's routes: ``/`` and its parts, open to all because they hold no data, and ``/status.json`` behind the
API key.

The page may load from this proxy and from nowhere else (``POLICY``); the browser enforces it.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from proxy.status.board import StatusBoard

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
DATA_PATH = "/status.json"
# Path -> the file in this package and its type.
FILES = {
    "/": ("page.html", "text/html"),
    "/status/page.css": ("page.css", "text/css"),
    "/status/page.js": ("page.js", "text/javascript"),
    "/status/icon.svg": ("icon.svg", "image/svg+xml"),
}
PAGE_PATHS = frozenset(FILES)


def add_status_routes(app: FastAPI, board_of: Callable[[Request], StatusBoard]) -> None:
    """``board_of`` finds the board of a request's app, which its lifespan makes."""
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, (importlib.resources.files(__package__) / name).read_bytes(), media_type)

    @app.get(DATA_PATH)
    async def status(request: Request) -> Response:
        return JSONResponse(await board_of(request).to_json(), headers={"Cache-Control": "no-store"})


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path)
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)
