"""Token ids of a chat's answer to reasoning, content and calls, and stop strings in the content.

Text comes out of the tokens as in ``common.text.detokenizer``, a parser takes it apart. What comes out depends on the
tokens alone, not on how many come at once, so that an answer that goes on elsewhere goes on exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.text.answers.deltas import AnswerDelta
from common.text.answers.parser import AnswerParser
from common.text.detokenizer import Delta, StopStrings, TextStream


class AnswerStream:
    """
    Args:
        text: of all tokens, without stop strings.
        parser: of this answer alone.
        markers: special token -> its character in the parser's text, and its name.
        stops: looked for in content, from token number ``min_tokens`` on; none is partly before a call. White space
            behind content counts at once, although it is left out where a call follows.
    """

    def __init__(
        self,
        text: TextStream,
        parser: AnswerParser,
        markers: Mapping[int, tuple[str, str]],
        stops: StopStrings,
        *,
        min_tokens: int,
    ) -> None:
        self._text = text
        self._parser = parser
        self._markers = markers
        self._stops = stops
        self._min_tokens = min_tokens
        self._is_finished = False
        self.num_reasoning_tokens = 0
        """Tokens of reasoning, with its markers."""

    @property
    def num_tokens(self) -> int:
        """Tokens consumed so far; what ``usage`` counts."""
        return self._text.num_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the content."""
        return self._stops.found

    @property
    def has_calls(self) -> bool:
        """There are calls, and all are whole."""
        return self._parser.num_calls > 0 and not self._parser.is_call_open

    def add(self, token_ids: Sequence[int], *, hide_last: bool = False) -> Delta:
        """As of ``TextStream``; ``text`` is content."""
        assert not self._is_finished, "answer stream used after its end"
        total = AnswerDelta()
        num_visible = len(token_ids) - 1 if hide_last else len(token_ids)
        for index in range(num_visible):
            token_id = token_ids[index]
            was_reasoning = self._parser.is_reasoning
            text = self._text.add((token_id,)).text
            marker = self._markers.get(token_id)
            if marker is not None:
                text = text.removesuffix(marker[1]) + marker[0]
            self._take(self._parser.feed(text), total)
            self.num_reasoning_tokens += was_reasoning or self._parser.is_reasoning
            if self.stopped is not None:
                self._is_finished = True
                return Delta(total.content, index + 1, self.stopped, total)
        if hide_last and token_ids:
            self._text.add(token_ids[-1:], hide_last=True)
        return Delta(total.content, len(token_ids), None, total)

    def finish(self) -> Delta:
        """The rest."""
        total = AnswerDelta()
        if not self._is_finished:
            self._is_finished = True
            self._take(self._parser.feed(self._text.finish().text), total)
            if self.stopped is None:
                self._take(self._parser.finish(), total)
            if self.stopped is None:
                total.content += self._stops.held
        return Delta(total.content, 0, self.stopped, total)

    def _take(self, delta: AnswerDelta, total: AnswerDelta) -> None:
        looks_for_stops = self.num_tokens >= self._min_tokens
        if delta.content and looks_for_stops:
            delta.content = self._stops.match(delta.content)
        if self.stopped is None and any(call.name is not None for call in delta.calls):
            # What is held comes before the call, and is no part of a stop string that goes on behind it.
            delta.content, self._stops.held = delta.content + self._stops.held, ""
        space = self._parser.held_space
        if self.stopped is None and looks_for_stops and self._stops.ends_in(space):
            delta.content += self._stops.match(space)
        total.add(delta)
