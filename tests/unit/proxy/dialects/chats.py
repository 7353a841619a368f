"""Chats' answers as nodes send them, whole and as events, for the tests of their conversions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

ENVELOPE = {"id": "chatcmpl-1", "created": 1_700_000_000, "model": "tiny"}
CHUNK = {**ENVELOPE, "object": "chat.completion.chunk"}
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Chat:
    """One answer, of 40 prompt tokens of which 24 were cached."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": 40,
            "completion_tokens": 12,
            "total_tokens": 52,
            "prompt_tokens_details": {"cached_tokens": 24},
            "completion_tokens_details": {"reasoning_tokens": 5 if self.reasoning else 0},
        }

    def whole(self) -> bytes:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        logprobs = {"content": self.logprobs} if self.logprobs else None
        choice = {"index": 0, "message": message, "logprobs": logprobs, **self._end}
        return json.dumps({**ENVELOPE, "object": "chat.completion", "choices": [choice], "usage": self.usage}).encode()

    def events(self, *, piece_chars: int = 3) -> list[bytes]:
        """Server-sent events, of ``piece_chars`` characters each."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning": piece, "reasoning_content": piece} for piece in _pieces(self.reasoning, piece_chars)]
        deltas += [{"content": piece} for piece in _pieces(self.content, piece_chars)]
        for index, call in enumerate(self.calls):
            begin = {"index": index, "id": call.id, "type": "function", "function": {"name": call.name}}
            deltas.append({"tool_calls": [begin]})
            for piece in _pieces(call.arguments, piece_chars):
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        chunks: list[dict[str, Any]] = []
        for delta in deltas:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
            chunks.append({**CHUNK, "choices": [choice]})
        if self.logprobs:
            first = next(each for each in chunks if each["choices"][0]["delta"].get("content"))
            first["choices"][0]["logprobs"] = {"content": self.logprobs}
        chunks.append({**CHUNK, "choices": [{"index": 0, "delta": {}, "logprobs": None, **self._end}]})
        chunks.append({**CHUNK, "choices": [], "usage": self.usage})
        return [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks] + [DONE]

    @property
    def _end(self) -> dict[str, Any]:
        return {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}


CHATS = {
    "text": Chat(content="Grüße, 世界 🙂 and more."),
    "text of one token": Chat(content="a"),
    "nothing": Chat(),
    "cut": Chat(content="never end", finish_reason="length"),
    "cut in its reasoning": Chat(reasoning="on and", finish_reason="length"),
    "stop string": Chat(content="until", stop_reason="END"),
    "stop token": Chat(content="until", stop_reason=7),
    "reasoning and text": Chat(reasoning="hm, so", content="Yes."),
    "call": Chat(calls=(Call("call_1", "weather", '{"city": "Zürich"}'),), finish_reason="tool_calls"),
    "named call": Chat(calls=(Call("call_1", "weather", '{"city": "Bern"}'),)),
    "call without arguments": Chat(calls=(Call("call_1", "now", ""),), finish_reason="tool_calls"),
    "all": Chat(
        reasoning="first the city",
        content="I look.",
        calls=(Call("call_1", "weather", '{"city": "Zürich"}'), Call("call_2", "time", '{"zone": "CET"}')),
        finish_reason="tool_calls",
    ),
}


def call_piece(index: int, arguments: str, **begin: str) -> dict[str, Any]:
    """A piece of a call; ``begin``: id and name, of the first one."""
    piece: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if begin:
        piece |= {"id": begin["id"], "type": "function"}
        piece["function"]["name"] = begin["name"]
    return piece


def call_that_ends_in_a_chunk(field: str) -> bytes:
    """A stream whose chunks are of several tokens: the second one has the end of a call and what follows it in
    ``field``, the third one more of that and another call."""
    first = call_piece(0, '{"city": "Bern', id="call_1", name="weather")
    second = call_piece(1, '{"zone": "CET"}', id="call_2", name="time")
    deltas = [{"tool_calls": [first]}, {field: "The", "tool_calls": [call_piece(0, '"}')]}]
    choices = [{"index": 0, "delta": delta} for delta in [*deltas, {field: " rest", "tool_calls": [second]}]]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    return b"".join(b"data: " + json.dumps({**CHUNK, "choices": [each]}).encode() + b"\n\n" for each in choices) + DONE


def cut(data: bytes, seed: int) -> Iterator[bytes]:
    """``data`` in up to 12 pieces, cut anywhere."""
    places = sorted(random.Random(seed).choices(range(len(data) + 1), k=11))
    for begin, end in zip([0, *places], [*places, len(data)], strict=True):
        yield data[begin:end]


def _pieces(text: str, num_chars: int) -> list[str]:
    return [text[begin : begin + num_chars] for begin in range(0, len(text), num_chars)]


def read_events(data: bytes) -> list[dict[str, Any]]:
    """Server-sent events with names; the name is the data's type."""
    events = []
    for each in data.decode().split("\n\n")[:-1]:
        name, _, line = each.partition("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def assert_declared(answer: BaseModel) -> None:
    """Each field of ``answer``, which was checked, is one that its model has."""
    assert not answer.model_extra, answer.model_extra
    for value in dict(answer).values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, BaseModel):
                assert_declared(each)
