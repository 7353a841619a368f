"""Both legs of a request at once, between nodes that can follow a prompt while it is computed.

1 a name per prompt (the rendezvous), 2 the prefill legs and the decode leg are sent together, 3 the decode node pulls
what the prefill nodes have finished and streams its answer. What fails at a prefill node reaches the decode node
through its pull, which computes the prompt itself or says 502; a refusal that is the client's to hear (4xx) goes to the
client, whichever leg it comes from. Leaving, however, ends all legs and gives the names up: a leg that still runs is
aborted, a finished prompt is released.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import QueueFullError
from common.wire.handoff import Rendezvous
from proxy.legs.bodies import decode_body, prefill_body
from proxy.legs.client_stream import ClientStream
from proxy.legs.decode_leg import DecodeLegs
from proxy.legs.errors import LegFailedError, PrefillBusyError, RelayedAnswer
from proxy.legs.job import Job
from proxy.legs.leases import LeaseReleaser
from proxy.legs.protocol import call, check_draining, check_prefilled
from proxy.legs.stream_progress import StreamProgress
from proxy.metrics.proxy_metrics import ProxyMetrics
from proxy.nodes.node import Node
from proxy.placement.request import Placement

logger = logging.getLogger(__name__)

ABORTED_STATUS = 499
"""Status of a prefill leg that its decode node called off: nobody's failure."""


class ConcurrentLegs:
    """Runs the legs of placements with a prefill node per prompt. Stateless."""

    def __init__(
        self, decode_legs: DecodeLegs, releaser: LeaseReleaser, metrics: ProxyMetrics, prefill_timeout_s: float
    ) -> None:
        self._decode_legs = decode_legs
        self._releaser = releaser
        self._metrics = metrics
        self._prefill_timeout_s = prefill_timeout_s

    async def run(
        self,
        job: Job,
        placement: Placement,
        headers: Mapping[str, str],
        decode_headers: Mapping[str, str],
        client: ClientStream,
        progress: StreamProgress,
    ) -> None:
        """Answer ``job`` on ``client``. ``headers`` are the prefill legs'; ``progress``: what the client has of the
        stream.

        Raises:
            RelayedAnswer: a node refuses its leg, before the first byte.
            NodeDrainingError: one of the nodes drains; before the first byte.
            LegFailedError: the decode leg broke; TransferFailedError when it says 502; PrefillBusyError.
            DeadlineExceededError: a leg was silent for too long.
        """
        names = [secrets.token_hex(16) for _ in placement.prefill]
        params = [self._rendezvous(node, name) for node, name in zip(placement.prefill, names, strict=True)]
        handoff = params[0] if len(params) == 1 else params

        def content() -> bytes:
            return decode_body(job.body, handoff, encoder=job.encoder, reports_state=progress.may_go_on)

        with self._releaser.guard() as leases:
            for node, name in zip(placement.prefill, names, strict=True):
                leases.hold(node, name)
            decode = asyncio.create_task(
                self._decode_legs.relay(placement.decode, job, content, decode_headers, client, leases, progress)
            )
            prefill = [
                asyncio.create_task(self._prefill(job, node, prompt, name, placement.sources, headers))
                for node, prompt, name in zip(placement.prefill, job.prompts, names, strict=True)
            ]
            try:
                await self._wait(job, decode, prefill, client)
            finally:
                legs = (decode, *prefill)
                for task in legs:
                    task.cancel()
                # Also for legs that have ended: one that failed as another ended the request has told nobody yet.
                await asyncio.gather(*legs, return_exceptions=True)

    @staticmethod
    async def _wait(
        job: Job, decode: asyncio.Task[None], prefill: Sequence[asyncio.Task[None]], client: ClientStream
    ) -> None:
        """Until the decode leg has ended; a prefill leg's refusal ends everything while that is still possible."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def prefill_ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is None:
                return
            if client.is_started:
                logger.warning("prefill leg failed late request_id=%s: %s", job.request_id, error)
            elif not ended.done():
                ended.set_exception(error)

        def decode_ended(_: asyncio.Task[None]) -> None:
            if not ended.done():
                ended.set_result(None)

        decode.add_done_callback(decode_ended)
        for task in prefill:
            task.add_done_callback(prefill_ended)
        await ended
        decode.result()

    async def _prefill(
        self,
        job: Job,
        node: Node,
        prompt: Any,
        name: str,
        sources: Sequence[Mapping[str, Any]],
        headers: Mapping[str, str],
    ) -> None:
        """One prefill leg. Its answer is read, so that the node sees it taken, and not used. Raises RelayedAnswer for a
        4xx, PrefillBusyError for a 429, NodeDrainingError and DeadlineExceededError."""
        content = prefill_body(node, job.body, prompt, encoder=job.encoder, rendezvous_id=name, sources=sources)
        started_s = time.monotonic()
        try:
            answer = await call(
                node, "POST", job.route, content, headers, self._prefill_timeout_s, check=check_prefilled
            )
        except LegFailedError as exc:
            logger.warning("prefill leg failed request_id=%s node=%s: %s", job.request_id, node.name, exc)
            return
        self._metrics.observe_phase("prefill", time.monotonic() - started_s)
        check_draining(node, answer.status, answer.body)
        status = answer.status
        if 400 <= status < 500 and status != ABORTED_STATUS:
            relayed = RelayedAnswer(status, answer.headers, answer.body)
            if status == QueueFullError.status:
                raise PrefillBusyError(f"prefill node {node.name} answers {status}", reason="busy", answer=relayed)
            raise relayed
        if status != 200:
            logger.info("prefill leg ended request_id=%s node=%s status=%d", job.request_id, node.name, status)

    @staticmethod
    def _rendezvous(node: Node, name: str) -> dict[str, Any]:
        host, port = node.transfer_address
        return Rendezvous(host, port, name).to_params()
