"""How hosts are looked up, names that stand for several machines, ``dns+http://name:port``, and the address of this
one."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import urllib.parse
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from common.config.values import DNS_PREFIX, is_loopback_host

RESOLVE_TIMEOUT_S = 5.0
"""Seconds for an answer of DNS; a name that gives none in time is one that cannot be resolved."""

EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - not bound to, but looked up

LABEL = re.compile(r"[A-Za-z0-9-]{1,63}")
"""One part of a host name."""

Resolver = Callable[[str, int], Awaitable[Collection[str]]]
"""The addresses of a host (with the port it is asked for). Raises OSError, and UnicodeError for what can be no name."""


class SystemResolver:
    """The system's resolver: a ``Resolver``, for use on event loops. A lookup has a thread of its own.

    It cannot be ended: one that hangs keeps its thread for as long as the system lets it. Threads of the event loop's
    own are few, and everything else needs them; a pool's would all hang with the names that hang. So that threads do
    not add up either, there is one lookup of a name at a time: whoever asks meanwhile waits for its answer, and one
    that comes when nobody waits any more is for who asks next.
    """

    def __init__(self) -> None:
        self._lookups: dict[tuple[str, int], Future[list[Any]]] = {}  # whose answer nobody has had

    async def __call__(self, host: str, port: int) -> list[str]:
        return [str(address[0]) for *_, address in await self.look_up(host, port)]

    async def look_up(self, host: str, port: int) -> list[Any]:
        """As ``socket.getaddrinfo`` for TCP. Whoever stops waiting leaves the lookup to those that come later."""
        with contextlib.suppress(socket.gaierror):  # an address is no name: nobody is asked
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        lookup = self._lookups.get((host, port))
        if lookup is None or (lookup.done() and lookup.exception() is not None):
            lookup = Future()
            lookup.set_running_or_notify_cancel()  # from now on nobody cancels it
            threading.Thread(target=_look_up, args=(lookup, host, port), name=f"dns {host}", daemon=True).start()
            self._lookups[host, port] = lookup
        found = await asyncio.wrap_future(lookup)
        if self._lookups.get((host, port)) is lookup:
            del self._lookups[host, port]
        return found


def _look_up(lookup: Future[list[Any]], host: str, port: int) -> None:
    try:
        lookup.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except Exception as exc:  # noqa: BLE001  # raised again by those that wait
        lookup.set_exception(exc)


@dataclass(frozen=True, slots=True)
class DnsName:
    """A node at each address of the name. ``url``: ``dns+http://name:port``."""

    url: str

    async def node_urls(self, resolve: Resolver) -> set[str]:
        """Base URLs of the nodes that there are now.

        Raises:
            OSError: the name cannot be resolved (TimeoutError: in time).
        """
        parts = urllib.parse.urlsplit(self.url.removeprefix(DNS_PREFIX))
        port = parts.port or 80
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                addresses = await resolve(parts.hostname or "", port)
        except UnicodeError as exc:
            raise OSError(f"{type(exc).__name__}: {exc}") from exc
        return {f"http://{host_in_url(address)}:{port}" for address in addresses}

    def is_above(self, url: str) -> bool:
        """Whether ``url`` is of a node with a name of its own below this one, ``http://LABEL.name:port``, as pods of a
        Kubernetes StatefulSet have below their service. The one name is in the hands of whoever has the other."""
        parts = urllib.parse.urlsplit(self.url.removeprefix(DNS_PREFIX))
        label, _, place = url.removeprefix("http://").partition(".")
        return place.lower() == f"{parts.hostname}:{parts.port or 80}" and LABEL.fullmatch(label) is not None


def host_in_url(host: str) -> str:
    """IPv6 addresses stand in brackets."""
    return f"[{host}]" if ":" in host else host


def own_host(host: str) -> str:
    """Where others reach a process that listens at ``host``: there, or, when that is every address of this machine or
    container, at the one that its own name stands for. ``host`` again where that is nothing that others reach."""
    if host in EVERY_ADDRESS:
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            addresses = [str(address[0]) for *_, address in found if not is_loopback_host(str(address[0]))]
            return min(addresses, key=lambda address: ":" in address, default=host)  # IPv4 where there is one
    return host
