"""What ``POST /v1/messages`` and its ``count_tokens`` answer, as models: for ``/openapi.json`` and for tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from common.openai.answers import Answer


class TextContent(Answer):
    type: Literal["text"]
    text: str


class ThinkingContent(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(Answer):
    thinking_tokens: int


class MessageUsage(Answer):
    input_tokens: int = Field(description="Of the prompt, neither read from the cache nor counted as written to it.")
    cache_creation_input_tokens: int
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that no node computed for this request.")
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    tandem: dict[str, Any] | None = Field(None, description="The answer's trace, where it was asked for.")


class TokenCount(Answer):
    input_tokens: int
