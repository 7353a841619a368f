"""The status page's data, behind the API key; the page itself is in ``proxy.pages``."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from proxy.status.board import StatusBoard

DATA_PATH = "/status.json"


def add_status_routes(app: FastAPI, board_of: Callable[[Request], StatusBoard]) -> None:
    """``board_of`` finds the board of a request's app, which its lifespan makes."""

    @app.get(DATA_PATH)
    async def status(request: Request) -> Response:
        return JSONResponse(await board_of(request).to_json(), headers={"Cache-Control": "no-store"})
