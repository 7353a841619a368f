"""Streams of a node that generates what the client does not see, through a real proxy that bears no long silence."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from common.openai.responses import SSE_AT_WORK, SSE_DONE
from common.wire.headers import PROXY_SECONDS_HEADER
from common.wire.routes import CHAT_ROUTE, MESSAGES_ROUTE
from proxy.legs.stream_progress import ResumableProgress, StreamProgress
from tests.support.http_server import AppServer
from tests.unit.node.test_answers import codec_of, response_builder
from tests.unit.proxy.conftest import StartCluster
from tests.unit.proxy.fake_node import FakeNode

IDLE_S = 0.5
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "model": "fake", "stream": True}


class ThinkingNode(FakeNode):
    """Thinks for three times as long as the proxy bears silence."""

    async def _generate(self, request: Request) -> Response:
        codec = codec_of("hermes_thinking")
        answer = "Hm, well, let me think.\n</think>\n\nYes."
        pause_s = 3 * IDLE_S / codec.encode(answer).index(codec.encode("</think>")[0])
        builder = await response_builder(
            codec,
            answer,
            await request.json(),
            pause_s=pause_s,
            silence_s=0.2 * IDLE_S,
            headers=request.headers.raw,
        )
        return StreamingResponse(builder.events(), media_type="text/event-stream")


@pytest.mark.parametrize(
    ("route", "fields", "sign"),
    [
        (CHAT_ROUTE, {"include_reasoning": False}, SSE_AT_WORK),
        (
            MESSAGES_ROUTE,
            {"max_tokens": 99, "thinking": {"type": "adaptive", "display": "omitted"}},
            b'event: ping\ndata: {"type":"ping"}\n\n',
        ),
    ],
)
def test_stream_when_its_reasoning_is_hidden_then_the_client_hears_that_it_goes_on(
    start_cluster: StartCluster, route: str, fields: dict[str, Any], sign: bytes
) -> None:
    node = ThinkingNode("thinking")
    server = AppServer(node.app())
    try:
        cluster = start_cluster(0, 0, more_decode=[server.url], stream_idle_timeout_seconds=IDLE_S)
        answer = cluster.client.post(route, json={**HELLO, **fields})
    finally:
        server.stop()
    data = answer.content
    assert b"error" not in data
    assert data.count(sign) >= 3
    assert b"Hm" not in data
    assert b"tandem-tokens" not in data
    assert (b'"finish_reason":"stop"' in data and data.endswith(SSE_DONE)) or b'"stop_reason":"end_turn"' in data
    assert cluster.metric("tandem_request_ttft_seconds_count") == 1


def test_stream_when_it_goes_on_elsewhere_then_its_hidden_tokens_are_known() -> None:
    async def node_events() -> list[bytes]:
        body = {**HELLO, "include_reasoning": False, "tandem_stream_state": True}
        builder = await response_builder(codec_of("hermes_thinking"), "Hm, well.", body, silence_s=0.0)
        return [event async for event in builder.events()]

    events, progress = asyncio.run(node_events()), ResumableProgress()
    passed = [progress.feed(event) for event in events[:-2]]
    assert set(passed[1:]) == {SSE_AT_WORK}
    assert progress.resume is not None
    assert list(progress.resume.output_token_ids) == codec_of("hermes_thinking").encode("Hm, well.")


ANSWER = "Hm, well, let me think.\n</think>\n\nYes, or no."
FROM_PROXY = [(PROXY_SECONDS_HEADER.lower().encode(), b"0,0,0")]


def streamed(fields: dict[str, Any], **options: Any) -> list[bytes]:
    async def node_events() -> list[bytes]:
        builder = await response_builder(codec_of("hermes_thinking"), ANSWER, {**HELLO, **fields}, **options)
        return [event async for event in builder.events()]

    return asyncio.run(node_events())


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("silence_s", [0.0, 99.0])
@pytest.mark.parametrize("is_shown", [False, True])
def test_stream_when_a_proxy_reads_it_then_it_knows_how_many_tokens_there_are(
    n: int, at_once: int, silence_s: float, is_shown: bool
) -> None:
    fields = {"n": n, "include_reasoning": is_shown}
    own = streamed(fields, at_once=at_once, silence_s=silence_s)
    events = streamed(fields, at_once=at_once, silence_s=silence_s, headers=FROM_PROXY)
    progress, num_tokens, passed = StreamProgress(), 0, b""
    for event in events:
        passed += progress.feed(event)
        num_tokens += progress.num_tokens
    assert num_tokens == n * (len(codec_of("hermes_thinking").encode(ANSWER)) + 1)  # and the end's
    assert progress.is_complete
    assert progress.failure is None
    assert passed.count(b"\n\n") == len(own)
    assert b"tandem-tokens" not in passed + b"".join(own)


def test_stream_when_it_says_no_number_of_tokens_then_is_no_answer() -> None:
    progress = StreamProgress()
    assert progress.feed(b"data: {}\n\n: tandem-tokens many\ndata: {}\n\ndata: [DONE]\n\n") == b"data: {}\n\n"
    assert "no node writes" in str(progress.failure)
    assert not progress.is_complete


def test_comment_when_it_comes_before_the_answer_then_is_no_first_token(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    [node] = cluster.decode
    chunk = {"choices": [{"index": 0, "text": "a", "finish_reason": None}]}
    node.script = (": loading\n\n", f"data: {json.dumps(chunk)}\n\n", SSE_DONE.decode())
    node.chunk_pause_s = 0.3
    answer = cluster.client.post("/v1/completions", json={"prompt": "abc", "stream": True})
    assert answer.content == "".join(node.script[1:]).encode()
    assert cluster.metric("tandem_request_ttft_seconds_sum") >= 0.3
    assert cluster.metric("tandem_request_ttft_seconds_count") == 1
