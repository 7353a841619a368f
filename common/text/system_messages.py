"""Conversations of several system messages, for templates that take one, at the beginning.

Such templates refuse the others, and with them the request. What is refused is tried again: 1 the system messages that
the conversation begins with are one, 2 later ones are said by the user, 3 both. What a template takes as it is stays
so. ``cache_control`` marks go with the text before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.openai.messages import PART_SEPARATOR, CacheMark, text_of

SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Checked messages, and the marks in them."""

    messages: Sequence[Mapping[str, Any]]
    marks: Sequence[CacheMark]


def alternatives(given: Dialogue) -> Iterator[Dialogue]:
    """What to try, one after the other, where a template refuses ``given``."""
    messages = given.messages
    num_leading = next((i for i, each in enumerate(messages) if each["role"] != SYSTEM), len(messages))
    joined = _joined(given, num_leading) if num_leading > 1 else None
    if joined is not None:
        yield joined
    if any(each["role"] == SYSTEM for each in messages[num_leading:]):
        yield _said_by_user(given, num_leading)
        if joined is not None:
            yield _said_by_user(joined, 1)


def _joined(given: Dialogue, count: int) -> Dialogue:
    """The first ``count`` messages as parts of the first one."""
    parts: list[Any] = []
    ends: list[int] = []  # of each message in the joined text, with the separator behind it
    for message in given.messages[:count]:
        content = message["content"]
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
        ends.append((ends[-1] if ends else 0) + len(text_of(content) or "") + len(PART_SEPARATOR))
    has_images = any("text" not in part for part in parts)
    first = {**given.messages[0], "content": parts if has_images else text_of(parts)}
    marks = [_moved(mark, ends, has_images=has_images) for mark in given.marks]
    return Dialogue([first, *given.messages[count:]], marks)


def _moved(mark: CacheMark, ends: Sequence[int], *, has_images: bool) -> CacheMark:
    """``mark`` where messages up to ``ends`` are one. Content with an image is no text that could be cut: its end is
    marked."""
    index = mark.message_index
    if index >= len(ends):
        return replace(mark, message_index=index - len(ends) + 1)
    if has_images or (mark.num_chars is None and index == len(ends) - 1):
        return CacheMark(0)
    return CacheMark(0, ends[index] if mark.num_chars is None else mark.num_chars + (ends[index - 1] if index else 0))


def _said_by_user(given: Dialogue, begin: int) -> Dialogue:
    """Without system messages from message ``begin`` on."""
    later = [{**each, "role": "user"} if each["role"] == SYSTEM else each for each in given.messages[begin:]]
    return Dialogue([*given.messages[:begin], *later], given.marks)
