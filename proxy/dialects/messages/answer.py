"""A chat's answer as a Message: content blocks, and the events of their making; errors in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from common.errors import TandemError
from common.openai.errors import read_error
from proxy.dialects.chat_answer import Part, PartKind, Step
from proxy.dialects.conversion import Conversion, Event, sse
from proxy.dialects.messages.request import INNER_NAMES, NAMES

REQUEST_ID_NAME = "request-id"
"""The header in which Anthropic's clients look for a request's id."""
SIGNATURE = "tandem"
"""Of reasoning. Clients send it back with the block; it is not read."""

# Status -> type of an error; others: below 500 a bad request, from there on the service's fault.
_ERRORS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_PING: Event = {"type": "ping"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesConversion(Conversion):
    """``request_id`` names the answer. ``has_marks``: the client asked for its prompt to be kept."""

    inner_names = INNER_NAMES
    at_work = sse(_PING)

    def __init__(self, request_id: str, *, has_marks: bool, names: Mapping[str, str] = NAMES) -> None:
        super().__init__()
        self.names = names
        self._id = request_id
        self._has_marks = has_marks
        self.headers = {REQUEST_ID_NAME: request_id}

    def error(self, error: TandemError) -> dict[str, Any]:
        return {**error_of(self.renamed(error)), "request_id": self._id}

    # --- whole

    def build(self) -> dict[str, Any]:
        content = [self._block(part) for part in self.answer.parts]
        message = self._message(content, **self._stop())
        return message if self.answer.trace is None else {**message, "tandem": self.answer.trace}

    def _message(self, content: list[dict[str, Any]], **stop: Any) -> dict[str, Any]:
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self.answer.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
            **stop,
        }

    def _block(self, part: Part, *, is_begun: bool = False) -> dict[str, Any]:
        text = "" if is_begun else part.text
        if part.kind is PartKind.TEXT:
            return {"type": "text", "text": text}
        if part.kind is PartKind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": "" if is_begun else SIGNATURE}
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _arguments(text)}

    def _stop(self) -> dict[str, Any]:
        answer = self.answer
        if answer.finish_reason == "stop" and answer.has_calls:  # of a tool that was asked for by name
            return {"stop_reason": "tool_use"}
        if answer.finish_reason == "stop" and isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": _STOP_REASONS.get(answer.finish_reason or "", "end_turn")}

    def _usage(self) -> dict[str, Any]:
        """Tokens of the prompt: read from the cache, computed and kept because a mark asks for it, computed."""
        answer = self.answer
        computed = answer.num_prompt_tokens - answer.num_cached_tokens
        return {
            "input_tokens": 0 if self._has_marks else computed,
            "cache_creation_input_tokens": computed if self._has_marks else 0,
            "cache_read_input_tokens": answer.num_cached_tokens,
            "output_tokens": answer.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": answer.num_reasoning_tokens},
        }

    # --- events

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self._message([])}
        yield _PING

    def begin_part(self, step: Step) -> Iterator[Event]:
        block = self._block(step.part, is_begun=True)
        yield {"type": "content_block_start", "index": step.part.index, "content_block": block}

    def add(self, step: Step) -> Iterator[Event]:
        if step.part.kind is PartKind.TEXT:
            yield _delta(step.part, "text_delta", text=step.text)
        elif step.part.kind is PartKind.REASONING:
            yield _delta(step.part, "thinking_delta", thinking=step.text)
        else:
            yield _delta(step.part, "input_json_delta", partial_json=step.text)

    def end_part(self, step: Step) -> Iterator[Event]:
        if step.part.kind is PartKind.REASONING:
            yield _delta(step.part, "signature_delta", signature=SIGNATURE)
        yield {"type": "content_block_stop", "index": step.part.index}

    def end(self) -> Iterator[Event]:
        delta = {"stop_reason": None, "stop_sequence": None, **self._stop()}
        last: Event = {"type": "message_delta", "delta": delta, "usage": self._usage()}
        yield last if self.answer.trace is None else {**last, "tandem": self.answer.trace}
        yield {"type": "message_stop"}

    def fail(self, error: TandemError) -> Iterator[Event]:
        yield self.error(error)


def _delta(part: Part, kind: str, **fields: str) -> Event:
    return {"type": "content_block_delta", "index": part.index, "delta": {"type": kind, **fields}}


def _arguments(text: str) -> Mapping[str, Any]:
    """Of a call that was cut off: none."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def error_of(error: TandemError) -> dict[str, Any]:
    """``error`` as the API has it."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message_of(error)}}


def _message_of(error: TandemError) -> str:
    """Of a request that does not fit into the context, Anthropic's own words: they are all that clients have to tell it
    by (there is no ``code``), and some read the numbers in them to ask again for less."""
    overflow = error.overflow
    if overflow is None:
        return error.message
    prompt, most = overflow.num_prompt_tokens, overflow.max_model_len
    if overflow.max_tokens is None:
        return f"prompt is too long: {prompt} tokens > {most} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {overflow.max_tokens} > {most}, "
        "decrease input length or `max_tokens` and try again"
    )


def shape_error(response: Response, request_id: str) -> Response:
    """An error as every other route has it, in the API's own shape."""
    error = read_error(orjson.loads(bytes(response.body)), response.status_code)
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    body = orjson.dumps({**error_of(error), "request_id": request_id})
    return Response(body, response.status_code, {**headers, REQUEST_ID_NAME: request_id})
