"""What a client gets of an answer that becomes one of another API."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from common.metrics.outcomes import Outcome
from common.wire.json_text import LONG_BYTES
from proxy.dialects.dialect import convert_responses
from proxy.legs.client_stream import ClientStream
from tests.unit.proxy.dialects.chats import Chat


class Client:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.stream = ClientStream(self._send, "7")
        self.stream.conversion = convert_responses(
            {"input": "a", "include": ["message.output_text.logprobs"]}, "7"
        ).conversion

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


def chat(num_tokens: int) -> Chat:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1.0}] * 20}
    return Chat(content="a" * num_tokens, logprobs=[entry] * num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_whole_answer_when_it_is_long_then_is_converted_in_a_thread(num_tokens: int) -> None:
    async def work() -> None:
        client, threads, body = Client(), [], chat(num_tokens).whole()
        assert client.stream.conversion is not None
        convert = client.stream.conversion.whole

        def whole(status: int, body: bytes) -> bytes:
            threads.append(threading.current_thread() is threading.main_thread())
            return convert(status, body)

        client.stream.conversion.whole = whole  # type: ignore[method-assign]
        await client.stream.send_whole(200, {}, body, Outcome.STOP)
        assert threads == [len(body) <= LONG_BYTES]
        [answer] = client.bodies
        assert client.sent[0]["headers"].count((b"content-length", str(len(answer)).encode())) == 1
        assert len(json.loads(answer)["output"][0]["content"][0]["logprobs"]) == num_tokens
        assert client.stream.is_finished

    asyncio.run(work())


@pytest.mark.parametrize(("num_tokens", "num_last"), [(1, 1), (100, 4)])
def test_stream_when_its_last_events_are_long_then_each_is_sent_by_itself(num_tokens: int, num_last: int) -> None:
    async def work() -> None:
        client = Client()
        *events, done = chat(num_tokens).events(piece_chars=num_tokens)
        await client.stream.start_stream(200, {})
        for event in events:
            await client.stream.send_chunk(event)
        before = len(client.bodies)
        await client.stream.finish(Outcome.STOP, done)
        *last, end = client.bodies[before:]
        assert end == b""
        assert len(last) == num_last
        assert sum(piece.count(b"event: ") for piece in last) == 4
        assert [message["more_body"] for message in client.sent[1:]] == [True] * (len(client.sent) - 2) + [False]

    asyncio.run(work())
