"""Which requests a node admits, and how many wait.

A request waits for the engine, or before that for the first part of a prompt that a peer computes. A node that drains
takes nothing new, and at its deadline cuts off the waits for peers that are left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from common.engine.core import EngineCore
from common.errors import NodeUnavailableError, QueueFullError
from common.server.drain import Drain


class Admission:
    """Used on the event loop only. ``max_queue``: requests that may wait for the engine (``--max-queue``)."""

    def __init__(self, node_name: str, max_queue: int, core: EngineCore, drain: Drain) -> None:
        self._node_name = node_name
        self._max_queue = max_queue
        self._core = core
        self._drain = drain
        self.num_waiting_for_peer = 0
        self._limits: set[asyncio.Timeout] = set()
        self._cut_off_by: NodeUnavailableError | None = None

    @property
    def num_waiting(self) -> int:
        """Requests that wait: for the engine, or for the first part of a prompt that a peer computes."""
        return self._core.num_waiting + self.num_waiting_for_peer

    def check(self, num_answers: int) -> None:
        """Raises DrainingError, or QueueFullError when too many requests wait for the engine already, each counted as
        its answers; one that alone has too many begins when nobody waits."""
        self._drain.check_admission()
        waiting = self._core.num_waiting
        if waiting and waiting + num_answers > self._max_queue + 1:
            raise QueueFullError(
                f"{waiting} requests are waiting on {self._node_name} and this one is for {num_answers} answers, "
                f"--max-queue is {self._max_queue}"
            )

    @contextlib.asynccontextmanager
    async def waiting_for_peer(self) -> AsyncIterator[None]:
        """Round the wait for the first part of a prompt that a peer computes. Raises what the node's drain cuts waits
        off with."""
        self.num_waiting_for_peer += 1
        limit = asyncio.timeout(None)
        self._limits.add(limit)
        try:
            async with limit:
                self._expire_when_cut_off(limit)
                yield
        except TimeoutError:
            if self._cut_off_by is not None and limit.expired():
                raise self._cut_off_by from None
            raise
        finally:
            self._limits.discard(limit)
            self.num_waiting_for_peer -= 1

    def cut_off(self, error: NodeUnavailableError) -> None:
        """Ends all waits for peers with ``error``, those that begin later too."""
        self._cut_off_by = error
        for limit in self._limits:
            self._expire_when_cut_off(limit)

    def _expire_when_cut_off(self, limit: asyncio.Timeout) -> None:
        if self._cut_off_by is not None and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())
