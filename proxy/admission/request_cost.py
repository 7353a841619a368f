"""From a client's request to what admission needs to know of it: priority, deadline, key, size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import Request

from common.openai.bodies.models import MAX_TOKENS
from common.openai.protocol import DEFAULT_COMPLETION_TOKENS, ChatRequest, GenerationRequest, num_answers
from common.server.gate import api_key_digest_of
from common.wire.fields import seconds_of_header
from common.wire.headers import DEADLINE_HEADER
from proxy.admission.request import AdmissionRequest

CHARS_PER_TOKEN = 4
"""Of a text whose tokens are estimated: English in common vocabularies."""

TOKENS_PER_IMAGE = 1024
"""Of an image that nobody has looked at: a megapixel in patches of 32 x 32."""


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Tokens of a request: of its prompts (of text: a quarter of its characters), and of each of its answers when it is
    as long as it may be; None: ``max_tokens`` was not given, and the context is the bound."""

    num_prompt_tokens: int
    max_answer_tokens: int | None

    @classmethod
    def of(cls, parsed: GenerationRequest) -> RequestCost:
        """Takes as long as the body is."""
        max_tokens = parsed.sampling.max_tokens
        if isinstance(parsed, ChatRequest):
            num_tokens = _num_chars(parsed.messages) // CHARS_PER_TOKEN + TOKENS_PER_IMAGE * len(parsed.images)
            return cls(num_tokens, max_tokens)
        num_tokens = sum(
            -(-len(prompt) // CHARS_PER_TOKEN) if isinstance(prompt, str) else len(prompt) for prompt in parsed.prompts
        )
        return cls(num_tokens, DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens)

    def num_answer_tokens(self, num_answers: int, max_model_len: int | None) -> int:
        """Of all answers. ``max_model_len``: of the nodes; None: unknown."""
        if self.max_answer_tokens is not None:
            return num_answers * self.max_answer_tokens
        room = MAX_TOKENS if max_model_len is None else max(0, max_model_len - self.num_prompt_tokens)
        return num_answers * room


def read_admission_request(
    request: Request, parsed: GenerationRequest, cost: RequestCost, max_model_len: int | None, arrival_s: float
) -> AdmissionRequest:
    """Raises InvalidRequestError for a malformed deadline."""
    deadline_s = seconds_of_header(request.headers, DEADLINE_HEADER)
    return AdmissionRequest(
        arrival_s=arrival_s,
        priority=parsed.priority,
        deadline_s=None if deadline_s is None else arrival_s + deadline_s,
        key=api_key_digest_of(request),
        num_answers=num_answers(parsed),
        num_prompt_tokens=cost.num_prompt_tokens,
        num_answer_tokens=cost.num_answer_tokens(num_answers(parsed), max_model_len),
        is_open_ended=cost.max_answer_tokens is None,
        max_tokens_field=parsed.sampling.max_tokens_field,
    )


def _num_chars(value: object) -> int:
    """Characters of all texts in nested JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_chars(each) for each in value.values())
    if isinstance(value, Sequence):
        return sum(_num_chars(each) for each in value)
    return 0
