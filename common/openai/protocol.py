"""Requests of the OpenAI endpoints: raw JSON in, frozen and checked values out.

Life cycle: 1 the body is parsed (here, without a tokenizer or a model), 2 the node turns the prompt into token ids, 3
``common_sampling_params`` and ``to_sampling_params`` join the two and check what needs the vocabulary or the prompt's
length. Each violation is an ``InvalidRequestError`` with ``param`` set; fields that others define and that are not
built are refused by name, unknown ones are accepted and counted.

A prefill leg (``kv_transfer_params.do_remote_decode``) reads the prompt, ``cache_salt``, ``priority`` and pull sources
only: proxies leave the client's sampling and output fields in, and they may contradict the ``max_tokens: 1`` that the
proxy wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from common.errors import ContextLengthError, ContextOverflow, InvalidRequestError, ModelNotFoundError
from common.images.source import ImageSource
from common.openai.bodies.base import read_body
from common.openai.bodies.models import (
    AnswerFields,
    ChatBody,
    ChatPromptBody,
    CompletionBody,
    CompletionPromptBody,
    PromptBody,
    ReasoningEffort,
)
from common.openai.bodies.unsupported import refuse_unsupported
from common.openai.bodies.values import Prompt, ToolChoiceValue, ToolName, parse_prompts
from common.openai.constraint import Constraint, read_constraint
from common.openai.messages import CacheMark, Message, parse_cache_marks, parse_images, parse_messages, text_of
from common.openai.prompt_ids import PromptIds, read_prompt_ids, read_prompt_images
from common.openai.sampling import (
    OutputFields,
    SamplingDefaults,
    SamplingFields,
    chat_logprobs_of,
    or_default,
    output_of,
    sampling_of,
)
from common.request import SamplingParams
from common.wire.fields import Fields, invalid, shown
from common.wire.handoff import TransferMode, read_transfer_params
from common.wire.pull_sources import PullSource, read_pull_sources
from common.wire.resume import STREAM_STATE_KEY, Resume, check_resumable, read_resume

MAX_ANSWERS = 2048
"""``n`` times the prompts of one request: each answer is an object of its own for as long as the request runs."""
DEFAULT_COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that does not say; OpenAI's default."""

# The other route's prompt is no wish of this one's: bodies with both are sent to either.
_CHAT_ONLY = frozenset(ChatBody.model_fields) - frozenset(CompletionBody.model_fields) - {"messages"}
_COMPLETION_ONLY = frozenset(CompletionBody.model_fields) - frozenset(ChatBody.model_fields) - {"prompt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What both kinds of requests have.

    Attributes:
        add_special_tokens: None: as usual for the route.
        truncate_prompt_tokens: None: a prompt that is too long is refused; -1: what fits.
        reports_state, resume: see ``common.wire.resume``.
        request_id: the client's, in the body.
        constraint: what the answer's text must be.
        unknown_fields: names in the body that nobody knows.
    """

    model: str | None
    sampling: SamplingFields
    output: OutputFields
    cache_salt: str | None = None
    priority: int = 0
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncates_left: bool = True
    transfer_mode: TransferMode = TransferMode.NONE
    kv_transfer_params: tuple[Mapping[str, Any], ...] = ()
    sources: tuple[PullSource, ...] = ()
    resume: Resume | None = None
    reports_state: bool = False
    request_id: str | None = None
    constraint: Constraint | None = None
    unknown_fields: tuple[str, ...] = field(default=(), compare=False)

    def num_kept(self, max_model_len: int) -> int | None:
        """Tokens that a longer prompt is cut to, None: it is not. As ``truncate_prompt_tokens`` says; for -1, what the
        context holds beside ``max_tokens``, or beside one token, as in a prefill leg, which does not know better."""
        most = self.truncate_prompt_tokens
        return max(1, max_model_len - max(1, self.sampling.max_tokens or 0)) if most == -1 else most

    def truncated(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """What of a prompt is used: all, or ``num_kept`` tokens.

        Raises:
            InvalidRequestError: it says more than the context holds.
        """
        most = self.num_kept(max_model_len)
        if most is None:
            return token_ids
        if most > max_model_len:
            invalid("truncate_prompt_tokens", most, f"at most the model's context of {max_model_len} tokens")
        return token_ids[-most:] if self.truncates_left else token_ids[:most]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(_Request):
    """``POST /v1/completions``. ``prompts`` has one entry per prompt, in order; a single prompt is a list of one."""

    prompts: tuple[Prompt, ...]

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives per token of the prompt; None: no log-probabilities of it. An echo has the answer's."""
        given, echoed = self.sampling.prompt_logprobs, self.sampling.logprobs if self.output.echo else None
        return given if echoed is None else max(given or 0, echoed)


@dataclass(frozen=True, slots=True)
class ReasoningFields:
    """``effort``: None: the template's own. ``include``: the client gets the reasoning. ``token_budget``: most tokens
    of it; None: any number."""

    effort: ReasoningEffort | None = None
    include: bool = True
    token_budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(_Request):
    """``POST /v1/chat/completions``. ``messages`` are checked and ready for a template; ``cache_marks`` were in
    them, and so were ``images``. With ``prompt_ids`` there are no messages: they were rendered by whoever sent the
    request on."""

    messages: tuple[Message, ...]
    images: tuple[ImageSource, ...] = ()
    cache_marks: tuple[CacheMark, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: ToolChoiceValue = "none"
    parallel_tool_calls: bool = True
    reasoning: ReasoningFields = field(default_factory=ReasoningFields)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    documents: tuple[dict[str, Any], ...] | None = None
    prompt_ids: PromptIds | None = None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives per token of the prompt; None: no log-probabilities of it."""
        return self.sampling.prompt_logprobs


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
    mode, kv_transfer_params = read_transfer_params(body.get("kv_transfer_params"))
    is_prefill_leg = mode is TransferMode.REMOTE_DECODE
    fields = read_body(CompletionPromptBody if is_prefill_leg else CompletionBody, body)
    prompts = fields.prompt if fields.prompt is not None else parse_prompts(None)
    resume = read_resume(body, num_prompts=len(prompts)) if is_from_peer else None
    answer = _NO_ANSWER
    if isinstance(fields, CompletionBody):
        output = output_of(fields, echo=bool(fields.echo))
        check_answers(output.n, len(prompts))
        answer = _answer(
            body, fields, output, fields.logprobs, _CHAT_ONLY, echoes_prompt=output.echo, is_from_peer=is_from_peer
        )
        if answer.sampling.max_tokens == 0 and not output.echo:
            invalid(answer.sampling.max_tokens_field, 0, "at least 1 unless echo is true")
    return CompletionRequest(
        prompts=prompts,
        resume=resume,
        **_common(body, fields, answer, mode, kv_transfer_params, is_from_peer=is_from_peer),
    )


def check_answers(n: int, num_prompts: int) -> None:
    """Raises InvalidRequestError when there are too many."""
    if n * num_prompts > MAX_ANSWERS:
        raise InvalidRequestError(
            f"n times the prompts must be at most {MAX_ANSWERS} answers, got n {n} and {num_prompts} prompts, which "
            f"make {n * num_prompts}",
            param="n",
        )


def parse_chat(body: Mapping[str, Any], *, is_from_peer: bool = False) -> ChatRequest:
    """The checked form of a chat completion request body. ``is_from_peer``: it may have the prompt's tokens instead of
    messages (``common.openai.prompt_ids``), go on with an answer that began elsewhere (``common.wire.resume``), and
    name pull sources.

    Raises:
        InvalidRequestError: naming field, value and bound.
    """
    mode, kv_transfer_params = read_transfer_params(body.get("kv_transfer_params"))
    is_prefill_leg = mode is TransferMode.REMOTE_DECODE
    prompt_ids = read_prompt_ids(body) if is_from_peer else None
    fields = read_body(ChatPromptBody if is_prefill_leg else ChatBody, body)
    messages = parse_messages(fields.messages) if prompt_ids is None else ()
    if fields.continue_final_message and fields.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
        )
    resume = read_resume(body, num_prompts=1) if is_from_peer else None
    answer, reasoning = _NO_ANSWER, ReasoningFields(fields.reasoning_effort)
    if isinstance(fields, ChatBody):
        reasoning = _reasoning(fields)
        if prompt_ids is None:
            _check_tool_choice(fields.tool_choice, fields.tools)
        output = output_of(fields, echo=bool(fields.echo))
        # A chat's echo is a text without log-probabilities.
        answer = _answer(
            body,
            fields,
            output,
            chat_logprobs_of(fields),
            _COMPLETION_ONLY,
            echoes_prompt=False,
            is_from_peer=is_from_peer,
        )
        if answer.sampling.max_tokens == 0:
            invalid(answer.sampling.max_tokens_field, 0, "at least 1")
    return ChatRequest(
        messages=messages,
        images=parse_images(fields.messages) if messages else read_prompt_images(body) if prompt_ids else (),
        cache_marks=parse_cache_marks(fields.messages) if messages else (),
        tools=fields.tools,
        tool_choice=fields.tool_choice or ("auto" if fields.tools else "none"),
        parallel_tool_calls=not isinstance(fields, ChatBody) or fields.parallel_tool_calls is not False,
        reasoning=reasoning,
        add_generation_prompt=fields.add_generation_prompt is not False and not fields.continue_final_message,
        continue_final_message=bool(fields.continue_final_message),
        chat_template=fields.chat_template,
        chat_template_kwargs=fields.chat_template_kwargs,
        documents=fields.documents,
        prompt_ids=prompt_ids,
        resume=resume,
        **_common(body, fields, answer, mode, kv_transfer_params, is_from_peer=is_from_peer),
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a prefill leg has not."""

    sampling: SamplingFields = field(default_factory=SamplingFields)
    output: OutputFields = field(default_factory=OutputFields)
    unknown_fields: tuple[str, ...] = ()
    reports_state: bool = False
    request_id: str | None = None
    constraint: Constraint | None = None


_NO_ANSWER = _Answer()


def _answer(
    body: Mapping[str, Any],
    fields: AnswerFields,
    output: OutputFields,
    logprobs: int | None,
    of_other_route: frozenset[str],
    *,
    echoes_prompt: bool,
    is_from_peer: bool,
) -> _Answer:
    unknown_fields = refuse_unsupported(fields, of_other_route)
    if fields.stream_options is not None:
        unknown_fields += refuse_unsupported(fields.stream_options, frozenset(), prefix="stream_options.")
    sampling = sampling_of(fields, logprobs)
    reports_state = False
    if is_from_peer:
        has_prompt_logprobs = echoes_prompt and sampling.logprobs is not None
        check_resumable(body, stream=output.stream, n=output.n, has_prompt_logprobs=has_prompt_logprobs)
        reports_state = Fields(body).boolean(STREAM_STATE_KEY)
    return _Answer(sampling, output, unknown_fields, reports_state, fields.request_id, read_constraint(body))


def _reasoning(fields: ChatBody) -> ReasoningFields:
    budget = fields.thinking_token_budget
    return ReasoningFields(
        fields.reasoning_effort, fields.include_reasoning is not False, None if budget == -1 else budget
    )


def _check_tool_choice(choice: ToolChoiceValue | None, tools: tuple[dict[str, Any], ...] | None) -> None:
    if choice == "required" and not tools:
        raise InvalidRequestError("tool_choice required needs tools, got none", param="tool_choice")
    if isinstance(choice, ToolName) and choice.name not in [tool["function"]["name"] for tool in tools or ()]:
        invalid("tool_choice", choice.name, "the name of one of tools")


def _truncation(fields: PromptBody) -> int | None:
    if fields.truncate_prompt_tokens == 0:
        invalid("truncate_prompt_tokens", 0, "at least 1, or -1")
    return fields.truncate_prompt_tokens


def _common(
    body: Mapping[str, Any],
    fields: PromptBody,
    answer: _Answer,
    mode: TransferMode,
    kv_transfer_params: tuple[Mapping[str, Any], ...],
    *,
    is_from_peer: bool,
) -> dict[str, Any]:
    """Of both kinds of requests."""
    return {
        "model": fields.model,
        "sampling": answer.sampling,
        "output": answer.output,
        "unknown_fields": answer.unknown_fields,
        "reports_state": answer.reports_state,
        "request_id": answer.request_id,
        "constraint": answer.constraint,
        "cache_salt": fields.cache_salt,
        "priority": fields.priority or 0,
        "add_special_tokens": fields.add_special_tokens,
        "truncate_prompt_tokens": _truncation(fields),
        "truncates_left": fields.truncation_side != "right",
        "transfer_mode": mode,
        "kv_transfer_params": kv_transfer_params,
        "sources": read_pull_sources(body, kv_transfer_params) if is_from_peer else (),
    }


def echoed_message(request: ChatRequest) -> str | None:
    """The text that an answer with ``echo`` begins with: the last message's, if the answer is its role's."""
    last = request.messages[-1] if request.messages else {}
    role = "assistant" if request.add_generation_prompt else last.get("role")
    return text_of(last.get("content")) if last.get("role") == role else None


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for.

    Raises:
        InvalidRequestError: naming the largest id and ``vocab_size``.
    """
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise InvalidRequestError(f"{name} holds token id {largest}, the model has {vocab_size} tokens", param=name)


def check_model(requested: str | None, served: Collection[str]) -> None:
    """Absent, null and empty mean the served model, as in vLLM; any other name must be one of ``served``.

    Raises:
        ModelNotFoundError: naming both.
    """
    if requested and requested not in served:
        raise ModelNotFoundError(
            f"model {shown(requested)} is not served here, only {', '.join(sorted(served))}", param="model"
        )


# --- sampling ---------------------------------------------------------------------------------------------------------


def common_sampling_params(
    request: GenerationRequest,
    *,
    vocab_size: int,
    defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008 - frozen
) -> SamplingParams:
    """What the prompts of a request have in common: all but ``max_tokens``. Made once: it costs as much as the
    request's lists are long.

    Raises:
        InvalidRequestError: a token id is not in the vocabulary.
    """
    sampling = request.sampling
    check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", sampling.logit_bias, vocab_size)
    check_token_ids("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
    check_token_ids("logprob_token_ids", sampling.logprob_token_ids or (), vocab_size)
    return SamplingParams(
        min_tokens=sampling.min_tokens,
        temperature=or_default(sampling.temperature, defaults.temperature),
        top_p=or_default(sampling.top_p, defaults.top_p),
        top_k=or_default(sampling.top_k, defaults.top_k),
        min_p=or_default(sampling.min_p, defaults.min_p),
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=or_default(sampling.repetition_penalty, defaults.repetition_penalty),
        logit_bias=sampling.logit_bias,
        logprobs=sampling.logprobs,
        allowed_token_ids=sampling.allowed_token_ids,
        logprob_token_ids=sampling.logprob_token_ids,
        prompt_logprobs=request.num_prompt_logprobs,
    )


def to_sampling_params(
    request: GenerationRequest,
    common: SamplingParams,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008 - frozen
) -> SamplingParams:
    """The engine's view of a request whose prompt has ``num_prompt_tokens`` tokens. ``common``: of all its prompts.

    ``max_tokens`` defaults to 16 for completions (less where the context ends sooner) and to the remaining context for
    chat; ``defaults`` bound it. A prefill leg generates nothing: only the prompt itself has to fit.

    Raises:
        ContextLengthError: prompt and ``max_tokens`` exceed ``max_model_len``.
        InvalidRequestError: the prompt is empty, or ``min_tokens`` exceeds ``max_tokens``.
    """
    is_chat = isinstance(request, ChatRequest)
    prompt_field = "messages" if is_chat else "prompt"
    if num_prompt_tokens < 1:
        raise InvalidRequestError(f"{prompt_field} must not be empty, got 0 tokens", param=prompt_field)
    room = max_model_len - num_prompt_tokens
    if room < 0:
        raise ContextLengthError(prompt_field, ContextOverflow(max_model_len, num_prompt_tokens))
    if request.transfer_mode is TransferMode.REMOTE_DECODE:
        return replace(common, max_tokens=1)
    sampling = request.sampling
    max_tokens = sampling.max_tokens
    if max_tokens is None:
        if room == 0:
            raise ContextLengthError(prompt_field, ContextOverflow(max_model_len, num_prompt_tokens, max_tokens=1))
        max_tokens = room if is_chat else min(DEFAULT_COMPLETION_TOKENS, room)
    elif max_tokens > room:
        overflow = ContextOverflow(max_model_len, num_prompt_tokens, max_tokens)
        raise ContextLengthError(prompt_field, overflow, answer_field=sampling.max_tokens_field)
    if defaults.max_tokens is not None:
        max_tokens = min(max_tokens, defaults.max_tokens)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most {sampling.max_tokens_field} {max_tokens}, got {sampling.min_tokens}",
            param="min_tokens",
        )
    return replace(common, max_tokens=max_tokens)
