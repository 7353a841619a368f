"""The OpenAI endpoints of a node: JSON body in, engine requests, JSON or a stream of events out.

Life of a request here: 1 parse and check the body, 2 admit or 429, 3 token ids (tokenised here, or those of the
handoff), 4 one engine request per prompt (``n`` forks each), 5 outputs become text as they come, 6 answer. A prefill
leg leaves after 3 through ``PrefillLeg``. The status is decided before the first byte: a stream starts when its first
output is here; what fails later is an error event. Whatever ends the handler, the engine requests are aborted and
leases released.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from common.engine.outputs import RequestOutput
from common.errors import ImageRefusedError, InvalidRequestError, TandemError
from common.grammar.checker import GrammarChecker
from common.metrics.metrics import Metrics
from common.metrics.outcomes import outcome_of
from common.metrics.unknown_fields import UnknownFields
from common.models.vision.image_input import ImageInput
from common.node.engine_thread import EngineThread
from common.node.lend.prefill_leg import PrefillLeg
from common.node.lend.rendezvous import RendezvousTable, refused_rendezvous
from common.node.pull.handoff import HandoffReader
from common.node.pull.sources import PrefixSources
from common.node.serving.admission import Admission
from common.node.serving.prompt_jobs import EncodedPrompt, PromptJob, PromptReader, engine_request_id
from common.node.serving.request_record import RequestRecord
from common.node.serving.response_builder import EventStream, ResponseBuilder, response_id
from common.node.serving.tracing import RequestTrace
from common.openai import responses
from common.openai.protocol import (
    ChatRequest,
    GenerationRequest,
    check_model,
    num_answers,
    parse_chat,
    parse_completion,
)
from common.request import Request
from common.server.disconnect import run_until_disconnect
from common.server.gate import is_peer, request_id_of, take_request_id, wants_trace
from common.server.json_body import read_json_object, run_for_body
from common.server.pacer import Pacer
from common.telemetry.tracing import Tracer
from common.wire.fields import seconds_of_header
from common.wire.handoff import TransferMode, rendezvous_id_of
from common.wire.headers import ITL_TARGET_HEADER, PROXY_SECONDS_HEADER, TTFT_TARGET_HEADER

logger = logging.getLogger(__name__)


class Serving:
    """Used on the event loop only. A node without ``prefill_leg`` hands nothing out, one without ``handoffs`` pulls
    nothing that a prefill leg computed."""

    def __init__(
        self,
        node_name: str,
        model_name: str,
        *,
        eos_token_ids: frozenset[int],
        prompts: PromptReader,
        admission: Admission,
        engine: EngineThread,
        rendezvous: RendezvousTable,
        sources: PrefixSources,
        prefill_leg: PrefillLeg | None,
        handoffs: HandoffReader | None,
        grammars: GrammarChecker,
        metrics: Metrics,
        tracer: Tracer,
    ) -> None:
        self._node_name = node_name
        self._model_name = model_name
        self._eos_token_ids = eos_token_ids
        self._prompts = prompts
        self._admission = admission
        self._engine = engine
        self._rendezvous = rendezvous
        self._sources = sources
        self._prefill_leg = prefill_leg
        self._handoffs = handoffs
        self._grammars = grammars
        self._metrics = metrics
        self._unknown_fields = UnknownFields(metrics)
        self._tracer = tracer
        self._pacer = Pacer()

    async def completions(self, http: HttpRequest) -> Response:
        await self._pacer.turn()
        return await self._read_and_serve(http, parse_completion)

    async def chat(self, http: HttpRequest) -> Response:
        await self._pacer.turn()
        return await self._read_and_serve(http, parse_chat)

    async def _read_and_serve(self, http: HttpRequest, parse: Callable[..., GenerationRequest]) -> Response:
        body = await read_json_object(http, is_leg=True)
        with self._telling_reader(body):
            request = await run_for_body(http, lambda: parse(body, is_from_peer=is_peer(http)))
            take_request_id(http, request.request_id)
            label = "chat" if isinstance(request, ChatRequest) else "completions"
            self._unknown_fields.note(label, request.unknown_fields)
            return await self._serve(http, request)

    @contextlib.contextmanager
    def _telling_reader(self, body: Mapping[str, Any]) -> Iterator[None]:
        """A prefill leg that is refused before it begins: the reader at its rendezvous hears so at once."""
        try:
            yield
        except TandemError as exc:
            if isinstance(exc, ImageRefusedError):
                self._metrics.inc("images_refused_total", reason=exc.reason)
            rendezvous_id = refused_rendezvous(body)
            if rendezvous_id is not None:
                self._rendezvous.refuse(rendezvous_id, exc)
            raise

    async def _serve(self, http: HttpRequest, request: GenerationRequest) -> Response:
        check_model(request.model, (self._model_name,))
        span = self._tracer.begin(http.url.path, request_id_of(http), http.headers, time.monotonic())
        record = RequestRecord(self._metrics, "chat" if isinstance(request, ChatRequest) else "completions", span)
        jobs: Sequence[PromptJob] = ()
        try:
            self._admission.check(num_answers(request))
            if request.transfer_mode is TransferMode.REMOTE_DECODE:
                return await run_until_disconnect(http, self._serve_prefill_leg(http, request, record))
            if request.constraint is not None:
                request = replace(request, constraint=await request.constraint.in_lark(self._grammars.lark))
            due_s, itl_target_s = _first_token_due_s(http), seconds_of_header(http.headers, ITL_TARGET_HEADER)
            jobs = await self._prompts.jobs(http, request)
            for job in jobs:
                job.first_token_due_s, job.itl_target_s = due_s, itl_target_s
            await self._prepare_grammars(request, jobs)
            # The proxy shows every request on its status page, so it wants the trace even if the client does not.
            is_traced = wants_trace(http) or PROXY_SECONDS_HEADER in http.headers
            trace = RequestTrace.from_headers(http.headers, self._node_name) if is_traced else None
            response = ResponseBuilder(
                self._model_name, self._outputs, self._engine.finish, http, request, jobs, trace, record
            )
            if not request.output.stream:
                return await run_until_disconnect(http, response.whole())
            stream = response.events()
            first = await run_until_disconnect(http, anext(stream))  # errors up to here have a status
        except BaseException as exc:
            if isinstance(exc, InvalidRequestError):  # others may be answered by another node, with the same handoff
                self._prompts.give_back(jobs)
            record.close(outcome_of(exc))
            raise
        return EventStream(first, stream, response.report_headers())

    async def _prepare_grammars(self, request: GenerationRequest, jobs: Sequence[PromptJob]) -> None:
        """Refuses grammars that cannot be used, and begins to compile the others: prompts are still on their way."""
        param = request.constraint.param if request.constraint is not None else "tools"
        for grammar in {job.sampling.grammar for job in jobs} - {None}:
            assert grammar is not None
            await self._grammars.check(grammar, param=param)
            self._engine.prepare_grammar(grammar)

    async def _serve_prefill_leg(
        self, http: HttpRequest, request: GenerationRequest, record: RequestRecord
    ) -> Response:
        if self._prefill_leg is None:
            raise InvalidRequestError(
                "kv_transfer_params.do_remote_decode: this node does not hand prompts out; ask a prefill node",
                param="kv_transfer_params.do_remote_decode",
            )
        due_s = _first_token_due_s(http)
        prompts = await self._prompts.prompts(request)
        if len(prompts) != 1:
            raise InvalidRequestError(
                f"a prefill leg takes one prompt, got {len(prompts)}; send one leg per prompt", param="prompt"
            )
        [prompt] = prompts
        token_ids = prompt.token_ids
        self._prompts.check_length(request, token_ids)

        rendezvous_id = rendezvous_id_of(request.kv_transfer_params[0])
        now = time.monotonic()
        engine_request = Request(
            request_id=rendezvous_id or engine_request_id(http),
            prompt_token_ids=token_ids,
            sampling=None,
            cache_salt=request.cache_salt,
            priority=request.priority,
            is_remote_optional=True,
            arrival_s=now,
            ttft_target_s=None if due_s is None else due_s - now,
            semantic_boundaries=prompt.semantic_boundaries,
            wants_progress=rendezvous_id is not None,
            images=prompt.images,
        )
        async with contextlib.AsyncExitStack() as stack:

            async def prepare() -> None:
                found = self._sources.prefix(token_ids, request.cache_salt, request.sources, prompt.images)
                engine_request.remote = await stack.enter_async_context(found)
                if prompt.images:
                    engine_request.image_inputs = await self._image_inputs(request, prompt)

            manifest, output = await self._prefill_leg.run(engine_request, prepare)
        record.prompt_done(len(token_ids), output)
        record.close_finished([output.finish_reason])
        usage = responses.usage_block(len(token_ids), 0, output.num_cached_tokens)
        common: dict[str, Any] = {
            "response_id": response_id(http, request),
            "model": self._model_name,
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

    async def _image_inputs(
        self, request: GenerationRequest, prompt: EncodedPrompt | PromptJob
    ) -> Sequence[ImageInput]:
        """Of a prompt with images, on a node that computes them. Raises as ``PromptImages.inputs``."""
        images = self._prompts.images
        if images is None or not prompt.encoded_images:
            return ()
        keys = self._sources.keys(prompt.token_ids, request.cache_salt, prompt.images)
        return await images.inputs(prompt.encoded_images, keys)

    # --- engine outputs

    async def _outputs(
        self, request: GenerationRequest, job: PromptJob
    ) -> AsyncGenerator[tuple[PromptJob, RequestOutput], None]:
        """Runs one prompt; what a peer has of it is held meanwhile."""
        image_inputs = await self._image_inputs(request, job)
        async with contextlib.AsyncExitStack() as stack:
            if job.handoff is not None:
                assert self._handoffs is not None
                reading = self._handoffs.read(job.handoff, job.token_ids, request.cache_salt, job.images)
                async with self._admission.waiting_for_peer():
                    job.is_read = True
                    job.handoff_result = await stack.enter_async_context(reading)
            remote = job.handoff_result.prefix
            if job.handoff is None and job.sampling.prompt_logprobs is None:
                found = self._sources.prefix(job.token_ids, request.cache_salt, request.sources, job.images)
                remote = await stack.enter_async_context(found)
            now = time.monotonic()
            engine_request = Request(
                request_id=job.request_id,
                prompt_token_ids=job.token_ids,
                sampling=job.sampling,
                eos_token_ids=self._eos_token_ids,
                num_forks=request.output.n,
                priority=request.priority,
                cache_salt=request.cache_salt,
                remote=remote,
                is_remote_optional=job.handoff is None,
                lost_remote=job.handoff_result.is_lost,
                arrival_s=now,
                ttft_target_s=None if job.first_token_due_s is None else job.first_token_due_s - now,
                itl_target_s=job.itl_target_s,
                semantic_boundaries=job.semantic_boundaries,
                num_resumed_tokens=job.num_resumed,
                images=job.images,
                image_inputs=image_inputs,
            )
            outputs = await stack.enter_async_context(contextlib.aclosing(self._engine.generate(engine_request)))
            async for output in outputs:
                yield job, output


def _first_token_due_s(http: HttpRequest) -> float | None:
    """Monotonic, of a request that came just now; None: it has no target. Raises InvalidRequestError."""
    target_s = seconds_of_header(http.headers, TTFT_TARGET_HEADER)
    return None if target_s is None else time.monotonic() + target_s
