"""The OpenAI endpoints of a node: JSON body in, engine requests, JSON or a stream of events out.

Life of a request here: 1 parse and check the body, 2 token ids (tokenised here, or those of the handed-over prompt), 3
admit or 429, 4 one engine request per prompt (``n`` forks each), 5 outputs become text as they come, 6 answer. A
prefill leg leaves after 3 through ``PrefillLeg``. The status is decided before the first byte: a stream starts when its
first output is here; what fails later is an error event. Whatever ends the handler, the engine requests are aborted and
leases released.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, Protocol

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from common.engine.outputs import RequestOutput
from common.errors import InvalidRequestError, TandemError
from common.node.lend.rendezvous import refused_rendezvous
from common.node.node import Node
from common.node.pull.handoff import Intake
from common.node.pull.pull_task import RemotePrefix
from common.node.serving.metrics import RequestRecord
from common.node.serving.prompt_jobs import EncodedPrompt, PromptJob, PromptReader, engine_request_id
from common.node.serving.response_builder import EventStream, ResponseBuilder, outcome_of, response_id
from common.node.serving.tracing import RequestTrace
from common.openai import responses
from common.openai.protocol import ChatRequest, GenerationRequest, check_model, parse_chat, parse_completion
from common.request import Request
from common.server.http import is_peer, read_json_object, request_id_of, run_until_disconnect, wants_trace
from common.server.pacer import Pacer
from common.text.tokenizer import TextCodec
from common.wire.handoff import TransferMode, rendezvous_id_of
from common.wire.headers import PROXY_SECONDS_HEADER
from common.wire.manifest import Manifest

logger = logging.getLogger(__name__)


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


class Serving:
    """Stateless but for the node it belongs to."""

    def __init__(
        self, node: Node, codec: TextCodec | None, *, prefill_leg: PrefillLeg | None, intake: Intake | None
    ) -> None:
        self._node = node
        self._prompts = PromptReader(node, codec, intake)
        self._prefill_leg = prefill_leg
        self._intake = intake
        self._eos_token_ids = frozenset(node.model.loaded.eos_token_ids)
        self._pacer = Pacer()

    async def completions(self, http: HttpRequest) -> Response:
        await self._pacer.turn()
        body = await read_json_object(http)
        with self._telling_reader(body):
            return await self._serve(http, parse_completion(body, is_from_peer=is_peer(http)))

    async def chat(self, http: HttpRequest) -> Response:
        await self._pacer.turn()
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
        """Raises InvalidRequestError when the model has none."""
        return self._prompts.codec

    async def _serve(self, http: HttpRequest, request: GenerationRequest) -> Response:
        node = self._node
        check_model(request.model, (node.served_model_name,))
        span = node.tracer.begin(http.url.path, request_id_of(http), http.headers, time.monotonic())
        record = RequestRecord(node.metrics, "chat" if isinstance(request, ChatRequest) else "completions", span)
        try:
            node.check_admission()
            if request.transfer_mode is TransferMode.REMOTE_DECODE:
                return await run_until_disconnect(http, self._serve_prefill_leg(http, request, record))
            jobs = await self._prompts.jobs(http, request)
            # The proxy shows on its status page what the client need not ask for.
            is_traced = wants_trace(http) or PROXY_SECONDS_HEADER in http.headers
            trace = RequestTrace.from_headers(http.headers, node) if is_traced else None
            response = ResponseBuilder(node, self._outputs, http, request, jobs, trace, record)
            if not request.output.stream:
                return await run_until_disconnect(http, response.whole())
            stream = response.events()
            first = await run_until_disconnect(http, anext(stream))  # errors up to here have a status
        except BaseException as exc:
            record.close(outcome_of(exc))
            raise
        return EventStream(first, stream, response.report_headers())

    async def _serve_prefill_leg(
        self, http: HttpRequest, request: GenerationRequest, record: RequestRecord
    ) -> Response:
        if self._prefill_leg is None:
            raise InvalidRequestError(
                "kv_transfer_params.do_remote_decode: this node does not hand prompts out; ask a prefill node",
                param="kv_transfer_params.do_remote_decode",
            )
        prompts = await self._prompts.prompts(request)
        if len(prompts) != 1:
            raise InvalidRequestError(
                f"a prefill leg takes one prompt, got {len(prompts)}; send one leg per prompt", param="prompt"
            )
        token_ids = prompts[0].token_ids
        self._prompts.sampling(request, token_ids)
        async with self._node.prefix_sources.prefix(token_ids, request.cache_salt, request.sources) as remote:
            manifest, output = await self._prefill_leg.run(
                engine_request_id(http),
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
            "response_id": response_id(http, request),
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

    # --- engine outputs

    async def _outputs(
        self, request: GenerationRequest, job: PromptJob
    ) -> AsyncGenerator[tuple[PromptJob, RequestOutput], None]:
        """Runs one prompt; what a peer has of it is held meanwhile."""
        async with contextlib.AsyncExitStack() as stack:
            if job.handover is not None:
                assert self._intake is not None
                taking = self._intake.take(job.handover, job.token_ids, request.cache_salt)
                async with self._node.in_intake():
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
