"""The decode leg from its first byte sent to the last one passed on to the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from common.errors import DeadlineExceededError, TransferError
from proxy.leases import LeaseGuard
from proxy.legs import LegFailedError, RelayedAnswer, open_decode_leg
from proxy.nodes import Node
from proxy.observe import ProxyMetrics
from proxy.placement.hint import PlacementHint
from proxy.prompt_keys import PromptKeys
from proxy.relay import ClientStream


@dataclass(frozen=True, slots=True)
class Job:
    """One admitted request. ``prompts`` has one entry per prompt leg (None: the body's own prompt); so has
    ``prompt_keys``, with None for prompts that the proxy could not tokenise, or it is empty."""

    route: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    request_id: str
    prompts: list[Any]
    is_local: bool
    is_stream: bool
    arrival_s: float
    prompt_keys: Sequence[PromptKeys | None] = ()
    session_id: str | None = None
    placement_hint: PlacementHint = PlacementHint.AUTO


class TransferFailedError(LegFailedError):
    """The decode node could not get the prompt from its prefill node; ``answer`` is what it said."""

    def __init__(self, node: Node, answer: RelayedAnswer) -> None:
        super().__init__(f"decode node {node.name} could not get its prompt: {answer.body[:200]!r}")
        self.answer = answer


class DecodeLegs:
    """Relays decode legs. Stateless."""

    def __init__(self, metrics: ProxyMetrics, first_timeout: httpx.Timeout, idle_s: float) -> None:
        """``first_timeout``: until the answer begins, which may take as long as the prompt; ``idle_s``: the longest
        silence of a stream from then on."""
        self._metrics = metrics
        self._first_timeout = first_timeout
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
        async with open_decode_leg(node, job.route, content, headers, self._first_timeout) as answer:
            if answer.status_code < 400:
                leases.hand_over()
            if answer.status_code == TransferError.status:
                raise TransferFailedError(node, RelayedAnswer(answer.status_code, answer.headers, await answer.aread()))
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                await client.send_whole(answer.status_code, answer.headers, await answer.aread())
                return
            async for chunk in self._chunks(node, answer):
                if not client.is_started:
                    self._metrics.observe_ttft(time.monotonic() - job.arrival_s)
                    await client.start_stream(answer.status_code, answer.headers)
                await client.send_chunk(chunk)
            if not client.is_started:
                raise LegFailedError(f"decode node {node.name} ended its stream without a byte")
            await client.finish()

    async def _chunks(self, node: Node, answer: httpx.Response) -> AsyncIterator[bytes]:
        chunks = answer.aiter_raw()
        timeout_s: float | None = None  # the first one has httpx's
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError as exc:
                node.suspect("silent", down=False)
                raise DeadlineExceededError(
                    f"decode node {node.name} was silent for more than {self._idle_s:g} s"
                ) from exc
            timeout_s = self._idle_s
            yield chunk
