"""Tokenising for whoever asks: of a body of any size, off the event loop, on which the node's beats depend."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from common.node.routes.text_routes import add_text_routes
from common.openai.prompt_ids import PromptIds
from common.text.chat_prompt import ChatPrompt


class SpyCodec:
    """Notes on which threads it is called."""

    vocab_size = 100

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def check_length(self, name: str, text: str) -> None:
        self.threads.add(threading.get_ident())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.get_ident())
        return [7]

    def chat_prompt(self, request: object) -> ChatPrompt:
        return ChatPrompt(PromptIds(self.encode("")))

    def decode(self, token_ids: Sequence[int]) -> str:
        self.threads.add(threading.get_ident())
        return "seven"

    def pieces(self, token_ids: Sequence[int]) -> list[Any]:
        self.threads.add(threading.get_ident())
        return [SimpleNamespace(text="seven")]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "key", "expected"),
    [
        ("/tokenize", {"prompt": "seven"}, "tokens", [7]),
        ("/tokenize", {"prompt": "seven", "return_token_strs": True}, "token_strs", ["seven"]),
        ("/tokenize", {"messages": [{"role": "user", "content": "seven"}]}, "tokens", [7]),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "seven"}], "n": 0, "stop": 5, "guided_json": {}},
            "tokens",
            [7],
        ),
        ("/detokenize", {"tokens": [7]}, "prompt", "seven"),
    ],
)
async def test_text_when_tokenised_or_put_together_then_off_the_event_loop(
    path: str, body: dict[str, Any], key: str, expected: object
) -> None:
    app, codec = FastAPI(), SpyCodec()
    prompts: Any = SimpleNamespace(codec=codec, chat_prompt=codec.chat_prompt)
    add_text_routes(app, prompts, model_name="m", max_model_len=64)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
        response = await client.post(path, json=body)
    assert response.json()[key] == expected
    assert codec.threads
    assert threading.get_ident() not in codec.threads
