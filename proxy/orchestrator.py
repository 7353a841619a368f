"""One request from the client's body to the last byte of the answer: who gets its legs, in which order, and who else
when they fail.

Life of a request: 1 place it (``proxy.placer``): a decode node, and a prefill node per prompt or none, 2 both legs at
once, if all of them can follow a prompt while it is computed (``proxy.paired``); else one after the other: the prefill
legs together, then the decode leg with what they returned, or without when no prefill node could do it (the decode node
then computes the prompt itself), 3 bytes pass through to the client. Until the first byte a pair whose decode node
broke, or could not get the prompt, is replaced by another one; after it there is no way back. Leaving early, by
whatever exception, closes the legs' connections (nodes abort on that) and releases leases that no decode node took
over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from common.config import ProxyConfig
from proxy.decode_leg import DecodeLegs, Job, TransferFailedError
from proxy.leases import LeaseGuard, LeaseReleaser
from proxy.legs import LegFailedError, Prefilled, decode_body, prefill_body, send_prefill_leg
from proxy.nodes import Node, NodePool, NodeRole
from proxy.observe import ProxyMetrics
from proxy.paired import Pair, PairedLegs
from proxy.placer import Avoided, Placement, Placer
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


class Orchestrator:
    """Runs requests over one node pool. All state is the pool's and the placer's; safe for any number at once."""

    def __init__(
        self,
        config: ProxyConfig,
        pool: NodePool,
        placer: Placer,
        releaser: LeaseReleaser,
        metrics: ProxyMetrics,
        node_headers: Mapping[str, str],
    ) -> None:
        self._pool = pool
        self._releaser = releaser
        self._metrics = metrics
        self._node_headers = dict(node_headers)
        self._placer = placer
        self._prefill_timeout = _timeout(config, config.prefill_timeout_seconds)
        # Nothing comes until the prompt is computed, of a whole answer not before its last token.
        first_timeout = _timeout(config, max(config.prefill_timeout_seconds, config.stream_idle_timeout_seconds))
        self._decode_legs = DecodeLegs(metrics, first_timeout, config.stream_idle_timeout_seconds)
        self._paired_legs = PairedLegs(self._decode_legs, releaser, metrics, self._prefill_timeout)

    async def run(self, job: Job, client: ClientStream) -> None:
        """Answer ``job`` on ``client``. Raises RelayedAnswer and TandemError for what the caller has to say instead."""
        queue_s = time.monotonic() - job.arrival_s
        avoided = Avoided()
        placement = self._placer.place(job, avoided)
        client.on_start = lambda status: self._placer.started(job, is_answer=status == 200)
        try:
            if self._can_pair(job, placement):
                await self._run_paired(job, placement, avoided, client, queue_s)
            else:
                await self._run_in_turn(job, placement, avoided, client, queue_s)
        except TransferFailedError as exc:
            if client.is_started:
                raise
            await client.send_whole(exc.answer.status, exc.answer.headers, exc.answer.body)
        finally:
            self._placer.finished(job)

    # --- both legs at once

    @staticmethod
    def _can_pair(job: Job, placement: Placement) -> bool:
        """Whether both legs can be sent at once."""
        if placement.is_local or len(job.prompts) > MAX_PROMPTS_TOGETHER:
            return False
        return all(node.info.pull for node in (placement.decode, *placement.prefill))

    async def _run_paired(
        self, job: Job, placement: Placement, avoided: Avoided, client: ClientStream, queue_s: float
    ) -> None:
        """Up to MAX_TRIES pairs; when none is left to try, what the last one said. Without a prefill node the decode
        node computes the prompt."""
        self._metrics.count_decision(self._placer.name, "remote")
        num_tries = 0
        while self._can_pair(job, placement):
            num_tries += 1
            pair = Pair(placement.decode, placement.prefill, placement.sources)
            decode_headers = self._decode_headers(job, queue_s, placement.prefill_names)
            try:
                await self._paired_legs.run(job, pair, self._headers(job), decode_headers, client)
                return
            except LegFailedError as exc:
                if client.is_started or num_tries == MAX_TRIES or not self._avoid(placement, exc, avoided):
                    raise
                logger.warning("another pair is tried request_id=%s: %s", job.request_id, exc)
                # The prefill nodes that have begun go on where they are.
                began = () if avoided.prefill else placement.prefill
                placement = self._placer.place(job, avoided, began=began)
        await self._decode(job, placement, Handoff(None, None), client, LeaseGuard(), queue_s, avoided)

    def _avoid(self, placement: Placement, error: LegFailedError, avoided: Avoided) -> bool:
        """Remembers who not to try again. False: nobody is left to try instead."""
        other_decode = [node for node in self._pool.usable(NodeRole.DECODE) if node is not placement.decode]
        if not isinstance(error, TransferFailedError):
            avoided.decode.append(placement.decode)
            return bool(other_decode)
        if any(node not in placement.prefill for node in self._pool.usable(NodeRole.PREFILL)):
            avoided.prefill += placement.prefill
            return True
        avoided.decode.append(placement.decode)
        return bool(other_decode)

    # --- one leg after the other

    async def _run_in_turn(
        self, job: Job, placement: Placement, avoided: Avoided, client: ClientStream, queue_s: float
    ) -> None:
        with self._releaser.guard() as leases:
            handoff = await self._prefill(job, placement, leases)
            self._metrics.count_decision(self._placer.name, "local" if handoff.params is None else "remote")
            await self._decode(job, placement, handoff, client, leases, queue_s, avoided)

    async def _prefill(self, job: Job, placement: Placement, leases: LeaseGuard) -> Handoff:
        if placement.is_local:
            return Handoff(None, None)
        started_s = time.monotonic()
        results = await self._prefill_all(job, placement, leases)
        self._metrics.observe_phase("prefill", time.monotonic() - started_s)
        done = [each for each in results if each is not None]
        if len(done) < len(results):
            self._releaser.release(leases)
            return Handoff(None, None)
        names = ",".join(dict.fromkeys(each.node.name for each in done))
        params = [each.params for each in done]
        return Handoff(params[0] if len(params) == 1 else params, names)

    async def _prefill_all(self, job: Job, placement: Placement, leases: LeaseGuard) -> list[Prefilled | None]:
        """All prompts' prefill legs, at most MAX_PROMPTS_TOGETHER at a time; the first error ends the others."""
        placed = list(zip(job.prompts, placement.prefill, strict=True))
        if len(placed) == 1:
            return [await self._prefill_one(job, *placed[0], leases)]
        together = asyncio.Semaphore(MAX_PROMPTS_TOGETHER)

        async def one(prompt: Any, node: Node) -> Prefilled | None:
            async with together:
                return await self._prefill_one(job, prompt, node, leases)

        try:
            async with asyncio.TaskGroup() as group:
                legs = [group.create_task(one(prompt, node)) for prompt, node in placed]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [leg.result() for leg in legs]

    async def _prefill_one(self, job: Job, prompt: Any | None, first: Node, leases: LeaseGuard) -> Prefilled | None:
        """One prompt's prefill leg, on ``first`` or another; None when no prefill node could do it."""
        content = prefill_body(job.body, prompt)
        headers = self._headers(job)
        avoided = Avoided()
        node: Node | None = first
        while node is not None and len(avoided.prefill) < MAX_TRIES:
            avoided.prefill.append(node)
            try:
                prefilled = await send_prefill_leg(node, job.route, content, headers, self._prefill_timeout)
            except LegFailedError as exc:
                logger.warning("prefill leg failed request_id=%s node=%s: %s", job.request_id, node.name, exc)
                node = self._placer.place_prefill(avoided)
                continue
            if prefilled.lease_id is not None:
                leases.hold(node, prefilled.lease_id)
            return prefilled
        return None

    async def _decode(
        self,
        job: Job,
        placement: Placement,
        handoff: Handoff,
        client: ClientStream,
        leases: LeaseGuard,
        queue_s: float,
        avoided: Avoided,
    ) -> None:
        """The decode leg, on the node that was placed while it is usable, or on another."""
        failure = self._placer.no_decode_node()
        node: Node | None = placement.decode
        if node not in self._pool.usable(NodeRole.DECODE):
            node = self._placer.place_decode(avoided)
        num_tries = 0
        while node is not None and num_tries < MAX_TRIES:
            num_tries += 1
            sources = placement.sources if handoff.params is None and placement.is_local and node.info.pull else ()
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
            avoided.decode.append(node)
            node = self._placer.place_decode(avoided)
        raise failure

    def _headers(self, job: Job) -> dict[str, str]:
        return {**job.headers, **self._node_headers}

    def _decode_headers(self, job: Job, queue_s: float, prefill_node: str | None) -> dict[str, str]:
        elapsed_s = time.monotonic() - job.arrival_s
        headers = self._headers(job) | {"x-tandem-proxy-seconds": f"{queue_s:.6f},{elapsed_s:.6f}"}
        return headers if prefill_node is None else headers | {"x-tandem-prefill-node": prefill_node}


def _timeout(config: ProxyConfig, read_s: float) -> httpx.Timeout:
    return httpx.Timeout(read_s, connect=config.connect_timeout_seconds, pool=config.connect_timeout_seconds)
