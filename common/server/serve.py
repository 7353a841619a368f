"""Running an app under uvicorn, the same way for every process of the service.

Life cycle: 1 ``bind_socket`` takes the port before anything slow happens, so a port in use is a ``ConfigError`` and not
a surprise after the model was loaded, 2 ``run_app`` serves until SIGTERM or SIGINT, 3 the app drains
(``common.server.drain``, which bounds the time), 4 connections get ``GRACE_S`` to end, 5 the app's lifespan closes, and
connections that are left are broken off, 6 the process ends without the interpreter's own clean-up. A second signal
ends it at once, from wherever it is, and so does any before 2 (``end_on_signals``). An app whose drain says that it
failed leaves by 4 as well, with ``FAILED_STATUS``, and within ``FAILED_END_S``. Handlers are installed explicitly: a
process that a script started in the background inherits SIGINT as ignored and must stop all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import ConfigError, TandemError
from common.server.connection import BoundedProtocol, end_connections
from common.server.drain import Drain
from common.telemetry.logs import is_logging_json

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept: longer than the 60 s of common load balancers, so that they close first."""
GRACE_S = 1
"""Seconds that connections get after the drain."""
FORCED_STATUS = 1
"""Exit status after a second signal."""
SIGNAL_STATUS = 128
"""Exit status, with the signal's number added, after a signal before the process served."""
FAILED_STATUS = 3
"""Exit status of a process that could not go on: neither a signal (0) nor a start that cannot work (1, 2)."""
FAILED_END_S = 10.0
"""Seconds that a failed process gets to close what it has. What failed may be what closing waits for (a device, the
transport), and another process waits for its port."""


class _Server(uvicorn.Server):
    """uvicorn's server that drains on the first signal, ends normally then instead of raising the signal again (being
    stopped is success), and ends the process on the second. It ends too when the drain says that the app failed."""

    def __init__(self, config: uvicorn.Config, drain: Drain | None) -> None:
        super().__init__(config)
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_signals = 0
        self._ending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.last_resort: threading.Timer | None = None
        """Ends the process if it has not ended by itself; there is one once the app failed."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self._drain is not None:
            self._watching = asyncio.create_task(self._end_when_failed(self._drain), name="end-when-failed")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await end_connections(self)

    async def _end_when_failed(self, drain: Drain) -> None:
        await drain.failed.wait()
        logger.critical("ending with status %d, within %.0f s", FAILED_STATUS, FAILED_END_S)
        # A thread: nothing that closing waits for, on the event loop or off it, may keep the process.
        self.last_resort = threading.Timer(FAILED_END_S, os._exit, (FAILED_STATUS,))
        self.last_resort.daemon = True
        self.last_resort.start()
        await drain.wait_cut()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            # The second signal means: do not wait for the drain or for a clean-up.
            end_process(FORCED_STATUS)
        if self._drain is None or self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_to_end, signal.Signals(sig).name)

    def _begin_to_end(self, reason: str) -> None:
        assert self._drain is not None
        self._drain.begin(reason, is_end=True)
        self._ending = asyncio.create_task(self._end(self._drain), name="drain")

    async def _end(self, drain: Drain) -> None:
        try:
            await drain.wait()
        except Exception:  # the process has to end, also when counting what is held fails
            logger.exception("draining failed")
        finally:
            drain.stopped.set()
            self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _Startable:
    """The app, and the ``TandemError`` that it refused to start with, if any: uvicorn would print a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self.error: TandemError | None = None
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "lifespan":
            return self._app(scope, receive, send)

        async def send_outcome(message: Message) -> None:
            reason = sys.exc_info()[1]  # Starlette reports from where it caught it
            if message["type"] == "lifespan.startup.failed" and isinstance(reason, TandemError):
                self.error = reason
                message = {"type": message["type"]}
            await send(message)

        return self._app(scope, receive, send_outcome)


def end_on_signals() -> None:
    """The first thing that a program does: until ``run_app`` takes them, SIGTERM and SIGINT end the process, with the
    status that shells give. Without a handler the first process of a container ignores them, and one that loads its
    model could only be killed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_at_once)


def _end_at_once(number: int, _: FrameType | None) -> NoReturn:
    os._exit(SIGNAL_STATUS + number)  # nothing is flushed: what the signal interrupted may hold a lock


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
        is_host = isinstance(exc, socket.gaierror) or exc.errno == errno.EADDRNOTAVAIL
        option, value = ("--host", host) if is_host else ("--port", port)
        raise ConfigError(f"{option} {value}: cannot listen on {host}:{port}: {exc.strerror}", param=option) from exc
    return sock


@dataclass(frozen=True, slots=True)
class Tls:
    """Serve HTTPS with a certificate chain and its private key (None: in the same file), both PEM."""

    certfile: str
    keyfile: str | None = None

    def check(self) -> None:
        """Raises ConfigError for files that cannot be read or do not belong together."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile)
        except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
            files = f"--ssl-certfile {self.certfile}" + (f" --ssl-keyfile {self.keyfile}" if self.keyfile else "")
            raise ConfigError(f"{files}: {exc}", param="--ssl-certfile") from exc


def raise_file_limit(wanted: int, *, flag: str) -> int:
    """Allow this process ``wanted`` open files, as far as the system lets it; returns how many it may open. ``flag``
    is what needs them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        logger.warning("%s may need %d open files, the system allows %d (ulimit -n)", flag, wanted, soft)
    return soft


def run_app(
    app: Starlette,
    sock: socket.socket,
    *,
    log_level: str = "info",
    tls: Tls | None = None,
    max_connections: int | None = None,
) -> int:
    """Serve ``app`` on a bound socket until a signal, or until it fails; returns the process's exit status. Main thread
    only.

    ``max_connections``: further ones are refused with 503.

    Raises:
        TandemError: what the app's lifespan raised instead of starting.
    """
    startable = _Startable(app)
    config = uvicorn.Config(
        startable,
        interface="asgi3",
        http=functools.partial(BoundedProtocol, max_connections=max_connections),  # type: ignore[arg-type]
        ssl_certfile=tls.certfile if tls else None,
        ssl_keyfile=tls.keyfile if tls else None,
        proxy_headers=False,
        access_log=False,
        lifespan="on",
        log_config=None,
        # uvicorn's own "info" is about itself; who started what is ours to say.
        log_level="warning" if log_level == "info" else log_level,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
    )
    server = _Server(config, getattr(app.state, "drain", None))
    try:
        server.run(sockets=[sock])
    except SystemExit:  # the app did not start
        if startable.error is None:
            raise
        raise startable.error from None
    finally:
        sock.close()
    if server.last_resort is not None:
        server.last_resort.cancel()
        return FAILED_STATUS
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


def end_process(status: int) -> NoReturn:
    """End now, without the interpreter's clean-up: taking torch apart costs a node 2-3 s and gives back nothing that
    the system does not take anyway. Everything that has to be closed has been closed, or is given up."""
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also from a signal handler that interrupts a write to the very stream
        os._exit(status)
