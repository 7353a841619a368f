"""Clients that hang up at any moment, and processes that stand still."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.support.service import Node

WAIT_S = 30.0


class OpenRequest:
    """One POST over a socket of its own: reads as much of the answer as it is asked for; ``hang_up`` closes it.

    Leaving the context hangs up.
    """

    def __init__(self, url: str, route: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        host = urlsplit(url)
        assert host.hostname is not None
        content = json.dumps(body).encode()
        lines = [
            f"POST {route} HTTP/1.1",
            f"Host: {host.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        self._received = b""
        self._socket = socket.create_connection((host.hostname, host.port), timeout=WAIT_S)
        self._socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    def __enter__(self) -> OpenRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()

    def read_events(self, count: int) -> None:
        """Wait until ``count`` server-sent events of a 200 have come."""
        while self._received.count(b"data: ") < count:
            data = self._socket.recv(65536)
            assert data, f"the answer ended early: {self._received[-500:]!r}"
            self._received += data
            assert self._received.startswith(b"HTTP/1.1 200"[: len(self._received)]), self._received[:500]

    def read_to_end(self) -> bytes:
        """Everything that has come when the answer's last chunk is there, or the connection is closed."""
        while not self._received.endswith(b"\r\n0\r\n\r\n") and (data := self._socket.recv(65536)):
            self._received += data
        return self._received

    @property
    def has_answer(self) -> bool:
        """Whether anything of an answer has come; does not wait."""
        self._socket.setblocking(False)
        try:
            self._received += self._socket.recv(65536)
        except BlockingIOError:
            pass
        finally:
            self._socket.settimeout(WAIT_S)
        return bool(self._received)

    def hang_up(self) -> None:
        self._socket.close()


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Polls ``condition``; fails the test naming ``what`` when it never became true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def stopped(node: Node) -> Iterator[None]:
    """No thread of the node's process runs inside."""
    os.kill(node.process.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: set(_thread_states(node.process.pid)) == {"T"}, "the process to stand still")
        yield
    finally:
        os.kill(node.process.pid, signal.SIGCONT)


def _thread_states(pid: int) -> Iterator[str]:
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        yield stat.read_text().rpartition(")")[2].split()[0]
