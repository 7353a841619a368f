"""Keeps a group of child processes running until told to stop.

Life cycle: 1 start every child, each in a session of its own (a Ctrl-C in the terminal reaches the supervisor alone),
2 wait until all are ready; a child that dies before that, itself ready or not, ends everything, 3 watch: a restartable
child that dies is started again after 1, 2, 4 .. 30 s, any other death ends everything, 4 stop: SIGTERM to those that
others depend on least (the proxy, whose requests need the nodes to the end), then to the rest, SIGKILL to what is left
after a deadline. Leaves by: a signal (status 0), a death at start or of an essential child (status 1). No child
outlives ``run``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

import httpx

from common.cli.log_sink import LogSink
from common.errors import ConfigError

READY_POLL_S = 0.1
"""Seconds between two questions whether a child is ready."""
READY_TIMEOUT_S = 2.0
"""Seconds for the answer to one of them."""
STOP_DEADLINE_S = 10.0
"""Seconds from SIGTERM to SIGKILL, unless the caller says otherwise."""
KILL_DEADLINE_S = 5.0
"""Seconds for a killed child to be gone; then it is given up."""
MAX_BACKOFF_S = 30.0
"""Longest pause before a restart, in seconds."""
STEADY_AFTER_S = 60.0
"""A child that ran for so many seconds is restarted after the shortest pause again."""
TAIL_LINES = 12
"""Lines of a dead child's output that are repeated."""
LINE_LIMIT_BYTES = 1 << 20
"""Longest line of a child's output; asyncio drops a longer one."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start: ``url`` is where ``GET /ready`` answers 200 once it can serve."""

    name: str
    argv: tuple[str, ...]
    url: str
    is_restarted: bool


class ChildDiedError(Exception):
    """A child exited, or is no use, when it should have been running; ``tail`` is the end of its output."""

    def __init__(self, name: str, what: str, tail: Sequence[str] = ()) -> None:
        super().__init__(f"{name} {what}")
        self.name, self.tail = name, list(tail)


def describe_status(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


class Child:
    """One life of one child process. Owns the process group and the reader of its stderr."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log: LogSink) -> None:
        self.spec = spec
        self._process = process
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._reader = asyncio.create_task(self._forward(log))
        self._is_stopped = False

    @classmethod
    async def start(cls, spec: ChildSpec, environ: Mapping[str, str], log: LogSink) -> Child:
        process = await asyncio.create_subprocess_exec(
            *spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environ),
            limit=LINE_LIMIT_BYTES,
            start_new_session=True,
        )
        return cls(spec, process, log)

    async def wait(self) -> ChildDiedError:
        """Returns once the child has exited and its output was read to the end."""
        status = await self._process.wait()
        # A grandchild may hold the pipe open; the tail is worth a moment, not a hang.
        await asyncio.wait({self._reader}, timeout=1.0)
        return ChildDiedError(self.spec.name, describe_status(status), self._tail)

    def signal(self, number: signal.Signals) -> None:
        """Send ``number`` to the whole group; nothing happens when it is gone already."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def stop(self, deadline_s: float) -> None:
        """SIGTERM, then SIGKILL after ``deadline_s``; returns when the process is gone. Later calls do nothing."""
        if self._is_stopped:
            return
        if self._process.returncode is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._process.wait()
        # Also when it exited by itself: processes that it started are in its group.
        self.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_DEADLINE_S):
                await self._process.wait()
        self._is_stopped = True
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _forward(self, log: LogSink) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # one line beyond the limit; asyncio dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\n")
            self._tail.append(text)
            log.forward(self.spec.name, text)


class Supervisor:
    """Runs ``specs`` until a signal. ``on_ready`` is called with each spec that became ready, ``on_all_ready`` once."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        environ: Mapping[str, str],
        startup_timeout_s: float,
        on_ready: Callable[[ChildSpec], None],
        on_all_ready: Callable[[], None],
        log: TextIO | None = None,
        log_format: str = "text",
        stop_deadline_s: float = STOP_DEADLINE_S,
        first_backoff_s: float = 1.0,
    ) -> None:
        self._specs = list(specs)
        self._environ = dict(environ)
        self._startup_timeout_s = startup_timeout_s
        self._on_ready = on_ready
        self._on_all_ready = on_all_ready
        self._log = LogSink(log or sys.stderr, log_format)
        self._stop_deadline_s = stop_deadline_s
        self._first_backoff_s = first_backoff_s
        self._children: dict[str, Child] = {}

    async def run(self, stop: asyncio.Event) -> int:
        """Start, watch and stop everything; returns the exit status. ``stop`` set: stop and return 0."""
        work = asyncio.create_task(self._start_and_watch())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                self._say("stopping; requests in flight get their time to end, a second signal ends everything at once")
                return 0
            return work.result()
        finally:
            stopped.cancel()
            work.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
            await self._stop_all()

    def kill(self) -> None:
        """SIGKILL to every child now."""
        for child in self._children.values():
            child.signal(signal.SIGKILL)

    async def _start_and_watch(self) -> int:
        starting = {spec.name for spec in self._specs}
        all_ready = asyncio.Event()
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                await _all_or_first_error([self._start_with_all(spec, starting, all_ready) for spec in self._specs])
        except ChildDiedError as exc:
            self._report_death(exc, "while starting" if exc.name in starting else "while others were starting")
            return 1
        except TimeoutError:
            self._say(f"error: not ready after {self._startup_timeout_s:g} s; stopping")
            return 1
        self._on_all_ready()
        try:
            await _all_or_first_error([self._watch(spec) for spec in self._specs])
        except ChildDiedError as exc:
            self._report_death(exc, "and everything stops with it")
        return 1

    async def _start_with_all(self, spec: ChildSpec, starting: set[str], all_ready: asyncio.Event) -> None:
        """Start one child and wait until all are ready; raises ChildDiedError when it dies first. ``starting``: the
        names of those that are not ready yet; the last one sets ``all_ready``."""
        await self._start(spec)
        starting.remove(spec.name)
        if not starting:
            all_ready.set()
        await _unless_it_dies(self._children[spec.name], all_ready.wait())

    async def _start(self, spec: ChildSpec) -> None:
        """Start one child and wait until it is ready; raises ChildDiedError when it dies first."""
        child = self._children[spec.name] = await Child.start(spec, self._environ, self._log)
        await _unless_it_dies(child, _wait_ready(spec.url))
        self._on_ready(spec)

    async def _watch(self, spec: ChildSpec) -> None:
        """Restart one child whenever it dies; raises ChildDiedError for one that is not to be restarted."""
        backoff_s = self._first_backoff_s
        ready_at_s = time.monotonic()
        death = await self._children[spec.name].wait()
        while True:
            if not spec.is_restarted:
                raise death
            if time.monotonic() - ready_at_s > STEADY_AFTER_S:
                backoff_s = self._first_backoff_s
            await self._children[spec.name].stop(0.0)
            self._say(f"{death}; restarting it in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
            try:
                async with asyncio.timeout(self._startup_timeout_s):
                    await self._start(spec)
                ready_at_s = time.monotonic()
                death = await self._children[spec.name].wait()
            except ChildDiedError as exc:
                death, ready_at_s = exc, time.monotonic()
            except TimeoutError:
                death = ChildDiedError(spec.name, f"is not ready after {self._startup_timeout_s:g} s")
                ready_at_s = time.monotonic()

    async def _stop_all(self) -> None:
        for is_restarted in (False, True):
            children = [child for child in self._children.values() if child.spec.is_restarted is is_restarted]
            await asyncio.gather(*(child.stop(self._stop_deadline_s) for child in children))

    def _report_death(self, death: ChildDiedError, where: str) -> None:
        self._say(f"error: {death} {where}")
        if death.tail:
            self._say(f"the last lines of {death.name}:")
            for line in death.tail:
                self._log.repeat(line)

    def _say(self, text: str) -> None:
        self._log.say(text)


async def _all_or_first_error(works: Sequence[collections.abc.Coroutine[None, None, None]]) -> None:
    """Await all; the first error cancels the others and is raised as it is."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        for done in asyncio.as_completed(tasks):
            await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_it_dies(child: Child, work: collections.abc.Coroutine[None, None, object]) -> None:
    """Do ``work``; raises ChildDiedError when the child dies first."""
    exited = asyncio.create_task(child.wait())
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({exited, working}, return_when=asyncio.FIRST_COMPLETED)
        if exited.done():
            raise exited.result()
    finally:
        exited.cancel()
        working.cancel()
        await asyncio.gather(exited, working, return_exceptions=True)


async def _wait_ready(url: str) -> None:
    # The certificate names the address that clients use, not this one; it is this process's own child.
    async with httpx.AsyncClient(timeout=READY_TIMEOUT_S, trust_env=False, verify=False) as client:  # noqa: S501
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/ready")).status_code == 200:
                    return
            await asyncio.sleep(READY_POLL_S)


def check_port_free(host: str, port: int, what: str) -> None:
    """Raise ConfigError when something else listens on the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as exc:
        raise ConfigError(f"{what}: cannot listen on {host}:{port}: {exc.strerror}", param="--port") from exc
