"""The decode leg from its first byte sent to the last one passed on to the client."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import TransferError
from proxy.leases import LeaseGuard
from proxy.legs import LegFailedError, RelayedAnswer, open_decode_leg
from proxy.nodes import Node
from proxy.observe import ProxyMetrics
from proxy.recent import PREFILL_NODE_HEADER
from proxy.relay import ClientStream


@dataclass(frozen=True, slots=True)
class Job:
    """One admitted request. ``prompts`` has one entry per prompt leg (None: the body's own prompt)."""

    route: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    request_id: str
    prompts: list[Any]
    is_local: bool
    is_stream: bool
    arrival_s: float


class TransferFailedError(LegFailedError):
    """The decode node could not get the prompt from its prefill node; ``answer`` is what it said."""

    def __init__(self, node: Node, answer: RelayedAnswer) -> None:
        super().__init__(f"decode node {node.name} could not get its prompt: {answer.body[:200]!r}")
        self.answer = answer


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
    ) -> None:
        """Send the leg and pass its answer on; from the first good status on the node owns the request's leases.

        Raises:
            TransferFailedError: the node says 502 before the first byte.
            LegFailedError, DeadlineExceededError: also after the first byte.
        """
        client.entry.leg_sent(node.name, headers.get(PREFILL_NODE_HEADER))
        async with open_decode_leg(node, job.route, content, headers, self._first_timeout_s) as answer:
            if answer.status < 400:
                leases.hand_over()
            if answer.status == TransferError.status:
                raise TransferFailedError(node, RelayedAnswer(answer.status, answer.headers, await answer.read()))
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                await client.send_whole(answer.status, answer.headers, await answer.read())
                return
            async for chunk in answer.chunks(self._idle_s):
                if not client.is_started:
                    self._metrics.observe_ttft(time.monotonic() - job.arrival_s)
                    await client.start_stream(answer.status, answer.headers)
                await client.send_chunk(chunk)
            if not client.is_started:
                raise LegFailedError(f"decode node {node.name} ended its stream without a byte")
            await client.finish()
