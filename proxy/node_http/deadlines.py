"""Deadlines of what waits for one node: each passes by itself, and all of them when the node is given up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType

from proxy.node_http.errors import NodeClientError, NodeSilentError, NodeTimeoutError


class Deadline:
    """Of what a connection waits for, one thing after the other. One timer serves all of them and looks at the clock
    when it fires: a timer for each would cost more than passing a chunk on."""

    def __init__(self, fail: Callable[[NodeClientError], None]) -> None:
        """``fail`` ends what waits."""
        self._loop = asyncio.get_running_loop()
        self._fail = fail
        self._since_s: float | None = None
        self._limit_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf

    def begin(self, limit_s: float) -> None:
        """The wait that begins now may take ``limit_s``."""
        self._since_s, self._limit_s = self._loop.time(), limit_s
        if self._since_s + limit_s < self._due_s:
            self._set_timer(self._since_s + limit_s)

    def end(self) -> None:
        self._since_s = None

    def close(self) -> None:
        self._since_s = None
        if self._timer is not None:
            self._timer.cancel()

    def give_up(self, before_s: float) -> None:
        if self._since_s is not None and self._since_s <= before_s:
            self._fail(_no_sign_of_life())

    def _set_timer(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = self._loop.call_at(due_s, self._check)

    def _check(self) -> None:
        self._timer, self._due_s = None, math.inf
        if self._since_s is None:
            return
        end_s = self._since_s + self._limit_s
        if self._loop.time() >= end_s:
            self._fail(NodeTimeoutError(f"silent for more than {round(self._limit_s, 2):g} s"))
        else:
            self._set_timer(end_s)


class ConnectDeadline:
    """Of the block that connects: it ends with TimeoutError after ``timeout_s``, or with NodeSilentError when its node
    is given up."""

    def __init__(self, timeout_s: float, deadlines: Deadlines) -> None:
        self._timeout = asyncio.timeout(timeout_s)
        self._deadlines = deadlines
        self._is_given_up = False

    async def __aenter__(self) -> None:
        self._since_s = asyncio.get_running_loop().time()
        await self._timeout.__aenter__()
        self._deadlines.add(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._deadlines.discard(self)
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            if self._is_given_up:
                raise _no_sign_of_life() from None
            raise

    def give_up(self, before_s: float) -> None:
        if self._since_s <= before_s and not self._timeout.expired():
            self._is_given_up = True
            self._timeout.reschedule(asyncio.get_running_loop().time())


class Deadlines(set[Deadline | ConnectDeadline]):
    """All that are open for one node. ``heard_s``: when anything last came from it, on the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.heard_s = -math.inf


def _no_sign_of_life() -> NodeSilentError:
    return NodeSilentError("it gives no sign of life")
