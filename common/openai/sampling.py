"""What a checked body says of sampling and of the answer's form, with OpenAI's defaults filled in.

Made by ``common.openai.protocol`` only, and never for a prefill leg. Bounds that need the prompt's length or the
vocabulary are checked later, by ``to_sampling_params`` and ``common_sampling_params``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

from common.errors import InvalidRequestError
from common.openai.bodies.models import AnswerFields, ChatBody
from common.openai.bodies.unsupported import refuse_field
from common.wire.fields import invalid

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing logits by them overflows and changes nothing else."""

MAX_TOKENS_FIELD = "max_tokens"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Sampling fields as the client gave them. None: not given, ``SamplingDefaults`` say what is done.
    ``max_tokens_field``: which one ``max_tokens`` was given in, for errors."""

    max_tokens: int | None = None
    max_tokens_field: str = MAX_TOKENS_FIELD
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: frozenset[int] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a node does where a request does not say it. ``max_tokens`` bounds all answers; None: nothing does."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @classmethod
    def of(cls, body: AnswerFields) -> SamplingDefaults:
        """As ``body`` says, where it does."""
        sampling = sampling_of(body, None)
        given = {each.name: getattr(sampling, each.name) for each in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class OutputFields:
    """What the response looks like. ``stop`` strings are matched on text, outside the engine."""

    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    echo: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


def max_tokens_of(max_tokens: int | None, max_completion_tokens: int | None) -> tuple[int | None, str]:
    """The one that goes before the other, and its name."""
    if max_completion_tokens is None:
        return max_tokens, MAX_TOKENS_FIELD
    return max_completion_tokens, "max_completion_tokens"


def sampling_of(body: AnswerFields, logprobs: int | None) -> SamplingFields:
    """Raises InvalidRequestError where two fields contradict each other."""
    max_tokens, max_tokens_field = max_tokens_of(body.max_tokens, body.max_completion_tokens)
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        invalid("min_tokens", min_tokens, f"at most {max_tokens_field} {max_tokens}")
    if body.logprob_token_ids is not None and logprobs is None:
        raise InvalidRequestError("logprob_token_ids is allowed only with logprobs", param="logprob_token_ids")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs is allowed only without stream", param="prompt_logprobs")
    return SamplingFields(
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        min_tokens=min_tokens,
        temperature=0.0 if body.temperature is not None and body.temperature < GREEDY_BELOW else body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        min_p=body.min_p,
        seed=body.seed,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        presence_penalty=or_default(body.presence_penalty, 0.0),
        frequency_penalty=or_default(body.frequency_penalty, 0.0),
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        allowed_token_ids=body.allowed_token_ids,
        bad_words=body.bad_words,
        logprobs=logprobs,
        logprob_token_ids=body.logprob_token_ids,
        prompt_logprobs=body.prompt_logprobs,
    )


def output_of(body: AnswerFields, *, echo: bool) -> OutputFields:
    """Raises InvalidRequestError where two fields contradict each other."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequestError("stream_options is allowed only with stream true", param="stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        name = "stream_options.continuous_usage_stats"
        raise InvalidRequestError(f"{name} is allowed only with include_usage true", param=name)
    n = 1 if body.n is None else body.n
    if body.best_of is not None and body.best_of > n:
        refuse_field("best_of", body.best_of)
    return OutputFields(
        n=n,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        stop=body.stop,
        include_stop=bool(body.include_stop_str_in_output),
        echo=echo,
        skip_special_tokens=or_default(body.skip_special_tokens, True),
        return_token_ids=bool(body.return_token_ids),
        return_tokens_as_token_ids=bool(body.return_tokens_as_token_ids),
    )


def chat_logprobs_of(body: ChatBody) -> int | None:
    """Alternatives per token; None: no log-probabilities. Raises InvalidRequestError."""
    wanted, top = bool(body.logprobs), body.top_logprobs
    if top and not wanted:
        raise InvalidRequestError(f"top_logprobs {top} is allowed only with logprobs true", param="top_logprobs")
    return (top or 0) if wanted else None


def or_default(value: _T | None, default: _T) -> _T:
    return default if value is None else value
