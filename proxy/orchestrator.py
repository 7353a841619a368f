"""One request from the client's body to the last byte of the answer: who gets its legs, in which order, and who else
when they fail.

Life of a request: 1 pick a decode node and a prefill node per prompt, 2 both legs at once, if all of them can follow a
prompt while it is computed (``proxy.paired``); else one after the other: the prefill legs together, then the decode leg
with what they returned, or without when no prefill node could do it (the decode node then computes the prompt itself),
3 bytes pass through to the client. Until the first byte a pair whose decode node broke, or could not get the prompt, is
replaced by another one; after it there is no way back. Leaving early, by whatever exception, closes the legs'
connections (nodes abort on that) and releases leases that no decode node took over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.config import ProxyConfig
from common.errors import NodeUnavailableError
from proxy.decode_leg import DecodeLegs, Job, TransferFailedError
from proxy.leases import LeaseGuard, LeaseReleaser
from proxy.legs import LegFailedError, Prefilled, decode_body, prefill_body, send_prefill_leg
from proxy.nodes import Node, NodePool, NodeRole
from proxy.observe import ProxyMetrics
from proxy.paired import Pair, PairedLegs
from proxy.placement import create_policy, pick
from proxy.relay import ClientStream

logger = logging.getLogger(__name__)

MAX_TRIES = 2
# Prompts of one request that are prefilled at the same time: a list of 2,000 must not fill a node's queue by itself.
MAX_PROMPTS_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the decode leg is given: ``params`` None means that it prefills itself."""

    params: object
    prefill_node: str | None


@dataclass(slots=True)
class _Tried:
    """Nodes that further tries of a request avoid."""

    decode: list[Node] = field(default_factory=list)
    prefill: list[Node] = field(default_factory=list)


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
        self._prefill_timeout_s = config.prefill_timeout_seconds
        # Nothing comes until the prompt is computed, of a whole answer not before its last token.
        first_timeout_s = max(config.prefill_timeout_seconds, config.stream_idle_timeout_seconds)
        self._decode_legs = DecodeLegs(metrics, first_timeout_s, config.stream_idle_timeout_seconds)
        self._paired_legs = PairedLegs(self._decode_legs, releaser, metrics, self._prefill_timeout_s)

    async def run(self, job: Job, client: ClientStream) -> None:
        """Answer ``job`` on ``client``. Raises RelayedAnswer and TandemError for what the caller has to say instead."""
        self._require_decode_node()
        queue_s = time.monotonic() - job.arrival_s
        try:
            if self._can_pair(job):
                await self._run_paired(job, client, queue_s)
            else:
                await self._run_in_turn(job, client, queue_s)
        except TransferFailedError as exc:
            if client.is_started:
                raise
            await client.send_whole(exc.answer.status, exc.answer.headers, exc.answer.body)

    def _require_decode_node(self) -> None:
        if not self._pool.usable(NodeRole.DECODE):
            raise NodeUnavailableError("; ".join(self._pool.reasons()) or "no decode node is ready")

    # --- both legs at once

    def _can_pair(self, job: Job) -> bool:
        """Whether both legs can be sent at once, whoever gets them: decided before anybody's turn is taken."""
        prefill, decode = self._pool.usable(NodeRole.PREFILL), self._pool.usable(NodeRole.DECODE)
        if job.is_local or not prefill or len(job.prompts) > MAX_PROMPTS_TOGETHER:
            return False
        return all(node.info.pull for node in (*prefill, *decode))

    async def _run_paired(self, job: Job, client: ClientStream, queue_s: float) -> None:
        """Up to MAX_TRIES pairs; when none is left to try, what the last one said. Without a prefill node the decode
        node computes the prompt."""
        self._metrics.count_decision(self._prefill_policy.name, "remote")
        tried, failed = _Tried(), None
        for num_tries in range(1, MAX_TRIES + 1):
            pair = self._pick_pair(job, tried, failed)
            if pair is None:
                await self._decode(job, Handoff(None, None), client, LeaseGuard(), queue_s, tried.decode)
                return
            names = ",".join(dict.fromkeys(node.name for node in pair.prefill))
            decode_headers = self._decode_headers(job, queue_s, names)
            try:
                await self._paired_legs.run(job, pair, self._headers(job), decode_headers, client)
                return
            except LegFailedError as exc:
                if client.is_started or num_tries == MAX_TRIES or not self._avoid(pair, exc, tried):
                    raise
                logger.warning("another pair is tried request_id=%s: %s", job.request_id, exc)
                failed = pair

    def _pick_pair(self, job: Job, tried: _Tried, failed: Pair | None) -> Pair | None:
        """Nodes for the next try; None when no prefill node is usable. After a decode node broke, the prefill nodes
        that have begun go on where they are."""
        decode = pick(self._decode_policy, self._pool.usable(NodeRole.DECODE), tried=tried.decode)
        usable = self._pool.usable(NodeRole.PREFILL)
        if decode is None:
            raise NodeUnavailableError("; ".join(self._pool.reasons()) or "no decode node is ready")
        if failed is not None and not tried.prefill and all(node in usable for node in failed.prefill):
            prefill = list(failed.prefill)
        else:
            picked = [pick(self._prefill_policy, usable, tried=tried.prefill) for _ in job.prompts]
            prefill = [node for node in picked if node is not None]
        if len(prefill) < len(job.prompts):
            return None
        return Pair(decode, prefill, self._sources(decode))

    def _avoid(self, pair: Pair, error: LegFailedError, tried: _Tried) -> bool:
        """Remembers who not to try again. False: nobody is left to try instead."""
        other_decode = [node for node in self._pool.usable(NodeRole.DECODE) if node is not pair.decode]
        if not isinstance(error, TransferFailedError):
            tried.decode.append(pair.decode)
            return bool(other_decode)
        if any(node not in pair.prefill for node in self._pool.usable(NodeRole.PREFILL)):
            tried.prefill += pair.prefill
            return True
        tried.decode.append(pair.decode)
        return bool(other_decode)

    def _sources(self, decode: Node, *, with_decode: bool = True) -> list[dict[str, Any]]:
        """Who may have part of the prompt: the node that is to generate, then one more of its kind."""
        others = [node for node in self._pool.usable(NodeRole.DECODE) if node is not decode]
        hints = [node.source_hint() for node in ([decode] if with_decode else []) + others[:1]]
        return [hint for hint in hints if hint is not None]

    # --- one leg after the other

    async def _run_in_turn(self, job: Job, client: ClientStream, queue_s: float) -> None:
        with self._releaser.guard() as leases:
            handoff = await self._prefill(job, leases)
            placement = "local" if handoff.params is None else "remote"
            self._metrics.count_decision(self._prefill_policy.name, placement)
            await self._decode(job, handoff, client, leases, queue_s)

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
                prefilled = await send_prefill_leg(node, job.route, content, headers, self._prefill_timeout_s)
            except LegFailedError as exc:
                logger.warning("prefill leg failed request_id=%s node=%s: %s", job.request_id, node.name, exc)
                continue
            if prefilled.lease_id is not None:
                leases.hold(node, prefilled.lease_id)
            return prefilled
        return None

    async def _decode(
        self,
        job: Job,
        handoff: Handoff,
        client: ClientStream,
        leases: LeaseGuard,
        queue_s: float,
        avoided: Sequence[Node] = (),
    ) -> None:
        tried = list(avoided)
        num_tries = 0
        failure = NodeUnavailableError("; ".join(self._pool.reasons()) or "no decode node is ready")
        while num_tries < MAX_TRIES:
            node = pick(self._decode_policy, self._pool.usable(NodeRole.DECODE), tried=tried)
            if node is None:
                break
            tried.append(node)
            num_tries += 1
            is_local = handoff.params is None and not job.is_local and node.info.pull
            sources = self._sources(node, with_decode=False) if is_local else []
            content = decode_body(job.body, handoff.params, sources=sources)
            headers = self._decode_headers(job, queue_s, handoff.prefill_node)
            try:
                await self._decode_legs.relay(node, job, content, headers, client, leases)
                return
            except TransferFailedError:
                raise
            except LegFailedError as exc:
                if client.is_started:
                    raise
                logger.warning("decode leg failed request_id=%s node=%s: %s", job.request_id, node.name, exc)
                failure = exc
        raise failure

    def _headers(self, job: Job) -> dict[str, str]:
        return {**job.headers, **self._node_headers}

    def _decode_headers(self, job: Job, queue_s: float, prefill_node: str | None) -> dict[str, str]:
        elapsed_s = time.monotonic() - job.arrival_s
        headers = self._headers(job) | {"x-tandem-proxy-seconds": f"{queue_s:.6f},{elapsed_s:.6f}"}
        return headers if prefill_node is None else headers | {"x-tandem-prefill-node": prefill_node}
