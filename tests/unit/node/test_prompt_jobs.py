"""From a body to token ids: what may take long does not hold up the event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from common.node.serving.prompt_jobs import THREAD_TOKENISE_CHARS, THREAD_TOKENISE_PROMPTS, PromptReader
from common.openai.protocol import CompletionRequest, parse_completion
from common.text.tokenizer import TextCodec

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


def reader(codec: object, counts: list[int]) -> PromptReader:
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


class CountingCodec(TextCodec):
    """Notes on which threads words are made tokens, once for each time."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, vocab_size=len(tokenizer))
        self.word_threads: list[int] = []

    def bad_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        self.word_threads.append(threading.get_ident())
        return super().bad_token_ids(words)


class CountingIds(frozenset[int]):
    """Counts how often all of them are looked at."""

    num_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return super().__iter__()


@pytest.mark.asyncio
async def test_list_of_prompts_when_its_fields_cost_then_they_are_worked_on_once_for_all_prompts(
    tokenizer: Any,
) -> None:
    codec, ids = CountingCodec(tokenizer), CountingIds((5, 6))
    prompts = [[5] * num_tokens for num_tokens in (1, 2, 60)]
    words = ["fox", "dog"]
    request = parse_completion(
        {"prompt": prompts, "bad_words": words, "allowed_token_ids": [5, 6], "guided_json": {"type": "object"}}
    )
    request = replace(request, sampling=replace(request.sampling, allowed_token_ids=ids))
    http = HttpRequest({"type": "http", "headers": [], "state": {"request_id": "r", "body_bytes": 0}})
    jobs = await reader(codec, []).jobs(http, request)
    assert len(codec.word_threads) == 1
    assert codec.word_threads[0] != threading.get_ident()
    assert ids.num_passes == 1
    params = [job.sampling for job in jobs]
    assert [each.max_tokens for each in params] == [16, 16, 4]
    assert params[0] is params[1]  # whoever samples reads its lists once
    assert params[0].bad_token_ids == codec.bad_token_ids(words)
    for each in params:
        assert each.grammar is params[0].grammar is not None
        assert each == replace(params[0], max_tokens=each.max_tokens)
