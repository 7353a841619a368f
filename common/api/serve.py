"""Running an app under uvicorn, the same way for every process of the service.

Life cycle: 1 ``bind_socket`` takes the port before anything slow happens, so a port in use is a ``ConfigError`` and
not a surprise after the model was loaded, 2 ``run_app`` serves until SIGTERM or SIGINT, 3 connections get ``grace_s``
to end, 4 the app's lifespan closes. Handlers are installed explicitly: a process that a script started in the
background inherits SIGINT as ignored and must stop all the same.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from common.errors import ConfigError, TandemError
from common.telemetry.logs import is_logging_json

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """uvicorn's server that ends normally on a signal instead of raising the signal again: being stopped is success.

    From the signal on ``app.state.is_stopping`` is true: answers without an end have to find one.
    """

    def __init__(self, config: uvicorn.Config, app: Starlette) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._app.state.is_stopping = True
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def bind_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to ``host``:``port`` (0: any free port), not yet listening. Raises ConfigError."""
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as exc:
        if sock is not None:
            sock.close()
        option = "--host" if isinstance(exc, socket.gaierror) else "--port"
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}", param=option) from exc
    return sock


def run_app(app: Starlette, sock: socket.socket, *, log_level: str = "info", grace_s: int = 5) -> int:
    """Serve ``app`` on a bound socket until a signal; returns the process's exit status. Main thread only."""
    config = uvicorn.Config(
        app,
        access_log=False,
        lifespan="on",
        log_config=None,
        # uvicorn's own "info" is about itself; who started what is ours to say.
        log_level="warning" if log_level == "info" else log_level,
        server_header=False,
        timeout_graceful_shutdown=grace_s,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
    )
    server = _Server(config, app)
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
    return 0 if server.started else 1


def run_main(main: Callable[[], int], *, program: str) -> int:
    """Call ``main`` and turn an error that this project raises on purpose into one line on stderr and status 1."""
    try:
        return main()
    except TandemError as exc:
        if is_logging_json():
            logger.critical("%s: error: %s", program, exc.message)
        else:
            sys.stderr.write(f"{program}: error: {exc.message}\n")
        return 1
