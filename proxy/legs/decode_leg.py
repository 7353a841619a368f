"""The decode leg from its first byte sent to the last one passed on to the client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

import orjson

from common.errors import HandedOverError, QueueFullError, TransferError
from common.metrics.outcomes import Outcome, outcome_of_answer
from common.wire.fields import is_int
from common.wire.headers import LEG_FAILED, LEG_HEADER, PREFILL_NODE_HEADER, REPORT_HEADER
from common.wire.json_text import LONG_BYTES
from proxy.legs.client_stream import ClientStream
from proxy.legs.errors import LegFailedError, PrefillBusyError, RelayedAnswer, StreamLeavesError, TransferFailedError
from proxy.legs.job import Job
from proxy.legs.leases import LeaseGuard
from proxy.legs.protocol import DecodeLeg, check_draining, judge, status_reason
from proxy.legs.stream_progress import StreamProgress
from proxy.metrics.proxy_metrics import ProxyMetrics, RequestRecord
from proxy.metrics.recent_requests import parse_report
from proxy.metrics.token_gaps import TokenGaps
from proxy.node_http.client import NodeStream
from proxy.node_http.errors import NodeClientError
from proxy.nodes.breaker import Leg
from proxy.nodes.node import Node

THREAD_PROMPTS = 64
"""More prompts than this have a body that is made off the event loop: each brings a manifest."""

END_S = 1.0
"""Seconds from a stream's last event to the end of its connection's answer, which needs none."""


class DecodeLegs:
    """Relays decode legs. Stateless."""

    def __init__(self, metrics: ProxyMetrics, *, first_timeout_s: float, idle_s: float, whole_timeout_s: float) -> None:
        """``first_timeout_s``: until a stream begins, which may take as long as the prompt; ``idle_s``: the longest
        silence of a stream from then on; ``whole_timeout_s``: until an answer begins that is no stream, which may take
        as long as all of its tokens."""
        self._metrics = metrics
        self._first_timeout_s = first_timeout_s
        self._idle_s = idle_s
        self._whole_timeout_s = whole_timeout_s

    async def relay(
        self,
        node: Node,
        job: Job,
        content: Callable[[], bytes],
        headers: Mapping[str, str],
        client: ClientStream,
        leases: LeaseGuard,
        progress: StreamProgress,
    ) -> None:
        """Send the leg and pass its answer on; from the first good status on, until it fails, the node owns the
        request's leases. ``content`` makes its body. ``progress``: what the client has of the stream already.

        Raises:
            RelayedAnswer: a refusal that is the client's to hear.
            TransferFailedError: the node says 502 before the first byte.
            PrefillBusyError: it relays that its prefill node is full.
            NodeDrainingError: it drains; before the first byte.
            StreamLeavesError: what is left is for another node; after the first byte.
            LegFailedError, DeadlineExceededError: also after the first byte.
        """
        client.entry.leg_sent(node.name, headers.get(PREFILL_NODE_HEADER))
        try:
            # As long as the prompt, while the answer takes long: nothing here may keep it.
            body = await asyncio.to_thread(content) if len(job.prompts) > THREAD_PROMPTS else content()
            limit_s = self._first_timeout_s if job.is_stream else self._whole_timeout_s
            leg_of = DecodeLeg(node, job.route, body, headers, limit_s, is_stream=job.is_stream)
            del body
            async with leg_of as (answer, leg):
                if answer.status < 400:
                    leases.hand_over()
                await self._pass(node, job, answer, leg, client, progress)
        except BaseException:  # also the client's leaving: of a list, not every prompt may have been read by then
            leases.take_back()
            raise

    async def _pass(
        self,
        node: Node,
        job: Job,
        answer: NodeStream,
        leg: Leg,
        client: ClientStream,
        progress: StreamProgress,
    ) -> None:
        if answer.status != 200:
            judge(leg, answer.status)
            await self._refuse(node, answer, client)
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        if is_stream is not job.is_stream:
            raise LegFailedError(f"decode node {node.name} answers what was not asked for", reason="garbage")
        if is_stream:
            await self._pass_stream(node, job, answer, leg, client, progress)
        else:
            body = await answer.read(self._first_timeout_s)
            answer_json = _read_whole(node, answer, body)
            leg.succeed()
            outcome = _outcome_of_whole(answer_json)
            _count_usage(answer_json, client.record)
            await client.send_whole(answer.status, answer.headers, body, outcome)

    async def _refuse(self, node: Node, answer: NodeStream, client: ClientStream) -> NoReturn:
        """Raises what a status other than 200 means."""
        relayed = RelayedAnswer(answer.status, answer.headers, await answer.read(self._first_timeout_s))
        check_draining(node, answer.status, relayed.body)
        if answer.status == TransferError.status:
            raise TransferFailedError(node, relayed)
        if answer.status == QueueFullError.status and answer.headers.get(LEG_HEADER.lower()) == LEG_FAILED:
            message = f"the prefill node of decode node {node.name} answers {answer.status}"
            raise PrefillBusyError(message, reason="busy", answer=relayed)
        is_ours = 400 <= answer.status < 500 and answer.status != QueueFullError.status
        if client.is_started or not is_ours:
            message = f"decode node {node.name} answers {answer.status}"
            raise LegFailedError(message, reason=status_reason(answer.status), answer=relayed)
        raise relayed

    async def _pass_stream(
        self, node: Node, job: Job, answer: NodeStream, leg: Leg, client: ClientStream, progress: StreamProgress
    ) -> None:
        has_begun = has_passed = is_handed_over = False
        # The pause between two legs is a gap like any other.
        gaps = client.gaps = client.gaps or TokenGaps(self._metrics.observe_token_gap, num_choices=job.num_choices)
        chunks = answer.chunks(self._idle_s)
        async for chunk in chunks:
            if not has_begun:
                leg.begin_answer()
                has_begun = True
            data = progress.feed(chunk)
            # Comments are passed on, but no answer begins with one: there is no token yet.
            if data and (client.is_started or b"data:" in data):
                if not client.is_started:
                    self._metrics.observe_ttft(time.monotonic() - job.arrival_s)
                    await client.start_stream(answer.status, answer.headers)
                elif not has_passed:
                    client.go_on()
                has_passed = True
                if progress.is_complete:
                    leg.succeed()
                    await client.finish(progress.outcome, data)
                else:
                    await client.send_chunk(data)
            if client.is_started and progress.num_tokens:
                gaps.passed(progress.num_tokens)
                client.record.num_output_tokens = (client.record.num_output_tokens or 0) + progress.num_tokens
            if progress.failure is not None:
                if is_handed_over and progress.failure.code == HandedOverError.code:
                    await _read_end(chunks)
                    leg.succeed()
                    raise StreamLeavesError(node)
                judge(leg, progress.failure.status)
                raise progress.failure
            if client.is_finished:
                if not answer.is_read:
                    await _read_end(chunks)
                return
            if client.is_started and not is_handed_over and progress.is_leaving:
                # Read to its end: what the node then has of it is what the next one goes on from.
                is_handed_over = await progress.ask_to_hand_over()
                if not is_handed_over:
                    leg.succeed()
                    raise StreamLeavesError(node)
        end = "early" if client.is_started else "without a byte"
        raise LegFailedError(f"decode node {node.name} ended its stream {end}")


async def _read_end(chunks: AsyncIterator[bytes]) -> None:
    """To the end of an answer of which the client has all, so that the connection can be used again. One that breaks,
    lingers or goes on instead is closed."""
    with contextlib.suppress(NodeClientError, TimeoutError):
        async with asyncio.timeout(END_S):
            await anext(chunks, None)


def _read_whole(node: Node, answer: NodeStream, body: bytes) -> dict[str, Any]:
    """A whole answer; of a long one only what is counted of it, where the node's report says it: to parse megabytes of
    log-probabilities would hold up all other requests. Raises LegFailedError for what is no JSON object."""
    if len(body) > LONG_BYTES:
        report = parse_report(answer.headers.get(REPORT_HEADER.lower()))
        if "usage" in report and "choices" in report:
            return report
    try:
        whole = orjson.loads(body)
    except ValueError:
        whole = None
    if not isinstance(whole, dict):
        raise LegFailedError(f"decode node {node.name} answers what is no JSON object", reason="garbage")
    return whole


def _count_usage(answer: Mapping[str, Any], record: RequestRecord) -> None:
    usage = answer.get("usage")
    if isinstance(usage, dict) and is_int(usage.get("prompt_tokens")) and is_int(usage.get("completion_tokens")):
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_output_tokens = usage["completion_tokens"]


def _outcome_of_whole(answer: Mapping[str, Any]) -> Outcome:
    choices = answer.get("choices")
    choices = choices if isinstance(choices, list) else ()
    return outcome_of_answer(each.get("finish_reason") for each in choices if isinstance(each, dict))
