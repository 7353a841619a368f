"""What an answer's text turned out to be: pieces of reasoning, of content, and of calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.text.answers.values import escaped

_IN_JSON = re.compile(r"\\.?|[\"\x00-\x1f]", re.DOTALL)


@dataclass(slots=True)
class CallDelta:
    """A piece of call number ``index``. ``name`` comes once, with the first piece; ``arguments`` is a fragment of JSON
    text. ``call_id``: the model's own, in formats that have one."""

    index: int
    name: str | None = None
    arguments: str = ""
    call_id: str | None = None


@dataclass(slots=True)
class AnswerDelta:
    """What one piece of text added. Within it reasoning comes first, then content, then calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def add(self, other: AnswerDelta) -> None:
        """Puts what came next behind."""
        self.reasoning += other.reasoning
        self.content += other.content
        for call in other.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


class DeltaSink:
    """Where parsers put what they find. ``num_calls`` have begun, ``is_call_open``: the last one has not ended.

    ``texts``: what the characters that stand for special tokens are called, where they turned out to mark nothing.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self.num_calls = 0
        self.is_call_open = False
        self._delta = AnswerDelta()
        self._is_in_string = False
        self._half_escape = ""

    def take(self) -> AnswerDelta:
        """What came since the last time."""
        delta, self._delta = self._delta, AnswerDelta()
        return delta

    def reasoning(self, text: str) -> None:
        self._delta.reasoning += self.spelled(text)

    def content(self, text: str) -> None:
        self._delta.content += self.spelled(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        self._delta.calls.append(CallDelta(self.num_calls, self.spelled(name), "", call_id and self.spelled(call_id)))
        self.num_calls += 1
        self.is_call_open = True
        self._is_in_string, self._half_escape = False, ""

    def arguments(self, text: str) -> None:
        text, self._half_escape = self._half_escape + text, ""
        text = _IN_JSON.sub(self._mended, self.spelled(text))
        if not text:
            return
        calls, index = self._delta.calls, self.num_calls - 1
        if calls and calls[-1].index == index:
            calls[-1].arguments += text
        else:
            calls.append(CallDelta(index, None, text))

    def end_call(self) -> None:
        self.is_call_open = False

    def _mended(self, found: re.Match[str]) -> str:
        """A control character in a string is escaped: many models write line breaks as they are, which is no JSON."""
        mark = found.group()
        if mark == "\\":  # the piece ends in the middle of an escape
            self._half_escape = mark
            return ""
        if mark == '"':
            self._is_in_string = not self._is_in_string
        if not self._is_in_string or mark[-1] >= " ":
            return mark
        return mark[:-1] * 2 + escaped(mark[-1])  # a backslash before one stands for itself

    def spelled(self, text: str) -> str:
        """``text`` with the names of special tokens in place of their characters, which JSON would escape."""
        if self._texts and not text.isascii():
            for character, marker in self._texts.items():
                text = text.replace(character, marker)
        return text
