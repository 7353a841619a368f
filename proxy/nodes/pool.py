"""The nodes of one proxy: who belongs to it, in which state, and who is told when a node's life begins or ends.

Nodes come from flags, from DNS (``proxy.nodes.discovery``) and from the operator (``proxy.http.admin``); no other
address is ever called. One task per node probes its health (``proxy.nodes.health_probe``). Each probe reads what the
node says about itself, because a node that was restarted between two probes may serve another model; a node of another
model than the rest is refused. A node that is to leave gets nothing new and is gone when its last leg has ended. A node
that answers no probe for a while (frozen, or its machine is gone: no connection breaks) is given up with everything
that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from common.errors import InvalidRequestError
from proxy.node_http.client import NodeClient
from proxy.node_http.errors import describe
from proxy.nodes.breaker import Breaker
from proxy.nodes.health_probe import PROBE_LIMIT_S, probe
from proxy.nodes.node import Node, NodeInfo, NodeRole, NodeState

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 2.0
"""Longest pause in seconds between two probes of a node that does not answer, unless the usual interval is longer."""
MODEL_HOLD_S = 10.0
"""Seconds for which a node that fell silent still says which model the pool serves: a short silence must not let a node
of another model in."""
SILENT_PAUSE_S = 0.05
"""Seconds between two probes of a silent node on which requests wait."""
CLOSE_DELAY_S = 5.0
"""Seconds for which a removed node's connections stay open: leases that are released in the background need them."""


class NodeListener(Protocol):
    """Called on the event loop; must not block. ``node_up``: first ready in this life (epoch). ``node_gone``: removed,
    or restarted (then ``node_up`` follows): whatever it had is lost."""

    def node_up(self, node: Node) -> None: ...

    def node_gone(self, node: Node) -> None: ...


class NodePool:
    """All nodes of one proxy. Made and used on the event loop."""

    def __init__(
        self,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        *,
        create_client: Callable[[str], NodeClient],
        poll_interval_s: float,
        headers: Mapping[str, str],
        create_breaker: Callable[[str], Breaker] = Breaker,
        node_kind: str = "auto",
        max_silence_s: float = 5.0,
    ) -> None:
        self._max_silence_s = max_silence_s
        self._node_kind = node_kind
        self._create_client = create_client
        self._create_breaker = create_breaker
        self._poll_interval_s = poll_interval_s
        self._headers = dict(headers)
        self._nodes: dict[str, Node] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: set[Node] = set()  # gone, their connections still open
        self._listeners: list[NodeListener] = []
        self._announced: dict[Node, str | None] = {}
        self._is_started = False
        self.missing: dict[str, tuple[NodeRole, str]] = {}
        """Names that should give nodes and give none, with role and reason (``proxy.nodes.discovery``)."""
        for urls, role in ((prefill_urls, NodeRole.PREFILL), (decode_urls, NodeRole.DECODE)):
            for url in urls:
                self.add(url, role)

    def start(self) -> None:
        self._is_started = True
        for node in self.nodes:
            self._start_polling(node)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in (*self.nodes, *self._leaving):
            await node.client.close()

    # --- which nodes

    @property
    def nodes(self) -> list[Node]:
        """All of them, prefill nodes first."""
        return sorted(self._nodes.values(), key=lambda node: node.role is NodeRole.DECODE)

    def usable(self, role: NodeRole) -> list[Node]:
        """Who may be given work. When no decode node is left, those that are only late: a node in the middle of a burst
        may miss a probe, and nobody else could answer. A prompt does not need a late prefill node: the decode node can
        compute it."""
        usable = [node for node in self._nodes.values() if node.role is role and node.is_usable]
        if usable or role is NodeRole.PREFILL:
            return usable
        return [node for node in self._nodes.values() if node.role is role and node.is_late(self._max_silence_s)]

    def reasons(self) -> list[str]:
        """Why the pool cannot serve; empty when each role that should have nodes has a usable one."""
        reasons = []
        for role in NodeRole:
            nodes = [node for node in self._nodes.values() if node.role is role]
            missing = [reason for of, reason in self.missing.values() if of is role]
            is_expected = nodes or missing or role is NodeRole.DECODE
            if is_expected and not self.usable(role):
                detail = "; ".join([*(f"{node.url}: {node.unusable_reason}" for node in nodes), *missing])
                reasons.append(f"no {role.value} node is ready ({detail or 'none is known'})")
        return reasons

    def is_foreign(self) -> bool:
        """Whether all nodes are servers of another make."""
        return bool(self._nodes) and all(node.is_vllm for node in self._nodes.values())

    def served_models(self) -> set[str]:
        infos = [node.info for node in self._nodes.values() if node.is_up and node.info.model is not None]
        return {model for info in infos for model in (info.model, *info.more_models) if model is not None}

    def max_model_len(self) -> int | None:
        """The longest context of a node that is up; None when none says."""
        return max(self._model_lens(), default=None)

    def shortest_model_len(self) -> int | None:
        """The shortest context of a node that is up; None when none says."""
        return min(self._model_lens(), default=None)

    def _model_lens(self) -> list[int]:
        lengths = (node.info.max_model_len for node in self._nodes.values() if node.is_up)
        return [length for length in lengths if length is not None]

    # --- who belongs to it

    def find(self, url: str) -> Node | None:
        return self._nodes.get(url)

    def add(self, url: str, role: NodeRole, *, origin: str = "flag") -> Node:
        """A node of the pool at ``url``; one that is there already is taken back from draining and leaving.

        Raises InvalidRequestError when it is there in another role.
        """
        node = self._nodes.get(url)
        if node is None:
            node = self._nodes[url] = Node(
                url, role, self._create_client(url), origin, breaker=self._create_breaker(url)
            )
            logger.info("node added node=%s role=%s origin=%s", url, role.value, origin)
            if self._is_started:
                self._start_polling(node)
            return node
        if node.role is not role:
            raise InvalidRequestError(f"role {role.value}: {url} is a {node.role.value} node already", param="role")
        node.take_back()
        node.poll_now.set()
        return node

    def drain(self, node: Node, reason: str) -> None:
        """Nothing new goes to ``node`` until it is added again; what it has goes on."""
        node.hold_reason = reason
        if node.is_up:
            node.mark_draining(reason)

    def remove(self, node: Node, reason: str) -> None:
        """``node`` drains, and is gone when its last leg has ended (at once when it has none)."""
        self.drain(node, reason)
        node.is_leaving = True
        node.poll_now.set()
        if not node.num_in_flight:
            self._forget(node)

    # --- who is told

    def subscribe(self, listener: NodeListener) -> None:
        """``listener`` is told of every node's lives from now on, and at once of those that are up."""
        self._listeners.append(listener)
        for node in self._announced:
            self._tell(listener.node_up, node)

    def _announce(self, node: Node) -> None:
        epoch = node.info.epoch
        if node in self._announced:
            if self._announced[node] == epoch:
                return
            self._tell_all_gone(node)
        self._announced[node] = epoch
        for listener in self._listeners:
            self._tell(listener.node_up, node)

    def _tell_all_gone(self, node: Node) -> None:
        if self._announced.pop(node, False) is not False:
            for listener in self._listeners:
                self._tell(listener.node_gone, node)

    @staticmethod
    def _tell(what: Callable[[Node], None], node: Node) -> None:
        try:
            what(node)
        except Exception:  # one listener's bug must not end polling, and with it everything
            logger.exception("a listener failed node=%s", node.url)

    # --- health probes

    def _start_polling(self, node: Node) -> None:
        self._start_task(self._poll_forever(node), f"poll {node.url}")

    def _start_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _poll_forever(self, node: Node) -> None:
        num_failures = 0
        while node.state is not NodeState.GONE:
            try:
                await self.poll(node)
            except Exception as exc:  # or this node would never be probed again
                logger.exception("a health probe failed node=%s", node.url)
                node.mark_suspect(describe(exc))
            if node.is_leaving and not node.num_in_flight:
                self._forget(node)
                return
            num_failures = 0 if node.is_up else num_failures + 1
            delay_s = self._poll_interval_s * 2 ** min(max(num_failures - 1, 0), 10)
            if node.silent_since_s is not None and node.num_in_flight:
                delay_s = min(delay_s, SILENT_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(delay_s, max(MAX_BACKOFF_S, self._poll_interval_s))):
                    await node.poll_now.wait()
            node.poll_now.clear()

    async def poll(self, node: Node) -> None:
        """Probe one node and update its record. Never raises on what the node does."""
        started_s = time.monotonic()
        probed = await probe(node.client, self._node_kind, self._headers)
        if not probed.is_silent:
            node.silent_since_s = None
        elif node.silent_since_s is None:
            # Not given up for one missed probe: it may be this process that stood still. For as long as the probe took
            # beyond its own limits, it was.
            node.silent_since_s = max(started_s, time.monotonic() - PROBE_LIMIT_S)
        elif node.silence_s >= self._max_silence_s:
            node.client.give_up(self._max_silence_s)
        if probed.info is not None:
            self._take_info(node, probed.info)
        elif probed.is_draining:
            node.mark_draining(probed.problem)
        else:
            node.mark_suspect(probed.problem)

    def _take_info(self, node: Node, info: NodeInfo) -> None:
        if (refusal := self._refusal(node, info)) is not None:
            node.refuse(info, refusal)
            return
        node.mark_ready(info, self._neighbours(node))
        if node.is_up:
            self._announce(node)

    def _neighbours(self, node: Node) -> list[Node]:
        """The other nodes that are up at the same host; none before its first report."""
        others = (other for other in self._nodes.values() if other.machine == node.machine and other is not node)
        return [other for other in others if other.is_up]

    def _refusal(self, node: Node, info: NodeInfo) -> str | None:
        """Why what ``node`` says about itself does not fit; None when it does."""
        if info.role in ("prefill", "decode") and info.role != node.role.value:
            return f"refused: it is a {info.role} node, configured as a {node.role.value} node"
        if info.fingerprint is None:
            return None
        for other in self._nodes.values():
            known = other.info.fingerprint
            if other is not node and self._says_model(other) and known not in (None, info.fingerprint):
                return f"refused: serves fingerprint {info.fingerprint}, {other.url} and the pool {known}"
        return None

    @staticmethod
    def _says_model(node: Node) -> bool:
        if node.is_refused or node.heard_s is None:
            return False
        return node.is_up or time.monotonic() - node.heard_s < MODEL_HOLD_S

    def _forget(self, node: Node) -> None:
        if self._nodes.get(node.url) is not node:
            return
        del self._nodes[node.url]
        node.mark_gone()
        node.poll_now.set()  # its poller sees that it is gone, and ends
        self._tell_all_gone(node)
        self._leaving.add(node)
        self._start_task(self._close_client_later(node), f"close {node.url}")

    async def _close_client_later(self, node: Node) -> None:
        await asyncio.sleep(CLOSE_DELAY_S)
        self._leaving.discard(node)
        await node.client.close()
