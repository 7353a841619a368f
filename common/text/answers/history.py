"""Calls of earlier answers, as a template needs them to write what the model wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from common.openai.messages import Arguments
from common.text.answers.formats import CallLayout

_COMPACT = re.compile(r'\{"(?:[^"\\]|\\.)*":\S')
"""The first key decides: whoever writes JSON without blanks does so throughout."""


def call_arguments(call: Mapping[str, Any], *, as_text: bool) -> Any:
    """The arguments of one call: an object, or the client's own text. An object's text without any blank between its
    parts was written again on its way through a client, so that the object is nearer to what the model wrote."""
    arguments = call["function"].get("arguments")
    if not as_text or not isinstance(arguments, Arguments):
        return arguments
    return dict(arguments) if arguments and _COMPACT.match(arguments.text) else arguments.text


def with_calls_in_content(message: Mapping[str, Any], layout: CallLayout) -> dict[str, Any]:
    """A message for a template that does not write calls."""
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function.get("arguments")
        name = str(function.get("name", ""))
        if "functions." in layout.begin and str(call.get("id", "")).startswith("functions."):
            name = str(call["id"]).removeprefix("functions.")
        calls.append((name, arguments if isinstance(arguments, Mapping) else {}))
    content = message.get("content") or ""
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": content + layout.write(calls, after_text=bool(content))}
