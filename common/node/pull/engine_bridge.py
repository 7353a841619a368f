"""Joins the engine to whoever reads prefixes: the cache manager's pull plan becomes a pull, its outcome a commit.

1 the engine accepted a remote prefix (``start``, on the engine thread), 2 the reader of that kind of prefix begins a
pull on the event loop, 3 the outcome goes back to the engine as a command between steps. The destinations belong to the
read until the outcome says that it is terminal; if it never was, they wait in quarantine for ``end_quarantine``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from common.kv_cache.sharing.remote_prefix import PullPlan
from common.node.pull.prefix_reader import FinishedPull, PrefixReader, Pull, PulledPrefix
from common.transfer.codes import TransferCode

logger = logging.getLogger(__name__)


class PullListener(Protocol):
    """Whoever is told how a pull ended; called on the event loop. ``on_terminal`` is called only after an outcome that
    is not terminal, once the read cannot write any more."""

    def on_outcome(self, seq_id: str, prefix: PulledPrefix, result: FinishedPull) -> None: ...

    def on_terminal(self, seq_id: str) -> None: ...


class EngineBridge:
    """``common.engine.remote_prefixes.PrefixSource`` over readers. ``open`` and ``close`` it on the event loop.
    ``readers``: for each class of prefix who reads it."""

    def __init__(self, listener: PullListener, readers: Mapping[type, PrefixReader]) -> None:
        self._listener = listener
        self._readers = readers
        self._loop: asyncio.AbstractEventLoop
        self._pulls: dict[str, Pull] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """On the event loop that pulls will run on, before the engine starts."""
        self._loop = asyncio.get_running_loop()

    def start(self, seq_id: str, remote: PulledPrefix, plan: PullPlan) -> None:
        self._loop.call_soon_threadsafe(self._begin, seq_id, remote, plan)

    def cancel(self, seq_id: str) -> None:
        self._loop.call_soon_threadsafe(self._cancel, seq_id)

    def give_up(self, remote: PulledPrefix) -> None:
        self._loop.call_soon_threadsafe(remote.close)

    async def close(self) -> None:
        """Call it after the engine has ended, which starts no more pulls, and before the readers end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, seq_id: str, prefix: PulledPrefix, plan: PullPlan) -> None:
        try:
            reader = self._readers[type(prefix)]
            pull = reader.begin(seq_id, prefix, plan, on_terminal=lambda: self._listener.on_terminal(seq_id))
        except Exception:
            # Nothing was begun, and the engine waits for an outcome all the same.
            logger.exception("pull not begun seq_id=%s", seq_id)
            failed = FinishedPull(ok=False, terminal=True, reason=TransferCode.TRANSFER_FAILED)
            self._listener.on_outcome(seq_id, prefix, failed)
            prefix.close()
            return
        self._pulls[seq_id] = pull
        task = asyncio.create_task(self._run(seq_id, prefix, pull, reader), name=f"pull {seq_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, seq_id: str, prefix: PulledPrefix, pull: Pull, reader: PrefixReader) -> None:
        try:
            result = await pull.run()
        except Exception:
            # The engine waits for an outcome of each pull, so it gets one whatever went wrong here.
            logger.exception("pull failed seq_id=%s", seq_id)
            result = pull.failed(TransferCode.TRANSFER_FAILED)
        finally:
            del self._pulls[seq_id]
        self._listener.on_outcome(seq_id, prefix, result)
        prefix.close()
        reader.ended(prefix, result)

    def _cancel(self, seq_id: str) -> None:
        pull = self._pulls.get(seq_id)
        if pull is not None:  # else: its outcome is on the way to the engine
            pull.cancel()
