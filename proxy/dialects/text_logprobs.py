"""Which of a chat's log-probabilities are those of its text.

A chat has one entry for each token: of reasoning and calls too, with their markers, and of the end. A token may come
before its text: half a character, what may become a stop string. Here an entry waits until the text says whether it is
of it, so that the entries that come out are the same for a stream and a whole answer, and their bytes spell the text.
Servers of another make may name tokens otherwise than their text: where one does, all entries are passed on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]

_REPLACEMENT = "\ufffd".encode()
"""In the text for bytes of tokens that are no character."""


class TextLogprobs:
    """Of one answer. Holds what is not decided."""

    def __init__(self) -> None:
        self._waiting: deque[Entry] = deque()
        self._text = b""  # from its place on without entries so far
        self._place = 0
        self._num_left_out = 0
        self._has_begun = False
        self._has_entries = False
        self._passes_all = False

    def add(self, entries: Sequence[Entry], text: str, num_reasoning_tokens: int | None) -> list[Entry]:
        """More of the answer; the text's entries that are known now. ``num_reasoning_tokens``: of all so far; None: the
        answer is nothing but text."""
        if self._passes_all:
            return list(entries)
        self._has_entries |= bool(entries)
        if not self._has_entries:
            return []
        self._waiting += entries
        self._text, self._place = self._text[self._place :] + text.encode(), 0
        while self._waiting and not self._has_begun and self._num_left_out < (num_reasoning_tokens or 0):
            self._waiting.popleft()
            self._num_left_out += 1
        found: list[Entry] = []
        while self._waiting and (is_text := self._is_text(_bytes_of(self._waiting[0]))) is not None:
            if not is_text and num_reasoning_tokens is None and self._place < len(self._text):
                self._passes_all = True
                found += self._waiting
                self._waiting.clear()
                break
            entry = self._waiting.popleft()
            if is_text:
                self._has_begun = True
                found.append(entry)
        return found

    def end(self) -> list[Entry]:
        """The text goes no further: the entry of a token that does."""
        is_within = self._place < len(self._text)
        self._text, self._place = b"", 0
        return [self._waiting.popleft()] if is_within and self._waiting else []

    def _is_text(self, data: bytes) -> bool | None:
        """Whether the text goes on with ``data``, which is gone over then; None: more text has to come."""
        # White space between reasoning and text is of neither.
        for spelled in (data,) if self._has_begun else (data, data.lstrip()):
            here = self._text[self._place : self._place + len(spelled)]
            if here == spelled:
                self._place += len(spelled)
                return spelled != b""
            if len(here) < len(spelled) and spelled.startswith(here):
                return None
        if not self._text.startswith(_REPLACEMENT, self._place):
            return False
        if not _is_character(data):
            return True
        while self._text.startswith(_REPLACEMENT, self._place):
            self._place += len(_REPLACEMENT)
        return self._is_text(data)


def _bytes_of(entry: Entry) -> bytes:
    data = entry.get("bytes")
    try:
        return bytes(data) if isinstance(data, list) else str(entry.get("token", "")).encode()
    except (ValueError, TypeError):  # no bytes
        return b""


def _is_character(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
