"""A chat's answer as a Response: output items, and the typed events of their making.

Each part of the answer is an item: reasoning, a message with one text, a function call. What the client asked for is
given back as far as ``Echo`` keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequestError, QueueFullError, TandemError
from common.wire.json_text import dump_json
from proxy.dialects.chat_answer import Part, PartKind, Step
from proxy.dialects.conversion import Conversion, Event
from proxy.dialects.fields import as_given
from proxy.dialects.responses.body import ENCRYPTED_REASONING, LOGPROBS, ResponsesBody
from proxy.dialects.responses.request import INNER_NAMES, NAMES, seal, tools_as_given

ECHO_BYTES = 64 * 1024
"""Of instructions and tools that an answer repeats: longer ones are kept by nobody while the answer streams."""
_PREFIXES = {PartKind.REASONING: "rs", PartKind.TEXT: "msg", PartKind.CALL: "fc"}

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Echo:
    """What of the request its answer says again. ``shows_summary``: reasoning is given as the summary."""

    fields: Mapping[str, Any]
    has_logprobs: bool = False
    is_sealed: bool = False
    shows_summary: bool = False
    long_fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, body: ResponsesBody) -> Echo:
        """Takes as long as the body is."""
        include = body.include or ()
        reasoning = body.reasoning
        long_fields = {"instructions": body.instructions, "tools": tools_as_given(body.tools)}
        if len(dump_json(long_fields)) > ECHO_BYTES:
            long_fields = {"instructions": None, "tools": []}
        text: dict[str, Any] = {"format": {"type": "text"}}
        if body.text is not None:
            text |= as_given(body.text)
        if body.text is not None and body.text.format is not None:
            text["format"] = as_given(body.text.format)
        fields = {
            "background": False,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True if body.parallel_tool_calls is None else body.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": text,
            "tool_choice": body.tool_choice or "auto",
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }
        return cls(
            fields,
            has_logprobs=LOGPROBS in include or bool(body.top_logprobs),
            is_sealed=ENCRYPTED_REASONING in include,
            shows_summary=reasoning is not None and bool(reasoning.summary or reasoning.generate_summary),
            long_fields=long_fields,
        )


class ResponsesConversion(Conversion):
    """``request_id`` names the answer."""

    names = NAMES
    inner_names = INNER_NAMES

    def __init__(self, echo: Echo, request_id: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._echo = echo
        self._id = request_id
        self._number = -1

    # --- whole

    def build(self) -> dict[str, Any]:
        is_cut = self.answer.finish_reason == "length"
        return self._response(
            "incomplete" if is_cut else "completed",
            output=[self._item(part) for part in self.answer.parts],
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        )

    def _response(self, status: str, *, output: list[Item], **fields: Any) -> dict[str, Any]:
        answer = self.answer
        response = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": answer.created or int(self.clock()),
            "completed_at": int(self.clock()) if status == "completed" else None,
            "status": status,
            "model": answer.model,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None if status == "in_progress" else self._usage(),
            **self._echo.fields,
            **self._echo.long_fields,
            **fields,
        }
        return response if answer.trace is None else {**response, "tandem": answer.trace}

    def _usage(self) -> dict[str, Any]:
        answer = self.answer
        return {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
            "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
        }

    def _item_id(self, part: Part) -> str:
        return f"{_PREFIXES[part.kind]}_{self._id}_{part.index}"

    def _item(self, part: Part, *, is_begun: bool = False) -> Item:
        """``part`` as far as it is. ``is_begun``: as it begins, without content."""
        is_cut = part is self.answer.parts[-1] and self.answer.finish_reason in (None, "length")
        status = "in_progress" if is_begun else "incomplete" if is_cut else "completed"
        item: Item = {"id": self._item_id(part), "status": status}
        if part.kind is PartKind.CALL:
            arguments = "" if is_begun else part.text
            return {**item, "type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": arguments}
        contents = [] if is_begun else [self._content(part)]
        if part.kind is PartKind.TEXT:
            return {**item, "type": "message", "role": "assistant", "content": contents}
        item |= {"type": "reasoning", "summary": []}
        item["summary" if self._echo.shows_summary else "content"] = contents
        if self._echo.is_sealed:
            item["encrypted_content"] = None if is_begun else seal(part.text)
        return item

    def _content(self, part: Part, *, is_begun: bool = False) -> dict[str, Any]:
        text = "" if is_begun else part.text
        if part.kind is PartKind.REASONING:
            return {"type": "summary_text" if self._echo.shows_summary else "reasoning_text", "text": text}
        logprobs = part.logprobs_json if self._echo.has_logprobs and not is_begun else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    # --- events

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response=self._response("in_progress", output=[]))
        yield self._event("response.in_progress", response=self._response("in_progress", output=[]))

    def begin_part(self, step: Step) -> Iterator[Event]:
        part = step.part
        yield self._event("response.output_item.added", output_index=part.index, item=self._item(part, is_begun=True))
        if part.kind is not PartKind.CALL:
            yield self._part_event("part.added", part, part=self._content(part, is_begun=True))

    def add(self, step: Step) -> Iterator[Event]:
        part = step.part
        if part.kind is PartKind.TEXT:
            logprobs = step.logprobs_json if self._echo.has_logprobs else []
            yield self._part_event("text.delta", part, delta=step.text, logprobs=logprobs)
        else:
            yield self._part_event("text.delta", part, delta=step.text)

    def end_part(self, step: Step) -> Iterator[Event]:
        part = step.part
        if part.kind is PartKind.CALL:
            yield self._part_event("text.done", part, arguments=part.text)
        else:
            content = self._content(part)
            logprobs = {"logprobs": content["logprobs"]} if part.kind is PartKind.TEXT else {}
            yield self._part_event("text.done", part, text=part.text, **logprobs)
            yield self._part_event("part.done", part, part=content)
        yield self._event("response.output_item.done", output_index=part.index, item=self._item(part))

    def end(self) -> Iterator[Event]:
        response = self.build()
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: TandemError) -> Iterator[Event]:
        told = {"code": _error_code(error), "message": error.message, "param": error.param, "type": error.type}
        output = [self._item(part) for part in self.answer.parts]
        yield self._event("response.failed", response=self._response("failed", output=output, error=told))

    def _part_event(self, what: str, part: Part, /, **fields: Any) -> Event:
        """``what``: part.added, text.delta, text.done or part.done; each kind of part has its own names for them."""
        place: dict[str, Any] = {"item_id": self._item_id(part), "output_index": part.index}
        if part.kind is PartKind.CALL:
            what = what.replace("text.", "function_call_arguments.")
        elif part.kind is PartKind.TEXT:
            what = what.replace("text.", "output_text.").replace("part.", "content_part.")
            place["content_index"] = 0
        elif self._echo.shows_summary:
            what = what.replace("text.", "reasoning_summary_text.").replace("part.", "reasoning_summary_part.")
            place["summary_index"] = 0
        else:
            what = what.replace("text.", "reasoning_text.").replace("part.", "content_part.")
            place["content_index"] = 0
        return self._event(f"response.{what}", **place, **fields)

    def _event(self, name: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": name, "sequence_number": self._number, **fields}


def _error_code(error: TandemError) -> str:
    """One of those that the API has."""
    if error.type == QueueFullError.type:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.type == InvalidRequestError.type else "server_error"
