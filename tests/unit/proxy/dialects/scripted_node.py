"""A decode node whose answers are given: it says one chat after the other, in OpenAI's shapes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.errors import TandemError
from common.openai.errors import error_body
from tests.unit.proxy.dialects.chats import Chat
from tests.unit.proxy.fake_node import FakeNode, Received


@dataclass
class ScriptedNode(FakeNode):
    """``chats``: what is still to be said. ``fails_after``: events of a stream after which it says that it failed."""

    chats: list[Chat] = field(default_factory=list)
    fails_after: int | None = None
    error: TandemError | None = None
    refusal: tuple[int, bytes, str] | None = None  # status, body and content type

    async def _generate(self, request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        self.received.append(Received(request.url.path, dict(request.headers), body))
        if self.error is not None:
            return JSONResponse(error_body(self.error), self.error.status)
        if self.refusal is not None:
            status, content, content_type = self.refusal
            return Response(content, status, media_type=content_type)
        chat = self.chats.pop(0)
        if not body.get("stream"):
            return Response(chat.whole(), media_type="application/json")
        return StreamingResponse(self._script(chat), media_type="text/event-stream")

    async def _script(self, chat: Chat) -> AsyncIterator[bytes]:
        for index, event in enumerate(chat.events()):
            if index == self.fails_after:
                yield b"data: " + json.dumps(error_body(TandemError("out of luck"))).encode() + b"\n\n"
                return
            yield event
