"""Real processes for tests: nodes and proxies on free loopback ports, started, waited for, and always ended, by pid.

``Service`` is one prefill node, one decode node and a proxy (any number of each). Logs go to files; a process that dies
at start raises with the end of its log.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx

from common.wire.routes import CACHE_CHECK_ROUTE, READY_ROUTE
from tests.support.warm import WarmPopen, die_with_parent, warm_server

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
DRAIN_WAIT_S = 5.0
PORTS = (10_240, 32_000)
LATE_DEVICE_VARIABLE = "LATE_DEVICE"
"""Environment variable of a test run: ``1`` gives every node a late device (``tests.support.late_device``)."""


def free_port(*offsets: int) -> int:
    """A port that is free now, and so are those ``offsets`` above it.

    Drawn below the range from which the system takes ports for outgoing connections: a process that is seconds away
    from listening must not lose its port to one.
    """
    while True:
        port = random.randrange(*PORTS)
        with contextlib.ExitStack() as stack:
            try:
                for each in (port, *(port + offset for offset in offsets)):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", each))
            except OSError:
                continue
            return port


def child_environment(**extra: str) -> dict[str, str]:
    """This process's environment without the user's own ``TANDEM_*`` settings, one thread per process."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return environment | extra


class Process:
    """One process in a process group of its own, its output in a file."""

    def __init__(self, argv: Sequence[str], log: Path, **environment: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self.popen: subprocess.Popen[bytes] | WarmPopen = subprocess.Popen(
                argv,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(**environment),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def tail(self, num_chars: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-num_chars:]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the process: asks, asks again when it still drains (which ends it at once), then SIGKILL. Returns its
        exit status."""
        for wait_s in (DRAIN_WAIT_S, STOP_TIMEOUT_S):
            if self.popen.poll() is None:
                self.popen.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.popen.wait(wait_s)
        if self.popen.poll() is None:
            self.kill()
        return int(self.popen.wait())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(STOP_TIMEOUT_S)


class WarmProcess(Process):
    """``python -m module argv`` without the seconds of its imports."""

    def __init__(self, module: str, argv: Sequence[str], log: Path, **environment: str) -> None:
        self.log = log
        self.popen = warm_server(ROOT).start(module, argv, log, child_environment(**environment))


@dataclass
class Node:
    """A running node or proxy."""

    role: str
    url: str
    process: Process

    def check_cache(self) -> dict[str, object]:
        """``/internal/v1/cache/check`` of a node: {"ok", "violations", "blocks", "slots", "leases", "sequences"}."""
        response = httpx.get(self.url + CACHE_CHECK_ROUTE, timeout=30)
        response.raise_for_status()
        return dict(response.json())


def start_node(
    role: str,
    model: Path,
    folder: Path,
    *flags: str,
    port: int | None = None,
    program: Sequence[str] = (),
    **environment: str,
) -> Node:
    """``role`` is ``prefill`` or ``decode``. ``program``: a module that runs in place of the role's own, and the words
    that it takes before the flags. Does not wait: see ``wait_ready``."""
    port = port or free_port()
    usual = ("tests.support.late_node", role) if os.environ.get(LATE_DEVICE_VARIABLE) else (f"{role}_node",)
    module, *words = program or usual
    argv = [*words, "--model", str(model), "--port", str(port), "--device", "cpu", *flags]
    environment = {"TANDEM_TEST_HOOKS": "1", **environment}
    process = WarmProcess(module, argv, folder / f"{role}-{port}.log", **environment)
    return Node(role, f"http://127.0.0.1:{port}", process)


def start_proxy(
    prefill: Sequence[Node], decode: Sequence[Node], folder: Path, *flags: str, program: str = "proxy"
) -> Node:
    port = free_port()
    argv = ["--port", str(port), "--health-interval-seconds", "0.5"]
    # Most tests are about the handoff: without other flags every prompt takes it.
    argv += ["--policy", "round_robin"]
    if prefill:
        argv += ["--prefill", *(node.url for node in prefill)]
    argv += ["--decode", *(node.url for node in decode), *flags]
    return Node("proxy", f"http://127.0.0.1:{port}", WarmProcess(program, argv, folder / f"proxy-{port}.log"))


def wait_ready(node: Node, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if node.process.popen.poll() is not None:
            raise AssertionError(f"{node.role} exited with {node.process.popen.returncode}:\n{node.process.tail()}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(node.url + READY_ROUTE, timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"{node.role} not ready after {timeout_s} s:\n{node.process.tail()}")


@dataclass
class Service:
    """Context manager: everything is ready inside, and ended after it. ``is_faulty``: nodes take faults from marked
    requests (``tests.support.faulty_node``). ``program``: a module that runs in place of the nodes' own."""

    model: Path
    prefill_flags: Sequence[str] = ()
    decode_flags: Sequence[str] = ()
    proxy_flags: Sequence[str] = ()
    num_prefill: int = 1
    num_decode: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    is_faulty: bool = False
    program: str = ""
    prefill: list[Node] = field(default_factory=list, init=False)
    decode: list[Node] = field(default_factory=list, init=False)
    proxy: Node = field(init=False)

    def __enter__(self) -> Service:
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-service-")
        folder = Path(self._folder.name)
        try:
            for nodes, role, flags, number in (
                (self.prefill, "prefill", self.prefill_flags, self.num_prefill),
                (self.decode, "decode", self.decode_flags, self.num_decode),
            ):
                nodes += [self._start(role, folder, *flags) for _ in range(number)]
            for node in (*self.prefill, *self.decode):
                wait_ready(node)
            self.proxy = start_proxy(self.prefill, self.decode, folder, *self.proxy_flags)
            wait_ready(self.proxy, 30)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is not None:
            for node in self.nodes:
                sys.stderr.write(f"--- end of the log of {node.role} {node.url}\n{node.process.tail()}\n")
        self._stop()

    @property
    def nodes(self) -> Iterator[Node]:
        yield from (*self.prefill, *self.decode)
        if hasattr(self, "proxy"):
            yield self.proxy

    @property
    def url(self) -> str:
        return self.proxy.url

    def start_again(self, node: Node) -> None:
        """A new process for a node that has ended, on the same port with the same flags. Does not wait."""
        node.process.stop()
        flags = self.prefill_flags if node.role == "prefill" else self.decode_flags
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        port = int(node.url.rpartition(":")[2])
        node.process = self._start(node.role, folder, *flags, port=port).process

    def bring_back(self, node: Node, wait_s: float = 0.5) -> None:
        """After ``node`` stood still: UCX may end a holder that wakes up with answers nobody waits for any more
        (docs/failures.md); such a one is started again."""
        time.sleep(wait_s)
        if node.process.popen.poll() is not None:
            self.start_again(node)
            wait_ready(node)

    def _start(self, role: str, folder: Path, *flags: str, port: int | None = None) -> Node:
        module = "tests.support.faulty_node" if self.is_faulty else self.program
        program = (module, role) if module else ()
        return start_node(role, self.model, folder, *flags, port=port, program=program, **self.environment)

    def _stop(self) -> None:
        for node in reversed(list(self.nodes)):
            node.process.stop()
        self._folder.cleanup()
