"""The way back: one request's chat answer in the words of the API that it was asked in.

Life cycle: 1 ``whole`` once, or ``feed`` for each piece of a stream, 2 the stream's [DONE] or its error event makes the
last events of the other API. What is streamed and what comes whole is built of the same steps (``chat_answer``), so
that both say the same.
"""

from __future__ import annotations

import abc
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import orjson

from common.errors import TandemError
from common.openai.errors import error_body, read_any_error, read_error
from common.openai.responses import SSE_AT_WORK
from common.wire.json_text import LONG_BYTES, dump_json
from proxy.dialects.chat_answer import ChatAnswer, Step, StepKind

Event = dict[str, Any]
"""Its ``type`` is its name."""

_END = b"\n\n"
_DATA = b"data: "
_COMMENT = b":"
_DONE = b"[DONE]"
# Unescaped quotes are in no text: these are always between values.
_FIRST_ENTRY = b'"logprobs":{"content":[{"token":'
_NEXT_ENTRY = b'}]},{"token":'
MAX_FIELD_CHARS = 200
"""Of an error's ``param`` that is looked at."""


class Conversion(abc.ABC):
    """Of one request. ``names``: what a chat's field is called in the body that the client sent; ``inner_names``: the
    same of the end of a field that lies deeper; ``headers``: of every answer; ``at_work``: what a comment becomes, by
    which a node says that it is."""

    names: Mapping[str, str] = {}
    inner_names: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}
    at_work = SSE_AT_WORK

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.answer = ChatAnswer()
        self._rest = b""
        self._has_begun = self._has_ended = False

    # --- a whole answer

    def whole(self, status: int, body: bytes) -> bytes:
        """A chat's whole answer, or an error's body, whoever wrote it. Raises TandemError for what no node answers."""
        if status != 200:
            return orjson.dumps(self.error(_read_refusal(status, body)))
        try:
            self.answer.take(_read_whole(body))
        except (ValueError, TypeError, AttributeError) as exc:
            raise _garbage(exc) from exc
        self.answer.end()
        return dump_json(self.build())

    # --- a stream

    def feed(self, data: bytes) -> bytes:
        """As ``pieces``, all at once."""
        return b"".join(self.pieces(data))

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """The events that are due now, made as they are taken: a long one by itself, for the last ones say all that was
        said again, with log-probabilities. ``data`` may be cut anywhere. Raises TandemError for what no node
        streams."""
        *lines, self._rest = (self._rest + data).split(_END)
        short: list[bytes] = []
        try:
            for event in itertools.chain.from_iterable(map(self._converted, lines)):
                short.append(event)
                if len(event) > LONG_BYTES:
                    yield from short
                    short.clear()
        except (ValueError, TypeError, AttributeError) as exc:
            raise _garbage(exc) from exc
        if short:
            yield b"".join(short)

    def _converted(self, line: bytes) -> Iterator[bytes]:
        if line.startswith(_COMMENT):
            if self._has_begun and not self._has_ended:
                yield self.at_work
            return
        for event in self._take(line):
            yield sse(event)

    def _take(self, line: bytes) -> Iterator[Event]:
        if not line.startswith(_DATA) or self._has_ended:
            return
        data = line.removeprefix(_DATA)
        if data.strip() == _DONE:
            yield from self._begun()
            yield from self._told(self.answer.end())
            self._has_ended = True
            yield from self.end()
            return
        value = orjson.loads(data)
        if isinstance(value, Mapping) and "error" in value:
            yield from self._begun()
            self._has_ended = True
            yield from self.fail(self.renamed(read_error(value)))
            return
        steps = self.answer.take(value)
        yield from self._begun()
        yield from self._told(steps)

    def _begun(self) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            yield from self.begin()

    def _told(self, steps: Iterable[Step]) -> Iterator[Event]:
        for step in steps:
            if step.kind is StepKind.BEGIN:
                yield from self.begin_part(step)
            elif step.kind is StepKind.ADD:
                yield from self.add(step)
            else:
                yield from self.end_part(step)

    # --- errors

    def error(self, error: TandemError) -> Mapping[str, Any]:
        """The body of an answer that is an error."""
        return error_body(self.renamed(error))

    def renamed(self, error: TandemError) -> TandemError:
        """``error``, which may be about a chat's field, about the field that the client knows."""
        param = error.param or ""
        for there, here in self.inner_names.items():
            error.message = error.message.replace(there, here)
            if param.endswith(there):
                error.param = param = param.removesuffix(there) + here
        field = re.split(r"\W", param[:MAX_FIELD_CHARS], maxsplit=1)[0]
        # A name with an underscore is no other word of a message that is about another field.
        named = [name for name in self.names if name == field or "_" in name]
        if named:
            pattern = rf"\b({'|'.join(map(re.escape, named))})\b(?:\[\d+\][\w.\[\]]*)?"
            error.message = re.sub(pattern, lambda found: self.names[found.group(1)], error.message)
        if field in named:
            rest = param.removeprefix(field)
            error.param = self.names[field] + ("" if rest.startswith("[") else rest)  # lists differ
        return error

    # --- what each API has of its own

    @abc.abstractmethod
    def build(self) -> Mapping[str, Any]:
        """The whole answer, of ``self.answer``."""

    @abc.abstractmethod
    def begin(self) -> Iterable[Event]:
        """The first events, before any part."""

    @abc.abstractmethod
    def begin_part(self, step: Step) -> Iterable[Event]: ...

    @abc.abstractmethod
    def add(self, step: Step) -> Iterable[Event]: ...

    @abc.abstractmethod
    def end_part(self, step: Step) -> Iterable[Event]: ...

    @abc.abstractmethod
    def end(self) -> Iterable[Event]:
        """The last events of a stream that is complete."""

    @abc.abstractmethod
    def fail(self, error: TandemError) -> Iterable[Event]:
        """The last events of a stream that failed."""


def sse(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), dump_json(event))


def _read_whole(body: bytes) -> Any:
    """``body`` as JSON. Log-probabilities of a long one, as our nodes write them, are read entry by entry: one call for
    all holds the interpreter's lock for 25 us a token with 20 others."""
    first, *others = body.split(_NEXT_ENTRY)
    before, begin, entry = first.partition(_FIRST_ENTRY)
    if not others or not begin:
        return orjson.loads(body)
    *entries, last = (entry, *others)
    try:
        # What is left, with the last entry alone, is JSON again: what was taken out of it are entries then.
        value = orjson.loads(before + begin + last)
        content = value["choices"][0]["logprobs"]["content"]
        [end] = content
        content[:] = [*(orjson.loads(b'{"token":%b}]}' % each) for each in entries), end]
    except (ValueError, TypeError, LookupError):  # not as our nodes write it
        return orjson.loads(body)
    return value


def _read_refusal(status: int, body: bytes) -> TandemError:
    try:
        value = orjson.loads(body)
    except ValueError:
        value = None
    return read_any_error(value, status)


def _garbage(exc: Exception) -> TandemError:
    return TandemError(f"a node's answer is no chat completion: {exc}", code="garbage")
