"""Calls written as JSON: ``{"name": "f", "arguments": {...}}``, one or several, in a list or not.

Arguments are passed on as they are written, control characters in strings escaped (``DeltaSink``). A missing bracket at
the end, other keys and another order of keys are taken, and so is a bracket too many; what breaks off before a name is
known is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from common.text.answers.deltas import DeltaSink
from common.text.answers.reader import TextReader

MAX_HEAD_CHARS = 8192
"""Of what stands before a call's name; more is no call."""
_ARGUMENTS = ("arguments", "parameters")
_STRUCTURE = re.compile(r"[\"{}\[\]<\ud800-\udfff]")
_STRING_STOP = re.compile(r"[\"\\\ud800-\udfff]")
_SCALAR_STOP = re.compile(r"[,}\]\s<\ud800-\udfff]")


def json_calls(reader: TextReader, sink: DeltaSink, close: str) -> Generator[None, None, bool]:
    """Calls up to and with ``close``; whether there was one. At the first thing that is none it leaves the rest."""
    is_list, num_before = False, sink.num_calls
    while True:
        character = yield from reader.spaces()
        if character == "[" and not is_list and sink.num_calls == num_before:
            is_list = True
            reader.place += 1
        elif character == "{":
            if not (yield from _call(reader, sink, close)):
                yield from reader.literal(close)
                break
        elif character and character in ",]}" and (sink.num_calls > num_before or is_list):
            reader.place += 1
        else:
            yield from reader.literal(close)
            break
    return sink.num_calls > num_before


def _call(reader: TextReader, sink: DeltaSink, close: str) -> Generator[None, None, bool]:
    """One object; False when it ends in the middle."""
    reader.keep = reader.place if reader.keep is None else reader.keep
    start = reader.num_read
    reader.place += 1
    name: str | None = None
    held: str | None = None
    is_whole = False
    while True:
        character = yield from reader.spaces()
        if character == '"':
            key = yield from _string(reader)
            if key is None or (yield from reader.spaces()) != ":":
                break
            reader.place += 1
            first = yield from reader.spaces()
            if key == "name" and name is None:
                name = (yield from _string(reader)) if first == '"' else None
                if not name:
                    break
                sink.begin_call(name)
                reader.keep = None
                if held is not None:
                    sink.arguments(held)
            elif key in _ARGUMENTS and held is None:
                held = ""
                if name is None or first == '"' or first not in ("{", "["):
                    held = yield from _held_arguments(reader, close)
                    if held is None:
                        break
                    if name is not None:
                        sink.arguments(held)
                elif not (yield from json_value(reader, close, sink.arguments)):
                    break
            elif not (yield from json_value(reader, close, _drop)):
                break
        elif character == ",":
            reader.place += 1
        elif character == "}":
            reader.place += 1
            is_whole = True
            break
        else:
            # A bracket that is missing before the end of all calls.
            is_whole = name is not None and held is not None and reader.text.startswith(close[:1], reader.place)
            break
        if name is None and reader.num_read - start > MAX_HEAD_CHARS:
            break
    if name is None:
        reader.place, reader.keep = reader.keep or 0, None
        return False
    if is_whole:
        if held is None:
            sink.arguments("{}")
        sink.end_call()
    return is_whole


def _drop(text: str) -> None:
    pass


def _held_arguments(reader: TextReader, close: str) -> Generator[None, None, str | None]:
    """Arguments that cannot be passed on as they come: their call has no name yet, or they are JSON inside a string, or
    no object."""
    parts: list[str] = []
    if not (yield from json_value(reader, close, parts.append)):
        return None
    text = "".join(parts)
    if text.startswith('"'):
        try:
            inner = json.loads(text, strict=False)
            if not inner.strip():
                return "{}"
            return inner if isinstance(json.loads(inner, strict=False), dict) else text
        except ValueError:
            return text
    return "{}" if text == "null" else text


def json_value(reader: TextReader, close: str, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    """Emits a JSON value as it comes; False when it ends in the middle, by ``close`` or the text's end."""
    first = yield from reader.spaces()
    if first == '"':
        reader.place += 1
        emit('"')
        return (yield from _rest_of_string(reader, emit))
    if first not in ("{", "["):
        return (yield from _scalar(reader, emit))
    depth = 0
    while True:
        match = _STRUCTURE.search(reader.text, reader.place)
        end = match.start() if match is not None else len(reader.text)
        emit(reader.text[reader.place : end])
        reader.place = end
        if match is None:
            if reader.is_ended:
                return False
            yield
            continue
        character = match.group()
        if character == close[0]:
            if (yield from reader.literal(close)):
                reader.place -= len(close)
                return False
        elif character >= "\ud800":
            return False
        emit(character)
        reader.place += 1
        if character == '"':
            if not (yield from _rest_of_string(reader, emit)):
                return False
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if depth == 0:
                return True


def _rest_of_string(reader: TextReader, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    """Emits up to and with the closing quotation mark; an escape only as a whole."""
    while True:
        match = _STRING_STOP.search(reader.text, reader.place)
        end = match.start() if match is not None else len(reader.text)
        emit(reader.text[reader.place : end])
        reader.place = end
        if match is not None and match.group() == '"':
            emit('"')
            reader.place += 1
            return True
        if match is not None and match.group() != "\\":
            return False
        if match is not None and len(reader.text) > end + 1:
            emit(reader.text[end : end + 2])
            reader.place = end + 2
        elif reader.is_ended:
            reader.place = len(reader.text)  # half an escape is nothing
            return False
        else:
            yield


def _scalar(reader: TextReader, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    while True:
        match = _SCALAR_STOP.search(reader.text, reader.place)
        if match is not None or reader.is_ended:
            end = match.start() if match is not None else len(reader.text)
            emit(reader.text[reader.place : end])
            is_some, reader.place = end > reader.place, end
            return is_some
        yield


def _string(reader: TextReader) -> Generator[None, None, str | None]:
    """The value of a string; None when it does not end within reason."""
    parts: list[str] = []
    reader.place += 1
    ending = yield from _until_quote(reader, parts)
    if not ending:
        return None
    try:
        value = json.loads('"' + "".join(parts), strict=False)
    except ValueError:
        return None
    return str(value).encode(errors="replace").decode()


def _until_quote(reader: TextReader, parts: list[str]) -> Generator[None, None, bool]:
    steps = _rest_of_string(reader, parts.append)
    for _ in steps:
        if sum(map(len, parts)) > MAX_HEAD_CHARS:
            return False
        yield
    return bool(parts) and parts[-1] == '"'


def kimi_calls(
    reader: TextReader, sink: DeltaSink, markers: tuple[str, str, str], close: str, *, in_section: bool
) -> Generator[None, None, bool]:
    """Calls of a Kimi section up to and with ``close``; whether there was one. ``markers``: before a call's id, before
    its arguments, after them. Text between calls is left out. Without a section calls follow each other."""
    begin, middle, end = markers
    num_before = sink.num_calls
    while True:
        if in_section:
            found = yield from reader.until((begin, close), MAX_HEAD_CHARS)
        else:
            reader.keep = reader.place if reader.keep is None else reader.keep
            yield from reader.spaces()
            found = ("", begin) if (yield from reader.literal(begin)) else None
            if found is None:
                reader.place = reader.keep
        if found is None or found[1] == close:
            break
        found = yield from reader.until((middle, end, close), MAX_HEAD_CHARS)
        if found is None or found[1] != middle:
            break
        call_id = found[0].strip()
        name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
        if not name:
            break
        sink.begin_call(name, call_id)
        reader.keep = None
        yield from reader.spaces()
        parts: list[str] = []

        def emit(text: str, parts: list[str] = parts) -> None:
            parts.append(text)
            sink.arguments(text)

        stop = yield from reader.pass_on((end, close, begin, middle), emit, holds_space=" \n")
        if stop == middle or (not stop and not _is_object("".join(parts))):
            break
        if stop == begin:  # the marker after the arguments is missing
            reader.place -= len(begin)
        if not any(parts):
            sink.arguments("{}")
        sink.end_call()
        if stop in (close, ""):
            break
    return sink.num_calls > num_before


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False
