"""Reads what peers hold: a pull task for each, its check of the holder's digests, and how it is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.engine.rates import LinearCost
from common.errors import TransferError
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.metrics.metrics import Metrics
from common.node.peers.directory import PeerDirectory
from common.node.pull.manifest_stream import ReadablePrefix
from common.node.pull.metrics import failure_label, record_pull
from common.node.pull.prefix_reader import FinishedPull
from common.node.pull.pull_task import PullTask, RemotePrefix
from common.transfer.jobs import PullReason
from common.transfer.joint_puller import PullRunner

FORGETTABLE = ("failed", "timed_out", "peer_lost")
"""Labels of failed pulls after which the peer has to shake hands again before anything else is read from it."""


class PeerReader:
    """``common.node.pull.prefix_reader.PrefixReader`` of ``RemotePrefix`` over a node's pullers, which are given
    whole units (``RankPuller``).

    ``find_mismatch`` names what of the bytes that arrived is not what the holder digested; it runs on a thread of its
    own, and only when the holder sent digests. ``after_read`` is called with the plan before that: tests damage there
    what arrived. ``slot_bytes``: length of a state. ``pull_times``: of bytes, in seconds.
    """

    def __init__(
        self,
        puller: PullRunner,
        peers: PeerDirectory,
        timeout_s: float,
        find_mismatch: Callable[[PullPlan, ReadablePrefix], str | None] | None,
        *,
        metrics: Metrics,
        slot_bytes: int,
    ) -> None:
        self._puller = puller
        self._peers = peers
        self._timeout_s = timeout_s
        self._find_mismatch = find_mismatch
        self._metrics = metrics
        self._slot_bytes = slot_bytes
        self.pull_times = LinearCost()
        self.after_read: Callable[[PullPlan], None] | None = None

    def begin(self, seq_id: str, prefix: RemotePrefix, plan: PullPlan, on_terminal: Callable[[], None]) -> PullTask:
        return PullTask(
            seq_id,
            prefix,
            plan,
            puller=self._puller,
            peers=self._peers,
            timeout_s=self._timeout_s,
            check=self._check_arrived,
            on_terminal=on_terminal,
        )

    def ended(self, prefix: RemotePrefix, result: FinishedPull) -> None:
        record_pull(self._metrics, result, self._slot_bytes)
        if result.ok and result.num_bytes:
            self.pull_times.observe(result.num_bytes, result.seconds)
        is_failure = not result.ok and result.reason != PullReason.CANCELLED
        if is_failure and failure_label(result.reason) in FORGETTABLE:
            self._peers.forget(prefix.url)

    async def _check_arrived(self, plan: PullPlan, prefix: ReadablePrefix) -> None:
        if self.after_read is not None:
            self.after_read(plan)
        if self._find_mismatch is not None and prefix.digests.has_any:
            mismatch = await asyncio.to_thread(self._find_mismatch, plan, prefix)
            if mismatch is not None:
                raise TransferError(mismatch, code=PullReason.DIGEST_MISMATCH)
