"""Calls written as ``<function=f><parameter=p>value</parameter></function>``.

A string is passed on as it comes, escaped for JSON; other values when they are whole, with the type that the tool's
schema has for them. One line break after the opening tag and one before the closing tag belong to the markup. A closing
tag that is missing is made up for, and tags that are part of a value are left in it, as far as what follows tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence, Set

from common.text.answers.deltas import DeltaSink
from common.text.answers.formats import ToolTypes
from common.text.answers.json_calls import MAX_HEAD_CHARS
from common.text.answers.reader import Steps, TextReader
from common.text.answers.values import dumps, escaped, json_of_text

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_TAGS = (PARAMETER_END, PARAMETER, FUNCTION_END, FUNCTION)
_TAG = re.compile(r"\n?(?:" + "|".join(_TAGS) + ")")
_SCALARS = frozenset({"integer", "number", "boolean", "null"})
_FUNCTION_NAME = re.compile(r"[^\s<>{}\"']+")
_NAME = re.compile(r"[^\S\n]*([^<>\n]*?)[^\S\n]*[>\n]")


def xml_calls(
    reader: TextReader, sink: DeltaSink, markers: tuple[str, str], types: ToolTypes
) -> Generator[None, None, bool]:
    """Calls up to and with the second of ``markers``; whether there was one."""
    close = markers[1]
    num_before = sink.num_calls
    while True:
        yield from reader.spaces()
        if not (yield from reader.literal(FUNCTION)):
            yield from reader.literal(close)
            break
        found = yield from reader.until((">", "\n"), MAX_HEAD_CHARS)
        name = found[0].strip() if found is not None else ""
        if not _FUNCTION_NAME.fullmatch(name):
            break
        sink.begin_call(name)
        reader.keep = None
        yield from _parameters(reader, sink, name, markers, types)
        if sink.is_call_open:
            yield from reader.literal(close)
            break
    return sink.num_calls > num_before


def _parameters(reader: TextReader, sink: DeltaSink, name: str, markers: tuple[str, str], types: ToolTypes) -> Steps:
    """Text between parameters is left out."""
    close = markers[1]
    given: list[str] = []
    known = types.parameters.get(name, {})
    while True:
        found = yield from reader.until((PARAMETER, FUNCTION_END, close), MAX_HEAD_CHARS)
        if found is None:
            return
        if found[1] != PARAMETER:
            if found[1] == close:
                reader.place -= len(close)
            sink.arguments("}" if given else "{}")
            sink.end_call()
            return
        found = yield from reader.until((">", "\n"), MAX_HEAD_CHARS)
        if found is None:
            return
        key = found[0].strip()
        sink.arguments(("{" if not given else ", ") + dumps(sink.spelled(key)) + ": ")
        given.append(key)
        if not (yield from _value(reader, sink, known.get(key), _Ends(given, known, markers))):
            return


def _value(reader: TextReader, sink: DeltaSink, types: Set[str] | None, ends: _Ends) -> Generator[None, None, bool]:
    """One value up to its closing tag, or to what closes it without one, which is left. False when the text ends
    before."""
    yield from reader.literal("\n")
    parts: list[str] = []
    is_text = types is None or types == {"string"}
    if is_text:
        sink.arguments('"')

    def emit(text: str) -> None:
        if is_text:
            sink.arguments(escaped(text))
        else:
            parts.append(text)

    while stop := (yield from _until(reader, emit)):
        tag = stop.lstrip("\n")
        reader.keep = reader.place - len(tag)
        while True:
            rest = reader.text[reader.place : reader.place + MAX_HEAD_CHARS]
            is_all = len(rest) < MAX_HEAD_CHARS
            is_end = ends.judge(stop, rest, reader.is_ended and is_all)
            if is_end is not None or not is_all:
                break
            yield
        begin, reader.keep = reader.keep, None
        if is_end:
            reader.place = reader.place if tag == PARAMETER_END else begin
            break
        emit(stop)
    else:
        return False
    sink.arguments('"' if is_text else json_of_text(sink.spelled("".join(parts)), types or frozenset()))
    return True


class _Ends:
    """Which of the tags in a value end it, told by what comes after them. A closing tag does before another parameter
    or the function's end. In a value that has opening tags of its own, closing tags may be theirs: there it does only
    before a parameter that the function has and was not given, or where the answer ends or another call follows."""

    def __init__(self, given: Sequence[str], known: Mapping[str, Set[str]], markers: tuple[str, str]) -> None:
        self._given, self._known = given, known
        self._opener, self._close = markers
        types = known.get(given[-1], frozenset())
        self._has_no_tags = bool(types) and types <= _SCALARS
        self._has_own_tags = False

    def judge(self, stop: str, rest: str, is_ended: bool) -> bool | None:
        """Whether ``stop`` before ``rest`` ends the value. None: more text has to come."""
        tag = stop.lstrip("\n")
        if tag == PARAMETER_END and self._has_no_tags:
            return True
        if tag == PARAMETER_END:
            return self._ends_parameter(rest.lstrip(), is_ended)
        if tag == FUNCTION_END:
            return self._ends_function(rest.lstrip(), is_ended)
        if tag == PARAMETER and stop != tag:  # where the closing tag may be missing
            name = _name(rest)
            if name is None:
                return False if is_ended else None
            if name in self._known and name not in self._given:
                return True
        self._has_own_tags = True
        return False

    def _ends_parameter(self, after: str, is_ended: bool) -> bool | None:
        if after.startswith(PARAMETER):
            name = _name(after[len(PARAMETER) :])
            if name is None:
                return True if is_ended else None
            return name != "" and name not in self._given and (not self._has_own_tags or name in self._known)
        if after.startswith(FUNCTION_END) and self._has_own_tags:
            return self._ends_call(after[len(FUNCTION_END) :].lstrip(), is_ended)
        if after.startswith(self._close) and self._has_own_tags:
            return self._ends_call(after, is_ended)
        return _starts(after, (PARAMETER, FUNCTION_END, self._close), is_ended)

    def _ends_function(self, after: str, is_ended: bool) -> bool | None:
        """Where the closing tag may be missing."""
        is_closed = _starts(after, (self._close,), is_ended)
        return self._ends_call(after, is_ended) if is_closed and self._has_own_tags else is_closed

    def _ends_call(self, after: str, is_ended: bool) -> bool | None:
        if after.startswith(self._close):
            after = after[len(self._close) :].lstrip()
            return _starts(after, (self._opener, FUNCTION), is_ended)
        return _starts(after, (self._opener, FUNCTION, self._close), is_ended)


def _starts(text: str, literals: Sequence[str], is_ended: bool) -> bool | None:
    """Whether ``text`` starts with one of these, or has ended before it could. None: more has to come."""
    if text.startswith(tuple(literals)):
        return True
    if any(literal.startswith(text) for literal in literals):
        return True if is_ended else None
    return False


def _name(rest: str) -> str | None:
    """Of a tag, up to its end; "" when it is none. None: more has to come."""
    name = _NAME.match(rest)
    if name is not None:
        return name[1]
    return "" if "<" in rest else None


def _until(reader: TextReader, emit: Callable[[str], None]) -> Generator[None, None, str]:
    """Emits text as it comes, up to the first tag, with one line break before it; that, or "" at the end, whose text
    that may have become a tag is dropped."""
    while True:
        text, place = reader.text, reader.place
        found = _TAG.search(text, place)
        if found is not None:
            emit(text[place : found.start()])
            reader.place = found.end()
            return found.group()
        end = _held_from(text, place)
        emit(text[place:end])
        if reader.is_ended:
            reader.place = len(text)
            return ""
        reader.place = end
        yield


def _held_from(text: str, place: int) -> int:
    """Where the end of ``text`` begins that may become a tag."""
    end = text.rfind("<", max(place, len(text) - len(PARAMETER_END)))
    if end < 0 or not any(tag.startswith(text[end:]) for tag in _TAGS):
        end = len(text)
    return end - 1 if end > place and text[end - 1] == "\n" else end
