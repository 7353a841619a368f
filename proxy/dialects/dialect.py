"""The APIs that are converters over chat: what each makes of a body, and who makes the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.dialects.conversion import Conversion
from proxy.dialects.messages.answer import MessagesConversion
from proxy.dialects.messages.body import is_marked, read_messages_body
from proxy.dialects.messages.request import names_of
from proxy.dialects.messages.request import to_chat as messages_to_chat
from proxy.dialects.responses.answer import Echo, ResponsesConversion
from proxy.dialects.responses.body import read_responses_body
from proxy.dialects.responses.request import to_chat as responses_to_chat


@dataclass(frozen=True, slots=True)
class Converted:
    """A request as a chat: its ``body``, and who says its answer in the API that it came in."""

    body: dict[str, Any]
    conversion: Conversion


Convert = Callable[[Mapping[str, Any], str], Converted]
"""Body and request id. Takes as long as the body is. Raises InvalidRequestError naming the field at fault."""


def convert_responses(body: Mapping[str, Any], request_id: str) -> Converted:
    """``POST /v1/responses``."""
    read = read_responses_body(body)
    return Converted(responses_to_chat(read), ResponsesConversion(Echo.of(read), request_id))


def convert_messages(body: Mapping[str, Any], request_id: str) -> Converted:
    """``POST /v1/messages``."""
    read = read_messages_body(body)
    conversion = MessagesConversion(request_id, has_marks=is_marked(body), names=names_of(read))
    return Converted(messages_to_chat(read), conversion)
