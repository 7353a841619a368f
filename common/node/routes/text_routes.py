"""The model's name and its tokenizer for clients: ``/v1/models``, ``/tokenize``, ``/detokenize``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from common.errors import InvalidRequestError
from common.node.serving.prompt_jobs import PromptReader
from common.openai import responses
from common.openai.protocol import check_model, parse_chat
from common.server.json_body import read_json_object
from common.wire.fields import Fields
from common.wire.handoff import prefill_leg_params
from common.wire.manifest_reader import TRANSFER_PARAMS_KEY
from common.wire.routes import DETOKENIZE_ROUTE, MODELS_ROUTE, TOKENIZE_ROUTE

TEXT_THREADS = 2
"""Threads for texts that are only to be tokenised, or put together, apart from the event loop's own: those hash
prompts, make digests and meet peers for answers, which would wait behind whoever sends many long texts."""


def add_text_routes(app: FastAPI, prompts: PromptReader, *, model_name: str, max_model_len: int) -> None:
    started_s = int(time.time())
    threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="texts")

    async def in_thread(work: Callable[[Mapping[str, Any]], bytes], body: Mapping[str, Any]) -> Response:
        # A long text takes seconds, in which this node would not beat and seem dead to its peers.
        answer = await asyncio.get_running_loop().run_in_executor(threads, work, body)
        return Response(answer, media_type="application/json")

    @app.get(MODELS_ROUTE)
    async def models() -> dict[str, Any]:
        return responses.models_response(model_name, created=started_s, max_model_len=max_model_len)

    @app.get(MODELS_ROUTE + "/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        check_model(model, (model_name,))
        entry: dict[str, Any] = (await models())["data"][0]
        return entry

    @app.post(TOKENIZE_ROUTE)
    async def tokenize(http: HttpRequest) -> Response:
        body = await read_json_object(http)
        return await in_thread(_tokenize, body)

    def _tokenize(body: Mapping[str, Any]) -> bytes:
        fields = Fields(body)
        check_model(fields.string("model"), (model_name,))
        if body.get("messages") is not None:
            # Only the fields that make the prompt are checked here: what a chat request says of its answer is ignored.
            chat = parse_chat({**body, TRANSFER_PARAMS_KEY: prefill_leg_params()})
            token_ids = list(prompts.chat_prompt(chat).ids.token_ids)
        else:
            prompt = fields.string("prompt")
            if prompt is None:
                raise InvalidRequestError("prompt or messages is required", param="prompt")
            add_special_tokens = fields.boolean("add_special_tokens", True)
            prompts.codec.check_length("prompt", prompt)
            token_ids = prompts.codec.encode(prompt, add_special_tokens=add_special_tokens)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if fields.boolean("return_token_strs"):
            answer["token_strs"] = [piece.text for piece in prompts.codec.pieces(token_ids)]
        return orjson.dumps(answer)

    @app.post(DETOKENIZE_ROUTE)
    async def detokenize(http: HttpRequest) -> Response:
        body = await read_json_object(http)
        return await in_thread(_detokenize, body)

    def _detokenize(body: Mapping[str, Any]) -> bytes:
        fields = Fields(body)
        check_model(fields.string("model"), (model_name,))
        token_ids = fields.int_list("tokens", le=prompts.codec.vocab_size - 1)
        if token_ids is None:
            raise InvalidRequestError("tokens is required", param="tokens")
        return orjson.dumps({"prompt": prompts.codec.decode(token_ids)})
