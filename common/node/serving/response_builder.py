"""From engine outputs to what the client reads: a whole body, or a stream of events.

The outputs of a request's prompts become text as they come, each on its choice. A stream starts when its first output
is here, so that a failure before has a status; a later one is an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse

from common.engine.outputs import RequestOutput
from common.errors import HandedOverError, TandemError
from common.metrics.outcomes import outcome_of
from common.node.serving.choices import Choice, ChoiceDelta
from common.node.serving.prompt_jobs import ANSWERS_PER_TURN, PromptJob
from common.node.serving.request_record import RequestRecord
from common.node.serving.tracing import RequestTrace
from common.openai import responses
from common.openai.protocol import ChatRequest, GenerationRequest
from common.server.disconnect import why_gone
from common.server.gate import request_id_of, wants_trace
from common.wire.headers import PROXY_SECONDS_HEADER, REPORT_HEADER
from common.wire.resume import count_line, state_line

logger = logging.getLogger(__name__)

PROMPTS_PER_TURN = 8
"""Prompts of a request that begin in one turn of the event loop: each looks up what is here and asks a peer for the
rest, which takes milliseconds."""
THREAD_BODY_TOKENS = 200
"""Tokens, each with up to 20 alternatives, beyond which what a client reads of them is put together off the event loop:
it takes up to 10 ms."""
SILENCE_S = 15.0
"""Seconds after which a stream says that the node is at work, though reasoning is hidden or text is held back: proxies
take a long silence for a node's end."""

JobOutputs = AsyncGenerator[tuple[PromptJob, RequestOutput], None]
RunJob = Callable[[GenerationRequest, PromptJob], JobOutputs]


class ResponseBuilder:
    """Turns the outputs of a request's prompts into one response. Used once.

    ``run_job`` runs one prompt. ``finish(request_id, fork)`` ends a continuation whose stop string has matched.
    """

    def __init__(
        self,
        model_name: str,
        run_job: RunJob,
        finish: Callable[[str, int], None],
        http: HttpRequest,
        request: GenerationRequest,
        jobs: list[PromptJob],
        trace: RequestTrace | None,
        record: RequestRecord,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._run_job = run_job
        self._finish = finish
        self._request = request
        self._jobs = jobs
        self._trace = trace
        self._scope = http.scope
        self._shows_trace = wants_trace(http)
        self._tells_counts = PROXY_SECONDS_HEADER in http.headers
        self._is_chat = isinstance(request, ChatRequest)
        self._tells_prompt = request.output.return_token_ids or request.sampling.prompt_logprobs is not None
        # Kept as they grow: each event may tell them, of up to 2,048 answers.
        choices = [choice for job in jobs for choice in job.choices]
        reasoning = [choice.num_reasoning_tokens for choice in choices]
        self._num_prompt_tokens = sum(len(job.token_ids) - job.num_resumed for job in jobs)
        self._num_completion_tokens = sum(choice.num_completion_tokens for choice in choices)
        self._num_reasoning_tokens = None if None in reasoning else sum(filter(None, reasoning))
        self._num_cached_tokens = 0
        self._record = record
        self._silence_s = silence_s
        resume = request.resume
        self._unreported: list[int] = []
        self._has_reported = False
        self._envelope: dict[str, Any] = {
            "response_id": response_id(http, request),
            "model": model_name,
            "created": int(time.time()) if resume is None or resume.created is None else resume.created,
        }

    async def whole(self) -> Response:
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for _ in deltas:
                pass
        num_tokens = sum(len(choice.token_ids) for job in self._jobs for choice in job.choices)
        if self._tells_prompt:
            num_tokens += sum(len(job.token_ids) for job in self._jobs)
        body = await asyncio.to_thread(self._whole_body) if num_tokens > THREAD_BODY_TOKENS else self._whole_body()
        reasons = {choice.finish_reason for job in self._jobs for choice in job.choices}
        told = [{"finish_reason": reason.value} for reason in reasons if reason is not None]
        headers = self.report_headers(usage=self._usage(), choices=told)
        return Response(body, media_type="application/json", headers=headers)

    def _whole_body(self) -> bytes:
        common = {"choices": [], "usage": self._usage(), "trace": self._trace_block(), **self._envelope}
        if self._is_chat:
            body = responses.chat_response(prompt=self._prompt_block(self._jobs[0]), **common)
        else:
            body = responses.completion_response(**common)
        # One by one: log-probabilities of many tokens are megabytes, and one call holds the interpreter's lock.
        choices = b",".join(self._whole_choice(job, choice) for job in self._jobs for choice in job.choices)
        before, separator, after = orjson.dumps(body).partition(b'"choices":[')
        return before + separator + choices + after

    def _whole_choice(self, job: PromptJob, choice: Choice) -> bytes:
        assert choice.finish_reason is not None
        what: dict[str, Any] = {
            "finish_reason": choice.finish_reason if not self._is_chat else choice.told_reason,
            "stop_reason": choice.stop_reason,
            "logprobs": choice.all_logprobs(),
            "token_ids": choice.token_ids if self._request.output.return_token_ids else None,
        }
        if self._is_chat:
            what |= {"reasoning": choice.reasoning, "tool_calls": choice.tool_calls()}
            return orjson.dumps(responses.chat_choice(choice.index, choice.text, **what))
        return orjson.dumps(
            responses.completion_choice(choice.index, choice.text, prompt=self._prompt_block(job), **what)
        )

    def _prompt_block(self, job: PromptJob) -> dict[str, Any]:
        """What the client asked to know of a prompt."""
        if not self._tells_prompt:
            return {}
        request, logprobs = self._request, None
        if request.sampling.prompt_logprobs is not None and job.prompt_logprobs is not None:
            logprobs = job.choices[0].prompt_logprobs(job.prompt_logprobs, num_top=request.sampling.prompt_logprobs)
        token_ids = job.token_ids[: len(job.token_ids) - job.num_resumed]
        return responses.prompt_block(token_ids if request.output.return_token_ids else None, logprobs)

    def report_headers(self, **whole: Any) -> dict[str, str]:
        """Where the request ran and where the time to its first token went, for the proxy; ``whole``: what it counts of
        an answer that comes whole, so that it need not read that."""
        return {} if self._trace is None else {REPORT_HEADER: self._trace.report(**whole)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. Raises only before the first one; later failures become an error event."""
        chunk = responses.chat_chunk if self._is_chat else responses.completion_chunk
        is_started = False
        told_s = time.monotonic()
        try:
            async with contextlib.aclosing(self._deltas()) as deltas:
                async for delta in deltas:
                    self._unreported += delta.output_token_ids
                    event = b""
                    if delta.is_visible:
                        make = partial(self._event, delta)
                        # A prompt that is echoed, or whose tokens are told.
                        tells = delta.is_first and self._request.output.return_token_ids
                        num_tokens = len(delta.token_ids) + (len(self._job_of(delta).token_ids) if tells else 0)
                        is_long = num_tokens > THREAD_BODY_TOKENS
                        event = await asyncio.to_thread(make) if is_long else make()
                    elif time.monotonic() - told_s >= self._silence_s:
                        event = responses.SSE_AT_WORK
                    if event:
                        yield self._line_for_proxy(delta) + event
                        is_started, told_s = True, time.monotonic()
            include_usage = self._request.output.include_usage
            if include_usage or self._shows_trace:
                usage = self._usage() if include_usage else None
                yield responses.sse_event(chunk(choices=[], usage=usage, trace=self._trace_block(), **self._envelope))
            yield responses.SSE_DONE
        except Exception as exc:
            self._record.close(outcome_of(exc))
            if not is_started:
                raise
            response_id, event = self._envelope["response_id"], responses.sse_error(exc)
            if isinstance(exc, HandedOverError):
                logger.info("stream is handed over id=%s", response_id)
                event = self._state_line(is_end=False) + event
            elif isinstance(exc, TandemError):
                logger.warning("stream failed id=%s: %s", response_id, exc.message)
            else:
                logger.exception("stream failed id=%s", response_id)
            yield event
        except BaseException:  # the client is gone
            self._record.close(outcome_of(why_gone(self._scope)))
            raise

    def _event(self, delta: ChoiceDelta) -> bytes:
        usage = self._usage() if self._request.output.continuous_usage else None
        prompt = self._prompt_block(self._job_of(delta)) if delta.is_first else {}
        if self._is_chat:
            choice = self._chunk_choice(delta)
            return responses.sse_event(
                responses.chat_chunk(choices=[choice], usage=usage, prompt=prompt, **self._envelope)
            )
        choice = self._chunk_choice(delta, prompt)
        return responses.sse_event(responses.completion_chunk(choices=[choice], usage=usage, **self._envelope))

    def _job_of(self, delta: ChoiceDelta) -> PromptJob:
        return self._jobs[delta.index // self._request.output.n]

    def _line_for_proxy(self, delta: ChoiceDelta) -> bytes:
        """What the client knows once it has the event that follows, with the tokens that had no event of their own; or
        how many they are, where the event does not show it."""
        if self._request.reports_state:
            return self._state_line(is_end=delta.finish_reason is not None)
        token_ids, self._unreported = self._unreported, []
        # Reasoning that is hidden, text that is held back, several tokens at once. An event that shows nothing is a
        # comment, which has no choice.
        is_shown = len(token_ids) == int(delta.is_visible)
        return count_line(len(token_ids)) if self._tells_counts and not is_shown else b""

    def _state_line(self, *, is_end: bool) -> bytes:
        """Of a stream that may go on elsewhere."""
        token_ids, self._unreported = self._unreported, []
        is_first, self._has_reported = not self._has_reported, True
        return state_line(
            token_ids,
            created=self._envelope["created"],
            num_cached_tokens=self._num_cached_tokens if is_first else None,
            is_end=is_end,
            stream_id=self._jobs[0].request_id,
        )

    def _chunk_choice(self, delta: ChoiceDelta, prompt: dict[str, Any] | None = None) -> dict[str, Any]:
        token_ids = delta.token_ids if self._request.output.return_token_ids else None
        if self._is_chat:
            return responses.chat_chunk_choice(
                delta.index,
                delta.text,
                reasoning=delta.reasoning,
                tool_calls=delta.tool_calls,
                is_first=delta.is_first,
                finish_reason=delta.told_reason,
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
            prompt=prompt,
        )

    async def _deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """What each engine output adds to its choice, until every choice has ended."""
        unfinished = sum(len(job.choices) for job in self._jobs)
        streams = [self._run_job(self._request, job) for job in self._jobs]
        merged = streams[0] if len(streams) == 1 else _merge(streams)
        begun: set[int] = set()
        async with contextlib.aclosing(merged):
            async for job, output in merged:
                if job.index not in begun:
                    begun.add(job.index)
                    self._prompt_done(job, output)
                choice = job.choices[output.index]
                if choice.finish_reason is not None:
                    continue  # a stop string ended it a step ago
                self._record.tokens(choice.index, len(output.token_ids))
                is_long = output.prompt_logprobs is not None and len(output.prompt_logprobs) > THREAD_BODY_TOKENS
                num_tokens, num_reasoning = choice.num_completion_tokens, choice.num_reasoning_tokens or 0
                delta = await asyncio.to_thread(choice.add, output) if is_long else choice.add(output)
                self._num_completion_tokens += choice.num_completion_tokens - num_tokens
                if self._num_reasoning_tokens is not None:
                    self._num_reasoning_tokens += (choice.num_reasoning_tokens or 0) - num_reasoning
                if delta.finish_reason is not None:
                    unfinished -= 1
                    if self._trace is not None:
                        self._trace.add_drafts(output)
                    if output.finish_reason is None:
                        self._finish(job.request_id, output.index)
                yield delta
                if not unfinished:
                    break
        self._record.close_finished(choice.finish_reason for job in self._jobs for choice in job.choices)

    def _prompt_done(self, job: PromptJob, output: RequestOutput) -> None:
        job.prompt_logprobs = output.prompt_logprobs
        report = job.handoff_result.report
        prefill_computed = report.computed_tokens if report is not None else 0
        computed = prefill_computed + output.num_local_computed_tokens
        resume = self._request.resume
        if resume is not None and resume.num_cached_tokens is not None:
            self._num_cached_tokens = resume.num_cached_tokens
        else:
            self._num_cached_tokens += max(0, len(job.token_ids) - job.num_resumed - computed)
        self._record.prompt_done(len(job.token_ids), output, ready_s=job.handoff_result.ready_s)
        if self._trace is not None:
            self._trace.add_prompt(len(job.token_ids), job.handoff_result, output)

    def _usage(self) -> dict[str, Any]:
        return responses.usage_block(
            self._num_prompt_tokens, self._num_completion_tokens, self._num_cached_tokens, self._num_reasoning_tokens
        )

    def _trace_block(self) -> dict[str, Any] | None:
        return self._trace.block() if self._trace is not None and self._shows_trace else None


class EventStream(StreamingResponse):
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


async def _merge(streams: Sequence[JobOutputs]) -> JobOutputs:
    """Items of several generators as they come; the first error ends all of them."""
    items: asyncio.Queue[tuple[PromptJob, RequestOutput] | Exception | None] = asyncio.Queue(maxsize=len(streams) * 4)

    async def pump(stream: JobOutputs) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for item in stream:
                    await items.put(item)
            await items.put(None)
        except Exception as exc:  # noqa: BLE001  # raised again by the reader
            await items.put(exc)

    tasks: list[asyncio.Task[None]] = []
    try:
        for stream in streams:
            tasks.append(asyncio.create_task(pump(stream)))
            if len(tasks) % PROMPTS_PER_TURN == 0:
                await asyncio.sleep(0)
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
        for start in range(0, len(tasks), ANSWERS_PER_TURN):
            some = tasks[start : start + ANSWERS_PER_TURN]
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)


def response_id(http: HttpRequest, request: GenerationRequest) -> str:
    prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
    return f"{prefix}-{request_id_of(http)}"
