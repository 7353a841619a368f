"""Names that stand for several machines, ``dns+http://name:port``, and the address of this one."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import urllib.parse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.config.values import DNS_PREFIX, is_loopback_host

RESOLVE_TIMEOUT_S = 5.0
"""Seconds for an answer of DNS; a name that gives none in time is one that cannot be resolved."""

EVERY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - not bound to, but looked up

LABEL = re.compile(r"[A-Za-z0-9-]{1,63}")
"""One part of a host name."""

Resolver = Callable[[str, int], Awaitable[set[str]]]
"""The addresses of a host (with the port it is asked for). Raises OSError."""


async def resolve_host(host: str, port: int) -> set[str]:
    """All addresses of a name, by the system's resolver. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {str(address[0]) for _, _, _, _, address in found}


@dataclass(frozen=True, slots=True)
class DnsName:
    """A node at each address of the name. ``url``: ``dns+http://name:port``."""

    url: str

    async def node_urls(self, resolve: Resolver = resolve_host) -> set[str]:
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
