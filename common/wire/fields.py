"""Strict reading of JSON fields, one error wording for every body this service parses.

``null`` and absent both mean "the default", integers are integers (a boolean is not one), numbers may be written as
integers, and nothing is converted from text. A value that does not fit is an ``InvalidRequestError`` that names the
field, the value and the bound. Only fields that the code asks for are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from common.errors import InvalidRequestError

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id that any body may hold; whether the model has it is checked where its vocabulary is known."""
MAX_MILLISECONDS = 86_400_000
"""A day: no request waits or runs longer."""
MAX_SHOWN_CHARS = 80
"""Characters of a value that an error message repeats."""


def shown(value: object) -> str:
    """``value`` as it may appear in a message: its repr, cut to ``MAX_SHOWN_CHARS`` characters."""
    text = _begin_repr(value, MAX_SHOWN_CHARS + 1)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def _begin_repr(value: object, num_chars: int) -> str:
    """At least the first ``num_chars`` of JSON's ``repr``: all of it may be megabytes."""
    if isinstance(value, str):
        return repr(value[:num_chars])
    if not isinstance(value, list | tuple | dict):
        return repr(value)
    parts: list[str] = []
    for item in value.items() if isinstance(value, dict) else value:
        if num_chars <= 0:
            break
        if isinstance(value, dict):
            key, each = item
            part = f"{_begin_repr(key, num_chars)}: {_begin_repr(each, num_chars)}"
        else:
            part = _begin_repr(item, num_chars)
        parts.append(part)
        num_chars -= len(part)
    text = ", ".join(parts)
    if isinstance(value, tuple):
        return f"({text},)" if len(value) == 1 else f"({text})"
    return f"{{{text}}}" if isinstance(value, dict) else f"[{text}]"


def seconds_of_header(headers: Mapping[str, str], name: str) -> float | None:
    """Seconds, of a header of milliseconds; None without one. Raises InvalidRequestError."""
    given = headers.get(name)
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}(\.[0-9]{1,3})?", given.strip()) or not 1 <= float(given) <= MAX_MILLISECONDS:
        raise InvalidRequestError(
            f"header {name} must be milliseconds from 1 to {MAX_MILLISECONDS}, with three decimals at most, got "
            f"{given[:40]!r}",
            param=name,
        )
    return float(given) / 1000


def is_int(value: object) -> bool:
    """An integer as JSON means it; ``true`` is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_empty(value: object) -> bool:
    """Asks for nothing, whatever the field is."""
    return value is None or value is False or value in ("", [], {})


def invalid(name: str, value: object, expected: str) -> NoReturn:
    """Raise the error for field ``name``; ``expected`` reads on from "must be"."""
    raise InvalidRequestError(f"{name} must be {expected}, got {shown(value)}", param=name)


def bounds_in_words(ge: float | None, le: float | None, gt: float | None) -> str:
    """Begins with a space; empty without bounds."""
    words = []
    if gt is not None:
        words.append(f"greater than {gt}")
    if ge is not None and le is not None and not words:
        return f" between {ge} and {le}"
    if ge is not None:
        words.append(f"at least {ge}")
    if le is not None:
        words.append(f"at most {le}")
    return " " + " and ".join(words) if words else ""


def check_int(name: str, value: object, *, ge: int | None = None, le: int | None = None) -> int:
    """``value`` as an integer within ``[ge, le]``; raises naming ``name``."""
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or (ge is not None and value < ge)
        or (le is not None and value > le)
    ):
        invalid(name, value, "an integer" + bounds_in_words(ge, le, None))
    return value


def check_number(
    name: str, value: object, *, ge: float | None = None, le: float | None = None, gt: float | None = None
) -> float:
    """``value`` as a finite float within the bounds; raises naming ``name``."""
    wanted = "a number" + bounds_in_words(ge, le, gt)
    if not isinstance(value, int | float) or isinstance(value, bool):
        invalid(name, value, wanted)
    try:
        number = float(value)
    except OverflowError:
        invalid(name, value, wanted)
    if (
        not math.isfinite(number)
        or (ge is not None and number < ge)
        or (le is not None and number > le)
        or (gt is not None and number <= gt)
    ):
        invalid(name, value, wanted)
    return number


def check_int_list(name: str, value: object, *, ge: int = 0, le: int | None = None) -> tuple[int, ...]:
    """``value`` as a tuple of integers within ``[ge, le]``; the message names the first index at fault."""
    if not isinstance(value, list | tuple):
        invalid(name, value, "a list of integers")
    if set(map(type, value)) == {int} and min(value) >= ge and (le is None or max(value) <= le):
        return tuple(value)  # a prompt has thousands
    for index, item in enumerate(value):
        if type(item) is not int or item < ge or (le is not None and item > le):
            raise InvalidRequestError(
                f"{name}[{index}] must be an integer{bounds_in_words(ge, le, None)}, got {shown(item)}", param=name
            )
    return tuple(value)


class Fields:
    """Typed view of one JSON object. Every reader returns ``None`` for a field that is absent or null."""

    def __init__(self, body: Mapping[str, object], *, prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix

    def name(self, key: str) -> str:
        return self._prefix + key

    def raw(self, key: str) -> object:
        return self._body.get(key)

    def integer(self, key: str, *, ge: int | None = None, le: int | None = None) -> int | None:
        value = self._body.get(key)
        return None if value is None else check_int(self.name(key), value, ge=ge, le=le)

    def number(
        self, key: str, *, ge: float | None = None, le: float | None = None, gt: float | None = None
    ) -> float | None:
        value = self._body.get(key)
        return None if value is None else check_number(self.name(key), value, ge=ge, le=le, gt=gt)

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self._body.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            invalid(self.name(key), value, "true or false")
        return value

    def string(
        self, key: str, *, min_chars: int = 0, max_chars: int | None = None, pattern: re.Pattern[str] | None = None
    ) -> str | None:
        value = self._body.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            invalid(self.name(key), value, "a string")
        if len(value) < min_chars or (max_chars is not None and len(value) > max_chars):
            bound = f"a string of {min_chars} to {max_chars} characters"
            raise InvalidRequestError(
                f"{self.name(key)} must be {bound}, got {len(value)} characters", param=self.name(key)
            )
        if pattern is not None and pattern.fullmatch(value) is None:
            invalid(self.name(key), value, f"a string that matches {pattern.pattern}")
        return value

    def required_string(self, key: str, *, pattern: re.Pattern[str]) -> str:
        """Raises where it is absent or null, too."""
        value = self.string(key, pattern=pattern)
        if value is None:
            raise InvalidRequestError(f"{self.name(key)} is required", param=self.name(key))
        return value

    def mapping(self, key: str) -> Mapping[str, object] | None:
        value = self._body.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            invalid(self.name(key), value, "an object")
        return value

    def sequence(self, key: str) -> Sequence[object] | None:
        value = self._body.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            invalid(self.name(key), value, "a list")
        return value

    def int_list(self, key: str, *, ge: int = 0, le: int | None = None) -> tuple[int, ...] | None:
        value = self._body.get(key)
        return None if value is None else check_int_list(self.name(key), value, ge=ge, le=le)
