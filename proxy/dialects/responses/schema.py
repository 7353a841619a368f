"""What ``POST /v1/responses`` answers, as models: for ``/openapi.json`` and for tests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from common.openai.answers import Answer, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob]


class ReasoningText(Answer):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningOutput(Answer):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[ReasoningText]
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class FunctionCallOutput(Answer):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str = Field(description="JSON text.")


class InputTokensDetails(Answer):
    cached_tokens: int = Field(description="Tokens of the prompt that no node computed for this request.")
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class ResponseError(Answer):
    code: str
    message: str
    param: str | None = None
    type: str | None = None


class ReasoningSettings(Answer):
    effort: str | None
    summary: str | None


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    model: str
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | ReasoningOutput | FunctionCallOutput]
    usage: ResponseUsage | None
    # What the client asked for, given back.
    background: bool
    instructions: str | list[Any] | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    tandem: dict[str, Any] | None = Field(None, description="The answer's trace, where it was asked for.")
