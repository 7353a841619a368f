"""One node that the proxy drives, and what the proxy knows about it.

Life of a record: 1 ``new``, made from a URL, not heard of yet, 2 ``ready``: its ``/ready`` answered 200 and what it
says about itself fits the pool, 3 ``suspect``: it does not answer, is not ready, or is refused; ``draining``: it
finishes what it has and gets nothing new. From both it comes back by itself when it is ready again, 4 ``gone``: removed
from the pool; an end. ``is_usable`` is the one question that decides whether it gets work.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.node_http.client import NodeClient
from proxy.nodes.breaker import Breaker
from proxy.nodes.contention import Contention
from proxy.nodes.load import LoadReport, NodeLoad

logger = logging.getLogger(__name__)

ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - what a node listens on, not where it is reached


class NodeRole(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class NodeKind(enum.Enum):
    """What a node speaks: this project's own routes, or vLLM's."""

    TANDEM = "tandem"
    VLLM = "vllm"


class NodeState(enum.Enum):
    NEW = "new"
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a node says about itself; None where it does not say (nodes of other makes).

    ``pull``: it can follow a prompt that a peer still computes, and lets itself be followed. ``host`` and ``port``:
    where its peers reach it. ``epoch``: its life. ``resume``: it goes on with answers that began elsewhere.
    ``answers``: how it reads chats' answers, as text: only a node that says the same can go on with one.
    ``more_models``: further names that it answers to. ``tensor_parallel_size``: how many processes it is.
    """

    name: str | None = None
    role: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    tensor_parallel_size: int = 1
    fingerprint: str | None = None
    pull: bool = False
    host: str | None = None
    port: int | None = None
    epoch: str | None = None
    resume: bool = False
    answers: str | None = None
    kind: NodeKind = NodeKind.TANDEM
    more_models: tuple[str, ...] = ()
    load: LoadReport | None = None

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> NodeInfo:
        def text(*keys: str) -> str | None:
            return next((body[key] for key in keys if isinstance(body.get(key), str)), None)

        def whole(key: str) -> int | None:
            value = body.get(key)
            return value if isinstance(value, int) and not isinstance(value, bool) else None

        port = whole("port")
        return cls(
            name=text("node_name", "name"),
            role=text("role"),
            model=text("served_model_name", "model"),
            max_model_len=whole("max_model_len"),
            max_num_seqs=whole("max_num_seqs"),
            tensor_parallel_size=whole("tensor_parallel_size") or 1,
            fingerprint=text("fingerprint"),
            pull=body.get("pull") is True,
            host=text("host"),
            port=port if port is not None and 0 < port < 65_536 else None,
            epoch=text("epoch"),
            resume=body.get("resume") is True,
            answers=json.dumps(body.get("answers"), sort_keys=True),
            load=LoadReport.from_json(body.get("load")),
        )


@dataclass(eq=False, slots=True)
class Node:
    """One node. ``num_in_flight`` counts the legs that this proxy has open on it. ``origin``: who named it.

    ``load``: how fast it is and what it has to do. ``machine``: the host at which it is reached, once it was ready;
    ``neighbours``: the other nodes there; ``contention``: what they make of its steps. ``breaker``: how its legs went.
    ``hold_reason``: why the proxy itself keeps work from it, whatever it says; ``is_leaving``: it is gone as soon as
    its last leg has ended. ``heard_s``: when it was last ready. ``silent_since_s``: when the first probe began that it
    has not answered at all; None while it answers.
    """

    url: str
    role: NodeRole
    client: NodeClient
    origin: str = "flag"
    info: NodeInfo = field(default_factory=NodeInfo)
    state: NodeState = NodeState.NEW
    reason: str = "not heard of yet"
    hold_reason: str | None = None
    is_leaving: bool = False
    is_refused: bool = False
    heard_s: float | None = None
    silent_since_s: float | None = None
    num_in_flight: int = 0
    poll_now: asyncio.Event = field(default_factory=asyncio.Event)
    breaker: Breaker = field(default_factory=Breaker)
    load: NodeLoad = field(default_factory=NodeLoad)
    machine: str = ""
    contention: Contention = field(default_factory=Contention)
    neighbours: Sequence[Node] = ()

    @property
    def name(self) -> str:
        return self.info.name or urllib.parse.urlsplit(self.url).netloc

    @property
    def is_vllm(self) -> bool:
        return self.info.kind is NodeKind.VLLM

    @property
    def is_usable(self) -> bool:
        """Whether it may be given work now. Everything that keeps work from a node belongs in here."""
        return self.state is NodeState.READY and self.breaker.is_admitting

    @property
    def may_generate(self) -> bool:
        """Whether it can serve whole requests, whatever its role: our own nodes can."""
        return self.role is NodeRole.DECODE or (self.info.pull and not self.is_vllm)

    @property
    def silence_s(self) -> float:
        """For how long it has answered no probe and sent nothing else either; 0 while it answers probes."""
        if self.silent_since_s is None:
            return 0.0
        return time.monotonic() - max(self.silent_since_s, self.client.heard_s)

    def is_late(self, max_silence_s: float) -> bool:
        """Whether all that speaks against it is that it has missed probes, and been silent for less than that."""
        if self.state is not NodeState.SUSPECT or self.silent_since_s is None or not self.breaker.is_admitting:
            return False
        if self.hold_reason is not None or self.is_leaving or self.is_refused or self.heard_s is None:
            return False
        return self.silence_s < max_silence_s

    @property
    def unusable_reason(self) -> str:
        return self.reason or self.breaker.reason or self.state.value

    @property
    def is_up(self) -> bool:
        """Whether it answers, also while it drains."""
        return self.state in (NodeState.READY, NodeState.DRAINING)

    @property
    def transfer_address(self) -> tuple[str, int]:
        """Host and port at which other nodes reach this one: what it says itself, else as the proxy does."""
        parts = urllib.parse.urlsplit(self.url)
        host, port = self.info.host, self.info.port
        if host is None or host in ANY_ADDRESS:
            host = parts.hostname or ""
        return host, port or parts.port or 80

    def pull_source(self) -> dict[str, Any] | None:
        """This node as a place from which part of a prompt may be pulled; None when it cannot be pulled from."""
        if not self.info.pull or self.info.epoch is None:
            return None
        host, port = self.transfer_address
        return {"url": f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", "epoch": self.info.epoch}

    def in_flight(self) -> InFlight:
        """Goes round one leg."""
        return InFlight(self)

    # --- what was learned about it

    def mark_ready(self, info: NodeInfo, neighbours: Sequence[Node] = ()) -> None:
        """It answers, and fits; while the proxy holds work from it, it drains all the same."""
        if self.info.epoch is not None and info.epoch != self.info.epoch:
            self.breaker.reset()
        self.info, self.is_refused, self.heard_s = info, False, time.monotonic()
        self.machine, _ = self.transfer_address
        self.take_load(info.load, self.heard_s, neighbours)
        if self.hold_reason is not None:
            self._enter(NodeState.DRAINING, self.hold_reason)
        else:
            self._enter(NodeState.READY, "")

    def take_load(self, report: LoadReport | None, now: float, neighbours: Sequence[Node]) -> None:
        """What it says of its work, or None, and who else is on its machine then."""
        self.load.update(report, now)
        self.neighbours = neighbours
        totals = None if report is None else report.decode_totals
        self.contention.update(totals, now, [other.contention for other in neighbours])

    def mark_draining(self, reason: str) -> None:
        """It finishes what it has: it says so itself, or the proxy has decided it."""
        self._enter(NodeState.DRAINING, reason)

    def take_back(self) -> None:
        """The proxy holds no work from it any more: it is ready at once where nothing else spoke against it."""
        was_held = self.state is NodeState.DRAINING and self.reason == self.hold_reason
        self.hold_reason, self.is_leaving = None, False
        if was_held:
            self._enter(NodeState.READY, "")

    def mark_suspect(self, reason: str) -> None:
        # Every node starts like this: one that was never ready stays new, with the reason.
        self._enter(NodeState.NEW if self.state is NodeState.NEW else NodeState.SUSPECT, reason)

    def refuse(self, info: NodeInfo, reason: str) -> None:
        """It answers but does not belong here."""
        self.info, self.is_refused = info, True
        self._enter(NodeState.SUSPECT, reason)

    def mark_gone(self) -> None:
        self._enter(NodeState.GONE, "removed")

    def suspect(self, reason: str, *, down: bool) -> None:
        """A leg met trouble: the node is probed now. ``down``: it refused the connection, and is suspect until then."""
        if down:
            self.mark_suspect(reason)
        self.poll_now.set()

    def _enter(self, state: NodeState, reason: str) -> None:
        if self.state is NodeState.GONE or (state is self.state and reason == self.reason):
            return
        # A node that answered and no longer does, or that is refused, is news that somebody should read.
        is_bad = state is NodeState.SUSPECT and (self.is_up or self.is_refused)
        logger.log(
            logging.WARNING if is_bad else logging.INFO,
            "node %s node=%s role=%s model=%s reason=%s",
            state.value,
            self.url,
            self.role.value,
            self.info.model,
            reason,
        )
        self.state, self.reason = state, reason


class InFlight:
    """One leg of ``node``, counted there."""

    __slots__ = ("_node",)

    def __init__(self, node: Node) -> None:
        self._node = node

    def __enter__(self) -> None:
        self._node.num_in_flight += 1

    def __exit__(self, *_: object) -> None:
        node = self._node
        node.num_in_flight -= 1
        if node.is_leaving and not node.num_in_flight:
            node.poll_now.set()  # its last leg has ended: it may go
