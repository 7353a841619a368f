"""The decode leg from its first byte sent to the last one passed on to the client."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from common.errors import DeadlineExceededError, QueueFullError, TransferError
from common.wire.headers import PREFILL_NODE_HEADER
from proxy.legs.client_stream import ClientStream
from proxy.legs.errors import LegFailedError, RelayedAnswer, TransferFailedError
from proxy.legs.job import Job
from proxy.legs.leases import LeaseGuard
from proxy.legs.migration import DONE, END_OF_EVENT, ERROR, StreamProgress
from proxy.legs.protocol import check_draining, judge, open_decode_leg, status_reason
from proxy.metrics.proxy_metrics import ProxyMetrics
from proxy.metrics.token_gaps import TokenGaps
from proxy.node_http.client import NodeStream
from proxy.nodes.breaker import Leg
from proxy.nodes.node import Node

END_OF_STREAM = DONE + END_OF_EVENT


class DecodeLegs:
    """Relays decode legs. Stateless."""

    def __init__(self, metrics: ProxyMetrics, first_timeout_s: float, idle_s: float) -> None:
        """``first_timeout_s``: until the answer begins, which may take as long as the prompt; ``idle_s``: the longest
        silence of a stream from then on."""
        self._metrics = metrics
        self._first_timeout_s = first_timeout_s
        self._idle_s = idle_s

    async def relay(
        self,
        node: Node,
        job: Job,
        content: bytes,
        headers: Mapping[str, str],
        client: ClientStream,
        leases: LeaseGuard,
        progress: StreamProgress | None = None,
    ) -> None:
        """Send the leg and pass its answer on; from the first good status on, until it fails, the node owns the
        request's leases. With ``progress`` the client may have part of the stream already.

        Raises:
            TransferFailedError: the node says 502 before the first byte.
            NodeDrainingError: it drains; before the first byte.
            LegFailedError, DeadlineExceededError: also after the first byte.
        """
        client.entry.leg_sent(node.name, headers.get(PREFILL_NODE_HEADER))
        try:
            async with open_decode_leg(node, job.route, content, headers, self._first_timeout_s) as (answer, leg):
                if answer.status < 400:
                    leases.hand_over()
                await self._pass(node, job, answer, leg, client, progress)
        except (LegFailedError, DeadlineExceededError):
            leases.take_back()
            raise

    async def _pass(
        self,
        node: Node,
        job: Job,
        answer: NodeStream,
        leg: Leg,
        client: ClientStream,
        progress: StreamProgress | None,
    ) -> None:
        if answer.status != 200:
            judge(leg, answer.status)
            await self._pass_refusal(node, answer, client)
            return
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        if is_stream is not job.is_stream:
            raise LegFailedError(f"decode node {node.name} answers what was not asked for", reason="garbage")
        if is_stream:
            await self._pass_stream(node, job, answer, leg, client, progress)
        else:
            body = await answer.read()
            _check_json(node, body)
            leg.succeed()
            await client.send_whole(answer.status, answer.headers, body)

    @staticmethod
    async def _pass_refusal(node: Node, answer: NodeStream, client: ClientStream) -> None:
        relayed = RelayedAnswer(answer.status, answer.headers, await answer.read())
        check_draining(node, answer.status, relayed.body)
        if answer.status == TransferError.status:
            raise TransferFailedError(node, relayed)
        is_ours = 400 <= answer.status < 500 and answer.status != QueueFullError.status
        if client.is_started or not is_ours:
            message = f"decode node {node.name} answers {answer.status}"
            raise LegFailedError(message, reason=status_reason(answer.status), answer=relayed)
        await client.send_whole(relayed.status, relayed.headers, relayed.body)

    async def _pass_stream(
        self,
        node: Node,
        job: Job,
        answer: NodeStream,
        leg: Leg,
        client: ClientStream,
        progress: StreamProgress | None,
    ) -> None:
        end, has_error, has_passed = b"", False, False
        gaps = TokenGaps(self._metrics.observe_token_gap, num_choices=job.num_choices)
        async for chunk in answer.chunks(self._idle_s):
            if not end:
                leg.begin_answer()
            data = chunk if progress is None else progress.feed(chunk)
            if data:
                if not client.is_started:
                    self._metrics.observe_ttft(time.monotonic() - job.arrival_s)
                    await client.start_stream(answer.status, answer.headers)
                elif not has_passed:
                    client.go_on()
                has_passed = True
                await client.send_chunk(data)
                gaps.passed(data)
            if progress is not None and progress.failure is not None:
                leg.fail("error event")
                raise progress.failure
            seen = end + chunk  # what is looked for may have come in two pieces
            end = seen[-len(END_OF_STREAM) :]
            has_error = has_error or ERROR in seen
        if not client.is_started:
            raise LegFailedError(f"decode node {node.name} ended its stream without a byte")
        is_complete = end == END_OF_STREAM or has_error if progress is None else progress.is_complete
        if not is_complete:
            raise LegFailedError(f"decode node {node.name} ended its stream early")
        if has_error:
            leg.fail("error event")
        leg.succeed()
        await client.finish()


def _check_json(node: Node, body: bytes) -> None:
    try:
        is_object = isinstance(json.loads(body), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise LegFailedError(f"decode node {node.name} answers what is no JSON object", reason="garbage")
