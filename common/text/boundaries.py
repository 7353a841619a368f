"""Where in a chat prompt a later prompt is likely to part from it: exact token positions worth a kept state.

A recurrent state cannot be cut back, so a prefix can be resumed only where a state was kept, and the first prompt that
has a prefix is the one that passes through it. The places are known from the conversation: ``cache_control`` marks, the
ends of the last images, the end of system prompt and tools, the end of the last message before the generation prompt,
the end of each earlier turn.

1 a candidate is rendered as a conversation that ends there, without a generation prompt; where that text is no prefix
of the whole text (templates that refuse partial conversations, or drop earlier reasoning), the conversation is rendered
with another text in the next message, and the candidate ends where the two texts part. 2 The text between the
candidate and a known place is tokenised: the candidate is kept where that gives the prompt's own tokens. 3 The first
few stay.

Cost: at most ``2 * MAX_CANDIDATES`` renderings, and less than one more tokenisation of the prompt; in a long chat the
texts between are short. A wrong position could only waste a state, never give a wrong answer. Nothing here fails a
request.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from common.openai.messages import CacheMark, text_of
from common.openai.prompt_ids import MAX_BOUNDARIES

MAX_CANDIDATES = 12
"""Places that are examined, the most promising first; each costs up to two renderings."""

MAX_IMAGE_ENDS = 3
"""Ends of images that are kept, the last ones: a history of images grows at its end."""

MIN_GAP = 16
"""Tokens below which a boundary is not worth a state beside its neighbour (or beside the prompt's start)."""


class ChatRenderer(Protocol):
    """One chat request's template, tools and arguments, with a tokenizer."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, continue_final_message: bool
    ) -> str | None:
        """Text of a conversation; None when the template refuses it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of rendered text."""
        ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat request says of its prompt. ``messages`` have text content, or a list with images in it."""

    messages: Sequence[Mapping[str, Any]]
    marks: Sequence[CacheMark]
    has_tools: bool
    add_generation_prompt: bool
    continue_final_message: bool


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The prefix of ``num_messages`` whole messages and, when given, ``num_chars`` of the next one's content."""

    num_messages: int
    num_chars: int | None = None
    is_marked: bool = False


def semantic_boundaries(
    conversation: Conversation, token_ids: list[int], renderer: ChatRenderer, image_ends: Sequence[int] = ()
) -> tuple[int, ...]:
    """Positions below ``len(token_ids)``, the tokens of the rendered ``conversation``; the most reusable first.
    ``image_ends``: where images end, likewise."""
    text = renderer.render(
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
    )
    if not text:
        return ()
    positions = _Positions(text, token_ids, renderer)
    kept: list[int] = []
    ends = [position for position in image_ends if 0 < position < len(token_ids)][:MAX_IMAGE_ENDS]
    for candidate in _candidates(conversation)[:MAX_CANDIDATES]:
        if not candidate.is_marked:
            kept, ends = [*kept, *(each for each in ends if each not in kept)][:MAX_BOUNDARIES], []
        if len(kept) == MAX_BOUNDARIES:
            break
        cut = _cut(candidate, conversation, text, renderer)
        position = positions.find(cut) if 0 < cut < len(text) else None
        near = 1 if candidate.is_marked else MIN_GAP
        if position and position < len(token_ids) and all(abs(position - other) >= near for other in (0, *kept)):
            kept.append(position)
    return tuple([*kept, *(each for each in ends if each not in kept)][:MAX_BOUNDARIES])


def _candidates(conversation: Conversation) -> list[_Candidate]:
    """The most reusable first: marks, system prompt and tools, the last message, turns from the last one back, the
    other messages likewise."""
    messages = conversation.messages
    num_system = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    earlier = range(len(messages) - 1, num_system, -1)
    found = [
        _Candidate(mark.message_index + (mark.num_chars is None), mark.num_chars, is_marked=True)
        for mark in reversed(conversation.marks)
    ]
    if num_system or conversation.has_tools:
        found.append(_Candidate(num_system))
    if conversation.add_generation_prompt:
        found.append(_Candidate(len(messages)))
    found += [_Candidate(index) for index in earlier if messages[index]["role"] == "user"]
    found += [_Candidate(index) for index in earlier if messages[index]["role"] != "user"]
    unique: dict[tuple[int, int | None], _Candidate] = {}
    for candidate in found:
        unique.setdefault((candidate.num_messages, candidate.num_chars), candidate)
    return list(unique.values())


def _cut(candidate: _Candidate, conversation: Conversation, text: str, renderer: ChatRenderer) -> int:
    """Length of the part of ``text`` that ends at the candidate; 0 when it cannot be told."""
    messages, index = conversation.messages, candidate.num_messages
    if candidate.num_chars is None:
        part = renderer.render(messages[:index], add_generation_prompt=False, continue_final_message=False)
        if part and text.startswith(part):
            return len(part)
        if index >= len(messages) or messages[index]["role"] != "user":
            return 0  # templates look back from the last user message: another one changes what is before it
        kept, following = "", text_of(messages[index]["content"]) or ""
        rest: Sequence[Mapping[str, Any]] = ()
    else:
        content = text_of(messages[index]["content"]) or ""
        kept, following = content[: candidate.num_chars], content[candidate.num_chars :]
        rest = messages[index + 1 :]  # some templates refuse a conversation without them
    other = {**messages[index], "content": kept + ("1" if following.lstrip().startswith("0") else "0")}
    variant = renderer.render(
        [*messages[:index], other, *rest], add_generation_prompt=False, continue_final_message=False
    )
    return _common_length(text, variant) if variant else 0


def _common_length(one: str, other: str) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class _Positions:
    """Token positions of places in the prompt's text.

    A place is reached from the nearest one whose position is known, the text's ends to begin with: the piece between
    the two must become the prompt's own tokens. Where a piece by itself does not, it is tried from the text's end.
    """

    def __init__(self, text: str, token_ids: list[int], renderer: ChatRenderer) -> None:
        self._text = text
        self._token_ids = token_ids
        self._renderer = renderer
        self._known = [(0, 0), (len(text), len(token_ids))]
        self._budget = len(text)

    def find(self, cut: int) -> int | None:
        """Tokens before character ``cut``; None when it is inside a token, or too much text was looked at."""
        index = bisect.bisect_left(self._known, (cut, 0))
        below, above = self._known[max(0, index - 1)], self._known[index]
        is_forward = cut - below[0] < above[0] - cut
        tries = (below, self._known[0]) if is_forward else (above, self._known[-1])
        for chars, tokens in dict.fromkeys(tries):
            self._budget -= abs(cut - chars)
            if self._budget < 0:
                return None
            piece = self._renderer.encode(self._text[min(cut, chars) : max(cut, chars)])
            begin = tokens if is_forward else tokens - len(piece)
            if begin >= 0 and self._token_ids[begin : begin + len(piece)] == piece:
                position = begin + len(piece) if is_forward else begin
                bisect.insort(self._known, (cut, position))
                return position
        return None
