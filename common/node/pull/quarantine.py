"""Gets quarantined memory back: when too much of it waits for reads that do not end, the transfer agent is made again.

Destinations of a read that outlived its pull (a frozen peer) may be written at any time, so no timer frees them. What
ends such a read for certain is the end of the agent that posted it. That costs every other read from and to this node a
new handshake, so it is done only once more than ``MAX_SHARE`` of a pool, or anything for longer than ``MAX_AGE_S``, is
in quarantine. An agent that cannot be proven dead frees nothing: the memory stays where it is until another try can.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from common.errors import DeadlineExceededError, TransferError
from common.kv_cache.observe.stats import CacheStats
from common.transfer.codes import TransferCode

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
"""Time between two checks."""

MAX_SHARE = 0.05
"""The share of a pool that may be in quarantine: a node works nearly as well without it."""

MAX_AGE_S = 60.0
"""How long a read may outlive its pull before the agent is made again however little memory it holds. One of
generations holds some of the puller's scratch memory, of which there is little, and nothing of a pool."""

DRAIN_S = 2.0
"""How long other reads may take to end before their agent does."""

RETRY_S = 10.0
"""Time until the next try after an agent that did not end. Each try lets new reads wait for up to ``DRAIN_S``."""


class Agents(Protocol):
    """What of a ``Puller``, or of several, the keeper looks after."""

    @property
    def num_unterminated(self) -> int: ...

    @property
    def oldest_unterminated_s(self) -> float: ...

    def recreate_backend(self, timeout_s: float) -> None: ...


class QuarantineKeeper:
    """Lives on the event loop between ``start`` and ``close``; close it before the puller.

    ``read_stats``: the cache's numbers, from the engine thread; read only while something is in quarantine.
    ``on_recreated``: the agent is new: peers have to be added again, and this node announces other metadata.
    """

    def __init__(
        self, agents: Agents, read_stats: Callable[[], Awaitable[CacheStats]], on_recreated: Callable[[], None]
    ) -> None:
        self._agents = agents
        self._read_stats = read_stats
        self._on_recreated = on_recreated
        self._has_failed = False
        self._not_before_s = 0.0  # the next try, on time.monotonic
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="quarantine-keeper")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.check()
            except Exception:
                logger.exception("looking after the quarantine failed")

    async def check(self) -> bool:
        """Makes the agent again when that is due. True: the agent is new."""
        reason = await self._reason()
        if reason is None or time.monotonic() < self._not_before_s:
            return False
        logger.warning("recreating the transfer agent: %s", reason)
        try:
            await asyncio.to_thread(self._agents.recreate_backend, DRAIN_S)
        except TransferError as exc:
            if exc.code == TransferCode.AGENT_ALIVE:
                self._not_before_s = time.monotonic() + RETRY_S
                logger.error("the quarantine stays as it is, trying again in %g s: %s", RETRY_S, exc.message)
            elif exc.code != TransferCode.CLOSED:
                # There is no agent now. Nothing is in quarantine any more, so this has to be remembered.
                self._has_failed = True
                logger.error("recreating the transfer agent failed, trying again: %s", exc.message)
            return False
        self._has_failed = False
        self._on_recreated()
        return True

    async def _reason(self) -> str | None:
        if self._has_failed:
            return "the last attempt failed"
        age_s = self._agents.oldest_unterminated_s
        if age_s > MAX_AGE_S:
            return f"a read has outlived its pull by {age_s:.1f} s, the bound is {MAX_AGE_S:.0f} s"
        if not self._agents.num_unterminated:
            return None
        try:
            stats = await self._read_stats()
        except DeadlineExceededError:  # the engine is in a long step
            return None
        pools = {**{f"blocks of {name}": states for name, states in stats.group_blocks.items()}, "slots": stats.slots}
        for name, states in pools.items():
            quarantined, total = _use(states)
            if quarantined > MAX_SHARE * total:
                return f"{quarantined} of {total} {name} are in quarantine, the bound is {MAX_SHARE:.0%}"
        return None


def _use(states: Mapping[str, int]) -> tuple[int, int]:
    """Units in quarantine, units in all."""
    return states.get("quarantined", 0), sum(states.values())
