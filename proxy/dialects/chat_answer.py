"""A chat's answer, whole or as events, as a row of parts: reasoning, text, tool calls, in the order in which they came.

A chat's stream says what is added; the other APIs say where each part begins and ends. ``ChatAnswer.take`` turns the
one into the other: each object (a chunk, or the whole answer) gives the ``Step`` s that it makes.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from common.wire.fields import is_int
from common.wire.json_text import dump_json
from proxy.dialects.text_logprobs import TextLogprobs


class PartKind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(eq=False, slots=True)
class Part:
    """``index``: among the answer's parts. A call's text is its arguments; ``call_index`` is the chat's own.
    ``logprobs``: entries as JSON, with commas between them: a fifth of what they are as objects."""

    kind: PartKind
    index: int
    call_index: int | None = None
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)

    @property
    def logprobs_json(self) -> orjson.Fragment:
        """All of them, as a list, for ``dump_json``."""
        return orjson.Fragment(b"".join((b"[", self.logprobs, b"]")))

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""


class StepKind(enum.Enum):
    BEGIN = "begin"
    ADD = "add"
    END = "end"


@dataclass(frozen=True, slots=True)
class Step:
    """``text`` and ``logprobs``, as of ``Part``: what is added."""

    kind: StepKind
    part: Part
    text: str = ""
    logprobs: bytes = b""

    @property
    def logprobs_json(self) -> orjson.Fragment:
        return orjson.Fragment(b"[%b]" % self.logprobs)


class ChatAnswer:
    """What is known of the first choice of one answer; ``usage`` and ``trace`` come last."""

    def __init__(self) -> None:
        self.id = ""
        self.model = ""
        self.created = 0
        self.parts: list[Part] = []
        self.finish_reason: str | None = None
        self.stop_reason: object = None
        self.trace: Mapping[str, Any] | None = None
        self._usage: Mapping[str, Any] = {}
        self._open: Part | None = None
        self._logprobs = TextLogprobs()

    @property
    def has_calls(self) -> bool:
        return any(part.kind is PartKind.CALL for part in self.parts)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if part.kind is PartKind.TEXT)

    # --- usage: 0 where the answer does not say

    @property
    def num_prompt_tokens(self) -> int:
        return _count(self._usage, "prompt_tokens")

    @property
    def num_completion_tokens(self) -> int:
        return _count(self._usage, "completion_tokens")

    @property
    def num_cached_tokens(self) -> int:
        return _count(_mapping(self._usage, "prompt_tokens_details"), "cached_tokens")

    @property
    def num_reasoning_tokens(self) -> int:
        return _count(_mapping(self._usage, "completion_tokens_details"), "reasoning_tokens")

    # --- growing

    def take(self, value: Mapping[str, Any]) -> list[Step]:
        """A chunk of the answer, or all of it. Raises ValueError for what is no chat's answer."""
        self.id = self.id or str(value.get("id") or "")
        self.model = self.model or str(value.get("model") or "")
        self.created = self.created or int(value.get("created") or 0)
        if isinstance(usage := value.get("usage"), Mapping):
            self._usage = usage
        if isinstance(trace := value.get("tandem"), Mapping):
            self.trace = trace
        choices = value.get("choices")
        if not isinstance(choices, list):
            raise ValueError("an answer without choices")
        return [step for choice in choices[:1] for step in self._take_choice(choice)]

    def end(self) -> list[Step]:
        """Nothing is added any more."""
        part, self._open = self._open, None
        if part is None:
            return []
        last = self._logprobs.end() if part.kind is PartKind.TEXT else ()
        return [*([self._grow(part, "", last)] if last else ()), Step(StepKind.END, part)]

    def _take_choice(self, choice: Mapping[str, Any]) -> Iterator[Step]:
        delta = choice.get("delta") or choice.get("message") or {}
        calls = [(call.get("index", place), call) for place, call in enumerate(delta.get("tool_calls") or ())]
        # A chunk of several tokens may end the open call and go on with what follows it.
        open_index = self._open.call_index if self._open is not None else None
        while open_index is not None and calls and calls[0][0] == open_index:
            yield from self._add_call(*calls.pop(0))
        # Both names are in use, for the same text.
        yield from self._add(PartKind.REASONING, delta.get("reasoning_content") or delta.get("reasoning"))
        text = delta.get("content") or ""
        entries = _mapping(choice, "logprobs").get("content") or ()
        has_more = bool(self._usage.get("completion_tokens_details"))
        num_reasoning_tokens = self.num_reasoning_tokens if has_more or self.parts else None
        yield from self._add(PartKind.TEXT, text, self._logprobs.add(entries, text, num_reasoning_tokens))
        for index, call in calls:
            yield from self._add_call(index, call)
        if choice.get("finish_reason") is not None:
            self.finish_reason, self.stop_reason = str(choice["finish_reason"]), choice.get("stop_reason")

    def _add(self, kind: PartKind, text: str | None, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Step]:
        if not text:
            return
        part = self._open
        if part is None or part.kind is not kind:
            part = yield from self._begin(Part(kind, len(self.parts)))
        yield self._grow(part, text, logprobs)

    def _add_call(self, index: object, call: Mapping[str, Any]) -> Iterator[Step]:
        function = _mapping(call, "function")
        part = self._open
        if part is None or part.call_index != index:
            if not is_int(index) or not call.get("id") or not function.get("name"):
                raise ValueError("a tool call that does not begin with its index, id and name")
            new = Part(PartKind.CALL, len(self.parts), int(str(index)), str(call["id"]), str(function["name"]))
            part = yield from self._begin(new)
        if arguments := function.get("arguments"):
            yield self._grow(part, str(arguments))

    def _begin(self, part: Part) -> Generator[Step, None, Part]:
        yield from self.end()
        self._open = part
        self.parts.append(part)
        yield Step(StepKind.BEGIN, part)
        return part

    @staticmethod
    def _grow(part: Part, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Step:
        part.pieces.append(text)
        encoded = b",".join(map(dump_json, logprobs))
        if encoded:
            part.logprobs += b"," + encoded if part.logprobs else encoded
        return Step(StepKind.ADD, part, text, encoded)


def _mapping(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, Mapping) else {}


def _count(value: Mapping[str, Any], key: str) -> int:
    found = value.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0
