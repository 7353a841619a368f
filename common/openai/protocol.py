"""Requests of the OpenAI endpoints: raw JSON in, frozen and checked values out.

Life cycle: 1 the body is parsed (here, without a tokenizer or a model), 2 the node turns the prompt into token ids, 3
``to_sampling_params`` joins the two and checks what needs the prompt's length or the vocabulary. Each violation is an
``InvalidRequestError`` with ``param`` set; unknown fields are ignored; fields of the API that are not built are refused
by name.

A prefill leg (``kv_transfer_params.do_remote_decode``) reads the prompt, ``cache_salt``, ``priority`` and pull sources
only: proxies leave the client's sampling and output fields in, and they may contradict the ``max_tokens: 1`` that the
proxy wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequestError, ModelNotFoundError
from common.openai.messages import CACHE_CONTROL, CacheMark, Message, parse_cache_marks, parse_messages
from common.openai.prompt_ids import PromptIds, read_prompt_ids
from common.openai.sampling import (
    MAX_LOGPROBS,
    OutputFields,
    SamplingFields,
    parse_chat_logprobs,
    parse_output,
    parse_sampling,
    refuse_unbuilt,
)
from common.request import SamplingParams
from common.wire.fields import MAX_TOKEN_ID, Fields, check_int_list, invalid, is_int, shown
from common.wire.handoff import TransferMode, read_transfer_params
from common.wire.pull_sources import PullSource, read_pull_sources
from common.wire.resume import STREAM_STATE_KEY, Resume, check_resumable, read_resume

__all__ = [
    "CompletionRequest",
    "ChatRequest",
    "GenerationRequest",
    "SamplingFields",
    "OutputFields",
    "Prompt",
    "parse_completion",
    "parse_chat",
    "parse_prompts",
    "check_token_ids",
    "check_model",
    "to_sampling_params",
]

MAX_PROMPTS = 2048
"""Prompts of one completion request."""
MAX_TOKENS_TOGETHER = 500_000
"""Tokens of all prompts of a request with several: what the nodes tell each other of a prompt names them again."""
MAX_ANSWERS = 2048
"""``n`` times the prompts of one request: each answer is an object of its own for as long as the request runs."""
MAX_TEMPLATE_KWARGS = 256
"""Variables that a chat may give its template: each rendering copies the table of them."""
MAX_TOOLS = 1024
"""Of one chat: a template prints them all."""
DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that does not say; OpenAI's default."""

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """``POST /v1/completions``. ``prompts`` has one entry per prompt, in order; a single prompt is a list of one.
    ``reports_state``, ``resume``: see ``common.wire.resume``."""

    model: str | None
    prompts: tuple[Prompt, ...]
    sampling: SamplingFields
    output: OutputFields
    cache_salt: str | None = None
    priority: int = 0
    transfer_mode: TransferMode = TransferMode.NONE
    kv_transfer_params: tuple[Mapping[str, Any], ...] = ()
    sources: tuple[PullSource, ...] = ()
    resume: Resume | None = None
    reports_state: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``POST /v1/chat/completions``. ``messages`` are checked and ready for a template; ``cache_marks`` were in
    them. With ``prompt_ids`` there are none: they were rendered by whoever sent the request on."""

    model: str | None
    messages: tuple[Message, ...]
    sampling: SamplingFields
    output: OutputFields
    cache_marks: tuple[CacheMark, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None
    priority: int = 0
    transfer_mode: TransferMode = TransferMode.NONE
    kv_transfer_params: tuple[Mapping[str, Any], ...] = ()
    sources: tuple[PullSource, ...] = ()
    prompt_ids: PromptIds | None = None
    resume: Resume | None = None
    reports_state: bool = False


GenerationRequest = CompletionRequest | ChatRequest


def num_answers(request: GenerationRequest) -> int:
    """``n`` for each prompt: what a request counts for wherever requests are counted against a limit."""
    return request.output.n * (1 if isinstance(request, ChatRequest) else len(request.prompts))


# --- bodies -----------------------------------------------------------------------------------------------------------


def parse_completion(body: Mapping[str, Any], *, is_from_peer: bool = False) -> CompletionRequest:
    """The checked form of a completion request body. ``is_from_peer``: it may go on with an answer that began elsewhere
    (``common.wire.resume``), and name pull sources.

    Raises:
        InvalidRequestError: naming field, value and bound.
    """
    fields = Fields(body)
    mode, kv_transfer_params = read_transfer_params(fields.raw("kv_transfer_params"))
    prompts = parse_prompts(body.get("prompt"))
    resume = read_resume(body, num_prompts=len(prompts)) if is_from_peer else None
    sampling, output, reports_state = SamplingFields(), OutputFields(), False
    if mode is not TransferMode.REMOTE_DECODE:
        refuse_unbuilt(body)
        output = parse_output(fields)
        if output.n * len(prompts) > MAX_ANSWERS:
            raise InvalidRequestError(
                f"n times the prompts must be at most {MAX_ANSWERS} answers, got n {output.n} and {len(prompts)} "
                f"prompts, which make {output.n * len(prompts)}",
                param="n",
            )
        sampling = parse_sampling(fields, fields.integer("logprobs", ge=0, le=MAX_LOGPROBS))
        if is_from_peer:
            echoes_logprobs = output.echo and sampling.logprobs is not None
            check_resumable(body, stream=output.stream, n=output.n, has_prompt_logprobs=echoes_logprobs)
            reports_state = fields.boolean(STREAM_STATE_KEY)
        if sampling.max_tokens == 0 and not output.echo:
            invalid("max_tokens", 0, "at least 1 unless echo is true")
    return CompletionRequest(
        model=fields.string("model"),
        prompts=prompts,
        sampling=sampling,
        output=output,
        cache_salt=_cache_salt(fields),
        priority=_priority(fields),
        transfer_mode=mode,
        kv_transfer_params=kv_transfer_params,
        sources=read_pull_sources(body, kv_transfer_params) if is_from_peer else (),
        resume=resume,
        reports_state=reports_state,
    )


def parse_chat(body: Mapping[str, Any], *, is_from_peer: bool = False) -> ChatRequest:
    """The checked form of a chat completion request body. ``is_from_peer``: it may have the prompt's tokens instead of
    messages (``common.openai.prompt_ids``), go on with an answer that began elsewhere (``common.wire.resume``), and
    name pull sources.

    Raises:
        InvalidRequestError: naming field, value and bound.
    """
    fields = Fields(body)
    mode, kv_transfer_params = read_transfer_params(fields.raw("kv_transfer_params"))
    prompt_ids = read_prompt_ids(body) if is_from_peer else None
    messages = parse_messages(body.get("messages")) if prompt_ids is None else ()
    add_generation_prompt = fields.boolean("add_generation_prompt", True)
    continue_final_message = fields.boolean("continue_final_message")
    if continue_final_message:
        if body.get("add_generation_prompt") is True:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        add_generation_prompt = False
    resume = read_resume(body, num_prompts=1) if is_from_peer else None
    sampling, output, reports_state = SamplingFields(), OutputFields(), False
    if mode is not TransferMode.REMOTE_DECODE:
        refuse_unbuilt(body)
        output = parse_output(fields)
        if output.echo:
            invalid("echo", True, "false for chat completions")
        if is_from_peer:
            check_resumable(body, stream=output.stream, n=output.n, has_prompt_logprobs=False)
            reports_state = fields.boolean(STREAM_STATE_KEY)
        sampling = parse_sampling(fields, parse_chat_logprobs(fields))
        if sampling.max_tokens == 0:
            invalid("max_tokens", 0, "at least 1")
    return ChatRequest(
        model=fields.string("model"),
        messages=messages,
        sampling=sampling,
        output=output,
        cache_marks=parse_cache_marks(body["messages"]) if messages else (),
        tools=_tools(fields),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template_kwargs=_template_kwargs(fields),
        cache_salt=_cache_salt(fields),
        priority=_priority(fields),
        transfer_mode=mode,
        kv_transfer_params=kv_transfer_params,
        sources=read_pull_sources(body, kv_transfer_params) if is_from_peer else (),
        prompt_ids=prompt_ids,
        resume=resume,
        reports_state=reports_state,
    )


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """``prompt`` as one entry per prompt: text, token ids, a list of texts, or a list of token id lists.

    Raises:
        InvalidRequestError: absent, empty, mixed or negative; ``param`` is ``prompt``.
    """
    if value is None:
        raise InvalidRequestError("prompt is required", param="prompt")
    if isinstance(value, str):
        return (_one_prompt("prompt", value),)
    if not isinstance(value, list | tuple):
        invalid("prompt", value, "a string, a list of token ids, or a list of either")
    if not value:
        raise InvalidRequestError("prompt must not be empty, got an empty list", param="prompt")
    if is_int(value[0]):
        return (_one_prompt("prompt", value),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt must hold at most {MAX_PROMPTS} prompts, got {len(value)}", param="prompt")
    prompts = tuple(_one_prompt(f"prompt[{index}]", item) for index, item in enumerate(value))
    check_tokens_together(sum(len(prompt) for prompt in prompts if not isinstance(prompt, str)), len(prompts))
    return prompts


def check_tokens_together(num_tokens: int, num_prompts: int) -> None:
    """Raises InvalidRequestError for several prompts that have too many tokens together."""
    if num_prompts > 1 and num_tokens > MAX_TOKENS_TOGETHER:
        raise InvalidRequestError(
            f"{num_prompts} prompts must have at most {MAX_TOKENS_TOGETHER} tokens together, got {num_tokens}",
            param="prompt",
        )


def _one_prompt(where: str, value: object) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise InvalidRequestError(f"{where} must not be empty, got an empty string", param="prompt")
        return value
    if not isinstance(value, list | tuple):
        raise InvalidRequestError(
            f"{where} must be a string or a list of token ids, got {shown(value)}", param="prompt"
        )
    if not value:
        raise InvalidRequestError(f"{where} must not be empty, got an empty list", param="prompt")
    try:
        return check_int_list(where, value, le=MAX_TOKEN_ID)
    except InvalidRequestError as exc:
        raise InvalidRequestError(exc.message, param="prompt") from exc


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for.

    Raises:
        InvalidRequestError: naming the largest id and ``vocab_size``.
    """
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequestError(f"{name} holds token id {largest}, the model has {vocab_size} tokens", param=name)


def check_model(requested: str | None, served: Collection[str]) -> None:
    """Absent and null mean the served model; any other name must be one of ``served``.

    Raises:
        ModelNotFoundError: naming both.
    """
    if requested is not None and requested not in served:
        raise ModelNotFoundError(
            f"model {shown(requested)} is not served here, only {', '.join(sorted(served))}", param="model"
        )


# --- sampling ---------------------------------------------------------------------------------------------------------


def to_sampling_params(
    request: GenerationRequest, *, num_prompt_tokens: int, max_model_len: int, vocab_size: int
) -> SamplingParams:
    """The engine's view of a request whose prompt has ``num_prompt_tokens`` tokens.

    ``max_tokens`` defaults to 16 for completions (less where the context ends sooner) and to the remaining context for
    chat. A prefill leg generates nothing: only the prompt itself has to fit.

    Raises:
        InvalidRequestError: prompt and ``max_tokens`` exceed ``max_model_len``, or a token id is not in the vocabulary.
    """
    is_chat = isinstance(request, ChatRequest)
    prompt_field = "messages" if is_chat else "prompt"
    if num_prompt_tokens < 1:
        raise InvalidRequestError(f"{prompt_field} must not be empty, got 0 tokens", param=prompt_field)
    room = max_model_len - num_prompt_tokens
    if room < 0:
        raise InvalidRequestError(
            f"{prompt_field} has {num_prompt_tokens} tokens, more than the model's context of {max_model_len} tokens",
            param=prompt_field,
            code="context_length_exceeded",
        )
    if request.transfer_mode is TransferMode.REMOTE_DECODE:
        return SamplingParams(max_tokens=1)
    sampling = request.sampling
    max_tokens = sampling.max_tokens
    if max_tokens is None:
        if room == 0:
            raise InvalidRequestError(
                f"{prompt_field} has {num_prompt_tokens} tokens, which leaves no room to generate in the model's "
                f"context of {max_model_len} tokens",
                param=prompt_field,
                code="context_length_exceeded",
            )
        max_tokens = room if is_chat else min(DEFAULT_COMPLETION_TOKENS, room)
    elif max_tokens > room:
        raise InvalidRequestError(
            f"{num_prompt_tokens} prompt tokens and max_tokens {max_tokens} make {num_prompt_tokens + max_tokens}, "
            f"more than the model's context of {max_model_len} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most max_tokens {max_tokens}, got {sampling.min_tokens}", param="min_tokens"
        )
    check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", sampling.logit_bias, vocab_size)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
        prompt_logprobs=request.output.echo and sampling.logprobs is not None,
    )


def _tools(fields: Fields) -> tuple[dict[str, Any], ...] | None:
    tools = fields.sequence("tools")
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must hold at most {MAX_TOOLS} tools, got {len(tools)}", param="tools")
    for tool in tools:
        if not isinstance(tool, dict):
            invalid("tools", tool, "a list of objects")
    # Templates print tools whole: a mark in one must not change the prompt. Their end is a boundary anyway.
    return tuple(
        {key: item for key, item in tool.items() if key != CACHE_CONTROL} for tool in tools if isinstance(tool, dict)
    )


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    given = fields.mapping("chat_template_kwargs") or {}
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise InvalidRequestError(
            f"chat_template_kwargs must hold at most {MAX_TEMPLATE_KWARGS} variables, got {len(given)}",
            param="chat_template_kwargs",
        )
    return dict(given)


def _cache_salt(fields: Fields) -> str | None:
    return fields.string("cache_salt", min_chars=1, max_chars=1024)


def _priority(fields: Fields) -> int:
    return fields.integer("priority", ge=-(2**31), le=2**31 - 1) or 0
