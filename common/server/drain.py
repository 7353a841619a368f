"""Stopping without losing anything: a process that drains finishes what it has admitted and admits nothing new.

Life: 1 serving, 2 draining, from a signal or ``POST /internal/v1/drain`` on: ``/ready`` says 503, ``/health`` 200, new
work is refused with a 503 that says so, so that a proxy sends it elsewhere, 3 idle: no request is open and nothing is
held for others (a prefill node's leases); or the deadline has passed: what is left is cut off with a typed error. Then
``common.server.serve`` ends the process, if a signal came. Without one ``DELETE /internal/v1/drain`` leads back to 1.
From 1 or 2 also: failed (``fail``): what is open ends with a typed error, peers hear of it, and the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import DrainingError, EndingError, NodeUnavailableError, PermissionDeniedError
from common.wire.headers import CLUSTER_KEY_HEADER
from common.wire.routes import CHAT_ROUTE, COMPLETIONS_ROUTE, DRAIN_ROUTE

logger = logging.getLogger(__name__)

STATUS = "draining"
SERVING_STATUS = "serving"
WORK_PATHS = frozenset({COMPLETIONS_ROUTE, CHAT_ROUTE})
"""Routes whose requests a drain waits for."""
POLL_S = 0.02
"""Seconds between two checks of whether anything is left, while draining."""
CUT_GRACE_S = 0.5
"""Seconds that cut-off requests get to send their clients the error."""


class Drain:
    """One per process; event loop only.

    Args:
        who: the process in messages.
        timeout_s: longest time from the beginning to the end.
        count_held: counts what is held for others besides open requests; called at each check.
        cut_off: called at the deadline, and when the process fails, with the error that open requests end with.
    """

    def __init__(
        self,
        who: str,
        timeout_s: float,
        *,
        count_held: Callable[[], Awaitable[int]] | None = None,
        cut_off: Callable[[NodeUnavailableError], None] | None = None,
    ) -> None:
        self._who = who
        self._timeout_s = timeout_s
        self._count_held = count_held
        self._cut_off = cut_off
        self._deadline_s: float | None = None
        self._is_ending = False
        self.num_open = 0
        self._all_closed = asyncio.Event()
        self.stopped = asyncio.Event()
        """Set when the process is about to end: answers without an end have to find one."""
        self.failed = asyncio.Event()
        """Set by ``fail``."""

    @property
    def is_draining(self) -> bool:
        return self._deadline_s is not None

    def begin(self, reason: str, *, is_end: bool = False) -> None:
        """Refuse new work from now on. A second call leaves the deadline as it is. ``is_end``: the process will end,
        nothing leads back."""
        self._is_ending = self._is_ending or is_end
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._timeout_s
            logger.info("draining reason=%s open=%d timeout_s=%.1f", reason, self.num_open, self._timeout_s)

    def fail(self, error: NodeUnavailableError) -> None:
        """The process cannot go on: it takes nothing new, what is open ends with ``error``, whoever watches it learns
        that it is gone, and ``common.server.serve`` ends it with a status that says so. The first call counts."""
        if self.failed.is_set():
            return
        self.begin(error.message, is_end=True)
        self.stopped.set()
        self.failed.set()
        if self._cut_off is not None:
            self._cut_off(error)

    def undo(self, reason: str) -> None:
        """Serve again. Nothing happens to a process that does not drain.

        Raises:
            EndingError: it was told to end.
        """
        if self._is_ending:
            raise EndingError(f"{self._who} was told to end by a signal: its drain cannot be undone")
        if self._deadline_s is not None:
            self._deadline_s = None
            logger.info("serving again reason=%s open=%d", reason, self.num_open)

    def check_admission(self) -> None:
        """Raises DrainingError for new work while draining."""
        if self.is_draining:
            raise DrainingError(f"{self._who} is draining and takes nothing new")

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Round one piece of work, from before its admission to the last byte of its answer."""
        self.num_open += 1
        self._all_closed.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._all_closed.set()

    async def held(self) -> int:
        return 0 if self._count_held is None else await self._count_held()

    async def wait(self) -> bool:
        """Until nothing is left, or the deadline: then what is left is cut off. Needs ``begin``. True: all ended."""
        assert self._deadline_s is not None
        started_s = time.monotonic()
        # Held is counted only once nothing is open: an open request may end in a lease.
        while self.num_open or await self.held():
            if time.monotonic() >= self._deadline_s:
                await self._cut()
                return False
            await asyncio.sleep(POLL_S)
        logger.info("drained seconds=%.2f", time.monotonic() - started_s)
        return True

    async def _cut(self) -> None:
        logger.warning("not drained open=%d timeout_s=%.1f: cutting off what is left", self.num_open, self._timeout_s)
        if self._cut_off is None or not self.num_open:
            return
        message = f"{self._who} ends: draining took longer than --drain-timeout-seconds {self._timeout_s:g}"
        self._cut_off(NodeUnavailableError(message, code="shutting_down"))
        await self.wait_cut()

    async def wait_cut(self) -> None:
        """Until what was cut off has told its clients, ``CUT_GRACE_S`` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CUT_GRACE_S if self.num_open else 0):
                await self._all_closed.wait()


class OpenWorkMiddleware:
    """Counts generation requests as open from their headers to the end of their answers."""

    def __init__(self, app: ASGIApp, *, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in WORK_PATHS:
            await self._app(scope, receive, send)
            return
        with self._drain.open():
            await self._app(scope, receive, send)


def add_drain(app: FastAPI, drain: Drain, *, has_cluster_key: bool) -> None:
    """Give ``app`` the drain route and the counting; ``common.server.serve`` finds ``drain`` in ``app.state``."""
    app.state.drain = drain
    app.add_middleware(OpenWorkMiddleware, drain=drain)

    @app.post(DRAIN_ROUTE)
    async def begin() -> dict[str, Any]:
        require_cluster_key(has_cluster_key)
        drain.begin("asked to")
        return {"status": STATUS, "open": drain.num_open, "held": await drain.held()}

    @app.delete(DRAIN_ROUTE)
    async def undo() -> dict[str, Any]:
        require_cluster_key(has_cluster_key)
        drain.undo("asked to")
        return {"status": SERVING_STATUS, "open": drain.num_open, "held": await drain.held()}


def require_cluster_key(has_cluster_key: bool) -> None:
    """Raises PermissionDeniedError when the process has no cluster key: a route that changes who serves is never open
    to everybody, not even on loopback, which any web page on this machine can post to."""
    if not has_cluster_key:
        raise PermissionDeniedError(
            f"this route needs the header {CLUSTER_KEY_HEADER}, and this process was started without --cluster-key-file"
        )
