"""One request from the client's body to the last byte of the answer.

Life of a request: 1 pick a decode node, 2 one prefill leg per prompt, together, each on a picked prefill node, a
second one when the first fails, 3 the decode leg with what the prefill legs returned, or without when there is no
usable prefill node or none succeeded (the decode node then computes the prompt itself), 4 bytes pass through to the
client. Until the first byte a decode node that broke the connection is replaced by another one; after it there is no
way back. Leaving early, by whatever exception, closes the legs' connections (nodes abort on that) and releases leases
that no decode node took over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from common.config import ProxyConfig
from common.errors import NodeUnavailableError
from proxy.leases import LeaseGuard, LeaseReleaser
from proxy.legs import LegFailedError, Prefilled, decode_body, open_decode_leg, prefill_body, send_prefill_leg
from proxy.nodes import Node, NodePool, NodeRole
from proxy.observe import ProxyMetrics
from proxy.placement import create_policy, pick
from proxy.relay import ClientStream

logger = logging.getLogger(__name__)

MAX_TRIES = 2
# Prompts of one request that are prefilled at the same time: a list of 2,000 must not fill a node's queue by itself.
MAX_PROMPTS_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Job:
    """One admitted request. ``prompts`` has one entry per prompt leg (None: the body's own prompt)."""

    route: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    request_id: str
    prompts: Sequence[Any]
    is_local: bool
    is_stream: bool
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the decode leg is given: ``params`` None means that it prefills itself."""

    params: object
    prefill_node: str | None


class Orchestrator:
    """Runs requests over one node pool. All state is the pool's and the policies'; safe for any number at once."""

    def __init__(
        self,
        config: ProxyConfig,
        pool: NodePool,
        releaser: LeaseReleaser,
        metrics: ProxyMetrics,
        node_headers: Mapping[str, str],
    ) -> None:
        self._pool = pool
        self._releaser = releaser
        self._metrics = metrics
        self._node_headers = dict(node_headers)
        self._prefill_policy = create_policy(config.policy)
        self._decode_policy = create_policy(config.decode_policy or config.policy)
        self._prefill_timeout = _timeout(config, config.prefill_timeout_seconds)
        self._stream_timeout = _timeout(config, config.stream_idle_timeout_seconds)
        # A whole answer is silent until its last token is there.
        self._whole_timeout = _timeout(config, max(config.prefill_timeout_seconds, config.stream_idle_timeout_seconds))

    async def run(self, job: Job, client: ClientStream) -> None:
        """Answer ``job`` on ``client``. Raises RelayedAnswer and TandemError for what the caller has to say instead."""
        self._require_decode_node()
        queue_s = time.monotonic() - job.arrival_s
        with self._releaser.guard() as leases:
            handoff = await self._prefill(job, leases)
            placement = "local" if handoff.params is None else "remote"
            self._metrics.count_decision(self._prefill_policy.name, placement)
            await self._decode(job, handoff, client, leases, queue_s)

    def _require_decode_node(self) -> None:
        if not self._pool.usable(NodeRole.DECODE):
            raise NodeUnavailableError("; ".join(self._pool.reasons()) or "no decode node is ready")

    async def _prefill(self, job: Job, leases: LeaseGuard) -> Handoff:
        if job.is_local or not self._pool.usable(NodeRole.PREFILL):
            return Handoff(None, None)
        started_s = time.monotonic()
        results = await self._prefill_all(job, leases)
        self._metrics.observe_phase("prefill", time.monotonic() - started_s)
        done = [each for each in results if each is not None]
        if len(done) < len(results):
            self._releaser.release(leases)
            return Handoff(None, None)
        names = ",".join(dict.fromkeys(each.node.name for each in done))
        params = [each.params for each in done]
        return Handoff(params[0] if len(params) == 1 else params, names)

    async def _prefill_all(self, job: Job, leases: LeaseGuard) -> list[Prefilled | None]:
        """All prompts' prefill legs, at most MAX_PROMPTS_TOGETHER at a time; the first error ends the others."""
        if len(job.prompts) == 1:
            return [await self._prefill_one(job, job.prompts[0], leases)]
        together = asyncio.Semaphore(MAX_PROMPTS_TOGETHER)

        async def one(prompt: Any) -> Prefilled | None:
            async with together:
                return await self._prefill_one(job, prompt, leases)

        try:
            async with asyncio.TaskGroup() as group:
                legs = [group.create_task(one(prompt)) for prompt in job.prompts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [leg.result() for leg in legs]

    async def _prefill_one(self, job: Job, prompt: Any | None, leases: LeaseGuard) -> Prefilled | None:
        """One prompt's prefill leg; None when no prefill node could do it."""
        content = prefill_body(job.body, prompt)
        headers = self._headers(job)
        tried: list[Node] = []
        while len(tried) < MAX_TRIES:
            node = pick(self._prefill_policy, self._pool.usable(NodeRole.PREFILL), tried=tried)
            if node is None:
                break
            tried.append(node)
            try:
                prefilled = await send_prefill_leg(node, job.route, content, headers, self._prefill_timeout)
            except LegFailedError as exc:
                logger.warning("prefill leg failed request_id=%s node=%s: %s", job.request_id, node.name, exc)
                continue
            leases.hold(prefilled)
            return prefilled
        return None

    async def _decode(
        self, job: Job, handoff: Handoff, client: ClientStream, leases: LeaseGuard, queue_s: float
    ) -> None:
        content = decode_body(job.body, handoff.params)
        tried: list[Node] = []
        failure = NodeUnavailableError("; ".join(self._pool.reasons()) or "no decode node is ready")
        while len(tried) < MAX_TRIES:
            node = pick(self._decode_policy, self._pool.usable(NodeRole.DECODE), tried=tried)
            if node is None:
                break
            tried.append(node)
            elapsed_s = time.monotonic() - job.arrival_s
            headers = self._headers(job) | {"x-tandem-proxy-seconds": f"{queue_s:.6f},{elapsed_s:.6f}"}
            if handoff.prefill_node is not None:
                headers["x-tandem-prefill-node"] = handoff.prefill_node
            try:
                await self._decode_on(node, job, content, headers, client, leases)
                return
            except LegFailedError as exc:
                if client.is_started:
                    raise
                logger.warning("decode leg failed request_id=%s node=%s: %s", job.request_id, node.name, exc)
                failure = exc
        raise failure

    async def _decode_on(
        self,
        node: Node,
        job: Job,
        content: bytes,
        headers: Mapping[str, str],
        client: ClientStream,
        leases: LeaseGuard,
    ) -> None:
        timeout = self._stream_timeout if job.is_stream else self._whole_timeout
        async with open_decode_leg(node, job.route, content, headers, timeout) as answer:
            if answer.status_code < 400:
                leases.hand_over()
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                await client.send_whole(answer.status_code, answer.headers, await answer.aread())
                return
            async for chunk in answer.aiter_raw():
                if not client.is_started:
                    self._metrics.observe_ttft(time.monotonic() - job.arrival_s)
                    await client.start_stream(answer.status_code, answer.headers)
                await client.send_chunk(chunk)
            if not client.is_started:
                raise LegFailedError(f"decode node {node.name} ended its stream without a byte")
            await client.finish()

    def _headers(self, job: Job) -> dict[str, str]:
        return {**job.headers, **self._node_headers}


def _timeout(config: ProxyConfig, read_s: float) -> httpx.Timeout:
    return httpx.Timeout(read_s, connect=config.connect_timeout_seconds, pool=config.connect_timeout_seconds)
