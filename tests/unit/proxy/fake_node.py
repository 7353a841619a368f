"""A stand-in for a node at the HTTP level: answers both legs, records what it got, fails on demand."""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

NUM_CHUNKS = 3


class Fault(enum.Enum):
    NONE = "none"
    STATUS = "status"  # answers `status` with an error body
    HANG = "hang"  # never answers
    NO_PARAMS = "no_params"  # a prefill answer without kv_transfer_params
    BREAK_EARLY = "break_early"  # breaks the connection after the headers, before the first byte of the body
    BREAK_LATE = "break_late"  # breaks the connection in the middle of the stream
    STALL = "stall"  # falls silent after the first chunk


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class FakeNode:
    """``fault`` applies to every generation request, the two lists of prompts to those prompts only."""

    name: str
    fault: Fault = Fault.NONE
    status: int = 500
    is_ready: bool = True
    model: str = "fake"
    fingerprint: str = "f00d"
    refused_prompts: list[Any] = field(default_factory=list)
    hanging_prompts: list[Any] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    num_aborted: int = 0
    num_leases: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def bodies(self) -> list[Any]:
        return [each.body for each in self.received]

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/ready")
        async def ready() -> Response:
            return JSONResponse({"reasons": ["loading"]} if not self.is_ready else {}, 200 if self.is_ready else 503)

        @app.get("/internal/v1/info")
        async def info(request: Request) -> dict[str, Any]:
            return {
                "node_name": self.name,
                "served_model_name": self.model,
                "max_model_len": 128,
                "fingerprint": self.fingerprint,
            }

        @app.post("/internal/v1/leases/release")
        async def release(request: Request) -> dict[str, Any]:
            self.released += (await request.json())["lease_ids"]
            return {}

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return await self._generate(request)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            return await self._generate(request)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            return {"object": "list", "data": [{"id": self.model, "max_model_len": 128}]}

        @app.post("/tokenize")
        async def tokenize(request: Request) -> dict[str, Any]:
            return {"node": self.name, "got": await request.json()}

        return app

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.received.append(Received(request.url.path, dict(request.headers), body))
        if self.fault is Fault.STATUS or body.get("prompt") in self.refused_prompts:
            status = self.status if self.fault is Fault.STATUS else 400
            return JSONResponse({"error": {"message": f"{self.name} says no", "code": "no"}}, status)
        if self.fault is Fault.HANG or body.get("prompt") in self.hanging_prompts:
            await self._hang(request)
        if (body.get("kv_transfer_params") or {}) and _is_prefill_leg(body):
            params = {"do_remote_prefill": True, "remote_host": self.name, "tandem_lease_id": self._lease_id()}
            return JSONResponse({} if self.fault is Fault.NO_PARAMS else {"kv_transfer_params": params})
        if body.get("stream"):
            return StreamingResponse(self._events(), media_type="text/event-stream")
        return JSONResponse({"node": self.name, "object": "text_completion"})

    def _lease_id(self) -> str:
        return f"{self.name}-lease-{next(self.num_leases)}"

    async def _hang(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.num_aborted += 1

    async def _events(self) -> AsyncIterator[str]:
        try:
            if self.fault is Fault.BREAK_EARLY:
                raise ConnectionError("on demand")
            for index in range(NUM_CHUNKS):
                yield f"data: {json.dumps({'index': index, 'node': self.name})}\n\n"
                if self.fault is Fault.BREAK_LATE:
                    raise ConnectionError("on demand")
                if self.fault is Fault.STALL:
                    await asyncio.Event().wait()
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise


def _is_prefill_leg(body: dict[str, Any]) -> bool:
    params = body["kv_transfer_params"]
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))
