"""An ASGI app on a real loopback port, served by uvicorn in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette

from common.server.connection import BoundedProtocol, end_connections

WAIT_S = 20.0
T = TypeVar("T")


class _Server(uvicorn.Server):
    """Ends when it is told to, and not at its next tick, a tenth of a second later: the tests stop a thousand."""

    loop: asyncio.AbstractEventLoop
    _stopping: asyncio.Event

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        await super().startup(sockets)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await end_connections(self)

    def ask_to_stop(self) -> None:
        self.should_exit = True
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self._stopping.set)


class AppServer:
    """One running app. ``stop`` closes its listener and connections; it may be called twice."""

    def __init__(self, app: Starlette, port: int = 0, host: str = "127.0.0.1", *, keep_alive_s: int = 5) -> None:
        self.app = app
        self.host = host
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=keep_alive_s,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started or not self._thread.is_alive(), "the server to start")
        assert self._server.started, "the app failed to start"
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the app's event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._server.loop).result(WAIT_S)

    def ask_to_stop(self) -> None:
        """Begin to stop without waiting, for stopping several at once."""
        self._server.ask_to_stop()

    def stop(self) -> None:
        self.ask_to_stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def serving(app: Starlette) -> Iterator[AppServer]:
    server = AppServer(app)
    try:
        yield server
    finally:
        server.stop()


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until ``condition`` is true; fails the test naming ``what`` after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)
