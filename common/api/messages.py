"""Chat messages as templates expect them, checked before anything is rendered.

Content is text: a string, or a list of text parts, which are joined with newlines because most templates know strings
only. Images and audio are refused by name. Keys this module does not know stay in the message, for templates that read
them (``name``, ``tool_call_id``, ``reasoning_content``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from common.api.fields import shown
from common.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


def parse_messages(value: object) -> tuple[Message, ...]:
    """The checked copy of a request's ``messages``.

    Raises:
        InvalidRequestError: naming the message and key at fault.
    """
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"messages must be a list of messages, got {shown(value)}", param="messages")
    if not value:
        raise InvalidRequestError("messages must hold at least one message, got an empty list", param="messages")
    return tuple(_parse_message(f"messages[{index}]", item) for index, item in enumerate(value))


def _parse_message(where: str, value: object) -> Message:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} must be an object, got {shown(value)}", param=where)
    role = value.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", param=f"{where}.role"
        )
    message: Message = {key: item for key, item in value.items() if item is not None}
    calls = message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = _parse_tool_calls(f"{where}.tool_calls", calls)
    content = value.get("content")
    if content is None:
        if role != "assistant":
            raise InvalidRequestError(
                f"{where}.content must be text for role {role}, got null", param=f"{where}.content"
            )
        message["content"] = ""
    else:
        message["content"] = _parse_content(f"{where}.content", content)
    return message


def _parse_content(where: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise InvalidRequestError(f"{where} must be a string or a list of text parts, got {shown(value)}", param=where)
    texts = []
    for index, part in enumerate(value):
        name = f"{where}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise InvalidRequestError(f"{name} must be a text part, got {shown(part)}", param=name)
        kind = part.get("type")
        if kind != "text":
            raise InvalidRequestError(
                f"{name}.type {shown(kind)} is not supported: only text parts are", param=f"{name}.type"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name}.text must be a string, got {shown(text)}", param=f"{name}.text")
        texts.append(text)
    return "\n".join(texts)


def _parse_tool_calls(where: str, value: object) -> list[dict[str, Any]]:
    """Tool calls with ``function.arguments`` as an object: the API carries JSON text, templates iterate over a
    mapping."""
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"{where} must be a list, got {shown(value)}", param=where)
    calls = []
    for index, item in enumerate(value):
        name = f"{where}[{index}]"
        function = item.get("function") if isinstance(item, Mapping) else None
        if not isinstance(item, Mapping) or not isinstance(function, Mapping):
            raise InvalidRequestError(f"{name} must be an object with a function, got {shown(item)}", param=name)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError) as exc:
                raise InvalidRequestError(
                    f"{name}.function.arguments must be JSON text: {exc}", param=f"{name}.function.arguments"
                ) from exc
        calls.append({**item, "function": {**function, "arguments": arguments}})
    return calls
