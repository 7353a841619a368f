"""One running node: owns the engine thread, the transfer layer and the connections to peers, from start to close.

Life: ``start`` (transport up, engine thread running) -> serving -> ``close`` in reverse order: engine first, so that
nothing starts a read, then puller, then backend, which ends every read that is still in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.engine.rates import LinearCost
from common.errors import NodeUnavailableError, QueueFullError, RequestAbortedError
from common.kv_cache.observe.stats import CacheStats
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.metrics.metrics import Metrics, Samples
from common.node.engine_thread import EngineThread
from common.node.lend.digests import VERIFY_OFF, find_mismatch
from common.node.lend.rendezvous import RendezvousTable
from common.node.peers.peers import PeerDirectory
from common.node.pull.engine_bridge import PullSource
from common.node.pull.manifest_stream import Offer
from common.node.pull.pull_task import FinishedPull, RemotePrefix
from common.node.pull.quarantine import QuarantineKeeper
from common.node.pull.remote_leases import RemoteLeases
from common.node.pull.sources import PrefixSources
from common.node.runtime import NodeModel, create_backend, create_core, new_engine_id, read_cluster_key
from common.node.serving.metrics import cache_samples, failure_label, record_pull
from common.server.drain import Drain
from common.server.versions import installed_versions
from common.telemetry.create import create_tracer
from common.telemetry.tracing import Tracer
from common.transfer.backend import TransferBackend
from common.transfer.jobs import PullReason
from common.transfer.puller import Puller

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 2.0
FORGETTABLE = ("failed", "timed_out", "peer_lost")
"""Failures after which a peer is shaken hands with again before anything else is read from it."""


class Node:
    """Made on the event loop. ``role`` is ``prefill`` or ``decode``; both can do everything, the apps differ."""

    def __init__(self, config: NodeConfig, model: NodeModel, role: str, metrics: Metrics) -> None:
        self.config = config
        self.model = model
        self.role = role
        self.metrics = metrics
        self.name = config.node_name or role
        self.engine_id = new_engine_id(config)
        self.advertised_host = config.advertise_host or config.host
        self.served_model_name = config.served_model_name or config.model
        self.cluster_key = read_cluster_key(config)
        self.verify = config.kv_transfer_verify
        self.num_in_intake = 0
        self._intake_limits: set[asyncio.Timeout] = set()
        self._cut_off_by: NodeUnavailableError | None = None
        self.drain = Drain(
            self.name, config.drain_timeout_seconds, count_held=self._count_leases, cut_off=self._interrupt_all
        )
        self.core: EngineCore = create_core(config, model)
        self.tracer = Tracer()
        self.prefix_sources = PrefixSources(self)
        self.pull_times = LinearCost()
        self.backend: TransferBackend
        self.source: PullSource
        self.engine: EngineThread
        self.peers: PeerDirectory
        self.remote_leases: RemoteLeases
        self.rendezvous: RendezvousTable
        self._puller: Puller
        self._quarantine_keeper: QuarantineKeeper

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.tracer = create_tracer(
            self.config.otlp_traces_endpoint,
            role=self.role,
            name=self.name,
            version=installed_versions()["tandem"] or "",
        )
        self.backend = await asyncio.to_thread(create_backend, self.config, self.model, self.engine_id)
        self._puller = Puller(self.backend)
        self.peers = PeerDirectory(self.backend, self.config.peers, self.cluster_key)
        self.source = PullSource(
            self._puller,
            self.peers,
            self,
            self.config.kv_transfer_timeout_seconds,
            self._find_mismatch if self.verify != VERIFY_OFF else None,
        )
        self.core.pull_with(self.source)
        self.engine = EngineThread(self.core, self._loop)
        self.rendezvous = RendezvousTable(self._loop, is_in_use=self._is_in_use, call_off=self._call_off)
        self.remote_leases = RemoteLeases(self.peers)
        self.remote_leases.start()
        self._quarantine_keeper = QuarantineKeeper(self._puller, self._read_stats, self._on_recreated)
        self._quarantine_keeper.start()
        self.engine.start()
        self.cache_stats = self.model.manager.stats()
        self.metrics.set_source(self._samples)
        logger.info("node ready role=%s name=%s engine_id=%s", self.role, self.name, self.engine_id)

    async def close(self) -> None:
        await self._quarantine_keeper.close()
        await asyncio.to_thread(self.engine.close)
        await self.source.close()
        await asyncio.to_thread(self._puller.close)
        await self.remote_leases.close()
        await self.peers.close()
        await asyncio.to_thread(self.backend.close)
        await asyncio.to_thread(self.tracer.close)

    def not_ready_reason(self) -> str | None:
        if not self.engine.is_alive:
            return "the engine stopped"
        return None if self._puller.is_alive else "the transfer layer stopped"

    # --- requests

    def check_admission(self) -> None:
        """Raises DrainingError, or QueueFullError when too many requests wait for their turn already."""
        self.drain.check_admission()
        waiting = self.core.num_waiting
        if waiting > self.config.max_queue:
            raise QueueFullError(
                f"{waiting} requests are waiting on {self.name}, --max-queue is {self.config.max_queue}"
            )

    @property
    def num_waiting(self) -> int:
        """Requests that wait: for the engine, or for the first part of a prompt that a peer computes."""
        return self.core.num_waiting + self.num_in_intake

    @contextlib.asynccontextmanager
    async def in_intake(self) -> AsyncIterator[None]:
        """Round the wait for the first part of a prompt that a peer computes. Raises what the node's drain cuts waits
        off with."""
        self.num_in_intake += 1
        limit = asyncio.timeout(None)
        self._intake_limits.add(limit)
        try:
            async with limit:
                self._end_intake(limit)
                yield
        except TimeoutError:
            if self._cut_off_by is not None and limit.expired():
                raise self._cut_off_by from None
            raise
        finally:
            self._intake_limits.discard(limit)
            self.num_in_intake -= 1

    def _end_intake(self, limit: asyncio.Timeout) -> None:
        if self._cut_off_by is not None and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())

    # --- what draining needs

    async def _count_leases(self) -> int:
        """Prompts that are held for readers; none when the engine has ended."""
        try:
            return (await self._read_stats()).leases_active
        except TimeoutError:  # a long step: they are there as long as nobody says otherwise
            return 1
        except NodeUnavailableError:
            return 0

    def _interrupt_all(self, error: NodeUnavailableError) -> None:
        self._cut_off_by = error
        for limit in self._intake_limits:
            self._end_intake(limit)
        self.engine.interrupt_all(error)

    # --- common.node.pull.engine_bridge.PullListener

    def on_outcome(self, seq_id: str, remote: RemotePrefix, result: FinishedPull) -> None:
        self.engine.post(lambda: self.core.finish_pull(seq_id, result))
        remote.offers.close()
        record_pull(self.metrics, result, self.model.storage.layout.slot_bytes)
        if result.ok and result.num_bytes:
            self.pull_times.observe(result.num_bytes, result.seconds)
        is_failure = not result.ok and result.reason != PullReason.CANCELLED
        if is_failure and failure_label(result.reason) in FORGETTABLE:
            self.peers.forget(remote.url)

    def on_terminal(self, seq_id: str) -> None:
        self.engine.post(lambda: self.core.end_quarantine(seq_id))

    def _find_mismatch(self, plan: PullPlan, offer: Offer) -> str | None:
        return find_mismatch(self.model.storage, offer.digests, plan.pairs, plan.num_tokens, plan.slot_id)

    # --- what the quarantine's keeper needs

    async def _read_stats(self) -> CacheStats:
        return await self.engine.call(self.model.manager.stats, timeout_s=STATS_TIMEOUT_S)

    def _on_recreated(self) -> None:
        self.metrics.inc("agent_recreations_total")
        self.peers.forget_all()

    # --- what a rendezvous needs of the cache and the engine

    def _is_in_use(self, request_id: str) -> bool:
        is_leased = self.model.manager.leases.renew(request_id, 0.0)  # renewing never shortens: a question
        return is_leased or self.engine.is_in_use(request_id)

    def _call_off(self, request_id: str) -> None:
        self.engine.interrupt(request_id, RequestAbortedError("its reader does not want the prompt any more"))

    def _samples(self) -> Samples:
        core = self.core
        return cache_samples(
            self.cache_stats,
            running=core.num_running,
            waiting=self.num_waiting,
            waiting_for_peer=self.num_in_intake,
            preemptions=core.num_preemptions,
        )

    async def refresh_stats(self) -> None:
        """Brings ``cache_stats`` up to date between two steps; keeps the last ones when a step takes too long."""
        with contextlib.suppress(TimeoutError):
            self.cache_stats = await self._read_stats()
