"""What the fields of a request do to its answer: from a body to what the client reads, with an engine that follows a
script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from common.engine.outputs import RequestOutput
from common.metrics.metrics import Metrics
from common.metrics.table import Role
from common.node.serving.prompt_jobs import PromptReader
from common.node.serving.request_record import RequestRecord
from common.node.serving.response_builder import ResponseBuilder
from common.openai.answers import ChatCompletion, Completion
from common.openai.protocol import parse_chat, parse_completion
from common.request import FinishReason, TokenLogprob
from common.text.tokenizer import TextCodec

ANSWER = "the quick fox jumps"
USER = {"role": "user", "content": "hello"}
Json = dict[str, Any]


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer, vocab_size=len(tokenizer))


def entry(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -1.0, 2, ((3, -0.5), (token_id, -1.0)))


def answers(codec: TextCodec, body: Json, *, ends_by: str = "length") -> list[Json]:
    """What a node says to ``body``, whose answer is ``ANSWER``: one object, or those of the events."""

    async def run() -> list[Json]:
        http = HttpRequest({"type": "http", "headers": [], "state": {"request_id": "r", "body_bytes": 0}})
        parse = parse_chat if "messages" in body else parse_completion
        request = parse(body, is_from_peer="tandem_resume" in body)
        cache_config: Any = SimpleNamespace(
            geometry=SimpleNamespace(vocab_size=codec.vocab_size), keeps_boundaries=False
        )
        metrics = Metrics(Role.DECODE)
        reader = PromptReader(codec, None, cache_config=cache_config, max_model_len=100, metrics=metrics)
        jobs = await reader.jobs(http, request)

        async def outputs(_: object, job: Any) -> AsyncGenerator[tuple[Any, RequestOutput], None]:
            prompt_logprobs = None
            if job.sampling.prompt_logprobs is not None:
                prompt_logprobs = [None, *(entry(token_id) for token_id in job.token_ids[1:])]
            token_ids = codec.encode(ANSWER)
            for fork in range(request.output.n):
                for place, token_id in enumerate(token_ids):
                    is_last = place == len(token_ids) - 1
                    yield (
                        job,
                        RequestOutput(
                            job.request_id,
                            fork,
                            [token_id],
                            logprobs=[entry(token_id)] if job.sampling.logprobs is not None else None,
                            prompt_logprobs=prompt_logprobs if place == 0 else None,
                            finish_reason=FinishReason(ends_by) if is_last else None,
                        ),
                    )

        record = RequestRecord(metrics, "chat")
        builder = ResponseBuilder("m", outputs, lambda *_: None, http, request, jobs, None, record)
        if not request.output.stream:
            answer = json.loads((await builder.whole()).body)
            (ChatCompletion if "messages" in body else Completion).model_validate(answer)  # as /openapi.json says
            return [answer]
        events = [event async for event in builder.events()]
        return [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]

    return asyncio.run(run())


def one(codec: TextCodec, body: Json, **more: Any) -> Json:
    [answer] = answers(codec, body, **more)
    return answer


def text_of(answer: Json) -> str:
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "the quick fox jumps"),
        ({"stop": "fox"}, "the quick "),
        ({"stop": "fox", "include_stop_str_in_output": True}, "the quick fox"),
        ({"stop": ["ick fo", "fox"], "include_stop_str_in_output": True}, "the quick fo"),
        ({"echo": True}, "hellothe quick fox jumps"),
    ],
)
def test_text_when_fields_shape_it_then_does(codec: TextCodec, fields: Json, text: str) -> None:
    body = {"prompt": "hello", **fields}
    assert text_of(one(codec, body)) == text
    streamed = answers(codec, {**body, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in streamed) == text


def test_stop_token_when_stops_are_included_then_is_text_too(codec: TextCodec) -> None:
    hidden = text_of(one(codec, {"prompt": "a"}, ends_by="stop"))
    included = text_of(one(codec, {"prompt": "a", "include_stop_str_in_output": True}, ends_by="stop"))
    assert ANSWER.startswith(hidden)
    assert (hidden != ANSWER, included) == (True, ANSWER)


@pytest.mark.parametrize(
    ("messages", "fields", "text"),
    [
        ([USER], {"echo": True}, ANSWER),
        ([USER, {"role": "assistant", "content": "well, "}], {"echo": True}, "well, " + ANSWER),
        ([USER, {"role": "assistant", "content": "well, "}], {}, ANSWER),
        ([USER], {"echo": True, "add_generation_prompt": False}, "hello" + ANSWER),
    ],
)
def test_chat_when_echoed_then_begins_with_the_last_message_of_its_role(
    codec: TextCodec, messages: list[Json], fields: Json, text: str
) -> None:
    body = {"messages": messages, "return_token_ids": True, **fields}
    answer = one(codec, body)
    assert text_of(answer) == text
    assert answer["choices"][0]["token_ids"] == codec.encode(ANSWER)
    streamed = answers(codec, {**body, "stream": True})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == text


def test_chat_when_it_is_resumed_then_its_echo_is_not_told_again(codec: TextCodec) -> None:
    messages = [USER, {"role": "assistant", "content": "well, "}]
    body = {"messages": messages, "echo": True, "logprobs": True, "stream": True}
    events = answers(codec, {**body, "tandem_resume": {"output_token_ids": codec.encode("hello ")}})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == ANSWER


def test_token_ids_when_asked_for_then_the_prompts_are_told_once_for_each_choice(codec: TextCodec) -> None:
    body = {"prompt": [[5, 6], [7]], "n": 2, "return_token_ids": True}
    assert [choice["prompt_token_ids"] for choice in one(codec, body)["choices"]] == [[5, 6], [5, 6], [7], [7]]
    first: dict[int, list[Json]] = {}
    for event in answers(codec, {**body, "stream": True}):
        first.setdefault(event["choices"][0]["index"], []).append(event["choices"][0])
    assert [choices[0]["prompt_token_ids"] for _, choices in sorted(first.items())] == [[5, 6], [5, 6], [7], [7]]
    assert not any("prompt_token_ids" in choice for choices in first.values() for choice in choices[1:])
    assert "prompt_token_ids" not in one(codec, {"prompt": [5, 6]})["choices"][0]


def test_chat_when_token_ids_are_asked_for_then_the_prompts_stand_beside_its_choices(codec: TextCodec) -> None:
    body = {"messages": [USER], "return_token_ids": True}
    expected = codec.encode_chat(parse_chat(body))
    assert one(codec, body)["prompt_token_ids"] == expected
    events = answers(codec, {**body, "stream": True})
    assert [event.get("prompt_token_ids") for event in events] == [expected] + [None] * (len(events) - 1)


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_prompt_logprobs_when_asked_for_then_are_one_table_for_each_token(codec: TextCodec, num_top: int) -> None:
    answer = one(codec, {"prompt": [5, 6, 7], "prompt_logprobs": num_top})
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    own = {"logprob": -1.0, "rank": 2}
    for token_id, table in zip((6, 7), rest, strict=True):
        assert {key: table[str(token_id)][key] for key in own} == own
        assert table[str(token_id)]["decoded_token"] == codec.piece(token_id).text
        assert table.keys() == {str(token_id)} | ({"3"} if num_top else set())
    chat = one(codec, {"messages": [USER], "prompt_logprobs": num_top, "logprobs": True})
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in one(codec, {"messages": [USER]})


def test_prompt_logprobs_when_beside_an_echo_then_both_are_told(codec: TextCodec) -> None:
    answer = one(codec, {"prompt": [5, 6], "prompt_logprobs": 0, "echo": True, "logprobs": 2})
    choice = answer["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 2 + answer["usage"]["completion_tokens"]
    assert len(choice["prompt_logprobs"][1]) == 1
    bare = one(codec, {"prompt": [5, 6], "prompt_logprobs": 0, "echo": True})["choices"][0]
    assert (bare["logprobs"], len(bare["prompt_logprobs"])) == (None, 2)


def test_tokens_when_named_by_their_ids_then_are_in_all_log_probabilities(codec: TextCodec) -> None:
    ids = [f"token_id:{token_id}" for token_id in codec.encode(ANSWER)]
    fields = {"return_tokens_as_token_ids": True}
    block = one(codec, {"prompt": "a", "logprobs": 1, **fields})["choices"][0]["logprobs"]
    assert block["tokens"] == ids
    assert block["top_logprobs"][0].keys() == {"token_id:3", ids[0]}
    assert block["text_offset"] == one(codec, {"prompt": "a", "logprobs": 1})["choices"][0]["logprobs"]["text_offset"]
    content = one(codec, {"messages": [USER], "logprobs": True, **fields})["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == ids


def test_logprobs_when_tokens_are_named_then_as_many_are_told(codec: TextCodec) -> None:
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 0, "logprob_token_ids": [3, 9]}
    content = one(codec, body)["choices"][0]["logprobs"]["content"]
    assert len(content[0]["top_logprobs"]) == 2


def test_usage_when_continuous_then_each_event_counts_on(codec: TextCodec) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for body in ({"prompt": [5, 6]}, {"messages": [USER]}):
        events = answers(codec, {**body, "stream": True, "stream_options": options})
        counts = [event["usage"]["completion_tokens"] for event in events]
        num_tokens = len(codec.encode(ANSWER))
        assert counts == sorted(counts)
        assert (counts[0], counts[-2:]) == (1, [num_tokens, num_tokens])
        usual = answers(codec, {**body, "stream": True, "stream_options": {"include_usage": True}})
        assert [event.get("usage") is not None for event in usual] == [False] * (len(usual) - 1) + [True]


def test_bad_words_when_given_then_reach_the_engine_as_tokens(codec: TextCodec) -> None:
    ids = codec.bad_token_ids(["fox", " fox", ""])
    assert tuple(codec.encode("fox")) in ids
    assert all(codec.decode(each) in ("fox", " fox") for each in ids)
    assert len(set(ids)) == len(ids)
