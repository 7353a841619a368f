"""From a body to token ids: what may take long does not hold up the event loop."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from common.node.serving.prompt_jobs import THREAD_TOKENISE_CHARS, THREAD_TOKENISE_PROMPTS, PromptReader
from common.openai.protocol import CompletionRequest, parse_completion

LONG = "x" * (THREAD_TOKENISE_CHARS + 1)
MANY = ["x" * (THREAD_TOKENISE_CHARS // 10)] * 11
SHORT = ["x"] * (THREAD_TOKENISE_PROMPTS + 1)


class SpyCodec:
    """Notes on which threads it is called."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def encode_prompts(self, request: CompletionRequest) -> list[list[int]]:
        self.threads.add(threading.get_ident())
        return [[len(prompt)] for prompt in request.prompts]


def reader(codec: SpyCodec, counts: list[int]) -> PromptReader:
    geometry = SimpleNamespace(vocab_size=100)
    cache: Any = SimpleNamespace(keeps_boundaries=False, geometry=geometry)
    metrics: Any = SimpleNamespace(inc=lambda name, value: counts.append(value))
    any_codec: Any = codec
    return PromptReader(any_codec, None, cache_config=cache, max_model_len=64, metrics=metrics)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("prompt", "is_off_loop", "num_texts"),
    [
        *(("short", False, 1), (["short", "too"], False, 2), ([[1] * (THREAD_TOKENISE_CHARS + 1)], False, 0)),
        *((LONG, True, 1), (MANY, True, 11), (SHORT, True, len(SHORT))),
    ],
    ids=["text", "texts", "ids", "long-text", "many-texts", "many-short-texts"],
)
async def test_prompts_when_their_text_is_long_together_then_tokenised_off_the_event_loop(
    prompt: object, is_off_loop: bool, num_texts: int
) -> None:
    codec, counts = SpyCodec(), []  # type: tuple[SpyCodec, list[int]]
    request = parse_completion({"model": "m", "prompt": prompt})
    encoded = await reader(codec, counts).prompts(request)
    assert [each.token_ids for each in encoded] == [[len(each)] for each in request.prompts]
    assert counts == [num_texts]
    assert len(codec.threads) == 1
    assert (codec.threads != {threading.get_ident()}) is is_off_loop
