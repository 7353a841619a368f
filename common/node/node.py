"""One running node: owns the engine thread, the transfer layer and the connections to peers, from start to close.

Life: ``start`` (transport up, engine thread running) -> serving -> ``close`` in reverse order: engine first, so that
nothing starts a read, then puller, then backend, which ends every read that is still in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from common.config import NodeConfig
from common.engine.core import EngineCore
from common.errors import QueueFullError
from common.metrics.metrics import Metrics, Samples
from common.node.engine_thread import EngineThread
from common.node.node_metrics import cache_samples, record_pull
from common.node.peers import PeerDirectory
from common.node.pulling import FinishedPull, PullSource, RemotePrefix
from common.node.remote_leases import RemoteLeases
from common.node.runtime import NodeModel, create_backend, create_core, new_engine_id, read_cluster_key
from common.transfer.backend import TransferBackend
from common.transfer.puller import Puller, PullOutcome, PullStatus

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 2.0


class Node:
    """Made on the event loop. ``role`` is ``prefill`` or ``decode``; both can do everything, the apps differ."""

    def __init__(self, config: NodeConfig, model: NodeModel, role: str, metrics: Metrics) -> None:
        self.config = config
        self.model = model
        self.role = role
        self.metrics = metrics
        self.name = config.node_name or role
        self.engine_id = new_engine_id(config)
        self.served_model_name = config.served_model_name or config.model
        self.cluster_key = read_cluster_key(config)
        self.core: EngineCore = create_core(config, model)
        self.backend: TransferBackend
        self.source: PullSource
        self.engine: EngineThread
        self.peers: PeerDirectory
        self.remote_leases: RemoteLeases
        self._puller: Puller

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.backend = await asyncio.to_thread(create_backend, self.config, self.model, self.engine_id)
        self._puller = Puller(self.backend)
        self.source = PullSource(self._puller, self, self.config.kv_transfer_timeout_seconds)
        self.core.source = self.source
        self.engine = EngineThread(self.core, self._loop)
        self.peers = PeerDirectory(self.backend, self.config.peers, self.cluster_key)
        self.remote_leases = RemoteLeases(self.peers)
        self.remote_leases.start()
        self.engine.start()
        self.cache_stats = self.model.manager.stats()
        self.metrics.set_source(self._samples)
        logger.info("node ready role=%s name=%s engine_id=%s", self.role, self.name, self.engine_id)

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)
        await asyncio.to_thread(self._puller.close)
        await self.remote_leases.close()
        await self.peers.close()
        await asyncio.to_thread(self.backend.close)

    def not_ready_reason(self) -> str | None:
        return None if self.engine.is_alive else "the engine stopped"

    # --- requests

    def check_admission(self) -> None:
        """Raises QueueFullError when too many requests wait for their turn already."""
        waiting = self.core.num_waiting
        if waiting > self.config.max_queue:
            raise QueueFullError(
                f"{waiting} requests are waiting on {self.name}, --max-queue is {self.config.max_queue}"
            )

    # --- common.node.pulling.PullListener, on the poll thread (or, for an empty pull, the engine thread)

    def on_outcome(self, seq_id: str, remote: RemotePrefix, result: FinishedPull, outcome: PullOutcome | None) -> None:
        self.engine.post(lambda: self.core.finish_pull(seq_id, result))
        self._loop.call_soon_threadsafe(self._after_pull, remote, result, outcome)

    def on_terminal(self, seq_id: str) -> None:
        self.engine.post(lambda: self.core.end_quarantine(seq_id))

    def _after_pull(self, remote: RemotePrefix, result: FinishedPull, outcome: PullOutcome | None) -> None:
        self.remote_leases.release(remote.lease_id)
        if outcome is None:
            return
        record_pull(self.metrics, result, outcome, self.model.storage.layout.slot_bytes)
        if outcome.status in (PullStatus.FAILED, PullStatus.TIMED_OUT):
            self.peers.forget(remote.url)

    def _samples(self) -> Samples:
        core = self.core
        return cache_samples(
            self.cache_stats, running=core.num_running, waiting=core.num_waiting, preemptions=core.num_preemptions
        )

    async def refresh_stats(self) -> None:
        """Brings ``cache_stats`` up to date between two steps; keeps the last ones when a step takes too long."""
        with contextlib.suppress(TimeoutError):
            self.cache_stats = await self.engine.call(self.model.manager.stats, timeout_s=STATS_TIMEOUT_S)
