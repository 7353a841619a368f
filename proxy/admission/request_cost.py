"""From a client's request to what admission needs to know of it: priority, deadline, key, size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fastapi import Request

from common.errors import InvalidRequestError
from common.openai.protocol import DEFAULT_COMPLETION_TOKENS, ChatRequest, GenerationRequest
from common.server.gate import api_key_digest_of
from common.wire.headers import DEADLINE_HEADER
from proxy.admission.queue import AdmissionRequest

MAX_DEADLINE_MS = 86_400_000
"""A day: no request waits or runs longer."""
CHARS_PER_TOKEN = 4
"""Of a text whose tokens are estimated: English in common vocabularies."""


def read_admission_request(
    request: Request, parsed: GenerationRequest, num_tokens: int, arrival_s: float
) -> AdmissionRequest:
    """``num_tokens``: as ``estimate_tokens``. Raises InvalidRequestError for a malformed deadline."""
    deadline_s = read_deadline_s(request.headers)
    return AdmissionRequest(
        arrival_s=arrival_s,
        priority=parsed.priority,
        deadline_s=None if deadline_s is None else arrival_s + deadline_s,
        key=api_key_digest_of(request),
        num_tokens=num_tokens,
    )


def read_deadline_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from arrival to the deadline that the client gives; None without one. Raises InvalidRequestError."""
    given = headers.get(DEADLINE_HEADER)
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", given.strip()) or not 1 <= int(given) <= MAX_DEADLINE_MS:
        raise InvalidRequestError(
            f"header {DEADLINE_HEADER} must be a whole number of milliseconds from 1 to {MAX_DEADLINE_MS}, got "
            f"{given[:40]!r}",
            param=DEADLINE_HEADER,
        )
    return int(given) / 1000


def estimate_tokens(parsed: GenerationRequest) -> int:
    """Tokens of the prompts (of text: a quarter of its characters) and of the longest answers."""
    if isinstance(parsed, ChatRequest):
        num_prompt = _num_chars(parsed.messages) // CHARS_PER_TOKEN
        num_answers = parsed.output.n
        longest = parsed.sampling.max_tokens or 0
    else:
        num_prompt = sum(
            -(-len(prompt) // CHARS_PER_TOKEN) if isinstance(prompt, str) else len(prompt) for prompt in parsed.prompts
        )
        num_answers = parsed.output.n * len(parsed.prompts)
        longest = DEFAULT_COMPLETION_TOKENS if parsed.sampling.max_tokens is None else parsed.sampling.max_tokens
    return num_prompt + num_answers * longest


def _num_chars(value: object) -> int:
    """Characters of all texts in nested JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_num_chars(each) for each in value.values())
    if isinstance(value, Sequence):
        return sum(_num_chars(each) for each in value)
    return 0
