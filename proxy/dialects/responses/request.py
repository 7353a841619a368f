"""A Responses body as a chat body.

Items that the model made (reasoning, messages, calls) and that stand together are one message of the chat again, as it
was when the model wrote it, so that the next turn's prompt begins with the tokens of the last one.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import InvalidRequestError
from common.openai.messages import CACHE_CONTROL, IMAGE_URL
from common.wire.fields import invalid, shown
from proxy.dialects.fields import UNSUPPORTED, as_given, given, passed, refuse
from proxy.dialects.responses.body import (
    LOGPROBS,
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    TextFormat,
    read_parts,
)

SEALED = "tandem:"
"""Begins ``encrypted_content``: the reasoning in base64. It hides nothing: a client that keeps this field alone sends
the reasoning back with it."""

Message = dict[str, Any]
# A field of the chat body -> what the client calls it.
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
# How a field that lies deeper ends in the chat body -> in the client's.
INNER_NAMES: Mapping[str, str] = {".json_schema.schema": ".schema", ".function.parameters": ".parameters"}


def to_chat(body: ResponsesBody) -> dict[str, Any]:
    """Raises InvalidRequestError naming the item at fault."""
    reasoning, text = body.reasoning, body.text
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    chat = given(
        model=body.model,
        messages=_messages(body),
        tools=[_tool(tool) for tool in body.tools] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls if body.tools else None,
        response_format=None if text is None or text.format is None else _format(text.format),
        verbosity=None if text is None else text.verbosity,
        reasoning_effort=None if reasoning is None else reasoning.effort,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=True if wants_logprobs else None,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        stream=body.stream,
        # With log-probabilities each event says how many tokens of reasoning there are: their own are left out.
        stream_options=given(include_usage=True, continuous_usage_stats=wants_logprobs or None)
        if body.stream
        else None,
    )
    return {**passed(body), **chat}


def _messages(body: ResponsesBody) -> list[Message]:
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    system: list[Message] = [] if not body.instructions else [_part(body.instructions)]
    messages: list[Message] = []
    answer: Message | None = None  # what the model made, as far as it goes on
    for index, item in enumerate(items):
        name = f"input[{index}]"
        if isinstance(item, FunctionCallOutputItem):
            answer = None
            content = _content(f"{name}.output", item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            answer = None
            content = _content(f"{name}.content", item.content)
            if item.role == "user":
                messages.append({"role": "user", "content": content})
            elif messages:
                messages.append({"role": "system", "content": content})
            else:  # templates know one system message, at the beginning
                system += [_part(content)] if isinstance(content, str) else content
        else:
            if answer is None or not _goes_on(answer, item):
                answer = {"role": "assistant", "content": []}
                messages.append(answer)
            _add_made(answer, name, item)
    if system:
        content = system[0]["text"] if len(system) == 1 and CACHE_CONTROL not in system[0] else system
        messages.insert(0, {"role": "system", "content": content})
    for message in messages:
        if message["role"] == "assistant":
            message |= {name: "".join(message[name]) for name in ("content", "reasoning_content") if name in message}
    return messages


def _goes_on(answer: Message, item: Item) -> bool:
    """Two messages in a row are two; whatever else the model made is one."""
    return not (isinstance(item, MessageItem) and answer["content"] and not answer.get("tool_calls"))


def _add_made(answer: Message, name: str, item: Item) -> None:
    """Texts are lists of pieces until all items are read."""
    if isinstance(item, MessageItem):
        parts = read_parts(f"{name}.content", item.content)
        answer["content"] += [part.text for part in parts if part.text]
        if any(part.is_marked for part in parts):
            answer[CACHE_CONTROL] = {"type": "ephemeral"}
    elif isinstance(item, FunctionCallItem):
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        answer.setdefault("tool_calls", []).append(call)
    elif isinstance(item, ReasoningItem) and (text := _reasoning(name, item)):
        answer.setdefault("reasoning_content", []).append(text)


def _reasoning(name: str, item: ReasoningItem) -> str:
    for key in ("content", "summary"):
        if parts := getattr(item, key):
            return "".join(part.text for part in read_parts(f"{name}.{key}", parts))
    return unseal(f"{name}.encrypted_content", item.encrypted_content) if item.encrypted_content else ""


def seal(text: str) -> str:
    return SEALED + base64.b64encode(text.encode()).decode()


def unseal(name: str, value: str) -> str:
    """Raises InvalidRequestError for what ``seal`` did not make."""
    try:
        if value.startswith(SEALED):
            return base64.b64decode(value.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        pass
    raise InvalidRequestError(
        f"{name} {shown(value)} is not of this service, which cannot read it", param=name, code=UNSUPPORTED
    )


def _content(name: str, value: object) -> str | list[Message]:
    """As a chat has it: a text, or parts where one is marked or an image, or there are several."""
    parts = read_parts(name, value, may_have_images=True)
    if len(parts) == 1 and not (parts[0].is_marked or parts[0].is_image):
        return parts[0].text
    return [_part(*part) for part in parts]


def _part(text: str, is_marked: bool = False, is_image: bool = False) -> Message:
    mark = {CACHE_CONTROL: {"type": "ephemeral"}} if is_marked else {}
    if is_image:
        return {"type": IMAGE_URL, IMAGE_URL: {"url": text}, **mark}
    return {"type": "text", "text": text, **mark}


def _tool(tool: FunctionTool) -> Message:
    function = given(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict or None
    )
    return {"type": "function", "function": function}


def _tool_choice(value: object) -> object:
    if value is None or value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and kind == "function":
        name = value.get("name")
        if not isinstance(name, str):
            invalid("tool_choice.name", name, "a string")
        return {"type": "function", "function": {"name": name}}
    if kind is not None:
        refuse("tool_choice.type", kind, "only functions are")
    return invalid("tool_choice", value, "none, auto, required, or a function by name")


def _format(value: TextFormat) -> Message:
    if value.type != "json_schema":
        return given(type=value.type, schema=value.schema_)
    if value.schema_ is None:
        raise InvalidRequestError("text.format.schema is required for json_schema", param="text.format.schema")
    schema = given(
        name=value.name or "answer", description=value.description, schema=value.schema_, strict=value.strict
    )
    return {"type": "json_schema", "json_schema": schema}


def tools_as_given(tools: Sequence[FunctionTool]) -> list[Message]:
    """For the answer, which repeats them."""
    return [as_given(tool) for tool in tools]
