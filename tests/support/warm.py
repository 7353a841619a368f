"""Nodes and proxies forked from a process that has their imports behind it: see ``tests.support.warm_server``."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
START_TIMEOUT_S = 120.0


def die_with_parent() -> None:
    """A test run that is killed must not leave nodes behind: each has a session of its own."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class WarmPopen:
    """A forked process, in the words of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, status: int) -> None:
        self.returncode = status
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class WarmServer:
    """The client of one warm server, which ends when this process does. Safe from several threads."""

    def __init__(self, root: Path, connection: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        """``process``: of the server, kept as long as this."""
        self._root = root
        self._connection = connection
        self._process = process
        self._lock = threading.Lock()
        self._started: queue.Queue[WarmPopen | None] = queue.Queue()
        threading.Thread(target=self._read, name="warm-server", daemon=True).start()

    def start(self, module: str, argv: Sequence[str], log: Path, environment: dict[str, str]) -> WarmPopen:
        log.touch()
        request = {
            "module": module,
            "argv": list(argv),
            "environment": environment,
            "cwd": str(self._root),
            "log": str(log),
        }
        with self._lock:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            popen = self._started.get(timeout=START_TIMEOUT_S)
        assert popen is not None, "the warm server has ended"
        return popen

    def _read(self) -> None:
        running: dict[int, WarmPopen] = {}
        for line in self._connection.makefile("rb"):
            message = json.loads(line)
            if "status" in message:
                running.pop(message["pid"]).end(message["status"])
            else:
                popen = running[message["pid"]] = WarmPopen(message["pid"])
                self._started.put(popen)
        # Its children died with it.
        for popen in running.values():
            popen.end(-signal.SIGKILL)
        self._started.put(None)


inherited: list[socket.socket] = []
"""The connection of a warm server that is there already (``tests.support.forked_workers``)."""


@functools.cache
def warm_server(root: Path) -> WarmServer:
    """One for the whole test run, made at the first use."""
    if inherited:
        return WarmServer(root, inherited.pop())
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-m", "tests.support.warm_server"]
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            argv, cwd=root, stdin=theirs, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
        )
    return WarmServer(root, ours, process)
