"""``POST /v1/messages/count_tokens``: a node counts the tokens of the chat that a Messages body is."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from common.server.gate import request_id_of
from common.server.json_body import read_json_object, run_for_body
from common.wire.routes import TOKENIZE_ROUTE
from proxy.dialects.messages.answer import MessagesConversion
from proxy.dialects.messages.body import read_count_tokens_body
from proxy.dialects.messages.request import to_prompt
from proxy.http.forward import forward
from proxy.legs.bodies import encode
from proxy.nodes.pool import NodePool


async def count_tokens(
    pool: NodePool, request: Request, headers: Mapping[str, str], own_headers: Mapping[str, str]
) -> Response:
    """``{"input_tokens"}``. The headers: as of ``forward``. Raises InvalidRequestError, NodeUnavailableError,
    DeadlineExceededError."""
    body = await read_json_object(request)
    content = await run_for_body(request, lambda: encode(to_prompt(read_count_tokens_body(body))))
    answer = await forward(pool, "POST", TOKENIZE_ROUTE, headers=headers, own_headers=own_headers, content=content)
    told, conversion = bytes(answer.body), MessagesConversion(request_id_of(request), has_marks=False)
    if answer.status_code != 200:
        told = conversion.whole(answer.status_code, told)
        return Response(told, answer.status_code, conversion.headers, media_type="application/json")
    return JSONResponse({"input_tokens": orjson.loads(told)["count"]}, headers=conversion.headers)
