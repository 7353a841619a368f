"""Calls written as a list in Python: ``[f(a="b", c=1), g()]``.

A value is passed on when it is whole, as JSON. Templates write strings without escaping them, so a quotation mark ends
a string only where what follows can stand after one: another argument, another call or the end of all. A value without
a name is that of the function's next parameter; where the function is not known, that is no call, and behind a first
argument it is left out.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

from common.text.answers.deltas import DeltaSink
from common.text.answers.formats import ToolTypes
from common.text.answers.json_calls import MAX_HEAD_CHARS, json_calls
from common.text.answers.reader import TextReader
from common.text.answers.values import dumps, json_of_python

_NAME = re.compile(r"[A-Za-z_][\w.\-]*\Z")
_KEY = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*=")
_PART_OF_KEY = re.compile(r"\s*(?:[A-Za-z_][\w.\-]*\s*)?")
_STOP = re.compile(r"[\"'(){}\[\],\\\ud800-\udfff]")
_AFTER_STRING = ",)]}:"
_AFTER_ARGUMENT = re.compile(
    r",(?:\s*\)|\s*[A-Za-z_][\w.\-]*\s*=)|\)\s*(?:[,;\]\ud800-\udfff]|\n\s*[A-Za-z_][\w.\-]*\()"
)
_MAX_AFTER = 256
_ECHO, _PART_OF_ECHO = re.compile(r"\[\s*[A-Za-z_][\w.\-]*\("), re.compile(r"\[\s*[\w.\-]*")


def python_calls(reader: TextReader, sink: DeltaSink, close: str, types: ToolTypes) -> Generator[None, None, bool]:
    """Calls up to and with ``close``; whether there was one. A list of JSON objects is taken too."""
    num_before = sink.num_calls
    character = yield from reader.spaces()
    if character == "[":
        reader.place += 1
        character = yield from reader.spaces()
    if character == "{":
        return (yield from json_calls(reader, sink, close))
    while True:
        character = yield from reader.spaces()
        if character and character in ",];" and sink.num_calls > num_before:
            reader.place += 1
            continue
        if (yield from reader.literal(close)):
            break
        reader.keep = reader.place if reader.keep is None else reader.keep
        found = yield from reader.until(("(", close), MAX_HEAD_CHARS)
        name = found[0].strip() if found is not None and found[1] == "(" else ""
        known = tuple(types.parameters.get(name, ()))
        is_call = bool(_NAME.match(name))
        if is_call and not known:
            first = yield from reader.spaces()
            is_call = first in ("", ")") or (yield from _key(reader, is_read=False)) != ""
        if not is_call:
            reader.place, reader.keep = reader.keep or 0, None
            break
        sink.begin_call(name)
        reader.keep = None
        if not (yield from _arguments(reader, sink, close, known)):
            yield from reader.literal(close)
            break
    return sink.num_calls > num_before


def echo(reader: TextReader, close: str) -> Generator[None, None, bool]:
    """Goes over a list of calls up to and with ``close`` that comes without its opening marker, behind one that had it:
    some models say their calls twice."""
    while reader.text.startswith("[", reader.place):
        if _ECHO.match(reader.text, reader.place):
            end = reader.text.find(close, reader.place, reader.place + MAX_HEAD_CHARS)
            if end >= 0:
                reader.place = end + len(close)
                return True
        elif (part := _PART_OF_ECHO.match(reader.text, reader.place)) is None or part.end() < len(reader.text):
            return False
        if reader.is_ended or len(reader.text) - reader.place > MAX_HEAD_CHARS:
            return False
        yield
    return False


def _arguments(reader: TextReader, sink: DeltaSink, close: str, known: Sequence[str]) -> Generator[None, None, bool]:
    given: list[str] = []

    def name(key: str) -> None:
        sink.arguments(("{" if not given else ", ") + dumps(key) + ": ")
        given.append(key)

    while True:
        character = yield from reader.spaces()
        if character == ")":
            reader.place += 1
            sink.arguments("}" if given else "{}")
            sink.end_call()
            return True
        if character == ",":
            reader.place += 1
            continue
        key = yield from _key(reader)
        if key:
            name(key)
        text = yield from _literal(reader, close, is_named=bool(key))
        if text is None:
            return False
        if not key and (key := next((each for each in known if each not in given), "")):
            name(key)
        if key:
            sink.arguments(json_of_python(text))


def _key(reader: TextReader, *, is_read: bool = True) -> Generator[None, None, str]:
    """An argument's name, with the sign after it, which are gone over if ``is_read``; "" where there is none."""
    while (found := _KEY.match(reader.text, reader.place)) is None:
        part = _PART_OF_KEY.match(reader.text, reader.place)
        assert part is not None
        if reader.is_ended or part.end() < len(reader.text) or part.end() - reader.place > MAX_HEAD_CHARS:
            return ""
        yield
    if is_read:
        reader.place = found.end()
    return found[1]


def _literal(reader: TextReader, close: str, *, is_named: bool) -> Generator[None, None, str | None]:
    """A literal up to the comma or bracket after it; None when the text ends before."""
    parts: list[str] = []
    depth = 0
    quote = ""
    while True:
        match = _STOP.search(reader.text, reader.place)
        end = match.start() if match is not None else len(reader.text)
        parts.append(reader.text[reader.place : end])
        reader.place = end
        if match is None:
            if reader.is_ended:
                return None
            yield
            continue
        character = match.group()
        if character >= "\ud800":
            return None
        if not quote and depth == 0 and character in ",)":
            return "".join(parts)
        reader.place += 1
        if character == "\\":
            while reader.place == len(reader.text) and not reader.is_ended:
                yield
            character += reader.text[reader.place : reader.place + 1]
            reader.place = min(reader.place + 1, len(reader.text))
        elif quote:
            if character == quote and (yield from _ends_string(reader, close, depth, is_named=is_named)):
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        parts.append(character)


def _ends_string(reader: TextReader, close: str, depth: int, *, is_named: bool) -> Generator[None, None, bool]:
    """Whether what follows a quotation mark can stand after a string; goes over nothing. Behind a value that is not
    ``is_named`` another one may come without a name."""
    while True:
        rest = reader.text[reader.place : reader.place + _MAX_AFTER].lstrip()
        is_all = reader.is_ended or reader.place + _MAX_AFTER <= len(reader.text)
        if rest and (rest[0] not in ",)" or depth or (rest[0] == "," and not is_named)):
            return rest[0] in _AFTER_STRING or rest[0] >= "\ud800"
        if _AFTER_ARGUMENT.match(rest) or (rest[:1] == ")" and rest[1:].lstrip().startswith(close)):
            return True
        if _is_other(rest, close):
            return False
        if is_all:
            return bool(rest)
        yield


def _is_other(rest: str, close: str) -> bool:
    """No text after ``rest`` makes it an argument's end."""
    after = rest[1:].lstrip()
    if not after:
        return False
    if rest[0] == ",":
        return not re.fullmatch(r"[A-Za-z_][\w.\-]*\s*", after)
    if close.startswith(after):
        return False
    return "\n" not in rest[1 : len(rest) - len(after)] or not re.fullmatch(r"[A-Za-z_][\w.\-]*", after)
