"""Joins the engine to the transfer layer: the cache manager's pull plan becomes a pull task, its outcome a commit.

1 the engine accepted a remote prefix (``start``, on the engine thread), 2 a pull task on the event loop follows the
holder's manifest stream while the puller reads and checks on its own thread, 3 the outcome goes back to the engine as a
command between steps. The destinations belong to the read until the outcome says that it is terminal; if it never was,
they wait in quarantine for ``end_quarantine``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from common.errors import TransferError
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.node.peers.directory import PeerDirectory
from common.node.pull.manifest_stream import ReadablePrefix
from common.node.pull.pull_task import FinishedPull, PullTask, RemotePrefix
from common.transfer.codes import TransferCode
from common.transfer.jobs import PullReason
from common.transfer.puller import Puller

logger = logging.getLogger(__name__)


class PullListener(Protocol):
    """Whoever is told how a pull ended; called on the event loop. ``on_terminal`` is called only after an outcome that
    is not terminal, once the read cannot write any more."""

    def on_outcome(self, seq_id: str, remote: RemotePrefix, result: FinishedPull) -> None: ...

    def on_terminal(self, seq_id: str) -> None: ...


class EngineBridge:
    """``common.engine.remote_prefixes.PrefixSource`` over a ``Puller``. ``open`` and ``close`` it on the event loop.

    ``find_mismatch`` names what of the bytes that arrived is not what the holder digested; it runs on a thread of its
    own, and only when the holder sent digests. ``after_read`` is called with the plan before that: tests damage there
    what arrived.
    """

    def __init__(
        self,
        puller: Puller,
        peers: PeerDirectory,
        listener: PullListener,
        timeout_s: float,
        find_mismatch: Callable[[PullPlan, ReadablePrefix], str | None] | None,
    ) -> None:
        self._puller = puller
        self._peers = peers
        self._listener = listener
        self._timeout_s = timeout_s
        self._find_mismatch = find_mismatch
        self._loop: asyncio.AbstractEventLoop
        self._pulls: dict[str, PullTask] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.after_read: Callable[[PullPlan], None] | None = None

    def open(self) -> None:
        """On the event loop that pulls will run on, before the engine starts."""
        self._loop = asyncio.get_running_loop()

    def start(self, seq_id: str, remote: RemotePrefix, plan: PullPlan) -> None:
        self._loop.call_soon_threadsafe(self._begin, seq_id, remote, plan)

    def cancel(self, seq_id: str) -> None:
        self._loop.call_soon_threadsafe(self._cancel, seq_id)

    def give_up(self, remote: RemotePrefix) -> None:
        self._loop.call_soon_threadsafe(remote.manifests.close)

    async def close(self) -> None:
        """Call it after the engine has ended, which starts no more pulls, and before the puller's ``close``."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, seq_id: str, remote: RemotePrefix, plan: PullPlan) -> None:
        pull = self._pulls[seq_id] = PullTask(
            seq_id,
            remote,
            plan,
            puller=self._puller,
            peers=self._peers,
            timeout_s=self._timeout_s,
            check=self._check_arrived,
            on_terminal=lambda: self._listener.on_terminal(seq_id),
        )
        task = asyncio.create_task(self._run(seq_id, remote, pull), name=f"pull {seq_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, seq_id: str, remote: RemotePrefix, pull: PullTask) -> None:
        try:
            result = await pull.run()
        except Exception:
            # The engine waits for an outcome of each pull, so it gets one whatever went wrong here.
            logger.exception("pull failed seq_id=%s", seq_id)
            result = pull.failed(TransferCode.TRANSFER_FAILED)
        finally:
            del self._pulls[seq_id]
        self._listener.on_outcome(seq_id, remote, result)

    def _cancel(self, seq_id: str) -> None:
        pull = self._pulls.get(seq_id)
        if pull is not None:  # else: its outcome is on the way to the engine
            pull.cancel()

    async def _check_arrived(self, plan: PullPlan, prefix: ReadablePrefix) -> None:
        if self.after_read is not None:
            self.after_read(plan)
        if self._find_mismatch is not None and prefix.digests.has_any:
            mismatch = await asyncio.to_thread(self._find_mismatch, plan, prefix)
            if mismatch is not None:
                raise TransferError(mismatch, code=PullReason.DIGEST_MISMATCH)
