"""Token ids to text as they arrive, and stop strings in that text.

One ``TextStream`` per choice. 1 ``add`` decodes a short window of ids and emits only what later tokens cannot change: a
character whose bytes are spread over tokens comes out whole, with its last token. 2 What could be the beginning of a
stop string is held back. 3 At a stop string the text ends before it and no later token is consumed. 4 ``finish``
gives out what was held. Owns nothing but its own lists; not thread-safe.

``tokenizers.decoders.DecodeStream`` cannot take its place, although it is faster (4 against 32 us a token): it holds
invalid bytes back for ever, gives nothing out at the end, and needs a tokenizer of that library, which models with a
tokenizer in Python do not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.text.answers.deltas import AnswerDelta

REPLACEMENT = "\ufffd"
MAX_PENDING_CHARS = 3
"""Replacement characters at the end that may still become a character: one has at most 4 bytes, and some decoders show
one for each."""
CONTEXT_TOKENS = 6
"""Earlier tokens that stay in the window: some decoders drop the space of the first token they see."""
MAX_WINDOW_TOKENS = 24
"""Above this, tokens on the left leave the window, so that a step's cost does not grow with the output."""


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Delta:
    """What one ``add`` produced.

    ``num_tokens_consumed`` counts the given ids that belong to the output: all, or up to and with the one whose text
    completed a stop string. ``stopped`` is that stop string. ``answer``: what else there is beside ``text``, of an
    answer that is taken apart.
    """

    text: str
    num_tokens_consumed: int
    stopped: str | None = None
    answer: AnswerDelta | None = None


class StopStrings:
    """Looks for stop strings in text that comes in pieces; ``found`` is the one that ended it.

    ``include``: the text ends with the stop string, not before it.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = tuple(stop)
        self._longest = max((len(item) for item in self._stop), default=0)
        self._include = include
        self.held = ""
        self.found: str | None = None

    def match(self, new: str) -> str:
        """What may be emitted of held + ``new`` text; the rest is held."""
        if not self._stop:
            return new
        text = self.held + new
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            self.held = ""
            self.found = found[2]
            return text[: found[0] if self._include else found[1]]
        num_held = 0
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                num_held = length
                break
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def ends_in(self, new: str) -> bool:
        """Whether one would be found in ``new`` text behind what is held; nothing changes."""
        return bool(new) and any(stop in self.held + new for stop in self._stop)


class TextStream:
    """Text of one choice.

    Args:
        tokenizer: decodes ids, byte tokens as of ``common.text.byte_runs``.
        stop: stop strings; the one that ends first in the text wins, however the text is cut into tokens.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: no stop string is looked for before this many tokens.
        include_stop: the text ends with the stop string, not before it.
        context_token_ids: ids before the first (the prompt's last ones), for decoders that need a left neighbour.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        context_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stop, include=include_stop)
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        # Window of ids, and how many characters of its text were taken from it already.
        self._window = list(context_token_ids[-CONTEXT_TOKENS:])
        context = self._decode() if self._window else ""
        self._num_taken = len(self._stable(context))
        # Replacement characters that are the prompt's, unless the answer makes a character of their bytes.
        self._num_unfinished = len(context) - self._num_taken
        self._num_tokens = 0
        self._finished = False

    @property
    def num_tokens(self) -> int:
        """Tokens consumed so far; what ``usage`` counts."""
        return self._num_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def add(self, token_ids: Sequence[int], *, hide_last: bool = False) -> Delta:
        """Text that became certain with ``token_ids``.

        ``hide_last``: the last id ended the sequence (end of text, or a stop token); it counts as consumed and has no
        text.
        """
        assert not self._finished, "text stream used after its end"
        texts: list[str] = []
        num_visible = len(token_ids) - 1 if hide_last else len(token_ids)
        for index in range(num_visible):
            self._num_tokens += 1
            texts.append(self._match(self._advance(token_ids[index])))
            if self.stopped is not None:
                self._finished = True
                return Delta("".join(texts), index + 1, self.stopped)
        if hide_last and token_ids:
            self._num_tokens += 1
        return Delta("".join(texts), len(token_ids))

    def finish(self) -> Delta:
        """The rest: text held back for a stop string that did not come, and bytes that never became a character."""
        if self._finished:
            return Delta("", 0, self.stopped)
        self._finished = True
        rest = self._match(self._own(self._decode()[self._num_taken :])) if self._window else ""
        if self.stopped is not None:
            return Delta(rest, 0, self.stopped)
        rest, self._stops.held = rest + self._stops.held, ""
        return Delta(rest, 0)

    def _match(self, new: str) -> str:
        return new if self._num_tokens < self._min_tokens else self._stops.match(new)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _own(self, new: str) -> str:
        """``new`` text of the window without what the prompt left there."""
        if not new or not self._num_unfinished:
            return new
        num_left = 0
        while num_left < min(self._num_unfinished, len(new)) and new[num_left] == REPLACEMENT:
            num_left += 1
        self._num_unfinished = 0
        return new[num_left:]

    @staticmethod
    def _stable(text: str) -> str:
        """``text`` without replacement characters at its end that a next token may still turn into a character."""
        num_pending = 0
        while num_pending < min(MAX_PENDING_CHARS, len(text)) and text[-1 - num_pending] == REPLACEMENT:
            num_pending += 1
        return text[: len(text) - num_pending]

    def _advance(self, token_id: int) -> str:
        """Append one id to the window; returns the characters that became certain."""
        self._window.append(token_id)
        text = self._decode()
        stable = self._stable(text)
        new = self._own(stable[self._num_taken :])
        self._num_taken = max(self._num_taken, len(stable))
        if len(self._window) > MAX_WINDOW_TOKENS:
            # The pending characters stem from the last few ids, which stay; all text before them was taken. A cut
            # inside a run of byte tokens spoils the character that it cuts, and no later one.
            num_pending = len(text) - len(stable)
            self._window = self._window[-(CONTEXT_TOKENS + 3 * num_pending) :]
            self._num_taken = len(self._decode()) - num_pending
        return new
