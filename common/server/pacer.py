"""Lets few requests begin in one turn of the event loop."""

from __future__ import annotations

import asyncio
import collections

STARTS_PER_TURN = 4
"""Requests that may begin in one turn: each parses a body and places a request, which takes up to milliseconds."""


class Pacer:
    """Lets few requests begin in one turn of the event loop, in the order in which they came.

    The loop runs everything that is ready before it reads sockets again: a thousand requests that come at once would
    all be read, placed and sent on before ``/health`` is answered.
    """

    def __init__(self, num_per_turn: int = STARTS_PER_TURN) -> None:
        self._num_per_turn = num_per_turn
        self._num_left = num_per_turn
        self._is_refilling = False
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_refilling:
            self._is_refilling = True
            loop.call_soon(self._refill, loop)
        if self._num_left:
            self._num_left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _refill(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_left = self._num_per_turn
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._num_left -= 1
        self._is_refilling = bool(self._waiting)
        if self._is_refilling:
            loop.call_soon(self._refill, loop)
