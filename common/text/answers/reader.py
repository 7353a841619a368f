"""Text that comes in pieces, for parsers that are generators: each waits for what it needs by ``yield``.

A parser decides nothing on text that is not here yet, so what it makes of a text does not depend on its pieces. Special
tokens that are markers stand in the text as one character each that no text has (``marker_character``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

Steps = Generator[None, None, None]
"""Steps of a parser: it yields where it needs more text."""

_FIRST_MARKER = 0xD800  # lone surrogates: decoded text has none
_SPACE = re.compile(r"\s*")
MAX_HELD_SPACE = 64
"""Characters of white space that are held back because they may be dropped."""


def marker_character(index: int) -> str:
    """Stands for a special token in text."""
    return chr(_FIRST_MARKER + index)


class TextReader:
    """The text, and a place in it. ``keep``: text from there on stays, for a parser that may go back to it. ``space``:
    what ``pass_on`` left out before the stop. ``held_space``: what it holds back behind text that it emitted, while it
    waits."""

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.keep: int | None = None
        self.space = ""
        self.held_space = ""
        self.is_ended = False
        self._num_gone = 0

    @property
    def num_read(self) -> int:
        """Characters before the place, since the beginning."""
        return self._num_gone + self.place

    def feed(self, piece: str) -> None:
        done = self.place if self.keep is None else min(self.place, self.keep)
        if done:
            self.text = self.text[done:] + piece
            self.place -= done
            self._num_gone += done
            if self.keep is not None:
                self.keep -= done
        else:
            self.text += piece

    def spaces(self) -> Generator[None, None, str]:
        """Goes over white space; the character after it, "" at the end."""
        while True:
            match = _SPACE.match(self.text, self.place)
            assert match is not None
            self.place = match.end()
            if self.place < len(self.text):
                return self.text[self.place]
            if self.is_ended:
                return ""
            yield

    def literal(self, literal: str) -> Generator[None, None, bool]:
        """Whether the text goes on with ``literal``, which is gone over then."""
        while True:
            if self.text.startswith(literal, self.place):
                self.place += len(literal)
                return True
            here = self.text[self.place : self.place + len(literal)]
            if self.is_ended or not literal.startswith(here):
                return False
            yield

    def until(self, stops: Sequence[str], most: int) -> Generator[None, None, tuple[str, str] | None]:
        """Text up to the first of ``stops``, and that one, which is gone over; None when there is none within ``most``
        characters."""
        while True:
            found = first_of(self.text, stops, self.place)
            if found is not None:
                start, stop = found
                text, self.place = self.text[self.place : start], start + len(stop)
                return (text, stop) if len(text) <= most else None
            if self.is_ended or len(self.text) - self.place > most + max(map(len, stops)):
                return None
            yield

    def pass_on(
        self, stops: Sequence[str], emit: Callable[[str], None], *, holds_space: str = ""
    ) -> Generator[None, None, str]:
        """Emits text as it comes, up to the first of ``stops``; that one, or "" at the end. ``holds_space``: characters
        that are not emitted right before a stop."""
        firsts = {stop[0] for stop in stops}
        has_emitted = False
        while True:
            text, place = self.text, self.place
            found = first_of(text, stops, place)
            if found is not None:
                start, stop = found
                end = _without_space(text, place, start, holds_space)
                emit(text[place:end])
                self.space = text[end:start]
                self.place = start + len(stop)
                return stop
            if self.is_ended:
                emit(text[place:])
                self.place = len(text)
                return ""
            limit = held_from(text, stops, place) if any(first in text for first in firsts) else len(text)
            end = _without_space(text, place, limit, holds_space)
            if end > place:
                emit(text[place:end])
                self.place = end
                has_emitted = True
            self.held_space = text[end:limit] if has_emitted else ""
            yield
            self.held_space = ""


def _without_space(text: str, place: int, end: int, spaces: str) -> int:
    """``end`` without white space before it."""
    if not spaces:
        return end
    begin = max(place, end - MAX_HELD_SPACE)
    return begin + len(text[begin:end].rstrip(spaces))


def first_of(text: str, stops: Sequence[str], place: int) -> tuple[int, str] | None:
    """Where the first of ``stops`` begins, and the longest that begins there."""
    best: tuple[int, str] | None = None
    for stop in stops:
        start = text.find(stop, place)
        if start >= 0 and (best is None or start < best[0] or (start == best[0] and len(stop) > len(best[1]))):
            best = (start, stop)
    return best


def held_from(text: str, stops: Sequence[str], place: int) -> int:
    """Where the end of ``text`` begins that may become one of ``stops``."""
    longest = max(map(len, stops)) - 1
    for start in range(max(place, len(text) - longest), len(text)):
        if any(stop.startswith(text[start:]) for stop in stops):
            return start
    return len(text)
