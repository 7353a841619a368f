"""Bodies for servers of another make: read as far as the proxy has to know them.

Everything else is theirs to accept or to refuse: they may serve what is not built here, images in messages for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from common.errors import InvalidRequestError
from common.openai.bodies.base import Body, read_body
from common.openai.bodies.models import MAX_TOKENS
from common.openai.bodies.values import Prompts, parse_prompts
from common.openai.messages import MAX_MESSAGES
from common.openai.protocol import MAX_ANSWERS, ChatRequest, CompletionRequest, check_answers
from common.openai.sampling import OutputFields, SamplingFields, max_tokens_of
from common.wire.fields import invalid, is_int


class _Foreign(Body):
    model: str | None = None
    prompt: Prompts = None
    messages: Any = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS)
    stream: bool | None = None
    echo: bool | None = None
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    cache_salt: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    request_id: Any = None


def parse_foreign_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises InvalidRequestError for what the proxy cannot place or count."""
    fields = read_body(_Foreign, body)
    prompts = fields.prompt if fields.prompt is not None else parse_prompts(None)
    check_answers(fields.n or 1, len(prompts))
    return CompletionRequest(prompts=prompts, **_common(fields))


def parse_foreign_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Raises InvalidRequestError for what the proxy cannot place or count."""
    fields = read_body(_Foreign, body)
    messages = fields.messages
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        invalid("messages", messages, "a list of messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages must hold 1 to {MAX_MESSAGES} messages, got {len(messages)}", param="messages"
        )
    return ChatRequest(messages=tuple(messages), **_common(fields))


def _common(fields: _Foreign) -> dict[str, Any]:
    max_tokens, max_tokens_field = max_tokens_of(fields.max_tokens, fields.max_completion_tokens)
    return {
        "model": fields.model,
        "priority": fields.priority or 0,
        "cache_salt": fields.cache_salt if isinstance(fields.cache_salt, str) else None,
        "request_id": fields.request_id if isinstance(fields.request_id, str) else None,
        "sampling": SamplingFields(
            max_tokens=max_tokens,
            max_tokens_field=max_tokens_field,
            logprobs=fields.logprobs if is_int(fields.logprobs) else None,
            prompt_logprobs=fields.prompt_logprobs if is_int(fields.prompt_logprobs) else None,
        ),
        "output": OutputFields(n=fields.n or 1, stream=bool(fields.stream), echo=bool(fields.echo)),
    }
