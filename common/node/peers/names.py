"""Peers that are given as a name, ``--peers dns+http://prefill:8100``: nodes at its addresses come and go.

The name is resolved again and again, so that a request's address can be looked up without waiting. One that cannot be
resolved keeps its last answer: DNS that is down must not part nodes that work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from common.config.dns import DnsName, Resolver, SystemResolver
from common.config.values import DNS_PREFIX

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Seconds between two resolutions: shorter than a node takes from its first packet to its first request."""


class PeerNames:
    """Lives on the event loop between ``start`` and ``close``; one task per name."""

    def __init__(self, urls: Sequence[str], *, interval_s: float = INTERVAL_S, resolve: Resolver | None = None) -> None:
        """``resolve``: instead of the system's resolver."""
        self._known: dict[DnsName, frozenset[str]] = {
            DnsName(url): frozenset() for url in urls if url.startswith(DNS_PREFIX)
        }
        self._interval_s = interval_s
        self._resolve = resolve or SystemResolver()
        self._tasks: list[asyncio.Task[None]] = []

    def __contains__(self, url: str) -> bool:
        """Whether a node at this base URL stands behind one of the names."""
        return any(url in urls for urls in self._known.values())

    def have_below(self, url: str) -> bool:
        """Whether this base URL is of a host below one of the names."""
        return any(name.is_above(url) for name in self._known)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(name), name=f"peers {name.url}") for name in self._known]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, name: DnsName) -> None:
        is_warned = False
        while True:
            try:
                self._known[name] = frozenset(await name.node_urls(self._resolve))
                is_warned = False
            except OSError as exc:
                if not is_warned:
                    logger.warning("peers url=%s: %s: %s", name.url, type(exc).__name__, exc)
                is_warned = True
            await asyncio.sleep(self._interval_s)
