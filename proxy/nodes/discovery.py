"""Nodes behind a DNS name that is resolved again and again, as a Kubernetes headless service needs it.

``--decode dns+http://name:8200`` means: each address of ``name`` is a node. 1 a new address joins the pool, 2 an
address that is no longer in the answer drains: nothing new, its open requests go on, and it is gone after the last
one, 3 one that comes back is used again. A name that cannot be resolved changes nothing: DNS that is down must not take
nodes along, and nodes that are gone show that themselves. What an operator drained or removed stays so until its
address leaves the answer. An address that several names have leaves with the last of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.config.dns import DnsName, Resolver, SystemResolver
from common.config.values import DNS_PREFIX
from common.errors import InvalidRequestError
from proxy.nodes.node import NodeRole
from proxy.nodes.pool import NodePool

logger = logging.getLogger(__name__)

_LEFT = "its address has left"


@dataclass(slots=True)
class DnsTarget:
    """One ``dns+http`` URL of a role's flag. ``known``: the URLs of the last answer."""

    url: str
    role: NodeRole
    known: set[str] = field(default_factory=set)


def split_urls(urls: Sequence[str], role: NodeRole) -> tuple[list[str], list[DnsTarget]]:
    """A flag's URLs: those of nodes, and those of names."""
    names = [DnsTarget(url, role) for url in urls if url.startswith(DNS_PREFIX)]
    return [url for url in urls if not url.startswith(DNS_PREFIX)], names


class Discovery:
    """Lives on the event loop between ``start`` and ``close``; one task per name."""

    def __init__(
        self,
        pool: NodePool,
        targets: Sequence[DnsTarget],
        *,
        interval_s: float,
        resolve: Resolver | None = None,
    ) -> None:
        self._pool = pool
        self._targets = list(targets)
        self._interval_s = interval_s
        self._resolve = resolve or SystemResolver()
        self._tasks: list[asyncio.Task[None]] = []
        for target in self._targets:
            pool.missing[target.url] = (target.role, f"{target.url}: not resolved yet")

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run(target), name=f"dns {target.url}") for target in self._targets]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, target: DnsTarget) -> None:
        while True:
            await self.resolve_once(target)
            await asyncio.sleep(self._interval_s)

    async def resolve_once(self, target: DnsTarget) -> None:
        """Resolve once and bring the pool in line with the answer. Never raises on what DNS does."""
        try:
            answer = await DnsName(target.url).node_urls(self._resolve)
        except OSError as exc:
            self._say(target, f"{target.url}: {type(exc).__name__}: {exc}".rstrip(": "))
            return
        refused = set()
        problem = None if answer else f"{target.url}: no address"
        for url in sorted(answer - target.known):
            if self._is_kept_out(url, target):
                continue
            try:
                node = self._pool.add(url, target.role, origin=target.url)
            except InvalidRequestError as exc:
                problem = f"{target.url}: {exc.message}"
                refused.add(url)
                continue
            if any(url not in each.known for each in self._targets if each.url == node.origin):
                node.origin = target.url  # it was leaving another name
        for url in sorted(target.known - answer):
            leaving, other = self._pool.find(url), self._other_name(url, target)
            if leaving is None or leaving.origin != target.url:
                continue
            if other is None:
                self._pool.remove(leaving, f"{_LEFT} {target.url}")
            else:
                leaving.origin = other.url
        target.known = answer - refused
        self._say(target, problem)

    def _other_name(self, url: str, target: DnsTarget) -> DnsTarget | None:
        """Another of the same role whose last answer has the node."""
        others = (each for each in self._targets if each is not target and each.role is target.role)
        return next((each for each in others if url in each.known), None)

    def _is_kept_out(self, url: str, target: DnsTarget) -> bool:
        """Whether an operator has drained the node, or removed it while another name had it."""
        node = self._pool.find(url)
        if node is None:
            return self._other_name(url, target) is not None
        return node.role is target.role and node.hold_reason is not None and not node.hold_reason.startswith(_LEFT)

    def _say(self, target: DnsTarget, problem: str | None) -> None:
        old = self._pool.missing.get(target.url)
        if problem is None:
            self._pool.missing.pop(target.url, None)
        else:
            self._pool.missing[target.url] = (target.role, problem)
        if problem is not None and (old is None or old[1] != problem):
            logger.warning("discovery role=%s %s", target.role.value, problem)
