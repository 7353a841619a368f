"""Chat messages as templates expect them, checked before anything is rendered.

Content is text: a string, or a list of text parts (a model's refusal is one), which are joined with newlines because
most templates know strings only. Content with images stays a list, in which templates find where each image is; what
it is they never see. Audio and video are refused by name. Keys this module does not know stay in the message, for
templates that read them (``name``, ``tool_call_id``, ``reasoning_content``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from common.errors import InvalidRequestError
from common.images.source import ImageSource
from common.wire.fields import invalid, shown
from common.wire.json_text import INVALID_JSON, JsonBounds, parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")

PART_SEPARATOR = "\n"
"""Between the text parts of one message."""
CACHE_CONTROL = "cache_control"
IMAGE_URL = "image_url"
_TEXT_KINDS = ("text", "refusal")
"""Types of parts that are text, which is under the type's name."""
_IMAGE: Mapping[str, str] = MappingProxyType({"type": "image"})
"""An image as templates know it."""
MAX_MESSAGES = 10_000
"""Of one chat: a template visits each several times."""

Message = dict[str, Any]


class Arguments(dict[str, Any]):
    """A call's arguments, with the ``text`` that the client gave them in: of one that is no JSON object there are none.
    Models write such calls, and mend them when they get them back with the error."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text


@dataclass(frozen=True, slots=True)
class CacheMark:
    """``cache_control`` in a request: the prompt up to here will be used again.

    The prefix ends after the message (``num_chars`` None) or after that many characters of its joined content.
    """

    message_index: int
    num_chars: int | None = None


def parse_messages(value: object) -> tuple[Message, ...]:
    """The checked copy of a request's ``messages``.

    Raises:
        InvalidRequestError: naming the message and key at fault.
    """
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(f"messages must be a list of messages, got {shown(value)}", param="messages")
    if not value:
        raise InvalidRequestError("messages must hold at least one message, got an empty list", param="messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages must hold at most {MAX_MESSAGES} messages, got {len(value)}", param="messages"
        )
    bounds = JsonBounds()  # of all arguments together
    return tuple(_parse_message(f"messages[{index}]", item, bounds) for index, item in enumerate(value))


def text_of(content: object) -> str | None:
    """Of a checked message's content, without its images."""
    if isinstance(content, list):
        return PART_SEPARATOR.join(part["text"] for part in content if "text" in part)
    return content if isinstance(content, str) else None


def parse_cache_marks(value: Sequence[Mapping[str, Any]]) -> tuple[CacheMark, ...]:
    """``cache_control`` objects of messages and content parts, in order, of checked messages."""
    return tuple(mark for index, message in enumerate(value) for mark in _message_marks(index, message))


def _message_marks(index: int, message: Mapping[str, Any]) -> Iterator[CacheMark]:
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    num_chars: int | None = 0
    has_image = any(isinstance(part, Mapping) and part.get("type") == IMAGE_URL for part in parts)
    for number, part in enumerate(parts, start=1):
        is_marked = isinstance(part, Mapping) and isinstance(part.get(CACHE_CONTROL), Mapping)
        text = part if isinstance(part, str) else _part_text(part)
        # Content with an image is no text that could be cut: its end is marked.
        num_chars = None if text is None or num_chars is None else num_chars + len(text) + len(PART_SEPARATOR)
        if is_marked:
            yield CacheMark(index, num_chars if number < len(parts) and not has_image else None)
    if isinstance(message.get(CACHE_CONTROL), Mapping):
        yield CacheMark(index)


def _parse_message(where: str, value: object, bounds: JsonBounds) -> Message:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} must be an object, got {shown(value)}", param=where)
    role = value.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", param=f"{where}.role"
        )
    message: Message = {key: item for key, item in value.items() if item is not None and key != CACHE_CONTROL}
    _check_text(f"{where}.tool_call_id", message.get("tool_call_id"))
    calls = message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = _parse_tool_calls(f"{where}.tool_calls", calls, bounds)
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


def _parse_content(where: str, value: object) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise InvalidRequestError(f"{where} must be a string or a list of parts, got {shown(value)}", param=where)
    found = [_parse_part(f"{where}[{index}]", part) for index, part in enumerate(value)]
    if _IMAGE in found:
        return [dict(part) for part in found]
    return PART_SEPARATOR.join(part["text"] for part in found)


def _parse_part(name: str, part: object) -> Mapping[str, str]:
    """As templates know it."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{name} must be a text part, got {shown(part)}", param=name)
    kind = part.get("type")
    if kind == IMAGE_URL:
        _image_source(name, part)
        return _IMAGE
    if kind not in _TEXT_KINDS:
        raise InvalidRequestError(
            f"{name}.type {shown(kind)} is not supported: only {', '.join(_TEXT_KINDS)} and {IMAGE_URL} parts are",
            param=f"{name}.type",
        )
    text = _part_text(part)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name}.{kind} must be a string, got {shown(text)}", param=f"{name}.{kind}")
    return {"type": "text", "text": text}


def _part_text(part: Mapping[str, Any]) -> Any:
    """None: it is no text."""
    kind = part.get("type")
    return part.get(kind) if kind in _TEXT_KINDS else None


def _image_source(name: str, part: Mapping[str, Any]) -> ImageSource:
    value = part.get(IMAGE_URL)
    url = value.get("url") if isinstance(value, Mapping) else value
    name = f"{name}.{IMAGE_URL}.url" if isinstance(value, Mapping) else f"{name}.{IMAGE_URL}"
    if not isinstance(url, str):
        raise InvalidRequestError(f"{name} must be a string, got {shown(url)}", param=name)
    return ImageSource(name, url)


def parse_images(value: Sequence[Mapping[str, Any]]) -> tuple[ImageSource, ...]:
    """The images of checked messages, in the order in which templates write them."""
    return tuple(
        _image_source(f"messages[{index}].content[{number}]", part)
        for index, message in enumerate(value)
        if isinstance(content := message.get("content"), list | tuple)
        for number, part in enumerate(content)
        if isinstance(part, Mapping) and part.get("type") == IMAGE_URL
    )


def _parse_tool_calls(where: str, value: object, bounds: JsonBounds) -> list[dict[str, Any]]:
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
        if item.get("type") not in (None, "function"):
            invalid(f"{name}.type", item["type"], "function")
        _check_text(f"{name}.id", item.get("id"))
        called, arguments = function.get("name"), function.get("arguments")
        if not isinstance(called, str) or not called:
            invalid(f"{name}.function.name", called, "the function's name")
        if isinstance(arguments, str):
            arguments = _parse_arguments(f"{name}.function.arguments", arguments, bounds)
        elif arguments is not None and not isinstance(arguments, Mapping):
            invalid(f"{name}.function.arguments", arguments, "JSON text or an object")
        calls.append({**item, "function": {**function, "arguments": arguments}})
    return calls


def _check_text(name: str, value: object) -> None:
    """Raises InvalidRequestError for what is neither absent nor text."""
    if value is not None and not isinstance(value, str):
        invalid(name, value, "a string")


def _parse_arguments(where: str, text: str, bounds: JsonBounds) -> Mapping[str, Any]:
    if not text.strip():
        return {}
    value: object = None
    try:
        value = parse_json(text.encode(), bounds, where)
    except InvalidRequestError as exc:
        if exc.code != INVALID_JSON:
            raise InvalidRequestError(exc.message, param=where) from exc
    return Arguments(value if isinstance(value, Mapping) else {}, text)
