"""JSON of callers, parsed without holding up the process.

The parser is one call that holds the interpreter's lock: while it runs, no other thread does, the event loop's
included. So what it costs is bounded before it begins, by what is counted in the text: ``JsonBounds``. Long texts are
read by orjson alone (16 MiB within the bounds: at most 50 ms on one 2.6 GHz core, where ``json`` takes 500 ms); short
ones that orjson does not take exactly are read by ``json``, whose words errors have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

import orjson

from common.errors import InvalidRequestError

MAX_VALUES = 1_100_000
"""Values in one body: enough for the token ids of a prompt that fills a context of a million."""
MAX_ITEMS = 200_000
"""Objects, lists and texts (keys too) in one body: 10,000 messages of a chat have 50,000. Each costs ten times what a
number does."""
LEG_EXTRA = 150_000
"""Values and items that a body may have more when it comes from a proxy, which has bounded it before: of each of 2,048
prompts it says where the prompt is, block by block."""
LONG_BYTES = 32 * 1024
"""Texts up to this are short: parsing and checking one takes 2 ms at most, in either way."""
MAX_DIGITS = 20
"""Of whole numbers of 64 bits, with the sign of negative ones."""
MAX_DEPTH = 64
"""Levels of nested objects and lists: code that walks a deeper body recursively could exhaust its stack."""

INVALID_JSON = "invalid_json"
"""The code of errors about what a text is, not about how much it holds."""

_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
_MAYBE_BEYOND_64_BITS = b"0" * 19
_MARKS = b'"[{,'
_NO_MARKS = bytes(set(range(256)) - set(_MARKS))
_NO_MARKS_NOR_DIGITS = bytes(set(range(256)) - set(_MARKS + b"0123456789.+-eE"))
_DIGITS = re.compile(rb"\d++")
# Neither a fraction nor an exponent.
_LONG_WHOLE_NUMBER = re.compile(rb"(?<![.\deE+-])-?\d{19,}+(?![.eE])")
_TOO_DEEP = f"is nested deeper than {MAX_DEPTH} levels"


class JsonBounds:
    """What is left of the bounds for one body, or for the JSON in its texts. ``extra``: values and items beyond the
    bounds."""

    def __init__(self, extra: int = 0) -> None:
        self._max_values = self._values_left = MAX_VALUES + extra
        self._max_items = self._items_left = MAX_ITEMS + extra

    def take(self, raw: bytes, what: str) -> None:
        """Raises InvalidRequestError, which names ``what``, when ``raw`` holds more than is left."""
        items = raw.count(b"[") + raw.count(b"{") + raw.count(b'"') // 2
        values = items + raw.count(b",")
        if items > self._items_left or values > self._values_left:
            items, values = self._count(raw, what)  # without what stands in texts
        if items > self._items_left or values > self._values_left:
            self._refuse(what)
        self._items_left -= items
        self._values_left -= values

    def _count(self, raw: bytes, what: str) -> tuple[int, int]:
        marks = _without_escapes(raw).translate(None, _NO_MARKS)
        num_texts = marks.count(b'"') // 2
        if num_texts > self._items_left:
            self._refuse(what)
        outside = _outside_texts(marks)
        items = num_texts + outside.count(b"[") + outside.count(b"{")
        return items, items + outside.count(b",")

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidRequestError(
            f"{what} must hold at most {self._max_items} objects, lists and texts, and {self._max_values} values in "
            "all, got more",
            code="too_many_values",
        )


def parse_json(raw: bytes, bounds: JsonBounds, what: str = "the body") -> object:
    """The value that ``raw`` is the text of.

    Raises:
        InvalidRequestError: not UTF-8, not JSON (with the position), deeper than ``MAX_DEPTH`` or beyond ``bounds``;
            or long, with a whole number beyond 64 bits, which only short texts may have.
    """
    if len(raw) <= LONG_BYTES:
        value = _parse_short(raw, what)
        bounds.take(raw, what)
    else:
        bounds.take(raw, what)
        value = _parse_long(raw, what)
    # Counting brackets bounds the depth from above; most texts never need the walk.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _is_too_deep(value):
        raise _invalid(f"{what} {_TOO_DEEP}")
    return value


def dump_json(value: object) -> bytes:
    """``value``, which was parsed here, as compact JSON. ``orjson.Fragment`` s in it are JSON already."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # a whole number beyond 64 bits, which only short texts have
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_value_of_fragment).encode()


def _value_of_fragment(fragment: object) -> object:
    value: object = orjson.loads(orjson.dumps(fragment))
    return value


def _parse_long(raw: bytes, what: str) -> object:
    if _MAYBE_BEYOND_64_BITS in raw.translate(_DIGITS_TO_ZERO):
        outside = _outside_texts(_without_escapes(raw).translate(None, _NO_MARKS_NOR_DIGITS))
        if any(map(_is_beyond_64_bits, _long_whole_numbers(outside))):
            raise _invalid(f"{what} holds a whole number beyond 64 bits, which JSON beyond {LONG_BYTES} bytes must not")
    try:
        value: object = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        if exc.msg.startswith("depth limit"):
            raise _invalid(f"{what} {_TOO_DEEP}") from None
        # Not chained: the error holds the whole text.
        raise _invalid(f"{what} is not JSON: {exc.msg} at line {exc.lineno} column {exc.colno}") from None
    return value


def _long_whole_numbers(outside: bytes) -> Iterator[re.Match[bytes]]:
    """Those of 19 digits and more. A search by the pattern alone would hold the interpreter's lock all along: a call
    here looks at one number."""
    zeros = outside.translate(_DIGITS_TO_ZERO)
    at = zeros.find(_MAYBE_BEYOND_64_BITS)
    while at >= 0:
        has_sign = outside[at - 1 : at] == b"-"
        if number := _LONG_WHOLE_NUMBER.match(outside, at - has_sign):
            yield number
        digits = _DIGITS.match(zeros, at)
        assert digits is not None
        at = zeros.find(_MAYBE_BEYOND_64_BITS, digits.end())


def _is_beyond_64_bits(number: re.Match[bytes]) -> bool:
    digits = number[0]
    return len(digits) > MAX_DIGITS or not -(2**63) <= int(digits) < 2**64


def _parse_short(raw: bytes, what: str) -> object:
    # Only ``json`` reads whole numbers beyond 64 bits exactly.
    if _MAYBE_BEYOND_64_BITS not in raw.translate(_DIGITS_TO_ZERO):
        try:
            value: object = orjson.loads(raw)
        except orjson.JSONDecodeError:
            pass
        else:
            return value
    return _parse_with_words(raw, what)


def _parse_with_words(raw: bytes, what: str) -> object:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise _invalid(f"{what} is not UTF-8: byte {exc.start}") from exc
    try:
        value: object = json.loads(text, parse_constant=lambda name: _refuse_constant(name, what))
    except json.JSONDecodeError as exc:
        raise _invalid(f"{what} is not JSON: {exc.msg} at line {exc.lineno} column {exc.colno}") from exc
    except RecursionError as exc:
        raise _invalid(f"{what} {_TOO_DEEP}") from exc
    except ValueError as exc:
        raise _invalid(f"{what} holds a number of too many digits") from exc
    if b"\\u" in raw:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as exc:
            raise _invalid(f"{what} holds half of a surrogate pair, which is no character") from exc
        except RecursionError as exc:
            raise _invalid(f"{what} {_TOO_DEEP}") from exc
    return value


def _refuse_constant(name: str, what: str) -> NoReturn:
    raise _invalid(f"{what} is not JSON: {name} is no JSON number")


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code=INVALID_JSON)


def _without_escapes(raw: bytes) -> bytes:
    """``raw`` without escaped backslashes and quotes, so that each quote begins or ends a text."""
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw


def _outside_texts(marks: bytes) -> bytes:
    """What of ``marks``, in which each quote begins or ends a text, is in no text."""
    return b"|".join(marks.split(b'"')[::2])


def _is_too_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        children: list[object] = []
        for item in level:
            items = item.values() if isinstance(item, dict) else item
            children += [child for child in items if isinstance(child, dict | list)]  # type: ignore[attr-defined]
        if not children:
            return False
        level = children
    return True
