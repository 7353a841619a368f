"""Tokenising for whoever asks: of a body of any size, off the event loop, on which the node's beats depend."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from common.node.routes.text_routes import TEXT_THREADS, add_text_routes
from common.openai.prompt_ids import PromptIds
from common.text.chat_prompt import ChatPrompt

LONG_S = 10.0


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


class SlowCodec(SpyCodec):
    """Its texts take until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        token_ids = super().encode(text, add_special_tokens=add_special_tokens)
        assert self.may_end.wait(LONG_S)
        return token_ids


@pytest.mark.asyncio
async def test_texts_when_they_are_long_then_the_threads_that_answers_need_stay_free() -> None:
    app, codec = FastAPI(), SlowCodec()
    prompts: Any = SimpleNamespace(codec=codec)
    add_text_routes(app, prompts, model_name="m", max_model_len=64)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
        texts = [asyncio.create_task(client.post("/tokenize", json={"prompt": "seven"})) for _ in range(6)]
        try:
            async with asyncio.timeout(LONG_S):
                while not codec.threads:
                    await asyncio.sleep(0.01)
                assert await asyncio.to_thread(lambda: "hashed") == "hashed"
        finally:
            codec.may_end.set()
            answers = await asyncio.gather(*texts)
    assert [answer.json()["tokens"] for answer in answers] == [[7]] * len(texts)
    assert len(codec.threads) <= TEXT_THREADS
