"""A stand-in for a node at the HTTP level: answers both legs, records what it got, fails on demand.

With ``pull`` it says that it can follow a prompt while it is computed: its prefill leg then lasts until the test lets
it go on (``may_finish``), or the leg is closed or released.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from common.wire.headers import LEG_FAILED, LEG_HEADER, REPORT_HEADER, REQUEST_ID_HEADER
from common.wire.routes import (
    CHAT_ROUTE,
    COMPLETIONS_ROUTE,
    DETOKENIZE_ROUTE,
    HAND_OVER_ROUTE,
    HEALTH_ROUTE,
    INFO_ROUTE,
    LEASE_RELEASE_ROUTE,
    METRICS_ROUTE,
    MODELS_ROUTE,
    READY_ROUTE,
    TOKENIZE_ROUTE,
)

NUM_CHUNKS = 3


class Fault(enum.Enum):
    NONE = "none"
    STATUS = "status"  # answers `status` with an error body
    HANG = "hang"  # never answers
    NO_PARAMS = "no_params"  # a prefill answer without kv_transfer_params
    BREAK_EARLY = "break_early"  # breaks the connection after the headers, before the first byte of the body
    BREAK_LATE = "break_late"  # breaks the connection in the middle of the stream
    BREAK_LAST = "break_last"  # breaks the connection when only the [DONE] is missing
    END_EARLY = "end_early"  # ends the stream in the middle, as if it were complete
    TELL_ERROR = "tell_error"  # an error event in the middle of the stream
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
    is_draining: bool = False
    refuses_as_draining: bool = False
    num_refused: int = 0
    role: str | None = None
    epoch: str = "77"
    model: str = "fake"
    usage: dict[str, int] | None = None  # of whole answers
    padding_bytes: int = 0  # of whole answers
    fingerprint: str = "f00d"
    pull: bool = False
    resume: bool = False
    refuses_resume: bool = False
    hands_over: bool = True  # streams that may go on elsewhere; nodes of earlier versions have no names for them
    hidden_ids: Sequence[int] = ()  # of a stream that it hands over: tokens that nobody was shown
    breaks_when_asked: bool = False  # to hand a stream over
    handed_over: list[dict[str, str]] = field(default_factory=list)  # what it was asked
    hand_over_status: int = 200
    code: str = "no"
    port: int = 0
    may_finish: bool = True
    late_status: int = 200
    report: str = ""
    metrics: str = ""
    load: dict[str, Any] = field(default_factory=dict)
    is_frozen: bool = False
    is_silent: bool = False
    num_chunks: int = NUM_CHUNKS
    chunk_pause_s: float = 0.0
    endless_bytes: int = 0  # streams events of so many bytes until nobody takes them any more
    has_choices: bool = False
    script: Sequence[str] = ()  # what streams say instead of chunks, their [DONE] included
    num_answered: int = 0
    follows: list[FakeNode] = field(default_factory=list)
    full: list[FakeNode] = field(default_factory=list)  # prefill nodes of which it relays at once that they are full
    refused_prompts: list[Any] = field(default_factory=list)
    hanging_prompts: list[Any] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    releasing_ids: list[str | None] = field(default_factory=list)  # X-Request-Id of each release
    documents: dict[str, Any] = field(default_factory=dict)  # further internal routes: path -> JSON
    asked_models: list[str] = field(default_factory=list)
    own_headers: dict[str, str] = field(default_factory=dict)  # of the last request for its models
    num_aborted: int = 0
    num_leases: itertools.count[int] = field(default_factory=itertools.count)
    may_answer: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    @property
    def bodies(self) -> list[Any]:
        return [each.body for each in self.received]

    def app(self) -> Starlette:
        async def ready(request: Request) -> Response:
            while self.is_silent:
                await asyncio.sleep(0.02)
            if self.is_draining:
                return JSONResponse({"status": "draining", "reason": "draining"}, 503)
            return JSONResponse({"reasons": ["loading"]} if not self.is_ready else {}, 200 if self.is_ready else 503)

        async def health(request: Request) -> Response:
            if self.is_frozen:
                await asyncio.sleep(30)
            return JSONResponse({})

        async def metrics(request: Request) -> Response:
            return Response(self.metrics)

        async def info(request: Request) -> Response:
            body = {
                "node_name": self.name,
                "served_model_name": self.model,
                "max_model_len": 128,
                "fingerprint": self.fingerprint,
            }
            if self.load:
                body |= {"load": self.load}
            if self.resume:
                body |= {"resume": True}
            if self.role is not None:
                body["role"] = self.role
            if self.pull:
                body |= {"pull": True, "host": "127.0.0.1", "port": self.port, "epoch": self.epoch}
            return JSONResponse(body)

        async def document(request: Request) -> Response:
            path = request.path_params["path"]
            return JSONResponse(self.documents.get(path), 200 if path in self.documents else 404)

        async def release(request: Request) -> Response:
            self.released += (await request.json())["lease_ids"]
            self.releasing_ids.append(request.headers.get(REQUEST_ID_HEADER))
            return JSONResponse({})

        async def hand_over(request: Request) -> Response:
            self.handed_over.append(await request.json())
            return JSONResponse({"num_tokens": 7}, self.hand_over_status)

        async def models(request: Request) -> Response:
            self.own_headers = {name: value for name, value in request.headers.items() if name.startswith("x-tandem")}
            return JSONResponse({"object": "list", "data": [{"id": self.model, "max_model_len": 128}]})

        async def model(request: Request) -> Response:
            self.asked_models.append(request.path_params["model"])
            return JSONResponse({"error": {"message": "no such model", "code": "model_not_found"}}, 404)

        async def tokenize(request: Request) -> Response:
            return JSONResponse({"node": self.name, "got": await request.json(), "count": 3})

        read = {
            READY_ROUTE: ready,
            HEALTH_ROUTE: health,
            METRICS_ROUTE: metrics,
            MODELS_ROUTE: models,
            MODELS_ROUTE + "/{model:path}": model,
            INFO_ROUTE: info,
            "/internal/v1/{path:path}": document,  # behind the routes that are known
        }
        posted = {
            LEASE_RELEASE_ROUTE: release,
            HAND_OVER_ROUTE: hand_over,
            COMPLETIONS_ROUTE: self._generate,
            CHAT_ROUTE: self._generate,
            TOKENIZE_ROUTE: tokenize,
            DETOKENIZE_ROUTE: tokenize,
        }
        return Starlette(
            routes=[
                *(Route(path, handler, methods=["GET"]) for path, handler in read.items()),
                *(Route(path, handler, methods=["POST"]) for path, handler in posted.items()),
            ]
        )

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if self.refuses_as_draining:
            self.num_refused += 1
            return JSONResponse({"error": {"message": "draining", "code": "draining"}}, 503)
        self.received.append(Received(request.url.path, dict(request.headers), body))
        if self.fault is Fault.STATUS or body.get("prompt") in self.refused_prompts:
            status = self.status if self.fault is Fault.STATUS else 400
            if self.fault is Fault.STATUS and self.code == "transfer_failed":
                await self._follow(body.get("kv_transfer_params"))  # it has asked its prefill node before it says so
            return JSONResponse({"error": {"message": f"{self.name} says no", "code": self.code}}, status)
        if any(each.get("remote_port") == node.port for each in _handoffs(body) for node in self.full):
            error = {"message": "a prefill node is full", "type": "rate_limit_error", "code": "queue_full"}
            return JSONResponse({"error": error}, 429, {LEG_HEADER: LEG_FAILED, "Retry-After": "3"})
        if self.refuses_resume and "tandem_resume" in body:
            return JSONResponse({"error": {"message": f"{self.name} cannot", "code": "no"}}, 400)
        if self.fault is Fault.HANG or body.get("prompt") in self.hanging_prompts:
            await self._hang(request)
        if (body.get("kv_transfer_params") or {}) and _is_prefill_leg(body):
            name = body["kv_transfer_params"].get("tandem_rendezvous")
            if name is not None:
                is_computed = await self._compute(request, name)
                self.num_answered += 1
                if not is_computed or self.late_status != 200:
                    return Response(status_code=self.late_status if is_computed else 499)
            params = {"do_remote_prefill": True, "remote_host": self.name, "tandem_lease_id": self._lease_id()}
            return JSONResponse({} if self.fault is Fault.NO_PARAMS else {"kv_transfer_params": params})
        await self._follow(body.get("kv_transfer_params"))
        while not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        headers = {REPORT_HEADER: self.report} if self.report else {}
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream", headers=headers)
        more: dict[str, Any] = {"usage": self.usage} if self.usage else {}
        if self.padding_bytes:
            more["padding"] = "a" * self.padding_bytes
        return JSONResponse({"node": self.name, "object": "text_completion", **more}, headers=headers)

    def _lease_id(self) -> str:
        return f"{self.name}-lease-{next(self.num_leases)}"

    async def _follow(self, params: Any) -> None:
        """As a decode node that waits for what it follows: until the prefill legs are there, or a while."""
        names = {each.get("tandem_rendezvous") for each in _handoffs({"kv_transfer_params": params})}
        for _ in range(100):
            if names <= {None} | {name for node in self.follows for name in node.names}:
                return
            await asyncio.sleep(0.01)

    @property
    def names(self) -> list[Any]:
        """The rendezvous of the prefill legs that came."""
        params = [body.get("kv_transfer_params") or {} for body in self.bodies]
        return [each["tandem_rendezvous"] for each in params if isinstance(each, dict) and "tandem_rendezvous" in each]

    async def _compute(self, request: Request, name: str) -> bool:
        """Until the test lets it finish; False when the leg was called off."""
        while not self.may_finish:
            if name in self.released:
                return False
            if await request.is_disconnected():
                self.num_aborted += 1
                return False
            await asyncio.sleep(0.01)
        return True

    async def _hang(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.num_aborted += 1

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Chunk N has the tokens 10 * N and 10 * N + 1. A stream that is handed over ends with the hidden ids,
        of no chunk."""
        stream_id = f"{self.name}-{len(self.received)}"
        known = (body.get("tandem_resume") or {}).get("output_token_ids", [])
        try:
            if self.fault is Fault.BREAK_EARLY:
                raise ConnectionError("on demand")
            while self.endless_bytes:
                yield f'data: {{"text":"{"a" * self.endless_bytes}"}}\n\n'
                await asyncio.sleep(0)
            for text in self.script:
                yield text
                await asyncio.sleep(self.chunk_pause_s)
            if self.script and self.fault is Fault.STALL:
                await asyncio.Event().wait()
            if self.script:
                return
            for index in range(len(known) // 2, self.num_chunks):
                if stream_id in [each["id"] for each in self.handed_over]:
                    if self.breaks_when_asked:
                        raise ConnectionError("on demand")
                    yield f": tandem {json.dumps({'token_ids': self.hidden_ids})}\n"
                    yield f"data: {json.dumps({'error': {'message': 'elsewhere', 'code': 'handed_over'}})}\n\n"
                    return
                if body.get("tandem_stream_state"):
                    state: dict[str, Any] = {"token_ids": [10 * index, 10 * index + 1]}
                    state |= {"created": 7, "num_cached_tokens": 3} if not index else {}
                    state |= {"id": stream_id} if self.hands_over and not index else {}
                    state |= {"end": True} if index == self.num_chunks - 1 else {}
                    yield f": tandem {json.dumps(state)}\n"
                data: dict[str, Any] = {"index": index, "node": self.name}
                if self.has_choices:
                    data["choices"] = [{"index": 0, "text": "a", "finish_reason": None}]
                yield f"data: {json.dumps(data)}\n\n"
                if self.chunk_pause_s:
                    await asyncio.sleep(self.chunk_pause_s)
                if self.fault is Fault.BREAK_LATE:
                    await asyncio.sleep(0.05)  # what was sent is on its way
                    raise ConnectionError("on demand")
                if self.fault is Fault.TELL_ERROR:
                    error = {"message": f"{self.name} is out of luck", "type": "server_error", "code": "luck"}
                    yield f"data: {json.dumps({'error': error})}\n\n"
                    return
                if self.fault is Fault.END_EARLY:
                    return
                if self.fault is Fault.STALL:
                    await asyncio.Event().wait()
            if self.fault is Fault.BREAK_LAST:
                await asyncio.sleep(0.05)
                raise ConnectionError("on demand")
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise


def _handoffs(body: dict[str, Any]) -> list[dict[str, Any]]:
    params = body.get("kv_transfer_params") or {}
    return params if isinstance(params, list) else [params]


def _is_prefill_leg(body: dict[str, Any]) -> bool:
    params = body["kv_transfer_params"]
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))
