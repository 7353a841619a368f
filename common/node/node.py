"""One running node: owns the engine thread, the transfer layer and the connections to peers, from start to close.

Life: 1 made, with the transport up and the node's memory registered, 2 ``start`` on the event loop (engine thread
running), 3 serving, 4 ``close`` in reverse order: engine first, so that nothing starts a read, then puller, then
backend, which ends every read that is still in flight.

A node whose engine or puller has died, or whose engine hangs, leaves 3 by itself: clients and peers get typed errors,
and the process ends with a status that says so, for whoever started it to start another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from common.config.dns import own_host
from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.errors import DeadlineExceededError, NodeUnavailableError
from common.grammar.checker import GrammarChecker
from common.grammar.limits import GrammarLimits
from common.kv_cache.observe.stats import CacheStats
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.metrics.metrics import Metrics, Samples
from common.metrics.table import Role
from common.node.device import thread_entry
from common.node.digests import VERIFY_OFF, find_mismatch
from common.node.engine_thread import EngineThread
from common.node.lend.manifest_builder import ManifestBuilder
from common.node.lend.rendezvous import RendezvousTable, not_wanted
from common.node.metrics import ahead_samples, cache_samples, draft_samples
from common.node.peers.directory import PeerDirectory
from common.node.pull.engine_bridge import EngineBridge
from common.node.pull.manifest_stream import ReadablePrefix
from common.node.pull.peer_reader import PeerReader
from common.node.pull.prefix_reader import FinishedPull, PrefixReader, PulledPrefix
from common.node.pull.pull_task import RemotePrefix
from common.node.pull.quarantine import QuarantineKeeper
from common.node.pull.rank_agents import RankAgents
from common.node.pull.remote_leases import RemoteLeases
from common.node.runtime import NodeModel, create_backend, create_core, new_engine_id
from common.node.serving.admission import Admission
from common.node.tiers.create import create_tiers
from common.node.tiers.tier_reader import TierPrefix
from common.server.drain import Drain
from common.server.loop_lag import LoopLag
from common.server.versions import build_labels, installed_versions
from common.telemetry.create import create_tracer

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 2.0
"""How long the cache's numbers may take; they come between two steps, and a longer step leaves the last ones."""

WATCH_S = 0.1
"""Seconds between two looks at whether the engine and the puller live."""


class Node:
    """``start`` and ``close`` it on the event loop. Nodes of both roles can do everything; their apps differ.

    Raises:
        TransferError: the transport cannot be opened, or refuses the node's memory.
    """

    def __init__(self, config: NodeConfig, model: NodeModel, role: Role, cluster_key: str | None) -> None:
        self.config = config
        self.model = model
        self.role = role
        self.name = config.node_name or role.value
        self.engine_id = new_engine_id(config)
        self.advertised_host = config.advertise_host or own_host(config.host)
        self.model_name = config.served_model_name or config.model
        self.metrics = Metrics(role, versions=build_labels())
        self.tracer = create_tracer(
            config.otlp_traces_endpoint,
            role=role.value,
            name=self.name,
            version=installed_versions()["tandem"] or "",
        )
        self.core: EngineCore = create_core(config, model)
        self.core.step_model.on_error = lambda kind, share: self.metrics.observe(
            "step_time_error_ratio", share, kind=kind
        )
        self.engine = EngineThread(self.core, thread_entry(model.loaded.device))
        limits = GrammarLimits.from_json(config.structured_outputs_config)
        self.grammars = GrammarChecker(limits, self.metrics.grammar_checked)
        self.core.grammars.report_to(
            compiled=lambda seconds: self.metrics.observe("grammar_compile_seconds", seconds),
            filled=lambda seconds: self.metrics.observe("grammar_mask_seconds", seconds),
        )
        self.drain = Drain(self.name, config.drain_timeout_seconds, count_held=self._count_held, cut_off=self._cut_off)
        self.admission = Admission(self.name, config.max_queue, self.core, self.drain)
        num_ranks = len(model.storages)
        backends = [create_backend(config, model, self.engine_id, rank) for rank in range(num_ranks)]
        self.agents = RankAgents(backends, model.loaded.undivided, model.cache_config.block_size)
        # What is in a unit differs with the number of ranks: digests of it prove nothing to others.
        verify = config.kv_transfer_verify if model.ranks is None else VERIFY_OFF
        self.manifests = ManifestBuilder(
            engine_id=self.engine_id,
            epoch=model.manager.generations.epoch,
            host=self.advertised_host,
            port=config.port,
            fingerprint=self.agents.fingerprint,
            lease_seconds=config.kv_lease_seconds,
            verify=verify,
            storage=model.storage,
        )
        self.rendezvous = RendezvousTable(is_in_use=self._is_in_use, call_off=self._call_off)
        self.peers = PeerDirectory(self.agents, config.peers, cluster_key)
        self.remote_leases = RemoteLeases(self.peers)
        self.peer_reader = PeerReader(
            self.agents.pulls,
            self.peers,
            config.kv_transfer_timeout_seconds,
            self._find_mismatch if verify != VERIFY_OFF else None,
            metrics=self.metrics,
            slot_bytes=num_ranks * model.storage.layout.slot_bytes,
        )
        self.tiers = create_tiers(config, model, cluster_key, core=self.core, engine=self.engine, metrics=self.metrics)
        readers: dict[type, PrefixReader] = {RemotePrefix: self.peer_reader}
        if self.tiers is not None:
            readers[TierPrefix] = self.tiers.reader
        self.bridge = EngineBridge(self, readers)
        self.core.pull_with(self.bridge, self.tiers)
        self._quarantine_keeper = QuarantineKeeper(self.agents, self._read_stats, self._on_recreated)
        self._watching: asyncio.Task[None] | None = None
        self._lag = LoopLag(self.metrics.observe_lag)
        self._cache_stats = model.manager.stats()
        self.metrics.set_source(self._samples)

    def start(self) -> None:
        self._lag.start()
        self.peers.names.start()
        self.bridge.open()
        self.remote_leases.start()
        self._quarantine_keeper.start()
        self.engine.start()
        if self.tiers is not None:
            self.tiers.start()
        self._watching = asyncio.create_task(self._watch(), name="watch")
        logger.info("node ready role=%s name=%s engine_id=%s", self.role.value, self.name, self.engine_id)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        self._lag.close()
        await self._quarantine_keeper.close()
        await asyncio.to_thread(self.engine.close)
        if self.model.ranks is not None:
            await asyncio.to_thread(self.model.ranks.close)
        await asyncio.to_thread(self.grammars.close)
        await self.bridge.close()
        if self.tiers is not None:
            await self.tiers.close()
        await asyncio.to_thread(self.agents.close)
        await self.remote_leases.close()
        await self.peers.close()
        await asyncio.to_thread(self.tracer.close)

    @property
    def death(self) -> str | None:
        """Why this node will never serve again; None: it is well."""
        if self.engine.death is not None:
            return self.engine.death
        if self.model.ranks is not None and self.model.ranks.death is not None:
            return self.model.ranks.death
        return None if self.agents.is_alive else "the transfer layer stopped"

    async def _watch(self) -> None:
        """Ends the process when what cannot be replaced in it has died. An engine hangs when it has not taken a turn
        for as long as this task has: a process that was frozen, or whose event loop was busy, has not seen it."""
        seen_turns, still_s = 0, 0.0
        while self.death is None:
            await asyncio.sleep(WATCH_S)
            still_s = still_s + WATCH_S if self.engine.num_turns == seen_turns else 0.0
            seen_turns = self.engine.num_turns
            if still_s >= (limit_s := self.config.engine_hang_seconds):
                self.engine.give_up(f"a step takes longer than --engine-hang-seconds {limit_s:g}")
        logger.critical("node dead name=%s: %s", self.name, self.death)
        self.drain.fail(NodeUnavailableError(f"{self.name} ends: {self.death}"))

    # --- what draining needs

    async def _count_held(self) -> int:
        """Prompts that are held for readers, and prefixes that are being written; none when the engine has ended."""
        if self.tiers is not None and self.drain.is_draining and (num_writes := await self.tiers.flush()):
            return num_writes
        try:
            return (await self._read_stats()).leases_active
        except DeadlineExceededError:  # in a long step: nothing says that the leases have ended
            return 1
        except NodeUnavailableError:
            return 0

    def _cut_off(self, error: NodeUnavailableError) -> None:
        self.admission.cut_off(error)
        self.engine.interrupt_all(error)

    # --- common.node.pull.engine_bridge.PullListener

    def on_outcome(self, seq_id: str, prefix: PulledPrefix, result: FinishedPull) -> None:
        self.engine.post(lambda: self.core.finish_pull(seq_id, result))

    def on_terminal(self, seq_id: str) -> None:
        self.engine.post(lambda: self.core.end_quarantine(seq_id))

    def _find_mismatch(self, plan: PullPlan, prefix: ReadablePrefix) -> str | None:
        return find_mismatch(self.model.storage, prefix.digests, plan.pairs, plan.num_tokens, plan.slot_id)

    # --- what the quarantine's keeper needs

    async def _read_stats(self) -> CacheStats:
        return await self.engine.call(self.model.manager.stats, timeout_s=STATS_TIMEOUT_S)

    def _on_recreated(self) -> None:
        self.metrics.inc("agent_recreations_total")
        self.peers.forget_all()

    # --- what a rendezvous needs of the cache and the engine

    def _is_in_use(self, request_id: str) -> bool:
        # A renewal to time 0 never shortens a lease: it only says whether there is one.
        is_leased = self.model.manager.leases.renew(request_id, 0.0)
        return is_leased or self.engine.is_in_use(request_id)

    def _call_off(self, request_id: str) -> None:
        self.engine.interrupt(request_id, not_wanted())

    # --- metrics

    def _samples(self) -> Samples:
        core = self.core
        samples = cache_samples(
            self._cache_stats,
            running=core.num_running,
            waiting=self.admission.num_waiting,
            waiting_for_peer=self.admission.num_waiting_for_peer,
            preemptions=core.num_preemptions,
            images=self.model.runner.images.stats if self.model.runner.images is not None else None,
            grammars_waiting=self.grammars.num_waiting + core.grammars.num_waiting,
            transfers_in_flight=self.agents.num_in_flight,
            step_seconds=core.step_seconds,
        )
        samples = {**samples, **draft_samples(core.speculation), **ahead_samples(core.ahead_steps)}
        return samples if self.tiers is None else {**samples, **self.tiers.samples()}

    async def refresh_stats(self) -> None:
        """Brings the cache's numbers up to date between two steps; keeps the last ones when a step takes too long, or
        there will be none any more."""
        with contextlib.suppress(DeadlineExceededError, NodeUnavailableError):
            self._cache_stats = await self._read_stats()
