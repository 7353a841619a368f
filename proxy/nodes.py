"""The nodes that the proxy drives, and what it knows about them.

Life cycle of a node's record: 1 made from its URL, *down* until heard of, 2 polled at ``/ready``; on the first 200
its ``/internal/v1/info`` is read and it is *up*, 3 a failed poll or a refused connection takes it *down* with the
reason; polls back off and go on, so that a restarted node comes back by itself, 4 ``NodePool.close`` ends polling and
connections. Only configured nodes are ever called.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from proxy.node_load import LoadReport, NodeLoad

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 2.0
MAX_BACKOFF_S = 2.0
KEEP_ALIVE_S = 4.0  # below the 5 s after which a plain uvicorn closes an idle connection
REASON_LENGTH = 300
ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - what a node listens on, not where it is reached


class NodeRole(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says about itself; None where it does not say (nodes of other makes).

    ``pull``: it can follow a prompt that a peer still computes, and lets itself be followed. ``host`` and ``port``:
    where its peers reach it. ``epoch``: its life.
    """

    name: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    fingerprint: str | None = None
    pull: bool = False
    host: str | None = None
    port: int | None = None
    epoch: str | None = None
    load: LoadReport | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> NodeInfo:
        def text(*keys: str) -> str | None:
            return next((body[key] for key in keys if isinstance(body.get(key), str)), None)

        length, port = body.get("max_model_len"), body.get("port")
        return cls(
            name=text("node_name", "name"),
            model=text("served_model_name", "model"),
            max_model_len=length if isinstance(length, int) else None,
            fingerprint=text("fingerprint"),
            pull=body.get("pull") is True,
            host=text("host"),
            port=port if isinstance(port, int) and 0 < port < 65_536 else None,
            epoch=text("epoch"),
            load=LoadReport.from_json(body.get("load")),
        )


@dataclass(eq=False, slots=True)
class Node:
    """One node. ``num_in_flight`` counts the legs that this proxy has open on it."""

    url: str
    role: NodeRole
    client: httpx.AsyncClient
    info: NodeInfo = field(default_factory=NodeInfo)
    is_up: bool = False
    reason: str = "not heard of yet"
    num_in_flight: int = 0
    load: NodeLoad = field(default_factory=NodeLoad)
    poll_now: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.info.name or urllib.parse.urlsplit(self.url).netloc

    @property
    def transfer_address(self) -> tuple[str, int]:
        """Host and port at which other nodes reach this one: what it says itself, else as the proxy does."""
        parts = urllib.parse.urlsplit(self.url)
        host, port = self.info.host, self.info.port
        if host is None or host in ANY_ADDRESS:
            host = parts.hostname or ""
        return host, port or parts.port or 80

    def source_hint(self) -> dict[str, Any] | None:
        """This node as a place where part of a prompt may be; None when it cannot be asked."""
        if not self.info.pull or self.info.epoch is None:
            return None
        host, port = self.transfer_address
        return {"url": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", "epoch": self.info.epoch}

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    def mark_up(self, info: NodeInfo) -> None:
        if not self.is_up:
            logger.info("node up node=%s role=%s model=%s", self.url, self.role.value, info.model)
        self.info, self.is_up, self.reason = info, True, ""
        self.load.update(info.load, time.monotonic())

    def mark_down(self, reason: str) -> None:
        if self.is_up or reason != self.reason:
            # Not up yet is how every start looks; up no longer is news.
            level = logging.WARNING if self.is_up else logging.INFO
            logger.log(level, "node down node=%s role=%s reason=%s", self.url, self.role.value, reason)
        self.is_up, self.reason = False, reason

    def suspect(self, reason: str, *, down: bool) -> None:
        """A leg met trouble: look at the node now; until then count it as ``down`` if it refused the connection."""
        if down:
            self.mark_down(reason)
        self.poll_now.set()


class NodePool:
    """All nodes of one proxy, with one polling task each."""

    def __init__(
        self,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        *,
        create_client: Callable[[str], httpx.AsyncClient],
        poll_interval_s: float,
        headers: Mapping[str, str],
    ) -> None:
        self.prefill = [Node(url, NodeRole.PREFILL, create_client(url)) for url in prefill_urls]
        self.decode = [Node(url, NodeRole.DECODE, create_client(url)) for url in decode_urls]
        self._poll_interval_s = poll_interval_s
        self._headers = dict(headers)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def nodes(self) -> list[Node]:
        return [*self.prefill, *self.decode]

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._poll_forever(node), name=f"poll {node.url}") for node in self.nodes]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self.nodes:
            await node.client.aclose()

    def usable(self, role: NodeRole) -> list[Node]:
        return [node for node in (self.prefill if role is NodeRole.PREFILL else self.decode) if node.is_up]

    def reasons(self) -> list[str]:
        """Why the pool cannot serve; empty when each role that is configured has a usable node."""
        reasons = []
        for role, nodes in ((NodeRole.PREFILL, self.prefill), (NodeRole.DECODE, self.decode)):
            if nodes and not any(node.is_up for node in nodes):
                detail = "; ".join(f"{node.url}: {node.reason}" for node in nodes)
                reasons.append(f"no {role.value} node is ready ({detail})")
        return reasons

    def served_models(self) -> set[str]:
        return {node.info.model for node in self.nodes if node.is_up and node.info.model is not None}

    async def _poll_forever(self, node: Node) -> None:
        num_failures = 0
        while True:
            await self.poll(node)
            num_failures = 0 if node.is_up else num_failures + 1
            delay_s = self._poll_interval_s * 2 ** min(max(num_failures - 1, 0), 10)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.poll_now.wait(), min(delay_s, max(MAX_BACKOFF_S, self._poll_interval_s)))
            node.poll_now.clear()

    async def poll(self, node: Node) -> None:
        """Look at one node and update its record. Never raises on what the node does."""
        try:
            answer = await node.client.get("/ready", timeout=POLL_TIMEOUT_S)
            if answer.status_code != 200:
                node.mark_down(_not_ready_reason(answer))
                return
            info = await self._read_info(node)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
            node.mark_down(describe(exc))
            return
        if (other := self._other_fingerprint(node, info)) is not None:
            node.mark_down(f"serves fingerprint {info.fingerprint}, the other nodes {other}")
            return
        node.mark_up(info)

    async def _read_info(self, node: Node) -> NodeInfo:
        # Asked at every poll: a node restarted between two polls may serve another model.
        answer = await node.client.get("/internal/v1/info", headers=self._headers, timeout=POLL_TIMEOUT_S)
        if answer.status_code == 200:
            body = answer.json()
            if not isinstance(body, dict):
                raise ValueError("/internal/v1/info is not a JSON object")
            return NodeInfo.from_json(body)
        if answer.status_code != 404:
            raise ValueError(f"/internal/v1/info answers {answer.status_code}")
        return NodeInfo()

    def _other_fingerprint(self, node: Node, info: NodeInfo) -> str | None:
        if info.fingerprint is None:
            return None
        others = (other.info.fingerprint for other in self.nodes if other is not node and other.is_up)
        return next((each for each in others if each is not None and each != info.fingerprint), None)


def describe(exc: Exception) -> str:
    """One line about a failed call; httpx leaves some messages empty."""
    return f"{type(exc).__name__}: {exc}".rstrip(": ")[:REASON_LENGTH]


def _not_ready_reason(answer: httpx.Response) -> str:
    return f"/ready answers {answer.status_code} {answer.text[:REASON_LENGTH]}".rstrip()
