"""A prefill and a decode server that speak ``kv_transfer_params`` as vLLM's NIXL connector does, strictly.

Every field of either leg that vLLM would not get from its own example proxy is a 400, so is every one that is missing.
The prefill server holds the blocks of a prompt until the decode server has read them; reading them twice, or those of
another request, is noted in ``violations``, for there it would be another prompt's memory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.support.foreign import PREFILL_PARAMS

MODEL, ADAPTER = "vllm-model", "vllm-adapter"
MAX_MODEL_LEN = 4096
ANSWER = ("Hello", ", ", "world", "!")
CLIENT_FIELDS = frozenset(
    {
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop"),
        *("stream", "stream_options", "n", "min_tokens", "logprobs", "top_logprobs", "ignore_eos", "tools"),
        *("repetition_penalty", "user", "kv_transfer_params"),
    }
)
FORBIDDEN_ON_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens", "n")


@dataclass
class Leg:
    path: str
    request_id: str
    body: dict[str, Any]


@dataclass
class VllmPair:
    """Two apps with one memory. ``held``: parameters of finished prompts that nobody has read yet, by request."""

    has_nothing_to_hand_over: bool = False
    is_healthy: bool = True
    fails_decode: int = 0
    is_slow: bool = False
    api_key: str | None = None
    prefill_legs: list[Leg] = field(default_factory=list)
    decode_legs: list[Leg] = field(default_factory=list)
    held: dict[str, dict[str, Any]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    num_aborted: int = 0
    _engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _blocks: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def prefill_app(self) -> FastAPI:
        return self._app(self._prefill)

    def decode_app(self) -> FastAPI:
        return self._app(self._decode)

    def _app(self, generate: Any) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=200 if self.is_healthy else 503)

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            self._note_our_headers(request)
            if not self._has_key(request):
                return JSONResponse({"error": "Unauthorized"}, 401)
            entries = [
                {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": MAX_MODEL_LEN},
                {"id": ADAPTER, "object": "model", "owned_by": "vllm", "max_model_len": None, "parent": MODEL},
            ]
            return JSONResponse({"object": "list", "data": entries})

        @app.post("/tokenize")
        async def tokenize(request: Request) -> Response:
            self._note_our_headers(request)
            return JSONResponse({"count": 2, "max_model_len": MAX_MODEL_LEN, "tokens": [1, 2]})

        async def leg(request: Request) -> Response:
            body = await request.json()
            error = None if self._has_key(request) else "Unauthorized"
            error = error or self._check_common(request, body)
            if error is None:
                answer: Response | str = await generate(request, body)
                if isinstance(answer, Response):
                    return answer
                error = answer
            return JSONResponse({"error": {"message": error, "type": "BadRequestError", "code": 400}}, 400)

        app.post("/v1/completions")(leg)
        app.post("/v1/chat/completions")(leg)
        return app

    def _has_key(self, request: Request) -> bool:
        return self.api_key is None or request.headers.get("authorization") == f"Bearer {self.api_key}"

    def _note_our_headers(self, request: Request) -> None:
        if strange := _our_headers(request):
            self.violations.append(f"{request.url.path} has headers {strange}")

    def _check_common(self, request: Request, body: dict[str, Any]) -> str | None:
        if strange := set(body) - CLIENT_FIELDS:
            return f"unexpected fields {sorted(strange)}"
        if strange := _our_headers(request):
            return f"unexpected headers {strange}"
        if not request.headers.get("x-request-id"):
            return "no X-Request-Id"
        if ("messages" in body) is not request.url.path.endswith("/chat/completions"):
            return "messages and prompt belong to their own routes"
        if body.get("top_logprobs") and not body.get("logprobs") and "messages" in body:
            return "when using top_logprobs, logprobs must be set to true"
        return None

    # --- the prefill server

    async def _prefill(self, request: Request, body: dict[str, Any]) -> Response | str:
        self.prefill_legs.append(Leg(request.url.path, request.headers["x-request-id"], body))
        if body.get("kv_transfer_params") != dict(PREFILL_PARAMS):
            return f"kv_transfer_params {body.get('kv_transfer_params')}"
        if present := [name for name in FORBIDDEN_ON_PREFILL if name in body]:
            return f"{present} on a prefill leg"
        if body.get("stream") is not False or body.get("max_tokens") != 1:
            return f"stream {body.get('stream')}, max_tokens {body.get('max_tokens')}"
        if body.get("max_completion_tokens", 1) != 1:
            return f"max_completion_tokens {body['max_completion_tokens']}"
        params = None if self.has_nothing_to_hand_over else self._hold(request.headers["x-request-id"])
        is_chat = "messages" in body
        choice = {"index": 0, "finish_reason": "length", "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": "He"}} if is_chat else {"text": "He"}
        usage = {"prompt_tokens": 40, "completion_tokens": 1, "total_tokens": 41}
        return JSONResponse({"id": "x", "choices": [choice], "usage": usage, "kv_transfer_params": params})

    def _hold(self, request_id: str) -> dict[str, Any]:
        remote_request_id = f"cmpl-{request_id}-0-{uuid.uuid4().hex[:8]}"
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[next(self._blocks), next(self._blocks)], [next(self._blocks)]],
            "remote_engine_id": self._engine_id,
            "remote_request_id": remote_request_id,
            "remote_host": "10.1.2.3",
            "remote_port": 5600,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 39,
            "remote_blocks_expiry_time": None,
            "remote_registration_generation": 3,
            "transfer_mode": "pull",
            "_p_side_truncated": True,
        }
        self.held[remote_request_id] = params
        return params

    # --- the decode server

    async def _decode(self, request: Request, body: dict[str, Any]) -> Response | str:
        self.decode_legs.append(Leg(request.url.path, request.headers["x-request-id"], body))
        params = body.get("kv_transfer_params")
        if params is not None:
            self._read(params, request.headers["x-request-id"])
        if self.fails_decode:
            self.fails_decode -= 1
            return JSONResponse({"error": {"message": "engine", "type": "InternalServerError", "code": 500}}, 500)
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream; charset=utf-8")
        return JSONResponse({"id": "x", "choices": [{"index": 0, "text": "".join(ANSWER), "finish_reason": "stop"}]})

    def _read(self, params: Any, request_id: str) -> None:
        key = params.get("remote_request_id") if isinstance(params, dict) else None
        held = self.held.pop(key, None) if isinstance(key, str) else None
        if held is None:
            self.violations.append(f"a read of what is not held: {params}")
        elif held != params:
            self.violations.append(f"the parameters were changed: {params} for {held}")
        elif not str(key).startswith(f"cmpl-{request_id}-"):
            self.violations.append(f"{request_id} reads what {key} computed")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        try:
            for index, text in enumerate(ANSWER):
                choice = {"index": 0, "text": text, "finish_reason": "stop" if index == len(ANSWER) - 1 else None}
                yield f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n"
                while self.is_slow:
                    await asyncio.sleep(0.05)
            if (body.get("stream_options") or {}).get("include_usage"):
                yield 'data: {"id":"x","choices":[],"usage":{"prompt_tokens":40}}\n\n'
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise


def _our_headers(request: Request) -> list[str]:
    return [name for name in request.headers if name.startswith("x-tandem")]
