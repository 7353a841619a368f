from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from common.errors import DeadlineExceededError
from common.openai import responses
from common.openai.logprobs import chat_logprobs, completion_logprobs
from common.request import FinishReason, TokenLogprob
from common.text.tokenizer import TextCodec

USAGE = responses.usage_block(5, 2, 3)


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer, vocab_size=len(tokenizer))


def entries(codec: TextCodec, text: str) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, -0.5, 1, ((token_id, -0.5), (3, -1.5))) for token_id in codec.encode(text)]


def test_completion_is_what_the_openai_client_reads(codec: TextCodec) -> None:
    choice = responses.completion_choice(
        0,
        "hello é",
        finish_reason=FinishReason.STOP,
        stop_reason="###",
        logprobs=completion_logprobs(entries(codec, "hello é"), codec.piece, num_top=1),
        token_ids=[1, 2],
    )
    body = responses.completion_response(
        response_id="cmpl-1", model="m", created=7, choices=[choice], usage=USAGE, trace={"placement": "local"}
    )
    parsed = Completion.model_validate_json(json.dumps(body))
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.choices[0].logprobs is not None
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens_details is not None
    assert parsed.usage.prompt_tokens_details.cached_tokens == 3
    assert parsed.usage.total_tokens == 7
    assert body["choices"][0]["token_ids"] == [1, 2]
    assert body["choices"][0]["stop_reason"] == "###"
    assert body["tandem"] == {"placement": "local"}


def test_chat_is_what_the_openai_client_reads_and_bytes_rebuild_the_text(codec: TextCodec) -> None:
    block = chat_logprobs(entries(codec, "a 😀"), codec.piece)
    choice = responses.chat_choice(0, "a 😀", finish_reason=FinishReason.LENGTH, logprobs=block)
    body = responses.chat_response(response_id="c", model="m", created=7, choices=[choice], usage=USAGE)
    parsed = ChatCompletion.model_validate_json(json.dumps(body))
    assert parsed.choices[0].message.content == "a 😀"
    logprobs = parsed.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(item.bytes or []) for item in logprobs.content).decode() == "a 😀"


def test_first_chat_chunk_carries_the_role_and_later_ones_do_not() -> None:
    first = responses.chat_chunk_choice(0, "", is_first=True)
    later = responses.chat_chunk_choice(0, "x")
    last = responses.chat_chunk_choice(0, None, finish_reason=FinishReason.STOP)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert later["delta"] == {"content": "x"}
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    chunk = responses.chat_chunk(response_id="c", model="m", created=1, choices=[first, later, last])
    assert "usage" not in chunk
    assert ChatCompletionChunk.model_validate_json(json.dumps(chunk)).choices[0].delta.role == "assistant"
    usage = responses.chat_chunk(response_id="c", model="m", created=1, choices=[], usage=USAGE)
    assert ChatCompletionChunk.model_validate_json(json.dumps(usage)).usage is not None


def test_handoff_params_are_at_the_top_level_of_the_response() -> None:
    body = responses.completion_response(
        response_id="c", model="m", created=1, choices=[], usage=USAGE, kv_transfer_params={"remote_port": 3}
    )
    assert body["kv_transfer_params"] == {"remote_port": 3}
    assert "tandem" not in body


def test_event_is_one_line_of_json_however_the_text_looks() -> None:
    event = responses.sse_event({"text": "a\n\ndata: [DONE]\r\u2028é"})
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert b"\n" not in event[:-2]
    assert json.loads(event[6:])["text"] == "a\n\ndata: [DONE]\r\u2028é"


def test_error_event_has_the_error_shape_and_hides_what_is_not_ours() -> None:
    known = json.loads(responses.sse_error(DeadlineExceededError("late by 3 s"))[6:])
    assert known == {
        "error": {"message": "late by 3 s", "type": "timeout_error", "param": None, "code": "deadline_exceeded"}
    }
    assert "secret" not in responses.sse_error(RuntimeError("secret")).decode()


def test_trace_has_every_phase_and_models_the_context() -> None:
    trace = responses.trace_block(placement="remote", transferred_bytes=9, seconds={"prefill": 0.5, "transfer": None})
    assert trace["seconds"]["prefill"] == 0.5
    assert set(trace["seconds"]) == {
        "proxy_queue", "tokenize", "prefill_queue", "prefill", "transfer", "decode_queue", "first_token", "total",
    }  # fmt: skip
    models = responses.models_response("m", created=1, max_model_len=512)
    assert models["data"][0]["id"] == "m"
    assert models["data"][0]["max_model_len"] == 512
