"""One answer's text, as it comes, into reasoning, content and calls.

1 reasoning: at once where the prompt has opened it, else where the answer begins with its marker, 2 content until the
marker of calls, 3 calls, then 2 again. Nothing that was given out is taken back: text is held while it may be a marker,
and what begins like a call and has no name is content. White space between reasoning, content and calls belongs to the
markup. What a text becomes does not depend on the pieces in which it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping

from common.text.answers.deltas import AnswerDelta, DeltaSink
from common.text.answers.formats import KIMI_MARKERS, AnswerFormat, CallKind, ToolTypes
from common.text.answers.json_calls import json_calls, kimi_calls
from common.text.answers.python_calls import echo, python_calls
from common.text.answers.reader import Steps, TextReader
from common.text.answers.xml_calls import FUNCTION, FUNCTION_END, xml_calls

_SPACES = " \t\r\n"


class AnswerParser:
    """
    Args:
        answer_format: of the model.
        has_tools: calls are looked for.
        in_reasoning: the prompt ends inside reasoning.
        types: of the request's tools.
        characters: marker -> the character that stands for it in the text (``reader.marker_character``), of markers
            that are special tokens.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        *,
        has_tools: bool,
        in_reasoning: bool,
        types: ToolTypes,
        characters: Mapping[str, str],
    ) -> None:
        self._tools = answer_format.tools if has_tools else None
        self._types = types
        self._characters = characters
        reasoning = answer_format.reasoning
        self._think = None if reasoning is None else tuple(map(self._marker, reasoning.markers))
        self.is_reasoning = in_reasoning and reasoning is not None
        self._reader = TextReader()
        self._sink = DeltaSink({character: marker for marker, character in characters.items()})
        self._steps: Steps | None = self._run()
        next(self._steps)

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._sink.num_calls

    @property
    def is_call_open(self) -> bool:
        """The last call has not come to its end."""
        return self._sink.is_call_open

    @property
    def held_space(self) -> str:
        """White space behind content, which is content too unless a call follows."""
        return "" if self.is_reasoning or self.is_call_open else self._reader.held_space

    def feed(self, text: str) -> AnswerDelta:
        """What became certain with ``text``."""
        if text and self._steps is not None:
            self._reader.feed(text)
            self._step()
        return self._sink.take()

    def finish(self) -> AnswerDelta:
        """What was held at the answer's end."""
        self._reader.is_ended = True
        if self._steps is not None:
            self._step()
            assert self._steps is None
        return self._sink.take()

    def _step(self) -> None:
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None

    def _marker(self, marker: str) -> str:
        return self._characters.get(marker, marker)

    # --- the answer's parts

    def _run(self) -> Steps:
        yield
        if self._think is not None:
            yield from self._thinking(*self._think)
        if self._tools is None:
            yield from self._reader.pass_on(("\ud7ff\ud800",), self._sink.content)
            return
        openers = self._openers()
        while found := (yield from self._reader.pass_on(openers, self._sink.content, holds_space=_SPACES)):
            if (yield from self._calls(found, self._sink.content)):
                yield from self._after_calls()

    def _thinking(self, begin: str, end: str) -> Steps:
        reader = self._reader
        if not self.is_reasoning:
            reader.keep = reader.place
            yield from reader.spaces()
            is_opened = yield from reader.literal(begin)
            if not is_opened:
                reader.place = reader.keep
            reader.keep = None
            if not is_opened:
                return
            self.is_reasoning = True
        elif (yield from reader.spaces()):
            yield from reader.literal(begin)  # some models open once more
        yield from reader.spaces()
        tools = self._tools
        openers = self._openers() if tools is not None and tools.in_reasoning else ()
        openers = tuple(each for each in openers if each != FUNCTION)
        while True:
            stop = yield from reader.pass_on((end, *openers), self._sink.reasoning, holds_space=_SPACES)
            if stop not in openers:
                break
            if (yield from self._calls(stop, self._sink.reasoning)):
                yield from reader.spaces()
        self.is_reasoning = False
        if stop:
            yield from reader.spaces()

    def _openers(self) -> tuple[str, ...]:
        """What calls begin with: their marker, which some models leave out before the first one."""
        assert self._tools is not None
        first = {CallKind.XML: FUNCTION, CallKind.KIMI: KIMI_MARKERS[0]}.get(self._tools.kind)
        return (self._marker(self._tools.open_marker), *((self._marker(first),) if first is not None else ()))

    def _after_calls(self) -> Steps:
        """Goes over closing markers that come once more, calls that are said again before one, and white space if
        nothing follows it."""
        assert self._tools is not None
        reader, close = self._reader, self._marker(self._tools.close_marker)
        reader.keep = reader.place
        while (yield from reader.spaces()):
            is_closed = yield from reader.literal(close)
            if not is_closed and self._tools.kind is CallKind.XML:
                is_closed = yield from reader.literal(FUNCTION_END)
            if not is_closed and self._tools.kind is CallKind.PYTHON:
                is_closed = yield from echo(reader, close)
            if not is_closed:
                reader.place = reader.keep
                break
            reader.keep = reader.place
        reader.keep = None

    def _calls(self, opener: str, emit_instead: Callable[[str], None]) -> Generator[None, None, bool]:
        """Calls after their marker. Where there is none, the marker is text and what follows it is read again."""
        assert self._tools is not None
        reader, sink, kind = self._reader, self._sink, self._tools.kind
        space = reader.space
        close = self._marker(self._tools.close_marker)
        has_marker = opener == self._marker(self._tools.open_marker)
        if not has_marker:
            reader.place -= len(opener)
        reader.keep = reader.place
        if kind is CallKind.XML:
            markers = (self._marker(self._tools.open_marker), close)
            found = yield from xml_calls(reader, sink, markers, self._types)
        elif kind is CallKind.PYTHON:
            found = yield from python_calls(reader, sink, close, self._types)
        elif kind is CallKind.KIMI:
            begin, middle, end = map(self._marker, KIMI_MARKERS)
            found = yield from kimi_calls(reader, sink, (begin, middle, end), close, in_section=has_marker)
        else:
            found = yield from json_calls(reader, sink, close)
        if not found:
            reader.place = reader.keep if reader.keep is not None else reader.place
            if not has_marker:
                reader.place += len(opener)
            emit_instead(space + opener)
        reader.keep = None
        return found
