"""One choice of a response while it grows: engine outputs in, text, token ids and log-probabilities out.

The same object serves streamed and whole responses: ``add`` returns what is new, the totals stay readable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.engine.outputs import RequestOutput
from common.errors import InvalidRequestError
from common.node.serving.answers import AnswerPlan
from common.openai import responses
from common.openai.logprobs import chat_logprobs, completion_logprobs, named_by_id, prompt_logprobs
from common.openai.sampling import OutputFields
from common.request import FinishReason, TokenLogprob
from common.text.answer_stream import AnswerStream
from common.text.answers.deltas import AnswerDelta, CallDelta
from common.text.detokenizer import StopStrings, TextStream
from common.text.tokenizer import TextCodec
from common.wire.resume import RESUME_KEY

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one engine output added. ``is_visible``: the client gets a chunk of it. ``output_token_ids``: ``token_ids``
    without an echoed prompt. ``told_reason``: how the client is told the ``finish_reason``."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    is_first: bool
    is_visible: bool
    output_token_ids: Sequence[int]
    reasoning: str = ""
    tool_calls: Sequence[dict[str, Any]] = ()
    told_reason: str | None = None


class Choice:
    """Owned by one response. ``index`` is the choice's number in it.

    ``answer``: how a chat's answer is taken apart; None: all of it is text. ``echo_text``: what is given back before
    the answer; of completions it is the prompt's text, with its tokens.
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
        answer: AnswerPlan | None = None,
    ) -> None:
        self.index = index
        self._codec = codec
        self._output = output
        self._is_chat = is_chat
        self._num_logprobs = num_logprobs
        self._echo_text = echo_text
        self._echo_token_ids = list(prompt_token_ids) if echo_text is not None and not is_chat else []
        self._piece_of = named_by_id(codec.piece) if output.return_tokens_as_token_ids else codec.piece
        self._answer = answer
        self._stream: TextStream | AnswerStream = self._create_stream(min_tokens, prompt_token_ids)
        self._is_first = True
        self._text_offset = 0
        self.text = ""
        self.reasoning = ""
        self.calls: list[CallDelta] = []
        self.token_ids: list[int] = []
        self.entries: list[TokenLogprob | None] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def _create_stream(self, min_tokens: int, prompt_token_ids: Sequence[int]) -> TextStream | AnswerStream:
        codec, output = self._codec, self._output
        if self._answer is not None:
            return codec.answer_stream(
                StopStrings(output.stop, include=output.include_stop),
                types=self._answer.types,
                thinking=self._answer.thinking,
                min_tokens=min_tokens,
                skip_special_tokens=output.skip_special_tokens,
                context_token_ids=prompt_token_ids,
            )
        return TextStream(
            codec.decoder,
            output.stop,
            output.skip_special_tokens,
            min_tokens=min_tokens,
            include_stop=output.include_stop,
            context_token_ids=prompt_token_ids,
        )

    @property
    def num_completion_tokens(self) -> int:
        return self._stream.num_tokens

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None: nobody looked for them."""
        return self._stream.num_reasoning_tokens if isinstance(self._stream, AnswerStream) else None

    @property
    def told_reason(self) -> str | None:
        """``finish_reason`` as the client is told it: ``tool_calls`` where the answer ends with calls that the model
        chose to make."""
        if self.finish_reason is None:
            return None
        if self.finish_reason is FinishReason.STOP and isinstance(self._stream, AnswerStream):
            assert self._answer is not None
            if self._stream.has_calls and not self._answer.is_named:
                return TOOL_CALLS
        return self.finish_reason.value

    def tool_calls(self) -> list[dict[str, Any]]:
        """All calls."""
        return [responses.tool_call(self._call_id(call), call.name or "", call.arguments) for call in self.calls]

    def _call_id(self, call: CallDelta) -> str:
        """The model's own, or one that is the same wherever the answer is made."""
        if call.call_id is not None:
            return call.call_id
        assert self._answer is not None
        key = f"{self._answer.call_key}/{self.index}/{call.index}".encode()
        return "call_" + hashlib.blake2b(key, digest_size=12).hexdigest()

    def _pieces(self, calls: Sequence[CallDelta]) -> list[dict[str, Any]]:
        return [
            responses.tool_call_piece(
                call.index,
                call.arguments,
                call_id=self._call_id(call) if call.name is not None else "",
                name=call.name,
            )
            for call in calls
        ]

    def add(self, output: RequestOutput) -> ChoiceDelta:
        """Adds one output; after a stop string matched, ``finish_reason`` is set whatever the engine says."""
        ended_by_token = output.finish_reason is FinishReason.STOP and bool(output.token_ids)
        delta = self._stream.add(output.token_ids, hide_last=ended_by_token and not self._output.include_stop)
        text, token_ids = delta.text, list(output.token_ids[: delta.num_tokens_consumed])
        answer = delta.answer
        output_token_ids = token_ids
        entries: list[TokenLogprob | None] = list((output.logprobs or [])[: delta.num_tokens_consumed])
        if delta.stopped is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, delta.stopped
        elif output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            rest = self._stream.finish()
            text += rest.text
            if answer is not None and rest.answer is not None:
                answer.add(rest.answer)
            if rest.stopped is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP, rest.stopped
        if self._is_first and self._echo_text is not None:
            text = self._echo_text + text
            token_ids = self._echo_token_ids + token_ids
            if output.prompt_logprobs is not None and self._echo_token_ids and self._num_logprobs is not None:
                entries = list(output.prompt_logprobs) + entries
        is_first, self._is_first = self._is_first, False
        logprobs = self._logprobs_block(entries, token_ids)
        reasoning, tool_calls = ("", []) if answer is None else self._take(answer)
        self.text += text
        self.token_ids += token_ids
        self.entries += entries
        is_visible = bool(text or reasoning or tool_calls) or is_first or self.finish_reason is not None
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
            reasoning,
            tool_calls,
            self.told_reason,
        )

    def _take(self, answer: AnswerDelta) -> tuple[str, list[dict[str, Any]]]:
        """Adds what there is beside content; as the client gets it."""
        assert self._answer is not None
        tool_calls = self._pieces(answer.calls)
        for call in answer.calls:
            if call.name is None and self.calls:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)
        reasoning = answer.reasoning if self._answer.tells_reasoning else ""
        self.reasoning += reasoning
        return reasoning, tool_calls

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
