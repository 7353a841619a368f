"""From a request's body to the engine's requests: one job per prompt.

1 get the token ids: tokenise here, or take those of the proxy or of a manifest, 2 check them against the model, 3 add
sampling parameters and the choices that collect the outputs. Long texts are tokenised off the event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fastapi import Request as HttpRequest

from common.errors import InvalidRequestError
from common.images.rules import ImageLimits
from common.images.source import EncodedImage, ImageSource
from common.images.span import ImageSpan
from common.kv_cache.spec import KVCacheConfig
from common.metrics.metrics import Metrics
from common.node.pull.handoff import Handoff, HandoffReader, HandoffResult
from common.node.serving.answers import AnswerPlan, plan_answer
from common.node.serving.choices import Choice
from common.node.serving.images import PromptImages
from common.openai.prompt_ids import PROMPT_IDS_KEY, PromptIds
from common.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    check_token_ids,
    common_sampling_params,
    echoed_message,
    to_sampling_params,
)
from common.openai.sampling import SamplingDefaults
from common.request import SamplingParams, TokenLogprob
from common.server.gate import is_peer, request_id_of
from common.server.json_body import run_for_body
from common.text.chat_prompt import ChatPrompt, make_chat_prompt
from common.text.tokenizer import TextCodec
from common.wire.handoff import TransferMode
from common.wire.manifest import Manifest
from common.wire.resume import RESUME_KEY, Resume

THREAD_TOKENISE_CHARS = 20_000
"""A request with more characters of text than this is tokenised off the event loop: it takes about 10 ms."""

THREAD_TOKENISE_PROMPTS = 32
"""More texts than this are tokenised there too, however short: each takes up to 0.3 ms."""

ANSWERS_PER_TURN = 64
"""Answers of a request that begin in one turn of the event loop: it takes about 2 ms."""

THREAD_DECODE_TOKENS = 1000
"""An echoed prompt of more token ids than this is turned into text off the event loop: it takes about 1 ms."""

THREAD_RESUME_TOKENS = 256
"""A resumed answer of more tokens than this is turned into text off the event loop: it takes about 10 ms."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens, where in it states are worth keeping and images are (``Request.semantic_boundaries``,
    ``Request.images``), and those images, if this node computes any."""

    token_ids: list[int]
    semantic_boundaries: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    encoded_images: tuple[EncodedImage, ...] = ()


@dataclass(slots=True)
class PromptJob:
    """One prompt of a request on its way through the engine. ``is_read``: whether reading ``handoff`` has begun;
    ``handoff_result``: what it came to. ``num_resumed``: how many of ``token_ids``, at their end, are the answer so
    far. ``first_token_due_s``: when the first token is to be there, monotonic; ``itl_target_s``: as of the engine's
    request. ``prompt_logprobs``: once the prompt is computed, if they were asked for."""

    index: int
    request_id: str
    token_ids: list[int]
    semantic_boundaries: tuple[int, ...]
    sampling: SamplingParams
    handoff: Handoff | None
    choices: list[Choice]
    num_resumed: int = 0
    first_token_due_s: float | None = None
    itl_target_s: float | None = None
    images: tuple[ImageSpan, ...] = ()
    encoded_images: tuple[EncodedImage, ...] = ()
    prompt_logprobs: list[TokenLogprob | None] | None = None
    is_read: bool = False
    handoff_result: HandoffResult = field(default_factory=HandoffResult)


class PromptReader:
    """Makes the jobs of requests. Without ``codec`` the model has no tokenizer; without ``images`` no image is computed
    here; without ``handoffs`` this node pulls nothing that a prefill leg computed."""

    def __init__(
        self,
        codec: TextCodec | None,
        handoffs: HandoffReader | None,
        images: PromptImages | None = None,
        *,
        cache_config: KVCacheConfig,
        max_model_len: int,
        metrics: Metrics,
        defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008 - frozen
    ) -> None:
        self._codec = codec
        self._handoffs = handoffs
        self.images = images
        self._vocab_size = cache_config.geometry.vocab_size
        self._keeps_boundaries = cache_config.keeps_boundaries
        self._max_model_len = max_model_len
        self._metrics = metrics
        self._defaults = defaults

    @property
    def codec(self) -> TextCodec:
        if self._codec is None:
            raise InvalidRequestError("the model has no tokenizer: this node cannot turn text into tokens or back")
        return self._codec

    async def prompts(self, request: GenerationRequest) -> list[EncodedPrompt]:
        """One entry per prompt; the answer so far of one that is resumed is part of it."""
        prompts = await self._given_prompts(request)
        if request.resume is None:
            return prompts
        [prompt] = prompts
        token_ids = [*prompt.token_ids, *self._resumed_tokens(request.resume)]
        return [replace(prompt, token_ids=token_ids)]

    async def _given_prompts(self, request: GenerationRequest) -> list[EncodedPrompt]:
        if isinstance(request, ChatRequest):
            if request.prompt_ids is not None:
                if request.images:
                    return [await asyncio.to_thread(self._given, request.prompt_ids, request.images)]
                return [self._given(request.prompt_ids)]
            self._metrics.inc("prompts_tokenised_total")
            return [await asyncio.to_thread(self._encode_chat, request)]
        text_lengths = [len(prompt) for prompt in request.prompts if isinstance(prompt, str)]
        self._metrics.inc("prompts_tokenised_total", len(text_lengths))
        if sum(text_lengths) > THREAD_TOKENISE_CHARS or len(text_lengths) > THREAD_TOKENISE_PROMPTS:
            return await asyncio.to_thread(self._encode_prompts, request)
        return self._encode_prompts(request)

    def _encode_prompts(self, request: CompletionRequest) -> list[EncodedPrompt]:
        """Blocks; 10 ms for each 20,000 characters."""
        return [EncodedPrompt(token_ids) for token_ids in self.codec.encode_prompts(request)]

    def _given(self, prompt: PromptIds, sources: Sequence[ImageSource] = ()) -> EncodedPrompt:
        """A chat that the proxy has tokenised. Raises InvalidRequestError for ids that the model does not have, or
        images that are not the prompt's."""
        check_token_ids(f"{PROMPT_IDS_KEY}.token_ids", prompt.token_ids, self._vocab_size)
        boundaries = prompt.boundaries if self._keeps_boundaries else ()
        encoded = self.images.read(sources, prompt.images) if self.images is not None else ()
        return EncodedPrompt(list(prompt.token_ids), boundaries, prompt.images, encoded)

    def _encode_chat(self, request: ChatRequest) -> EncodedPrompt:
        """Blocks; several milliseconds for a long chat."""
        prompt = self.chat_prompt(request)
        return EncodedPrompt(list(prompt.ids.token_ids), prompt.ids.boundaries, prompt.ids.images, prompt.encoded)

    def chat_prompt(self, request: ChatRequest) -> ChatPrompt:
        """Blocks. Raises InvalidRequestError as ``make_chat_prompt``."""
        return make_chat_prompt(
            self.codec,
            request,
            self.images.limits if self.images is not None else ImageLimits(),
            keeps_boundaries=self._keeps_boundaries,
            max_model_len=self._max_model_len,
        )

    def _resumed_tokens(self, resume: Resume) -> tuple[int, ...]:
        check_token_ids(f"{RESUME_KEY}.output_token_ids", resume.output_token_ids, self._vocab_size)
        return resume.output_token_ids

    def check_length(self, request: GenerationRequest, token_ids: Sequence[int]) -> None:
        """Of a prefill leg's prompt. Raises InvalidRequestError."""
        self._sampling(request, SamplingParams(), token_ids)

    def _sampling(self, request: GenerationRequest, common: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
        return to_sampling_params(
            request,
            common,
            num_prompt_tokens=len(token_ids),
            max_model_len=self._max_model_len,
            defaults=self._defaults,
        )

    async def _common_sampling(self, http: HttpRequest, request: GenerationRequest) -> SamplingParams:
        """What all prompts of the request have in common, of which there may be 2,048: made once, off the event loop
        where it takes long, as up to 128 words do, each tokenised twice."""
        words = request.sampling.bad_words
        bad_token_ids = await asyncio.to_thread(self.codec.bad_token_ids, words) if words else ()

        def make() -> SamplingParams:
            common = common_sampling_params(request, vocab_size=self._vocab_size, defaults=self._defaults)
            grammar = request.constraint.grammar() if request.constraint is not None else None
            return replace(common, grammar=grammar, bad_token_ids=bad_token_ids)

        return await run_for_body(http, make)

    async def jobs(self, http: HttpRequest, request: GenerationRequest) -> list[PromptJob]:
        """Raises InvalidRequestError. What is not read of what the request was handed is given back."""
        handoffs: Sequence[Handoff] = ()
        if request.transfer_mode is TransferMode.REMOTE_PREFILL:
            parse = partial(self._parse_handoffs, request, is_from_peer=is_peer(http))
            handoffs = await run_for_body(http, parse)
        try:
            jobs = await self._jobs(http, request, handoffs)
        except InvalidRequestError:
            self._give_back(handoffs)
            raise
        if handoffs:
            self._give_back([handoff for job, handoff in zip(jobs, handoffs, strict=True) if job.handoff is None])
        return jobs

    def give_back(self, jobs: Sequence[PromptJob]) -> None:
        """The request is refused: what of its handoffs is not read will not be."""
        self._give_back([job.handoff for job in jobs if job.handoff is not None and not job.is_read])

    def _give_back(self, handoffs: Sequence[Handoff]) -> None:
        for handoff in handoffs:
            assert self._handoffs is not None
            self._handoffs.give_back(handoff)

    async def _jobs(
        self, http: HttpRequest, request: GenerationRequest, handoffs: Sequence[Handoff]
    ) -> list[PromptJob]:
        num_prompts = 1 if isinstance(request, ChatRequest) else len(request.prompts)
        if handoffs and len(handoffs) != num_prompts:
            raise InvalidRequestError(
                f"kv_transfer_params must have one entry per prompt: got {len(handoffs)} for {num_prompts} prompts",
                param="kv_transfer_params",
            )
        manifests = [handoff for handoff in handoffs if isinstance(handoff, Manifest)]
        if manifests and len(manifests) == len(handoffs):
            prompts = [EncodedPrompt(list(each.prompt_token_ids), images=each.images) for each in manifests]
        elif manifests:
            raise InvalidRequestError(
                "kv_transfer_params: all entries must have a tandem_rendezvous, or none", param="kv_transfer_params"
            )
        else:
            prompts = await self.prompts(request)
        common = await self._common_sampling(http, request)
        num_resumed = len(request.resume.output_token_ids) if request.resume is not None else 0
        jobs: list[PromptJob] = []
        alike: dict[int, SamplingParams] = {}  # by max_tokens: the sampler reads the lists of each object once
        for index, prompt in enumerate(prompts):
            if index % max(1, ANSWERS_PER_TURN // request.output.n) == 0:
                await asyncio.sleep(0)
            given = prompt.token_ids[: len(prompt.token_ids) - num_resumed]
            sampling = self._sampling(request, common, given)
            sampling = alike.setdefault(sampling.max_tokens, sampling)
            if prompt.images and sampling.prompt_logprobs is not None:
                raise InvalidRequestError("prompt_logprobs is not supported for prompts with images", param="messages")
            answer: AnswerPlan | None = None
            if isinstance(request, ChatRequest) and self._codec is not None:
                plan = partial(plan_answer, request, self._codec, given, request_id_of(http))
                answer = await run_for_body(http, plan)
            if answer is not None and answer.grammar is not None:
                sampling = replace(sampling, grammar=answer.grammar)
            echo_text = await self._echo_text(request, index, given)
            choices = self._choices(request, index, given, sampling, echo_text, answer)
            if request.resume is not None:
                await self._resume(request.resume, prompt.token_ids, sampling, choices[0])
            jobs.append(
                PromptJob(
                    index=index,
                    request_id=engine_request_id(http),
                    token_ids=prompt.token_ids,
                    semantic_boundaries=prompt.semantic_boundaries,
                    sampling=sampling,
                    handoff=handoffs[index] if handoffs and sampling.prompt_logprobs is None else None,
                    choices=choices,
                    num_resumed=num_resumed,
                    images=prompt.images,
                    encoded_images=prompt.encoded_images,
                )
            )
        return jobs

    @staticmethod
    async def _resume(resume: Resume, token_ids: Sequence[int], sampling: SamplingParams, choice: Choice) -> None:
        output_token_ids = resume.output_token_ids
        if len(token_ids) <= len(output_token_ids) or tuple(token_ids[-len(output_token_ids) :]) != output_token_ids:
            raise InvalidRequestError(
                f"{RESUME_KEY}.output_token_ids must be the end of the prompt that was handed over", param=RESUME_KEY
            )
        if len(output_token_ids) >= sampling.max_tokens:
            raise InvalidRequestError(
                f"{RESUME_KEY}.output_token_ids must be fewer than max_tokens {sampling.max_tokens}, got "
                f"{len(output_token_ids)}",
                param=RESUME_KEY,
            )
        if len(output_token_ids) > THREAD_RESUME_TOKENS:
            await asyncio.to_thread(choice.resume, output_token_ids)
        else:
            choice.resume(output_token_ids)

    def _parse_handoffs(self, request: GenerationRequest, *, is_from_peer: bool) -> list[Handoff]:
        if self._handoffs is None:
            raise InvalidRequestError(
                "kv_transfer_params.do_remote_prefill: this node does not take prompts in; ask a decode node",
                param="kv_transfer_params.do_remote_prefill",
            )
        return [self._handoffs.parse(each, is_from_peer=is_from_peer) for each in request.kv_transfer_params]

    async def _echo_text(self, request: GenerationRequest, prompt_index: int, token_ids: list[int]) -> str | None:
        output = request.output
        if not output.echo:
            return None
        if isinstance(request, ChatRequest):
            return echoed_message(request)
        prompt = request.prompts[prompt_index]
        if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
            return prompt
        decode = partial(self.codec.decode, token_ids, skip_special_tokens=output.skip_special_tokens)
        return await asyncio.to_thread(decode) if len(token_ids) > THREAD_DECODE_TOKENS else decode()

    def _choices(
        self,
        request: GenerationRequest,
        prompt_index: int,
        token_ids: list[int],
        sampling: SamplingParams,
        echo_text: str | None,
        answer: AnswerPlan | None,
    ) -> list[Choice]:
        output = request.output
        named = sampling.logprob_token_ids
        return [
            Choice(
                prompt_index * output.n + fork,
                self.codec,
                output,
                is_chat=isinstance(request, ChatRequest),
                num_logprobs=sampling.logprobs if named is None else len(named),
                min_tokens=sampling.min_tokens,
                prompt_token_ids=token_ids,
                echo_text=echo_text,
                answer=answer,
            )
            for fork in range(output.n)
        ]


def engine_request_id(http: HttpRequest) -> str:
    """Unique in this process and recognisable in logs, whatever ids clients send."""
    return f"{request_id_of(http)[:80]}-{uuid.uuid4().hex[:12]}"
