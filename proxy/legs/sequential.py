"""The prefill legs of a request whose legs go one after the other: all prompts together, each on one node or, when that
one fails, on another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.legs.bodies import prefill_body
from proxy.legs.errors import LegFailedError, NodeDrainingError
from proxy.legs.job import Job
from proxy.legs.leases import LeaseGuard, LeaseReleaser
from proxy.legs.protocol import Prefilled, send_prefill_leg
from proxy.metrics.proxy_metrics import ProxyMetrics
from proxy.nodes.node import Node
from proxy.placement.placer import Placer
from proxy.placement.request import Avoided, Placement

logger = logging.getLogger(__name__)

MAX_TRIES = 2
"""Nodes that one leg is sent to before it counts as failed; those that drain are not counted."""
MAX_PROMPTS_TOGETHER = 16
"""Prompts of one request that are prefilled at the same time: a list of 2,000 must not fill a node's queue alone."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """What the decode leg is given: ``params`` None means that it prefills itself."""

    params: object
    prefill_node: str | None


LOCAL = Handoff(None, None)


class SequentialPrefill:
    """Stateless. ``headers_for``: what a node is sent beside the body. ``may_retry``: whether a failed leg may be sent
    again."""

    def __init__(
        self,
        placer: Placer,
        releaser: LeaseReleaser,
        metrics: ProxyMetrics,
        timeout_s: float,
        *,
        headers_for: Callable[[Job, Node], Mapping[str, str]],
        may_retry: Callable[[LegFailedError], bool],
    ) -> None:
        self._placer = placer
        self._releaser = releaser
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._headers_for = headers_for
        self._may_retry = may_retry

    async def run(self, job: Job, placement: Placement, leases: LeaseGuard) -> Handoff:
        """Lets all prompts be computed; ``leases`` holds what that pins. ``LOCAL`` when one of them could not be: then
        nothing is held. Raises RelayedAnswer and DeadlineExceededError."""
        if placement.is_local:
            return LOCAL
        started_s = time.monotonic()
        results = await self._all(job, placement, leases)
        self._metrics.observe_phase("prefill", time.monotonic() - started_s)
        done = [each for each in results if each is not None]
        if len(done) < len(results):
            self._releaser.release(leases)
            return LOCAL
        names = ",".join(dict.fromkeys(each.node.name for each in done))
        params = [each.params for each in done]
        return Handoff(params[0] if len(params) == 1 else params, names)

    async def _all(self, job: Job, placement: Placement, leases: LeaseGuard) -> list[Prefilled | None]:
        """At most MAX_PROMPTS_TOGETHER at a time; the first error ends the others."""
        placed = list(zip(job.prompts, placement.prefill, strict=True))
        if len(placed) == 1:
            return [await self._one(job, *placed[0], leases)]
        together = asyncio.Semaphore(MAX_PROMPTS_TOGETHER)

        async def one(prompt: Any, node: Node) -> Prefilled | None:
            async with together:
                return await self._one(job, prompt, node, leases)

        try:
            async with asyncio.TaskGroup() as group:
                legs = [group.create_task(one(prompt, node)) for prompt, node in placed]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [leg.result() for leg in legs]

    async def _one(self, job: Job, prompt: Any | None, first: Node, leases: LeaseGuard) -> Prefilled | None:
        """One prompt's leg, on ``first`` or another; None when no prefill node could do it."""
        avoided = Avoided()
        node: Node | None = first
        num_tries = 0
        while node is not None:
            avoided.prefill.append(node)
            content, headers = prefill_body(node, job.body, prompt, encoder=job.encoder), self._headers_for(job, node)
            try:
                prefilled = await send_prefill_leg(node, job.route, content, headers, self._timeout_s)
            except NodeDrainingError:
                node = self._placer.place_prefill(avoided)  # not a try: nothing was done
                continue
            except LegFailedError as exc:
                num_tries += 1
                logger.warning("prefill leg failed request_id=%s node=%s: %s", job.request_id, node.name, exc)
                node = self._placer.place_prefill(avoided) if num_tries < MAX_TRIES else None
                if node is not None and not self._may_retry(exc):
                    return None
                continue
            if prefilled.lease_id is not None:
                leases.hold(node, prefilled.lease_id)
            return prefilled if prefilled.params else None
        return None
