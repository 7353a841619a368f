"""DNS that says what a test wants, or nothing, in the place of the system's resolver."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

_real = socket.getaddrinfo


class FakeDns:
    """``answers``: addresses of a name; none: it fails. ``hanging``: names whose lookups wait for ``go_on``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Sequence[str]) -> None:
        self.answers = {host.replace("_", "."): addresses for host, addresses in answers.items()}
        self.hanging: set[str] = set()
        self.go_on = threading.Event()
        self.asked: list[str] = []
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(
        self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[Any]:
        if host not in self.answers or flags & socket.AI_NUMERICHOST:
            return _real(host, port, family, type, proto, flags)
        self.asked.append(host)
        if host in self.hanging:
            assert self.go_on.wait(60)
        if not self.answers[host]:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [each for address in self.answers[host] for each in _real(address, port, family, type, proto, flags)]


class _NoThreads(ThreadPoolExecutor):
    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        raise AssertionError("one of the event loop's own threads was asked for")


def refuse_loop_threads() -> None:
    """From now on nothing on this event loop gets one of the threads that all its work shares."""
    asyncio.get_running_loop().set_default_executor(_NoThreads(1))
