"""One request from the client's body to the last byte of the answer: who gets its legs, in which order, and who else
when they fail.

Life of a request: 1 place it (``proxy.placement.placer``): a decode node, and a prefill node per prompt or none, 2 both
legs at once, if all of them can follow a prompt while it is computed (``proxy.legs.concurrent``); else one after the
other: the prefill legs together, then the decode leg with what they returned, or without when no prefill node could do
it (the decode node then computes the prompt itself), 3 bytes pass through to the client. Until the first byte a pair
whose decode node broke, or could not get the prompt, is replaced by another one, as far as the retry budget goes; after
it the stream goes on elsewhere if ``--migration-limit`` allows (``proxy.legs.stream_progress``), or because a prefill
node generates it and is wanted for other work (``proxy.placement.guests``); else there is no way back. Leaving early,
by whatever exception, closes the legs' connections (nodes abort on that) and releases leases that no decode node took
over.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from common.config.proxy import ProxyConfig
from common.errors import DeadlineExceededError, NodeUnavailableError, RequestDroppedError
from common.wire.headers import ITL_TARGET_HEADER, PREFILL_NODE_HEADER, PROXY_SECONDS_HEADER, TTFT_TARGET_HEADER
from common.wire.pull_sources import LEASE_ID_KEY, MAX_SOURCES
from common.wire.resume import RESUME_KEY
from common.wire.routes import CHAT_ROUTE
from proxy.admission.queue import MAX_RETRY_AFTER_S
from proxy.legs.bodies import BodyEncoder, decode_body
from proxy.legs.client_stream import ClientStream
from proxy.legs.concurrent import ConcurrentLegs
from proxy.legs.decode_leg import DecodeLegs
from proxy.legs.errors import (
    LegFailedError,
    NodeDrainingError,
    PrefillBusyError,
    RelayedAnswer,
    StreamLeavesError,
    TransferFailedError,
)
from proxy.legs.job import Job
from proxy.legs.leases import LeaseGuard, LeaseReleaser
from proxy.legs.retry_budget import RetryBudget
from proxy.legs.sequential import LOCAL, MAX_PROMPTS_TOGETHER, MAX_TRIES, Handoff, SequentialPrefill
from proxy.legs.stream_progress import ResumableProgress, StreamProgress
from proxy.metrics.proxy_metrics import ProxyMetrics
from proxy.nodes.node import Node, NodeRole
from proxy.nodes.pool import NodePool
from proxy.placement.estimate import Targets
from proxy.placement.placer import Placer
from proxy.placement.request import Avoided, Placement, PlacementHeader

logger = logging.getLogger(__name__)

DROPPED_LATE = "rejected-late"
"""``RequestDroppedError.dropped`` of a request whose first token would come after its target."""


@dataclass(slots=True)
class Run:
    """One request in progress: what was ``given``, and the ``job`` that is left of it. ``waits_s``: until it was
    admitted, and then until it was tokenised. ``resumable``: None when its stream is not to go on elsewhere.
    ``handoff``: what the decode leg is given, until its answer begins. ``left``: who generated it, and handed it
    over; ``is_owed``: nobody has gone on with it since, and it has not gone back: the proxy chose to move it;
    ``source``: under which lease ``left`` has what it computed of it, which is one of ``leases``."""

    given: Job
    job: Job
    client: ClientStream
    waits_s: tuple[float, float]
    resumable: ResumableProgress | None
    leases: LeaseGuard
    avoided: Avoided = field(default_factory=Avoided)
    handoff: Handoff = LOCAL
    left: Node | None = None
    is_owed: bool = False
    source: Mapping[str, Any] | None = None


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
        self._budget = RetryBudget(config.retry_budget)
        self._migration_limit = config.migration_limit
        self._sheds_late = config.shed_late
        self._names_sources = config.prefix_sources
        self._decode_legs = DecodeLegs(
            metrics,
            first_timeout_s=max(config.prefill_timeout_seconds, config.stream_idle_timeout_seconds),
            idle_s=config.stream_idle_timeout_seconds,
            whole_timeout_s=config.whole_answer_timeout_seconds,
        )
        self._concurrent_legs = ConcurrentLegs(self._decode_legs, releaser, metrics, config.prefill_timeout_seconds)
        self._sequential_prefill = SequentialPrefill(
            placer,
            releaser,
            metrics,
            config.prefill_timeout_seconds,
            headers_for=self._headers,
            may_retry=self._may_retry,
        )

    async def run(self, job: Job, client: ClientStream) -> None:
        """Answer ``job`` on ``client``. Raises RelayedAnswer and TandemError for what the caller has to say instead."""
        self._budget.add_request()
        progress = ResumableProgress() if self._migration_limit > 0 and _may_go_on(job) else None
        admitted_s = max(job.admitted_s, job.arrival_s)
        waits_s = (admitted_s - job.arrival_s, time.monotonic() - admitted_s)
        with self._releaser.guard() as leases:
            await self._run(Run(job, job, client, waits_s, progress, leases))

    async def _run(self, run: Run) -> None:
        job, client = run.given, run.client
        may_migrate, num_migrations = run.resumable is not None, 0
        while True:
            try:
                await self._run_legs(run)
                return
            except StreamLeavesError as exc:
                run.left, run.is_owed = exc.node, True
                if run.source is None:
                    self._forget_source(run)  # a node that has not said in time that it leases may do so yet
                if not await self._move(run):
                    raise LegFailedError(f"{exc}, and nobody is left to go on with it") from exc
                logger.info("stream is handed over request_id=%s: %s", job.request_id, exc)
                self._metrics.inc("proxy_migrations_total", outcome="handed_over")
            except (LegFailedError, DeadlineExceededError) as exc:
                if not client.is_started:
                    self._give_up(exc)
                is_owed = run.is_owed
                if not is_owed:  # if its node was asked to hand it over, it broke meanwhile
                    self._forget_source(run)
                # What is the client's own fault any other node would say too.
                if (not may_migrate and not is_owed) or exc.status < 500:
                    raise
                if (num_migrations == self._migration_limit and not is_owed) or not await self._move(run):
                    self._metrics.inc("proxy_migrations_total", outcome="gave_up")
                    raise
                num_migrations += not is_owed
                logger.warning("stream goes on elsewhere request_id=%s: %s", job.request_id, exc)
                self._metrics.inc("proxy_migrations_total", outcome="resumed")

    @staticmethod
    def _give_up(error: LegFailedError | DeadlineExceededError) -> NoReturn:
        """Raises the last node's own words, if they are an answer for a client; else ``error`` again."""
        answer = error.answer if isinstance(error, LegFailedError) else None
        if answer is None or not answer.headers.get("content-type", "").startswith("application/json"):
            raise error
        raise answer

    async def _run_legs(self, run: Run) -> None:
        job = run.job
        try:
            placement = self._placer.place(job, run.avoided)
        except NodeUnavailableError:
            if run.left is None or not self._go_back(run):
                raise
            placement = self._placer.place(job, run.avoided)
        if placement.crosses:
            work = "prompt" if placement.decode.role is NodeRole.DECODE else "answer"
            self._metrics.inc("proxy_elastic_placements_total", work=work)
        run.client.on_start = lambda status: self._started(run, status)
        try:
            if placement.late_s and self._sheds_late and not run.client.is_started:
                self._placer.turned_away(job)
                raise _too_late(placement, job.targets)
            if self._can_be_concurrent(job, placement):
                await self._run_concurrently(run, placement)
            else:
                await self._run_sequentially(run, placement)
        except RelayedAnswer as exc:
            if not run.client.is_started:
                raise
            # A stream that goes on has no status any more.
            raise LegFailedError(f"a node refuses to go on with the stream: {exc}", reason="status") from exc
        finally:
            self._placer.finished(job)

    def _started(self, run: Run, status: int) -> None:
        self._placer.started(run.job, is_answer=status == 200)
        for job in (run.job, run.given):
            job.begin_answer(may_go_on=job is run.given and run.resumable is not None)
        run.handoff, run.is_owed, run.source = LOCAL, False, None
        run.leases.hand_over()

    def _may_retry(self, error: LegFailedError) -> bool:
        """Whether the budget has a leg left; counts it."""
        if not self._budget.try_take():
            self._metrics.inc("proxy_retries_refused_total")
            return False
        self._metrics.inc("proxy_retries_total", reason=error.reason)
        return True

    # --- after the first byte

    def _progress_on(self, run: Run, node: Node) -> StreamProgress:
        """Of a leg to ``node`` that begins: one that may go on elsewhere, if it is wanted and the node reports what
        that needs. A prefill node hands its stream over, once."""
        is_guest = node.role is NodeRole.PREFILL and run.left is None
        if run.resumable is None and is_guest and _may_go_on(run.given):
            run.resumable = ResumableProgress()
        if run.resumable is None or not node.info.resume:
            return StreamProgress()
        run.resumable.begin(node)
        if is_guest:
            run.resumable.leaves = functools.partial(
                self._placer.leaves, run.job, lambda other: _may_follow(run, node, other)
            )
            run.resumable.ask = functools.partial(self._hand_over, run, node)
        return run.resumable

    async def _hand_over(self, run: Run, node: Node, stream_id: str) -> bool:
        """Whether ``node`` ends the stream and keeps what it has of it for the next one."""
        source = node.pull_source() if self._names_sources else None
        if source is None:
            return False
        lease_id = await self._releaser.hand_over(node, stream_id, run.leases)
        if lease_id is not None:
            run.source = {**source, LEASE_ID_KEY: lease_id}
        return lease_id is not None

    async def _move(self, run: Run) -> bool:
        """Make ``run`` one of what is left of its stream. False: nobody can go on with it, or nothing is known."""
        progress, given = run.resumable, run.given
        assert progress is not None
        usable = self._placer.generators()
        run.avoided.decode += [node for node in usable if not _may_follow(run, progress.node, node)]
        resume = progress.resume
        if resume is None or (all(node in run.avoided.decode for node in usable) and not self._go_back(run)):
            return False
        body = {**given.body, RESUME_KEY: resume.to_json()}
        known = resume.output_token_ids
        prompt_keys = [
            None if source is None else await asyncio.to_thread(source.followed_by, known)
            for source in given.key_sources
        ]
        header = given.placement_header
        if run.is_owed:
            header = PlacementHeader.LOCAL  # from the state that it left behind, and not behind the prompts there
        run.job = dataclasses.replace(
            given, body=body, prompt_keys=prompt_keys, encoder=BodyEncoder(), placement_header=header
        )
        return True

    def _go_back(self, run: Run) -> bool:
        """Whether nobody but who handed the stream over can go on with it, and does: it is not avoided any more."""
        if run.left is None or run.left not in self._placer.generators() or run.left not in run.avoided.decode:
            return False
        run.avoided.decode = [node for node in run.avoided.decode if node is not run.left]
        run.is_owed = False
        self._forget_source(run)
        return True

    def _forget_source(self, run: Run) -> None:
        """Nobody will read what the stream has left behind."""
        run.source = None
        self._releaser.release(run.leases)

    # --- both legs at once

    @staticmethod
    def _can_be_concurrent(job: Job, placement: Placement) -> bool:
        """Whether both legs can be sent at once."""
        if placement.is_local or len(job.prompts) > MAX_PROMPTS_TOGETHER:
            return False
        return all(node.info.pull for node in (placement.decode, *placement.prefill))

    async def _run_concurrently(self, run: Run, placement: Placement) -> None:
        """Up to MAX_TRIES pairs; when none is left to try, what the last one said. Without a prefill node the decode
        node computes the prompt."""
        job, client = run.job, run.client
        self._metrics.inc("proxy_decisions_total", policy=self._placer.name, placement="remote")
        was_started = client.is_started
        num_tries = 0
        while self._can_be_concurrent(job, placement):
            num_tries += 1
            node = placement.decode
            decode_headers = self._decode_headers(run, node, placement.prefill_names)
            progress = self._progress_on(run, node)
            try:
                await self._concurrent_legs.run(
                    job, placement, self._headers(job, node), decode_headers, client, progress
                )
                return
            except NodeDrainingError as exc:
                # Not a try: nothing was done. Each node says so once, so this comes to an end.
                num_tries -= 1
                run.avoided.add(exc.node)
                placement = self._placer.place(job, run.avoided, began=placement.prefill)
            except LegFailedError as exc:
                if client.is_started or was_started or num_tries == MAX_TRIES:
                    raise
                if not self._avoid(placement, exc, run.avoided) or not self._may_retry(exc):
                    raise
                logger.warning("another pair is tried request_id=%s: %s", job.request_id, exc)
                # The prefill nodes that have begun go on where they are.
                began = () if run.avoided.prefill else placement.prefill
                placement = self._placer.place(job, run.avoided, began=began)
        run.handoff = LOCAL
        await self._decode(run, placement, LeaseGuard())

    def _avoid(self, placement: Placement, error: LegFailedError, avoided: Avoided) -> bool:
        """Remembers who not to try again. False: nobody is left to try instead."""
        other_decode = [node for node in self._placer.generators() if node is not placement.decode]
        if isinstance(error, TransferFailedError | PrefillBusyError):
            if any(node not in placement.prefill for node in self._pool.usable(NodeRole.PREFILL)):
                avoided.prefill += placement.prefill
                return True
            if isinstance(error, PrefillBusyError):
                return False
        avoided.decode.append(placement.decode)
        return bool(other_decode)

    # --- one leg after the other

    async def _run_sequentially(self, run: Run, placement: Placement) -> None:
        with self._releaser.guard() as leases:
            run.handoff = await self._sequential_prefill.run(run.job, placement, leases)
            placed = "local" if run.handoff.params is None else "remote"
            self._metrics.inc("proxy_decisions_total", policy=self._placer.name, placement=placed)
            await self._decode(run, placement, leases)

    async def _decode(self, run: Run, placement: Placement, leases: LeaseGuard) -> None:
        """The decode leg, on the node that was placed while it is usable, or on another."""
        job, client = run.job, run.client
        failure: NodeUnavailableError | None = None
        was_started = client.is_started
        placed = placement.decode
        may_go = placed.is_usable or placed in self._placer.generators()
        node = placed if may_go else self._placer.place_decode(run.avoided)
        num_tries = 0
        while node is not None:
            num_tries += 1
            if node.role is NodeRole.PREFILL and run.handoff.params is not None:
                # It generates itself: what it was to hand over is in its cache, and of another's it computes.
                run.handoff = LOCAL
                self._releaser.release(leases)
            sources = _sources(run, placement, node)
            progress = self._progress_on(run, node)
            content = functools.partial(_decode_content, run, node, sources, reports_state=progress.may_go_on)
            headers = self._decode_headers(run, node, run.handoff.prefill_node)
            try:
                await self._decode_legs.relay(node, job, content, headers, client, leases, progress)
                return
            except NodeDrainingError as exc:
                failure = exc
                num_tries -= 1
                run.avoided.add(exc.node)
                node = self._placer.place_decode(run.avoided)
                continue
            except LegFailedError as exc:
                if client.is_started or was_started:
                    raise
                logger.warning("decode leg failed request_id=%s node=%s: %s", job.request_id, node.name, exc)
                failure = exc
                if isinstance(exc, TransferFailedError):
                    raise
                if leases.is_handed_over or (node.is_vllm and exc.reason != "refused"):
                    run.handoff = LOCAL  # who had begun with the handoff may have used it up
                    self._releaser.release(leases)
            run.avoided.decode.append(node)
            node = self._placer.place_decode(run.avoided) if num_tries < MAX_TRIES else None
            if node is not None and not self._may_retry(failure):
                break
        raise failure or self._placer.no_decode_node()

    def _headers(self, job: Job, node: Node) -> dict[str, str]:
        """Our own keys are not for servers of another make. Nodes pace prompts by the targets."""
        if node.is_vllm:
            return dict(job.headers)
        headers = {**job.headers, **self._node_headers}
        targets = job.targets_left(time.monotonic())
        if targets.ttft_s is not None:
            headers[TTFT_TARGET_HEADER] = _milliseconds(round(targets.ttft_s, 3))
        if targets.itl_s is not None:
            headers[ITL_TARGET_HEADER] = _milliseconds(targets.itl_s)
        return headers

    def _decode_headers(self, run: Run, node: Node, prefill_node: str | None) -> dict[str, str]:
        elapsed_s = time.monotonic() - run.job.arrival_s
        headers = self._headers(run.job, node)
        if node.is_vllm:
            return headers
        queue_s, tokenize_s = run.waits_s
        headers |= {PROXY_SECONDS_HEADER: f"{queue_s:.6f},{elapsed_s:.6f},{tokenize_s:.6f}"}
        return headers if prefill_node is None else headers | {PREFILL_NODE_HEADER: prefill_node}


def _sources(run: Run, placement: Placement, node: Node) -> Sequence[Mapping[str, Any]]:
    """From whom ``node`` may pull what it lacks of the prompt: who handed the stream over has the most of it."""
    if run.handoff.params is not None or not placement.is_local or not node.info.pull:
        return ()
    if run.source is None or node is run.left:
        return placement.sources
    others = [source for source in placement.sources if source["url"] != run.source["url"]]
    return [run.source, *others][:MAX_SOURCES]


def _too_late(placement: Placement, targets: Targets) -> RequestDroppedError:
    assert targets.ttft_s is not None
    return RequestDroppedError(
        f"the first token would come after {1e3 * (targets.ttft_s + placement.late_s):.0f} ms, "
        f"the target is {1e3 * targets.ttft_s:.0f} ms ({TTFT_TARGET_HEADER} or --ttft-target-ms)",
        dropped=DROPPED_LATE,
        code="target_unreachable",
        retry_after_s=min(max(1, math.ceil(placement.late_s)), MAX_RETRY_AFTER_S),
    )


def _may_go_on(job: Job) -> bool:
    """Whether its stream can at all."""
    return job.is_stream and len(job.prompts) == 1 and job.body.get("n") in (None, 1) and not job.is_local


def _may_follow(run: Run, last: Node | None, node: Node) -> bool:
    """Whether a stream that ``last`` generated can go on at ``node``."""
    if node is last or not node.info.resume or node in run.avoided.decode:
        return False
    return last is None or run.given.route != CHAT_ROUTE or node.info.answers == last.info.answers


def _milliseconds(seconds: float) -> str:
    """For a header, with as many decimals as it needs; at least 1."""
    return f"{max(1.0, 1000 * seconds):.3f}".rstrip("0").rstrip(".")


def _decode_content(run: Run, node: Node, sources: Sequence[Mapping[str, Any]], *, reports_state: bool) -> bytes:
    job = run.job
    return decode_body(
        job.body,
        run.handoff.params,
        encoder=job.encoder,
        sources=sources,
        reports_state=reports_state,
        computes_images=node.role is NodeRole.PREFILL,
    )
