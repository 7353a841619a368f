"""The sampling and output fields that completions and chat completions share, and the fields that are refused.

Read by ``common.openai.protocol`` only, and never for a prefill leg. Bounds that need the prompt's length or the
vocabulary are checked later, by ``to_sampling_params``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from common.errors import InvalidRequestError
from common.wire.fields import MAX_TOKEN_ID, Fields, check_number, invalid, is_int, shown

MAX_N = 128
"""Continuations of one prompt; OpenAI's bound."""
MAX_LOGPROBS = 20
"""Alternatives per token; OpenAI's bound for chats."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
"""Characters of one stop string; both bounds keep the search in the text cheap."""
MAX_LOGIT_BIAS = 1024
"""Tokens with a bias of their own; each step of the engine adds them all."""
MAX_STOP_TOKEN_IDS = 1024
MAX_TOKENS = 2**31 - 1
"""Largest ``max_tokens`` and ``min_tokens``; the model's own bound is checked later."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by them overflows and changes nothing else."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Sampling fields as the client gave them, defaults filled in but for ``max_tokens`` (``None``: not given)."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class OutputFields:
    """What the response looks like. ``stop`` strings are matched on text, outside the engine."""

    n: int = 1
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    echo: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False


def parse_sampling(fields: Fields, logprobs: int | None) -> SamplingFields:
    max_tokens = fields.integer("max_tokens", ge=0, le=MAX_TOKENS)
    newer = fields.integer("max_completion_tokens", ge=0, le=MAX_TOKENS)
    max_tokens = max_tokens if newer is None else newer
    min_tokens = fields.integer("min_tokens", ge=0, le=MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        invalid("min_tokens", min_tokens, f"at most max_tokens {max_tokens}")
    temperature = _default(fields.number("temperature", ge=0, le=2), 1.0)
    top_k = fields.integer("top_k", ge=-1, le=MAX_TOKEN_ID) or 0
    return SamplingFields(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=_default(fields.number("top_p", gt=0, le=1), 1.0),
        top_k=max(top_k, 0),
        min_p=_default(fields.number("min_p", ge=0, le=1), 0.0),
        seed=fields.integer("seed", ge=-(2**63), le=2**63 - 1),
        stop_token_ids=_stop_token_ids(fields),
        ignore_eos=fields.boolean("ignore_eos"),
        presence_penalty=_default(fields.number("presence_penalty", ge=-2, le=2), 0.0),
        frequency_penalty=_default(fields.number("frequency_penalty", ge=-2, le=2), 0.0),
        repetition_penalty=_default(fields.number("repetition_penalty", ge=0.01, le=100), 1.0),
        logit_bias=_logit_bias(fields),
        logprobs=logprobs,
    )


def parse_output(fields: Fields) -> OutputFields:
    stream = fields.boolean("stream")
    options = fields.mapping("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            raise InvalidRequestError("stream_options is allowed only with stream true", param="stream_options")
        include_usage = Fields(options, prefix="stream_options.").boolean("include_usage")
    return OutputFields(
        n=_default(fields.integer("n", ge=1, le=MAX_N), 1),
        stream=stream,
        include_usage=include_usage,
        stop=_stop(fields),
        echo=fields.boolean("echo"),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        return_token_ids=fields.boolean("return_token_ids"),
    )


def parse_chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", ge=0, le=MAX_LOGPROBS)
    if top and not wanted:
        raise InvalidRequestError(f"top_logprobs {top} is allowed only with logprobs true", param="top_logprobs")
    return (top or 0) if wanted else None


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        invalid("stop", value, "a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(strings)}", param="stop"
        )
    for item in strings:
        if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_CHARS:
            invalid("stop", item, f"strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(strings)


def _stop_token_ids(fields: Fields) -> frozenset[int]:
    token_ids = fields.int_list("stop_token_ids", le=MAX_TOKEN_ID) or ()
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids must hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(token_ids)}", param="stop_token_ids"
        )
    return frozenset(token_ids)


def _logit_bias(fields: Fields) -> Mapping[int, float]:
    bias: dict[int, float] = {}
    given = fields.mapping("logit_bias") or {}
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias must hold at most {MAX_LOGIT_BIAS} tokens, got {len(given)}", param="logit_bias"
        )
    for key, value in given.items():
        # One spelling per id, so that two entries cannot name the same token.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidRequestError(f"logit_bias keys must be token ids, got {shown(key)}", param="logit_bias")
        try:
            bias[int(key)] = check_number(f"logit_bias[{key}]", value, ge=-100, le=100)
        except InvalidRequestError as exc:
            raise InvalidRequestError(exc.message, param="logit_bias") from exc
    return bias


def _default(value: _T | None, default: _T) -> _T:
    return default if value is None else value


# --- known, not built -------------------------------------------------------------------------------------------------


def _is_absent(value: object, body: Mapping[str, Any]) -> bool:
    return value is None


def _is_empty(value: object, body: Mapping[str, Any]) -> bool:
    return value is None or value in ("", [], {})


def _is_text_format(value: object, body: Mapping[str, Any]) -> bool:
    return value is None or (isinstance(value, Mapping) and value.get("type") == "text")


def _is_free_choice(value: object, body: Mapping[str, Any]) -> bool:
    return value in (None, "none", "auto")


def _is_at_most_n(value: object, body: Mapping[str, Any]) -> bool:
    n = body.get("n")
    return value is None or (is_int(value) and value <= (n if is_int(n) else 1))  # type: ignore[operator]


# Field that is not built -> whether a value means what is done without the field.
_UNBUILT: Mapping[str, Callable[[object, Mapping[str, Any]], bool]] = {
    "response_format": _is_text_format,
    "tool_choice": _is_free_choice,
    "functions": _is_empty,
    "structured_outputs": _is_empty,
    "best_of": _is_at_most_n,
    "suffix": _is_empty,
    "prompt_logprobs": _is_absent,
    "logits_processors": _is_empty,
}


def refuse_unbuilt(body: Mapping[str, Any]) -> None:
    for name, is_neutral in _UNBUILT.items():
        if not is_neutral(body.get(name), body):
            raise InvalidRequestError(
                f"{name} {shown(body[name])} is not supported", param=name, code="unsupported_parameter"
            )
    for name, value in body.items():
        if name.startswith("guided_") and value is not None:
            raise InvalidRequestError(
                f"{name} {shown(value)} is not supported", param=name, code="unsupported_parameter"
            )
