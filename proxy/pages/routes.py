"""The pages' routes: open to all, because they hold no data.

A page may load from this proxy and from nowhere else (``data:`` images are its own), and runs no script but its files
(``POLICY``); the browser enforces it.
"""

from __future__ import annotations

import importlib.resources

from fastapi import FastAPI
from fastapi.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
CHAT_PATH = "/chat"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_PARTS = (
    "page.css",
    "chat.css",
    "icon.svg",
    "parts.js",
    "status.js",
    "chat.js",
    "answer.js",
    "images.js",
    "markdown.js",
    "settings.js",
    "stream.js",
)
# Path -> the file in this package.
FILES = {"/": "status.html", CHAT_PATH: "chat.html", **{f"/pages/{name}": name for name in _PARTS}}
PAGE_PATHS = frozenset(FILES)


def add_page_routes(app: FastAPI) -> None:
    for path, name in FILES.items():
        _add_file(app, path, (importlib.resources.files(__package__) / name).read_bytes(), media_type_of(name))


def media_type_of(name: str) -> str:
    return _TYPES[name.rpartition(".")[2]]


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)
