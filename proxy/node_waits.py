"""Waits for a node: each ends by itself after a while, and all at once when the node is given up."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

import aiohttp

from proxy.node_errors import NodeSilentError, NodeTimeoutError


class Silence:
    """Ends a read that waits too long. One timer per stream, which looks at the clock when it fires: one per chunk cost
    more than passing the chunk on."""

    def __init__(self, content: aiohttp.StreamReader, limit_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._content = content
        self._limit_s = limit_s
        self._since_s: float | None = None
        self._timer = self._loop.call_later(limit_s, self._look)

    def begin(self) -> None:
        self._since_s = self._loop.time()

    def end(self, limit_s: float) -> float:
        """Something came; when. The next may take ``limit_s``."""
        self._since_s = None
        if limit_s != self._limit_s:
            self._limit_s = limit_s
            self._timer.cancel()
            self._timer = self._loop.call_later(limit_s, self._look)
        return self._loop.time()

    def close(self) -> None:
        self._timer.cancel()

    def give_up(self, before_s: float) -> None:
        if self._since_s is not None and self._since_s <= before_s:
            self._content.set_exception(_no_sign_of_life())

    def _look(self) -> None:
        waited_s = 0.0 if self._since_s is None else self._loop.time() - self._since_s
        if waited_s >= self._limit_s:
            self._content.set_exception(NodeTimeoutError(f"silent for more than {self._limit_s:g} s"))
        else:
            self._timer = self._loop.call_later(self._limit_s - waited_s, self._look)


class Limit:
    """A block that ends with TimeoutError after ``timeout_s``, or with NodeSilentError when its node is given up."""

    def __init__(self, timeout_s: float, waits: Waits) -> None:
        self._timeout = asyncio.timeout(timeout_s)
        self._waits = waits
        self._is_given_up = False

    async def __aenter__(self) -> None:
        self._since_s = asyncio.get_running_loop().time()
        await self._timeout.__aenter__()
        self._waits.add(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._waits.discard(self)
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


class Waits(set[Silence | Limit]):
    """Everything that waits for one node now. ``heard_s``: when anything last came from it, on the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.heard_s = -math.inf


def _no_sign_of_life() -> NodeSilentError:
    return NodeSilentError("it gives no sign of life")
