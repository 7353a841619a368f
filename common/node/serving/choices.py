"""One choice of a response while it grows: engine outputs in, text, token ids and log-probabilities out.

The same object serves streamed and whole responses: ``add`` returns what is new, the totals stay readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.engine.outputs import RequestOutput
from common.errors import InvalidRequestError
from common.openai.logprobs import chat_logprobs, completion_logprobs, named_by_id, prompt_logprobs
from common.openai.protocol import OutputFields
from common.request import FinishReason, TokenLogprob
from common.text.detokenizer import TextStream
from common.text.tokenizer import TextCodec
from common.wire.resume import RESUME_KEY


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one engine output added. ``is_visible``: the client gets a chunk of it. ``output_token_ids``: ``token_ids``
    without an echoed prompt."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    is_first: bool
    is_visible: bool
    output_token_ids: Sequence[int]


class Choice:
    """Owned by one response. ``index`` is the choice's number in it.

    ``echo_text``: what is given back before the answer; of completions it is the prompt's text, with its tokens.
    """

    def __init__(
        self,
        index: int,
        codec: TextCodec,
        output: OutputFields,
        *,
        is_chat: bool,
        num_logprobs: int | None,
        min_tokens: int,
        prompt_token_ids: Sequence[int],
        echo_text: str | None = None,
    ) -> None:
        self.index = index
        self._codec = codec
        self._output = output
        self._is_chat = is_chat
        self._num_logprobs = num_logprobs
        self._echo_text = echo_text
        self._echo_token_ids = list(prompt_token_ids) if echo_text is not None and not is_chat else []
        self._piece_of = named_by_id(codec.piece) if output.return_tokens_as_token_ids else codec.piece
        self._stream = TextStream(
            codec.tokenizer,
            output.stop,
            output.skip_special_tokens,
            min_tokens=min_tokens,
            include_stop=output.include_stop,
            context_token_ids=prompt_token_ids,
        )
        self._is_first = True
        self._text_offset = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.entries: list[TokenLogprob | None] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_completion_tokens(self) -> int:
        return self._stream.num_tokens

    def add(self, output: RequestOutput) -> ChoiceDelta:
        """Adds one output; after a stop string matched, ``finish_reason`` is set whatever the engine says."""
        ended_by_token = output.finish_reason is FinishReason.STOP and bool(output.token_ids)
        delta = self._stream.add(output.token_ids, hide_last=ended_by_token and not self._output.include_stop)
        text, token_ids = delta.text, list(output.token_ids[: delta.num_tokens_consumed])
        output_token_ids = token_ids
        entries: list[TokenLogprob | None] = list((output.logprobs or [])[: delta.num_tokens_consumed])
        if delta.stopped is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, delta.stopped
        elif output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            rest = self._stream.finish()
            text += rest.text
            if rest.stopped is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP, rest.stopped
        if self._is_first and self._echo_text is not None:
            text = self._echo_text + text
            token_ids = self._echo_token_ids + token_ids
            if output.prompt_logprobs is not None and self._echo_token_ids and self._num_logprobs is not None:
                entries = list(output.prompt_logprobs) + entries
        is_first, self._is_first = self._is_first, False
        logprobs = self._logprobs_block(entries, token_ids)
        self.text += text
        self.token_ids += token_ids
        self.entries += entries
        is_visible = bool(text) or is_first or self.finish_reason is not None
        is_visible = is_visible or (bool(token_ids) and (logprobs is not None or self._output.return_token_ids))
        return ChoiceDelta(
            self.index,
            text,
            token_ids,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            is_first,
            is_visible,
            output_token_ids,
        )

    def resume(self, token_ids: Sequence[int]) -> None:
        """Adds what the client got from another node, so that the next text continues it exactly.

        Raises:
            InvalidRequestError: a stop string is in it: the answer has ended.
        """
        if self._stream.add(token_ids).stopped is not None:
            raise InvalidRequestError(
                f"{RESUME_KEY}.output_token_ids hold the stop string {self._stream.stopped!r}: the answer has ended",
                param=RESUME_KEY,
            )
        self._is_first = False
        if self._num_logprobs is not None:
            self._advance_text_offset(token_ids)

    def all_logprobs(self) -> dict[str, Any] | None:
        """The block of the whole choice."""
        self._text_offset = 0
        return self._logprobs_block(self.entries, self.token_ids)

    def prompt_logprobs(self, entries: Sequence[TokenLogprob | None], *, num_top: int) -> list[dict[str, Any] | None]:
        """``prompt_logprobs`` of the prompt's tokens."""
        return prompt_logprobs(entries, self._piece_of, num_top=num_top)

    def _logprobs_block(
        self, entries: Sequence[TokenLogprob | None], token_ids: Sequence[int]
    ) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        if self._is_chat:
            return chat_logprobs([e for e in entries if e is not None], self._piece_of, num_top=self._num_logprobs)
        block = completion_logprobs(
            entries,
            self._piece_of,
            token_ids=token_ids,
            text_offset=self._text_offset,
            skip_special_tokens=self._output.skip_special_tokens,
            num_top=self._num_logprobs,
        )
        self._advance_text_offset(token_ids[: len(entries)])
        return block

    def _advance_text_offset(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            piece = self._codec.piece(token_id)
            if not (piece.is_special and self._output.skip_special_tokens):
                self._text_offset += piece.num_chars
