"""Joins the engine to the transfer layer: a pull plan of the cache manager becomes a conversation with the holder, its
outcome a commit.

1 the engine accepted a remote prefix (``start``, on the engine thread), 2 a conversation on the event loop follows the
holder's offers while the puller reads and checks on its own thread, 3 the outcome goes back to the engine as a command
between steps. The destinations belong to the read until the outcome says that it is terminal; if it never was, they
wait in quarantine for ``end_quarantine``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from common.errors import TransferError
from common.kv_cache.manager import PullPlan
from common.node.peers.peers import PeerDirectory
from common.node.pull.manifest_stream import Offer
from common.node.pull.pull_task import Conversation, FinishedPull, RemotePrefix
from common.transfer.codes import TransferCode
from common.transfer.jobs import PullReason
from common.transfer.puller import Puller

logger = logging.getLogger(__name__)


class PullListener(Protocol):
    """Who wants to know; called on the event loop. ``on_terminal`` only after an outcome that is not terminal."""

    def on_outcome(self, seq_id: str, remote: RemotePrefix, result: FinishedPull) -> None: ...

    def on_terminal(self, seq_id: str) -> None: ...


class PullSource:
    """``common.engine.remote_prefixes.PrefixSource`` over a ``Puller``. Made and closed on the event loop.

    ``find_mismatch`` says what of the bytes that are here is not what the holder digested; it runs on a thread of its
    own, and only for offers that bring digests. ``after_read`` is called with the plan before that: the place where
    tests damage what arrived.
    """

    def __init__(
        self,
        puller: Puller,
        peers: PeerDirectory,
        listener: PullListener,
        timeout_s: float,
        find_mismatch: Callable[[PullPlan, Offer], str | None] | None,
    ) -> None:
        self._puller = puller
        self._peers = peers
        self._listener = listener
        self._timeout_s = timeout_s
        self._find_mismatch = find_mismatch
        self._loop = asyncio.get_running_loop()
        self._conversations: dict[str, Conversation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.after_read: Callable[[PullPlan], None] | None = None

    def start(self, seq_id: str, remote: RemotePrefix, plan: PullPlan) -> None:
        self._loop.call_soon_threadsafe(self._begin, seq_id, remote, plan)

    def cancel(self, seq_id: str) -> None:
        self._loop.call_soon_threadsafe(self._cancel, seq_id)

    def give_up(self, remote: RemotePrefix) -> None:
        self._loop.call_soon_threadsafe(remote.offers.close)

    async def close(self) -> None:
        """After the engine, which starts no more, and before the puller."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, seq_id: str, remote: RemotePrefix, plan: PullPlan) -> None:
        conversation = self._conversations[seq_id] = Conversation(
            seq_id,
            remote,
            plan,
            puller=self._puller,
            peers=self._peers,
            timeout_s=self._timeout_s,
            check=self._check_arrived,
            on_terminal=lambda: self._listener.on_terminal(seq_id),
        )
        task = asyncio.create_task(self._converse(seq_id, remote, conversation), name=f"pull {seq_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, seq_id: str, remote: RemotePrefix, conversation: Conversation) -> None:
        try:
            result = await conversation.run()
        except Exception:
            # The engine waits for an outcome of each pull, whatever went wrong here.
            logger.exception("pull failed seq_id=%s", seq_id)
            result = conversation.failed(TransferCode.TRANSFER_FAILED)
        finally:
            del self._conversations[seq_id]
        self._listener.on_outcome(seq_id, remote, result)

    def _cancel(self, seq_id: str) -> None:
        conversation = self._conversations.get(seq_id)
        if conversation is not None:  # else: its outcome is on the way to the engine
            conversation.cancel()

    async def _check_arrived(self, plan: PullPlan, offer: Offer) -> None:
        if self.after_read is not None:
            self.after_read(plan)
        if self._find_mismatch is not None and offer.digests.is_there:
            mismatch = await asyncio.to_thread(self._find_mismatch, plan, offer)
            if mismatch is not None:
                raise TransferError(mismatch, code=PullReason.DIGEST_MISMATCH)
