"""Calls written as ``<function=f><parameter=p>value</parameter></function>``.

A string is passed on as it comes, escaped for JSON; other values when they are whole, with the type that the tool's
schema has for them. One line break after the opening tag and one before the closing tag belong to the markup. A closing
tag that is missing is made up for where what follows leaves no doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence, Set

from common.text.answers.deltas import DeltaSink
from common.text.answers.formats import ToolTypes
from common.text.answers.json_calls import MAX_HEAD_CHARS
from common.text.answers.reader import Steps, TextReader, held_from
from common.text.answers.values import dumps, escaped, json_of_text

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def xml_calls(reader: TextReader, sink: DeltaSink, close: str, types: ToolTypes) -> Generator[None, None, bool]:
    """Calls up to and with ``close``; whether there was one."""
    num_before = sink.num_calls
    while True:
        yield from reader.spaces()
        if not (yield from reader.literal(FUNCTION)):
            yield from reader.literal(close)
            break
        found = yield from reader.until((">", "\n"), MAX_HEAD_CHARS)
        if found is None or not found[0].strip():
            break
        name = found[0].strip()
        sink.begin_call(name)
        reader.keep = None
        yield from _parameters(reader, sink, name, close, types)
        if sink.is_call_open:
            yield from reader.literal(close)
            break
    return sink.num_calls > num_before


def _parameters(reader: TextReader, sink: DeltaSink, name: str, close: str, types: ToolTypes) -> Steps:
    given: list[str] = []
    while True:
        yield from reader.spaces()
        if (yield from reader.literal(PARAMETER)):
            found = yield from reader.until((">", "\n"), MAX_HEAD_CHARS)
            if found is None:
                return
            key = found[0].strip()
            sink.arguments(("{" if not given else ", ") + dumps(key) + ": ")
            given.append(key)
            known = types.parameters.get(name, {})
            others = [f"\n{PARAMETER}{each}>" for each in known if each not in given]
            if not (yield from _value(reader, sink, known.get(key), (f"{FUNCTION_END}\n{close}", *others))):
                return
            continue
        is_closed = yield from reader.literal(FUNCTION_END)
        if not is_closed and (yield from reader.literal(close)):
            is_closed, reader.place = True, reader.place - len(close)
        if is_closed:
            sink.arguments("}" if given else "{}")
            sink.end_call()
        return


def _value(
    reader: TextReader, sink: DeltaSink, types: Set[str] | None, instead: Sequence[str]
) -> Generator[None, None, bool]:
    """One value up to its closing tag, or to one of ``instead``, which is left. False when the text ends before."""
    yield from reader.literal("\n")
    stops = ("\n" + PARAMETER_END, PARAMETER_END, *("\n" + each for each in instead if each[0] != "\n"), *instead)
    if types is None or types == {"string"}:
        sink.arguments('"')
        stop = yield from _until(reader, stops, lambda text: sink.arguments(escaped(text)))
        if stop:
            sink.arguments('"')
    else:
        parts: list[str] = []
        stop = yield from _until(reader, stops, parts.append)
        if stop:
            sink.arguments(json_of_text("".join(parts), types))
    if stop.endswith(PARAMETER_END):
        return True
    reader.place -= len(stop.lstrip("\n"))
    return bool(stop)


def _until(reader: TextReader, stops: Sequence[str], emit: Callable[[str], None]) -> Generator[None, None, str]:
    """As ``TextReader.pass_on``, which has no text at the end that may have become a stop."""
    held: list[str] = []

    def emit_held(text: str) -> None:
        held.append(text)

    steps = reader.pass_on(stops, emit_held)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            text = "".join(held)
            if not done.value:
                text = text[: held_from(text, stops, 0)]
            emit(text)
            return str(done.value)
        emit("".join(held))
        held.clear()
        yield
