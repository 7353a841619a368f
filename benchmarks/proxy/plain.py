"""The plainest proxy of both legs, FastAPI and httpx, to compare with: the legs go one after the other, chunks pass
through, and nothing else is done (no keys, limits, metrics, retries, leases, deadlines)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


def create_app(prefill_url: str, decode_url: str) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=prefill_url, limits=limits, timeout=None) as app.state.prefill,
            httpx.AsyncClient(base_url=decode_url, limits=limits, timeout=None) as app.state.decode,
        ):
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        leg = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        prefilled = (await app.state.prefill.post("/v1/completions", json=leg)).json()
        leg = {**body, "kv_transfer_params": prefilled["kv_transfer_params"]}

        async def chunks() -> AsyncIterator[bytes]:
            async with app.state.decode.stream("POST", "/v1/completions", json=leg) as answer:
                async for chunk in answer.aiter_raw():
                    yield chunk

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return app


if __name__ == "__main__":
    app = create_app(os.environ["PREFILL_URL"], os.environ["DECODE_URL"])
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["PORT"]), log_level="warning", access_log=False)
