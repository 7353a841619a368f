"""What the endpoints answer, as models: for ``/openapi.json`` and for tests. ``responses`` builds answers as plain
dictionaries, because some are built in each step of a stream."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from common.openai.bodies.values import ToolCall


class Answer(BaseModel):
    """An object of an answer."""

    model_config = ConfigDict(extra="allow")


class PromptTokensDetails(Answer):
    cached_tokens: int = Field(description="Tokens of the prompt that no node computed for this request.")


class CompletionTokensDetails(Answer):
    reasoning_tokens: int = 0


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class PromptLogprob(Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Answer):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    """A completion, whole or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class ErrorBody(Answer):
    message: str
    type: str
    param: str | None
    code: str


class Error(Answer):
    error: ErrorBody


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Answer):
    prompt: str


class Status(Answer):
    """``ok`` or ``ready``, or why not. ``degraded``, of a proxy that is ready all the same: why a role has no node."""

    status: str
    reason: str | None = None
    degraded: list[str] | None = None


class Versions(Answer):
    """Name of a package -> its version, null where it is not installed."""
