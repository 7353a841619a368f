"""Clients that stand still: they keep their connection and do not read what is written to it.

An answer waits for its reader when more than the transport's buffer (64 KiB, behind what the system buffers) is unread;
meanwhile it holds a place in a queue, memory, and streams from other processes. A reader has ``STALL_S`` to take what
is waiting, down to a quarter of the buffer. Of an answer that is written to its end nothing but the connection is held:
then it is enough that something is read in ``STALL_S``. A proxy reads from a node whenever its own client does, so it
gives its client up before the node gives it up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

STALL_S = 60.0
"""Seconds: what common web servers and load balancers wait for a reader."""


class StallTimer:
    """Of one connection. ``is_answering``: an answer is not yet written to its end. ``on_stall``: the client stands
    still; called with the number of unread bytes, at most once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        *,
        is_answering: Callable[[], bool],
        on_stall: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._is_answering = is_answering
        self._on_stall = on_stall
        self._is_paused = False
        self._num_unread = 0
        self._timer: asyncio.TimerHandle | None = None

    def pause(self) -> None:
        """More than the buffer is unread."""
        self._is_paused = True
        self._restart()

    def resume(self) -> None:
        """Enough was read."""
        self._is_paused = False

    def end_answer(self) -> None:
        """An answer is written to its end."""
        if self._timer is None and self._transport.get_write_buffer_size():
            self._restart()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _restart(self) -> None:
        self.close()
        self._num_unread = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(STALL_S, self._check)

    def _check(self) -> None:
        self._timer = None
        num_unread = self._transport.get_write_buffer_size()
        is_answering = self._is_answering()
        if not num_unread or (is_answering and not self._is_paused):
            return
        if not is_answering and num_unread < self._num_unread:
            self._restart()
        else:
            self._on_stall(num_unread)
