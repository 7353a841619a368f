"""The generation routes: a checked body becomes a job, and every outcome of the job becomes an answer or an
event.

The body is parsed here to refuse it early, before a prefill node has spent anything on it, and to tokenise its prompts
(``proxy.http.tokenizer``). Everything else that nodes get are the client's own values.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from common.errors import ImageRefusedError, RequestDroppedError, TandemError
from common.grammar.checker import GrammarChecker
from common.metrics.outcomes import Outcome, outcome_of
from common.metrics.unknown_fields import UnknownFields
from common.openai.bodies.unsupported import INTERNAL_FIELDS
from common.openai.errors import error_response
from common.openai.foreign import parse_foreign_chat, parse_foreign_completion
from common.openai.prompt_ids import IMAGES_KEY
from common.openai.protocol import ChatRequest, GenerationRequest, check_model, parse_chat, parse_completion
from common.openai.responses import sse_error
from common.server.drain import Drain
from common.server.gate import request_id_of, take_request_id, was_let_in_by
from common.server.json_body import body_bytes_of, read_json_object, run_for_body
from common.telemetry.tracing import Tracer, passed_on
from common.text.answers.grammar import CallRules
from common.wire.headers import (
    API_KEY_HEADER,
    PLACEMENT_HEADER,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    TRACE_HEADER,
)
from common.wire.json_text import LONG_BYTES
from common.wire.routes import CHAT_ROUTE, COMPLETIONS_ROUTE
from proxy.admission.key_limits import Charge
from proxy.admission.queue import AdmissionQueue
from proxy.admission.request import AdmissionRequest
from proxy.admission.request_cost import RequestCost, read_admission_request
from proxy.dialects.conversion import Conversion
from proxy.dialects.dialect import Convert, convert_messages, convert_responses
from proxy.http.targets import TargetRules
from proxy.http.time_limits import TimeLimits
from proxy.http.tokenizer import PromptTokenizer, Tokenised
from proxy.legs.client_stream import ClientStream, RelayResponse
from proxy.legs.errors import LegFailedError, RelayedAnswer
from proxy.legs.job import Job
from proxy.legs.orchestrator import DROPPED_LATE, Orchestrator
from proxy.metrics.proxy_metrics import ProxyMetrics
from proxy.metrics.recent_requests import RecentRequests, RequestAbout
from proxy.nodes.pool import NodePool
from proxy.placement.estimate import NO_TARGETS
from proxy.placement.request import PlacementHeader, session_from_header

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asked:
    """A request that was found good, but for its grammars: its ``parsed`` constraint's, and ``call_grammar`` of its
    tools' schemas. What is as long as the body is given up when it was used: the answer may take long."""

    http: Request
    label: str
    job: Job
    admission: AdmissionRequest
    parsed: GenerationRequest | None
    conversion: Conversion | None
    call_grammar: str | None


class GenerateService:
    """Turns requests into jobs for the orchestrator and outcomes into answers."""

    def __init__(
        self,
        pool: NodePool,
        tokenizer: PromptTokenizer,
        orchestrator: Orchestrator,
        metrics: ProxyMetrics,
        admission: AdmissionQueue,
        drain: Drain,
        tracer: Tracer,
        recent: RecentRequests,
        grammars: GrammarChecker,
        targets: TargetRules | None = None,
    ) -> None:
        """``targets``: of requests that name none."""
        self._pool = pool
        self._targets = targets or TargetRules()
        self._tracer = tracer
        self._tokenizer = tokenizer
        self._orchestrator = orchestrator
        self._metrics = metrics
        self._recent = recent
        self._grammars = grammars
        self._admission = admission
        self._drain = drain
        self._unknown_fields = UnknownFields(metrics)
        self._limits = TimeLimits(metrics.count_drop)

    def cut_off(self, error: TandemError) -> None:
        """Everything that is in flight, waiting or streaming, ends now with ``error``."""
        self._admission.evict_all(error)
        self._limits.cut_off(error)

    async def completions(self, request: Request) -> Response:
        return await self._respond(request, "completions", COMPLETIONS_ROUTE, parse_completion)

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, "chat", CHAT_ROUTE, parse_chat)

    async def responses(self, request: Request) -> Response:
        return await self._respond(request, "responses", CHAT_ROUTE, parse_chat, convert_responses)

    async def messages(self, request: Request) -> Response:
        return await self._respond(request, "messages", CHAT_ROUTE, parse_chat, convert_messages)

    async def _respond(
        self,
        request: Request,
        label: str,
        route: str,
        parse: Callable[[Mapping[str, Any]], GenerationRequest],
        convert: Convert | None = None,
    ) -> Response:
        """``label``: what metrics call it; ``route``: of its legs."""
        arrival_s = time.monotonic()
        with self._metrics.track_parsing(label, arrival_s):
            self._drain.check_admission()
            body = await read_json_object(request)
            # Only the proxy itself may name memory to read, and what a prompt or an answer consists of.
            for name in INTERNAL_FIELDS:
                body.pop(name, None)
            given_id = request_id_of(request)
            if self._pool.is_foreign():
                parse = parse_foreign_completion if route == COMPLETIONS_ROUTE else parse_foreign_chat
            read = await run_for_body(request, lambda: _read(body, given_id, parse, convert))
            parsed = read.parsed
            take_request_id(request, parsed.request_id)
            self._unknown_fields.note(label, parsed.unknown_fields)
            request_id = request_id_of(request)
            if models := self._pool.served_models():
                check_model(parsed.model, models)
            session_id = session_from_header(request.headers.get(SESSION_HEADER))
            placement_header = PlacementHeader.from_header(request.headers.get(PLACEMENT_HEADER))
            targets = self._targets.targets(request.headers, parsed.priority)
            call_grammar = None
            if isinstance(parsed, ChatRequest):
                with _in_words_of(read.conversion):
                    call_grammar = await run_for_body(request, CallRules.of(parsed).schemas)
            max_model_len = self._pool.max_model_len() if read.cost.max_answer_tokens is None else None
            admission_request = read_admission_request(request, parsed, read.cost, max_model_len, arrival_s)
        path = str(request.scope["path"])
        span = self._tracer.begin(path, request_id, request.headers, arrival_s)
        job = Job(
            route=route,
            body=read.body,
            headers={**forwarded_headers(request), **span.headers()},
            request_id=request_id,
            prompts=_prompts(read.body) if route == COMPLETIONS_ROUTE else [None],
            is_local=parsed.num_prompt_logprobs is not None,
            is_stream=parsed.output.stream,
            arrival_s=arrival_s,
            span=span,
            session_id=session_id,
            placement_header=placement_header,
            targets=targets,
            max_answer_tokens=read.cost.max_answer_tokens,
        )
        asked = _Asked(request, label, job, admission_request, parsed, read.conversion, call_grammar)
        return RelayResponse(lambda client: self._run(asked, client))

    async def _check_grammars(self, asked: _Asked, charge: Charge) -> None:
        """A second of a processor each, which few do at once: on the account of ``charge``. Raises as
        ``GrammarChecker.check``."""
        assert asked.parsed is not None
        constraint, call_grammar, asked.call_grammar = asked.parsed.constraint, asked.call_grammar, None
        if constraint is None and call_grammar is None:
            return
        charge.begin()
        try:
            if constraint is not None:
                constraint = await constraint.in_lark(self._grammars.lark)
                await self._grammars.check(constraint.grammar(), param=constraint.param)
            if call_grammar is not None:
                await self._grammars.check(call_grammar, param="tools")
        except BaseException:
            charge.give_back()
            raise

    async def _run(self, asked: _Asked, client: ClientStream) -> None:
        job, label, admission = asked.job, asked.label, asked.admission
        client.conversion = asked.conversion
        with self._metrics.track(label, job.arrival_s, client.record, job.span), self._follow(job, label, client):
            try:
                with self._admission.charged(admission) as charge:
                    await self._check_grammars(asked, charge)
                    async with self._admission.admitted(admission, charge):
                        # Round the limits: that a deadline has passed is an error out there, a cancellation inside.
                        with _settled(charge, job, client):
                            async with self._limits.bounded(admission):
                                job.admitted_s = time.monotonic()
                                self._metrics.observe_phase("queue", job.admitted_s - job.arrival_s)
                                client.record.num_prompt_tokens = await self._tokenise(asked)
                                await self._orchestrator.run(job, client)
            except RelayedAnswer as exc:
                await client.send_whole(exc.status, exc.headers, exc.body, outcome_of(exc.error))
            except Exception as exc:  # noqa: BLE001 - the app's error handlers only know whole answers
                await self._fail(job, client, exc)
            finally:
                self._count_targets(job, client)

    def _count_targets(self, job: Job, client: ClientStream) -> None:
        """Of a stream that came to its end. One that was turned away because it would not have kept its target is
        counted there (``_fail``); what was refused for another reason, or left by its client, says nothing."""
        targets, record, answer_s, gaps = job.targets, client.record, client.entry.answer_s, client.gaps
        if gaps is None or targets == NO_TARGETS:
            return
        if record.outcome in (Outcome.STOP, Outcome.LENGTH) and answer_s is not None:
            self._metrics.count_target("ttft", answer_s - job.arrival_s, targets.ttft_s)
            num_gaps = (record.num_output_tokens or 0) / gaps.num_choices - 1
            if num_gaps > 0:
                self._metrics.count_target("itl", (time.monotonic() - answer_s) / num_gaps, targets.itl_s)

    def _follow(self, job: Job, label: str, client: ClientStream) -> contextlib.AbstractContextManager[None]:
        about = RequestAbout(job.request_id, label, len(job.prompts), job.is_stream, job.arrival_s)
        return self._recent.follow(client.entry, about, client.record)

    async def _tokenise(self, asked: _Asked) -> int:
        """The job's prompts become tokens, as far as they can here; returns how many, or an estimate. What was parsed
        is given up."""
        job, parsed, asked.parsed = asked.job, asked.parsed, None
        assert parsed is not None
        num_bytes = body_bytes_of(asked.http)
        done = await self._tokenizer.tokenise(parsed, job.body, job.prompts, num_bytes=num_bytes)
        job.body, job.prompts, job.prompt_keys = done.body, done.prompts, done.prompt_keys
        if IMAGES_KEY in job.body:  # some may have been fetched, whatever the length of the client's own body
            await asyncio.to_thread(job.encoder.encode, job.body)
        elif num_bytes > LONG_BYTES:
            # What the legs' bodies have in common is remembered: putting them together takes no time then.
            await run_for_body(asked.http, lambda: job.encoder.encode(job.body))
        return _num_prompt_tokens(done, estimate=asked.admission.num_prompt_tokens)

    async def _fail(self, job: Job, client: ClientStream, error: Exception) -> None:
        if client.is_finished:
            logger.info("request failed after its answer request_id=%s: %s", job.request_id, error)
            return
        client.record.outcome = outcome_of(error)
        if isinstance(error, ImageRefusedError):
            self._metrics.inc("images_refused_total", reason=error.reason)
        if isinstance(error, RequestDroppedError) and error.dropped == DROPPED_LATE and job.is_stream:
            self._metrics.count_target("ttft", None, job.targets.ttft_s)
        if not isinstance(error, TandemError):
            logger.error("unexpected error request_id=%s", job.request_id, exc_info=error)
        status = error.status if isinstance(error, TandemError) else TandemError.status
        logger.log(
            logging.WARNING if status >= 500 else logging.INFO,
            "request failed request_id=%s status=%d started=%s: %s",
            job.request_id,
            status,
            client.is_started,
            error,
        )
        if client.is_started:
            if not (isinstance(error, LegFailedError) and error.is_told):
                await client.send_chunk(sse_error(error))
            await client.finish(client.record.outcome)
            return
        answer = error_response(error)
        headers = {name: value for name, value in answer.headers.items() if name != "content-length"}
        await client.send_whole(answer.status_code, headers, bytes(answer.body), client.record.outcome)


@dataclass(frozen=True, slots=True)
class _Read:
    """A body as its legs get it, and what was found in it."""

    body: dict[str, Any]
    parsed: GenerationRequest
    cost: RequestCost
    conversion: Conversion | None


def _read(
    body: dict[str, Any],
    request_id: str,
    parse: Callable[[Mapping[str, Any]], GenerationRequest],
    convert: Convert | None,
) -> _Read:
    """Takes as long as the body is."""
    conversion = None
    if convert is not None:
        converted = convert(body, request_id)
        body, conversion = converted.body, converted.conversion
    with _in_words_of(conversion):
        parsed = parse(body)
    return _Read(body, parsed, RequestCost.of(parsed), conversion)


@contextlib.contextmanager
def _in_words_of(conversion: Conversion | None) -> Iterator[None]:
    """Errors about a chat's field are about the field that the client knows. None: it is the client's own."""
    try:
        yield
    except TandemError as exc:
        raise exc if conversion is None else conversion.renamed(exc) from None


@contextlib.contextmanager
def _settled(charge: Charge, job: Job, client: ClientStream) -> Iterator[None]:
    """Settles ``charge`` by what the request used, whatever ends it: nothing when the client got an error instead of an
    answer. Of a whole answer that nobody waited for the tokens are not known: the charge stays as it is."""
    try:
        yield
    except Exception:
        charge.settle((_num_used(job, client) or 0) if client.is_started else 0)
        raise
    finally:
        used = _num_used(job, client)
        if used is not None:
            charge.settle(used)


def _num_used(job: Job, client: ClientStream) -> int | None:
    record = client.record
    if record.num_prompt_tokens is None:
        return 0
    if record.num_output_tokens is None and not job.is_stream:
        return None
    return record.num_prompt_tokens + (record.num_output_tokens or 0)


def _num_prompt_tokens(done: Tokenised, *, estimate: int) -> int:
    """Of all prompts, of which some may have no ids here."""
    counts = [
        len(prompt) if isinstance(prompt, array) else keys.num_tokens if keys is not None else None
        for prompt, keys in itertools.zip_longest(done.prompts, done.prompt_keys)
    ]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else estimate


def forwarded_headers(request: Request) -> dict[str, str]:
    """The headers that go on to the nodes: request id, key, trace, the client's trace context."""
    headers = {REQUEST_ID_HEADER: request_id_of(request), "content-type": "application/json"}
    headers |= passed_on(request.headers)
    key, authorization = request.headers.get(API_KEY_HEADER), request.headers.get("authorization")
    if key is not None and (authorization is None or was_let_in_by(request, key)):
        authorization = f"Bearer {key}"  # else the other one was, or nobody has looked at either
    for name, value in (("authorization", authorization), (TRACE_HEADER, request.headers.get(TRACE_HEADER))):
        if value is not None:
            headers[name] = value
    return headers


def _prompts(body: Mapping[str, Any]) -> list[Any]:
    """One entry per prompt of a checked completion body."""
    prompt = body["prompt"]
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        return list(prompt)
    return [prompt]
