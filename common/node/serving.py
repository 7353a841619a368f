"""The OpenAI endpoints of a node: JSON body in, engine requests, JSON or a stream of events out.

Life of a request here: 1 parse and check the body, 2 token ids (tokenised here, or those of the handed-over prompt), 3
admit or 429, 4 one engine request per prompt (``n`` forks each), 5 outputs become text as they come, 6 answer. A
prefill leg leaves after 3 through ``PrefillLeg``. The status is decided before the first byte: a stream starts when its
first output is here; what fails later is an error event. Whatever ends the handler, the engine requests are aborted and
leases released.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.api import responses
from common.api.handoff import TransferMode, rendezvous_id_of
from common.api.http import is_peer, read_json_object, request_id_of, run_until_disconnect, wants_trace
from common.api.manifest import Manifest
from common.api.prompt_ids import PROMPT_IDS_KEY, PromptIds
from common.api.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    check_model,
    check_token_ids,
    parse_chat,
    parse_completion,
    to_sampling_params,
)
from common.api.resume import RESUME_KEY, Resume, state_line
from common.api.tokenizer import TextCodec
from common.errors import InvalidRequestError, RequestAbortedError, TandemError
from common.node.choices import Choice, ChoiceDelta
from common.node.conversation import RemotePrefix
from common.node.handover import Handover, Taken
from common.node.node import Node
from common.node.node_metrics import RequestRecord
from common.node.rendezvous import refused_rendezvous
from common.node.tracing import PROXY_SECONDS_HEADER, REPORT_HEADER, RequestTrace
from common.request import Request, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

THREAD_TOKENISE_CHARS = 20_000
"""Longer texts are tokenised off the event loop (about 10 ms of work)."""
THREAD_RESUME_TOKENS = 256
"""More tokens of a resumed answer are turned into text off the event loop (about 10 ms of work)."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as tokens, and where in it states are worth keeping (``Request.semantic_boundaries``)."""

    token_ids: list[int]
    semantic_boundaries: tuple[int, ...] = ()


class PrefillLeg(Protocol):
    """How a node hands a computed prompt out."""

    async def run(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        *,
        cache_salt: str | None,
        priority: int,
        rendezvous_id: str | None,
        remote: RemotePrefix | None,
    ) -> tuple[Manifest, RequestOutput]: ...


class Intake(Protocol):
    """How a node takes a computed prompt in."""

    def parse(self, params: Mapping[str, Any]) -> Handover: ...

    def take(
        self, handover: Handover, token_ids: Sequence[int], cache_salt: str | None
    ) -> contextlib.AbstractAsyncContextManager[Taken]: ...


@dataclass(slots=True)
class PromptJob:
    """One prompt of a request on its way through the engine. ``taken``: what became of ``handover``, once it was looked
    at. ``num_resumed``: how many of ``token_ids``, at their end, are the answer so far."""

    index: int
    request_id: str
    token_ids: list[int]
    semantic_boundaries: tuple[int, ...]
    sampling: SamplingParams
    handover: Handover | None
    choices: list[Choice]
    num_resumed: int = 0
    taken: Taken = field(default_factory=Taken)


class Serving:
    """Stateless but for the node it belongs to."""

    def __init__(
        self, node: Node, codec: TextCodec | None, *, prefill_leg: PrefillLeg | None, intake: Intake | None
    ) -> None:
        self._node = node
        self._codec = codec
        self._prefill_leg = prefill_leg
        self._intake = intake
        self._eos_token_ids = frozenset(node.model.loaded.eos_token_ids)
        self._keeps_boundaries = node.model.cache_config.keeps_boundaries

    async def completions(self, http: HttpRequest) -> Response:
        body = await read_json_object(http)
        with self._telling_reader(body):
            return await self._serve(http, parse_completion(body, is_from_peer=is_peer(http)))

    async def chat(self, http: HttpRequest) -> Response:
        body = await read_json_object(http)
        with self._telling_reader(body):
            return await self._serve(http, parse_chat(body, is_from_peer=is_peer(http)))

    @contextlib.contextmanager
    def _telling_reader(self, body: Mapping[str, Any]) -> Iterator[None]:
        """A prefill leg that is refused before it begins: who waits for it at its rendezvous hears so at once."""
        try:
            yield
        except TandemError as exc:
            rendezvous_id = refused_rendezvous(body)
            if rendezvous_id is not None:
                self._node.rendezvous.refuse(rendezvous_id, exc)
            raise

    @property
    def codec(self) -> TextCodec:
        if self._codec is None:
            raise InvalidRequestError("the model has no tokenizer: this node cannot turn text into tokens or back")
        return self._codec

    async def _serve(self, http: HttpRequest, request: GenerationRequest) -> Response:
        node = self._node
        check_model(request.model, (node.served_model_name,))
        span = node.tracer.begin(http.url.path, request_id_of(http), http.headers, time.monotonic())
        record = RequestRecord(node.metrics, "chat" if isinstance(request, ChatRequest) else "completions", span)
        try:
            node.check_admission()
            if request.transfer_mode is TransferMode.REMOTE_DECODE:
                return await run_until_disconnect(http, self._serve_prefill_leg(http, request, record))
            jobs = await self._jobs(http, request)
            # The proxy shows on its status page what the client need not ask for.
            is_traced = wants_trace(http) or PROXY_SECONDS_HEADER in http.headers
            trace = RequestTrace.from_headers(http.headers, node) if is_traced else None
            response = _ResponseBuilder(self, http, request, jobs, trace, record)
            if not request.output.stream:
                return await run_until_disconnect(http, response.whole())
            stream = response.events()
            first = await run_until_disconnect(http, anext(stream))  # errors up to here have a status
        except BaseException as exc:
            record.close(_outcome(exc))
            raise
        return _EventStream(first, stream, response.report_headers())

    async def _serve_prefill_leg(
        self, http: HttpRequest, request: GenerationRequest, record: RequestRecord
    ) -> Response:
        if self._prefill_leg is None:
            raise InvalidRequestError(
                "kv_transfer_params.do_remote_decode: this node does not hand prompts out; ask a prefill node",
                param="kv_transfer_params.do_remote_decode",
            )
        prompts = await self._prompts(request)
        if len(prompts) != 1:
            raise InvalidRequestError(
                f"a prefill leg takes one prompt, got {len(prompts)}; send one leg per prompt", param="prompt"
            )
        token_ids = prompts[0].token_ids
        self._sampling(request, token_ids)
        async with self._node.prefix_sources.prefix(token_ids, request.cache_salt, request.sources) as remote:
            manifest, output = await self._prefill_leg.run(
                _engine_request_id(http),
                prompts[0],
                cache_salt=request.cache_salt,
                priority=request.priority,
                rendezvous_id=rendezvous_id_of(request.kv_transfer_params[0]),
                remote=remote,
            )
        record.prompt_done(len(token_ids), output)
        record.close_finished(output.finish_reason)
        usage = responses.usage_block(len(token_ids), 0, output.num_cached_tokens)
        common = {
            "response_id": _response_id(http, request),
            "model": self._node.served_model_name,
            "created": int(time.time()),
            "usage": usage,
            "kv_transfer_params": manifest.to_params(),
        }
        assert output.finish_reason is not None
        if isinstance(request, ChatRequest):
            chat_choice = responses.chat_choice(0, "", finish_reason=output.finish_reason)
            return JSONResponse(responses.chat_response(choices=[chat_choice], **common))
        choice = responses.completion_choice(0, "", finish_reason=output.finish_reason)
        return JSONResponse(responses.completion_response(choices=[choice], **common))

    # --- from body to engine requests

    async def _prompts(self, request: GenerationRequest) -> list[EncodedPrompt]:
        """One entry per prompt; the answer so far of one that is resumed is part of it."""
        prompts = await self._given_prompts(request)
        if request.resume is None:
            return prompts
        [prompt] = prompts
        token_ids = [*prompt.token_ids, *self._resumed_tokens(request.resume)]
        return [EncodedPrompt(token_ids, prompt.semantic_boundaries)]

    async def _given_prompts(self, request: GenerationRequest) -> list[EncodedPrompt]:
        if isinstance(request, ChatRequest):
            if request.prompt_ids is not None:
                return [self._given(request.prompt_ids)]
            self._node.metrics.inc("prompts_tokenised_total")
            return [await asyncio.to_thread(self._encode_chat, request)]
        encoded = []
        num_texts = sum(isinstance(prompt, str) for prompt in request.prompts)
        self._node.metrics.inc("prompts_tokenised_total", num_texts)
        for prompt in request.prompts:
            if isinstance(prompt, str) and len(prompt) > THREAD_TOKENISE_CHARS:
                encoded.append(EncodedPrompt(await asyncio.to_thread(self.codec.encode_prompt, prompt)))
            else:
                encoded.append(EncodedPrompt(self.codec.encode_prompt(prompt)))
        return encoded

    def _given(self, prompt: PromptIds) -> EncodedPrompt:
        """A chat that the proxy has tokenised. Raises InvalidRequestError for ids that the model does not have."""
        geometry = self._node.model.cache_config.geometry
        check_token_ids(f"{PROMPT_IDS_KEY}.token_ids", prompt.token_ids, geometry.vocab_size)
        return EncodedPrompt(list(prompt.token_ids), prompt.boundaries if self._keeps_boundaries else ())

    def _encode_chat(self, request: ChatRequest) -> EncodedPrompt:
        """Blocks; several milliseconds for a long chat."""
        token_ids = self.codec.encode_chat(request)
        if not self._keeps_boundaries or len(token_ids) > self._node.model.max_model_len:
            return EncodedPrompt(token_ids)
        return EncodedPrompt(token_ids, self.codec.chat_boundaries(request, token_ids))

    def _resumed_tokens(self, resume: Resume) -> tuple[int, ...]:
        vocab_size = self._node.model.cache_config.geometry.vocab_size
        check_token_ids(f"{RESUME_KEY}.output_token_ids", resume.output_token_ids, vocab_size)
        return resume.output_token_ids

    def _sampling(self, request: GenerationRequest, token_ids: Sequence[int]) -> SamplingParams:
        return to_sampling_params(
            request,
            num_prompt_tokens=len(token_ids),
            max_model_len=self._node.model.max_model_len,
            vocab_size=self._node.model.cache_config.geometry.vocab_size,
        )

    async def _jobs(self, http: HttpRequest, request: GenerationRequest) -> list[PromptJob]:
        handovers: Sequence[Handover] = ()
        if request.transfer_mode is TransferMode.REMOTE_PREFILL:
            handovers = self._handovers(request)
        manifests = [handover for handover in handovers if isinstance(handover, Manifest)]
        if manifests and len(manifests) == len(handovers):
            prompts = [EncodedPrompt(list(manifest.prompt_token_ids)) for manifest in manifests]
        elif manifests:
            raise InvalidRequestError(
                "kv_transfer_params: all entries must have a tandem_rendezvous, or none", param="kv_transfer_params"
            )
        else:
            prompts = await self._prompts(request)
        num_resumed = len(request.resume.output_token_ids) if request.resume is not None else 0
        jobs = []
        for index, prompt in enumerate(prompts):
            given = prompt.token_ids[: len(prompt.token_ids) - num_resumed]
            sampling = self._sampling(request, given)
            choices = self._choices(request, index, given, sampling)
            if request.resume is not None:
                await self._resume(request.resume, prompt.token_ids, sampling, choices[0])
            jobs.append(
                PromptJob(
                    index=index,
                    request_id=_engine_request_id(http),
                    token_ids=prompt.token_ids,
                    semantic_boundaries=prompt.semantic_boundaries,
                    sampling=sampling,
                    handover=handovers[index] if handovers and not sampling.prompt_logprobs else None,
                    choices=choices,
                    num_resumed=num_resumed,
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

    def _handovers(self, request: GenerationRequest) -> list[Handover]:
        if self._intake is None:
            raise InvalidRequestError(
                "kv_transfer_params.do_remote_prefill: this node does not take prompts in; ask a decode node",
                param="kv_transfer_params.do_remote_prefill",
            )
        handovers = [self._intake.parse(params) for params in request.kv_transfer_params]
        num_prompts = 1 if isinstance(request, ChatRequest) else len(request.prompts)
        if len(handovers) != num_prompts:
            raise InvalidRequestError(
                f"kv_transfer_params must have one entry per prompt: got {len(handovers)} for {num_prompts} prompts",
                param="kv_transfer_params",
            )
        return handovers

    def _choices(
        self, request: GenerationRequest, prompt_index: int, token_ids: list[int], sampling: SamplingParams
    ) -> list[Choice]:
        output = request.output
        echo_text = None
        if output.echo and isinstance(request, CompletionRequest):
            prompt = request.prompts[prompt_index]
            skip = output.skip_special_tokens
            echo_text = prompt if isinstance(prompt, str) else self.codec.decode(token_ids, skip_special_tokens=skip)
        return [
            Choice(
                prompt_index * output.n + fork,
                self.codec,
                output,
                is_chat=isinstance(request, ChatRequest),
                num_logprobs=sampling.logprobs,
                min_tokens=sampling.min_tokens,
                prompt_token_ids=token_ids,
                echo_text=echo_text,
            )
            for fork in range(output.n)
        ]

    # --- engine outputs

    async def outputs(
        self, request: GenerationRequest, job: PromptJob
    ) -> AsyncGenerator[tuple[PromptJob, RequestOutput], None]:
        """Runs one prompt; what a peer has of it is held meanwhile."""
        async with contextlib.AsyncExitStack() as stack:
            if job.handover is not None:
                assert self._intake is not None
                taking = self._intake.take(job.handover, job.token_ids, request.cache_salt)
                with self._node.in_intake():
                    job.taken = await stack.enter_async_context(taking)
            remote = job.taken.prefix
            if job.handover is None and not job.sampling.prompt_logprobs:
                asking = self._node.prefix_sources.prefix(job.token_ids, request.cache_salt, request.sources)
                remote = await stack.enter_async_context(asking)
            engine_request = Request(
                request_id=job.request_id,
                prompt_token_ids=job.token_ids,
                sampling=job.sampling,
                eos_token_ids=self._eos_token_ids,
                num_forks=request.output.n,
                priority=request.priority,
                cache_salt=request.cache_salt,
                remote=remote,
                is_remote_optional=job.handover is None,
                lost_remote=job.taken.is_lost,
                arrival_s=time.monotonic(),
                semantic_boundaries=job.semantic_boundaries,
                num_resumed_tokens=job.num_resumed,
            )
            outputs = await stack.enter_async_context(contextlib.aclosing(self._node.engine.generate(engine_request)))
            async for output in outputs:
                yield job, output

    @property
    def node(self) -> Node:
        return self._node


class _ResponseBuilder:
    """Turns the outputs of a request's prompts into one response. Used once."""

    def __init__(
        self,
        serving: Serving,
        http: HttpRequest,
        request: GenerationRequest,
        jobs: list[PromptJob],
        trace: RequestTrace | None,
        record: RequestRecord,
    ) -> None:
        self._serving = serving
        self._node = serving.node
        self._request = request
        self._jobs = jobs
        self._trace = trace
        self._shows_trace = wants_trace(http)
        self._is_chat = isinstance(request, ChatRequest)
        self._num_cached_tokens = 0
        self._record = record
        resume = request.resume
        self._unreported: list[int] = []
        self._has_reported = False
        self._envelope = {
            "response_id": _response_id(http, request),
            "model": self._node.served_model_name,
            "created": int(time.time()) if resume is None or resume.created is None else resume.created,
        }

    async def whole(self) -> Response:
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for _ in deltas:
                pass
        choices = []
        for choice in itertools.chain.from_iterable(job.choices for job in self._jobs):
            build = responses.chat_choice if self._is_chat else responses.completion_choice
            assert choice.finish_reason is not None
            choices.append(
                build(
                    choice.index,
                    choice.text,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    logprobs=choice.all_logprobs(),
                    token_ids=choice.token_ids if self._request.output.return_token_ids else None,
                )
            )
        build_body = responses.chat_response if self._is_chat else responses.completion_response
        return JSONResponse(
            build_body(choices=choices, usage=self._usage(), trace=self._trace_block(), **self._envelope),
            headers=self.report_headers(),
        )

    def report_headers(self) -> dict[str, str]:
        """Where the request ran and where the time to its first token went, for the proxy."""
        return {} if self._trace is None else {REPORT_HEADER: self._trace.report()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises only before the first one; later failures become an error event."""
        chunk = responses.chat_chunk if self._is_chat else responses.completion_chunk
        is_started = False
        try:
            async with contextlib.aclosing(self._deltas()) as deltas:
                async for delta in deltas:
                    self._unreported += delta.output_token_ids
                    if delta.is_visible:
                        event = responses.sse_event(chunk(choices=[self._chunk_choice(delta)], **self._envelope))
                        yield self._state_line(delta) + event if self._request.reports_state else event
                        is_started = True
            include_usage = self._request.output.include_usage
            if include_usage or self._shows_trace:
                usage = self._usage() if include_usage else None
                yield responses.sse_event(chunk(choices=[], usage=usage, trace=self._trace_block(), **self._envelope))
            yield responses.SSE_DONE
        except (GeneratorExit, asyncio.CancelledError):
            self._record.close("abort")
            raise
        except TandemError as exc:
            self._record.close(_outcome(exc))
            if not is_started:
                raise
            logger.warning("stream failed id=%s: %s", self._envelope["response_id"], exc.message)
            yield responses.sse_error(exc)
        except Exception as exc:
            self._record.close("error")
            if not is_started:
                raise
            logger.exception("stream failed id=%s", self._envelope["response_id"])
            yield responses.sse_error(exc)

    def _state_line(self, delta: ChoiceDelta) -> bytes:
        """What the client knows once it has the event that follows, tokens without an event of their own included."""
        token_ids, self._unreported = self._unreported, []
        is_first, self._has_reported = not self._has_reported, True
        return state_line(
            token_ids,
            created=self._envelope["created"],
            num_cached_tokens=self._num_cached_tokens if is_first else None,
            is_end=delta.finish_reason is not None,
        )

    def _chunk_choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        token_ids = delta.token_ids if self._request.output.return_token_ids else None
        if self._is_chat:
            return responses.chat_chunk_choice(
                delta.index,
                delta.text,
                is_first=delta.is_first,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                logprobs=delta.logprobs,
                token_ids=token_ids,
            )
        return responses.completion_choice(
            delta.index,
            delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            logprobs=delta.logprobs,
            token_ids=token_ids,
        )

    async def _deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """What each engine output adds to its choice, until every choice has ended."""
        unfinished = sum(len(job.choices) for job in self._jobs)
        streams = [self._serving.outputs(self._request, job) for job in self._jobs]
        merged = streams[0] if len(streams) == 1 else _merge(streams)
        seen: set[int] = set()
        async with contextlib.aclosing(merged):
            async for job, output in merged:
                if job.index not in seen:
                    seen.add(job.index)
                    self._prompt_done(job, output)
                choice = job.choices[output.index]
                if choice.finish_reason is not None:
                    continue  # a stop string ended it a step ago
                self._record.tokens(choice.index, len(output.token_ids))
                delta = choice.add(output)
                if delta.finish_reason is not None:
                    unfinished -= 1
                    if output.finish_reason is None:
                        self._node.engine.finish(job.request_id, output.index)
                yield delta
                if not unfinished:
                    break
        self._record.close_finished(self._jobs[0].choices[0].finish_reason)

    def _prompt_done(self, job: PromptJob, output: RequestOutput) -> None:
        report = job.taken.report
        prefill_computed = report.computed_tokens if report is not None else 0
        computed = prefill_computed + output.num_local_computed_tokens
        resume = self._request.resume
        if resume is not None and resume.num_cached_tokens is not None:
            self._num_cached_tokens = resume.num_cached_tokens
        else:
            self._num_cached_tokens += max(0, len(job.token_ids) - job.num_resumed - computed)
        self._record.prompt_done(len(job.token_ids), output, ready_s=job.taken.ready_s)
        if self._trace is not None:
            self._trace.add_prompt(len(job.token_ids), job.taken, output)

    def _usage(self) -> dict[str, Any]:
        num_prompt_tokens = sum(len(job.token_ids) - job.num_resumed for job in self._jobs)
        num_completion_tokens = sum(choice.num_completion_tokens for job in self._jobs for choice in job.choices)
        return responses.usage_block(num_prompt_tokens, num_completion_tokens, self._num_cached_tokens)

    def _trace_block(self) -> dict[str, Any] | None:
        return self._trace.block() if self._trace is not None and self._shows_trace else None


class _EventStream(StreamingResponse):
    """A stream whose first event is known; closes its source whatever ends it."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self._rest = rest
        headers = {"Cache-Control": "no-cache", **headers}
        super().__init__(self._chain(first), media_type=responses.SSE_MEDIA_TYPE, headers=headers)

    async def _chain(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        async for event in self._rest:
            yield event

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()


async def _merge(
    streams: Sequence[AsyncGenerator[tuple[PromptJob, RequestOutput], None]],
) -> AsyncGenerator[tuple[PromptJob, RequestOutput], None]:
    """Items of several generators as they come; the first error ends all of them."""
    items: asyncio.Queue[tuple[PromptJob, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=len(streams) * 4)

    async def pump(stream: AsyncGenerator[tuple[PromptJob, RequestOutput], None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await items.put(item)
            await items.put(None)
        except Exception as exc:  # noqa: BLE001  # raised again by the reader
            await items.put(exc)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await items.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _outcome(exc: BaseException) -> str:
    """How a request that ended with ``exc`` is counted."""
    if isinstance(exc, asyncio.CancelledError | RequestAbortedError):
        return "abort"
    if isinstance(exc, TandemError) and exc.status < 500:
        return "rejected"
    return "error"


def _engine_request_id(http: HttpRequest) -> str:
    """Unique in this process and recognisable in logs, whatever ids clients send."""
    return f"{request_id_of(http)[:80]}-{uuid.uuid4().hex[:12]}"


def _response_id(http: HttpRequest, request: GenerationRequest) -> str:
    prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
    return f"{prefix}-{request_id_of(http)}"
