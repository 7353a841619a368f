"""The HTTP of the two legs of one request, with the client's failures translated into this project's.

A leg ends in one of five ways: an answer to use, an answer to hand to the client as it is (``RelayedAnswer``), a node
that could not be talked to, broke or answered what is of no use (``LegFailedError``: another node may be tried), or
silence beyond the deadline (``DeadlineExceededError``: nothing is tried again, the client has waited long enough), or
an answer that is no stream and takes longer than any may (the same error). How it ended is told to the node's circuit
breaker here; of the last way nothing, for a node that is dead or frozen fails its legs long before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from common.errors import (
    DeadlineExceededError,
    NodeUnavailableError,
    QueueFullError,
    RequestAbortedError,
    TransferError,
)
from common.wire.manifest_reader import TRANSFER_PARAMS_KEY
from proxy.legs.errors import LegFailedError, NodeDrainingError, RelayedAnswer
from proxy.node_http.client import NodeAnswer, NodeStream
from proxy.node_http.errors import NodeClientError, NodeRefusedError, NodeSilentError, NodeTimeoutError, describe
from proxy.nodes.breaker import Leg
from proxy.nodes.health_probe import is_draining_answer
from proxy.nodes.node import Node


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A finished prefill leg: opaque ``params`` for the decode leg (empty: the node has nothing to hand over), and what
    names its lease on ``node``."""

    node: Node
    params: Mapping[str, Any]

    @property
    def lease_id(self) -> str | None:
        lease_id = self.params.get("tandem_lease_id")
        return lease_id if isinstance(lease_id, str) else None


def check_draining(node: Node, status: int, body: bytes) -> None:
    """Raises NodeDrainingError when an answer says that the node drains; the pool learns of it at once."""
    if is_draining_answer(status, body):
        node.mark_draining("it refused a request: it is draining")
        raise NodeDrainingError(node)


async def send_prefill_leg(
    node: Node, route: str, content: bytes, headers: Mapping[str, str], timeout_s: float
) -> Prefilled:
    """Let ``node`` compute one prompt. Raises RelayedAnswer for its 4xx, LegFailedError, DeadlineExceededError."""
    answer = await call(node, "POST", route, content, headers, timeout_s, check=check_prefilled)
    check_draining(node, answer.status, answer.body)
    if answer.status != 200:
        relayed = RelayedAnswer(answer.status, answer.headers, answer.body)
        if 400 <= answer.status < 500 and answer.status != QueueFullError.status:
            raise relayed
        raise LegFailedError(
            f"prefill node {node.name} answers {answer.status}", reason=status_reason(answer.status), answer=relayed
        )
    return Prefilled(node, answer.json().get(TRANSFER_PARAMS_KEY) or {})


def check_prefilled(node: Node, answer: NodeAnswer) -> None:
    """Raises LegFailedError when a prefill leg's 200 is none. A vLLM server may have nothing to hand over."""
    try:
        params = answer.json().get(TRANSFER_PARAMS_KEY)
    except (ValueError, AttributeError):
        params = False
    if node.is_vllm and params is None:
        return
    if not isinstance(params, dict):
        raise LegFailedError(f"prefill node {node.name} answers without {TRANSFER_PARAMS_KEY}", reason="garbage")


async def call(
    node: Node,
    method: str,
    route: str,
    content: bytes,
    headers: Mapping[str, str],
    timeout_s: float,
    *,
    check: Callable[[Node, NodeAnswer], None] | None = None,
) -> NodeAnswer:
    """One whole answer of ``node`` within ``timeout_s``, whatever its status. ``check`` may refuse a 200.

    Raises LegFailedError and DeadlineExceededError.
    """
    with _LegScope(node) as leg:
        answer = await node.client.request(method, route, content=content, headers=headers, timeout_s=timeout_s)
        if check is not None and answer.status == 200:
            check(node, answer)
        judge(leg, answer.status)
        return answer


class DecodeLeg:
    """A decode leg, as ``async with``: entering gives the node's answer, its head within ``timeout_s``, its body not
    yet read; and the leg, of which the caller says that it succeeded. Leaving closes the connection, on which the node
    aborts. ``is_stream``: what is asked for; else the head comes with the answer's last token.

    Raises LegFailedError and DeadlineExceededError, also for what the caller does with the answer inside.
    """

    def __init__(
        self,
        node: Node,
        route: str,
        content: bytes,
        headers: Mapping[str, str],
        timeout_s: float,
        *,
        is_stream: bool,
    ) -> None:
        self._stream = node.client.stream("POST", route, content=content, headers=headers, timeout_s=timeout_s)
        self._scope = _LegScope(node)
        self._name = f"{node.role.value} node {node.name}"
        self._timeout_s = timeout_s
        self._is_stream = is_stream

    async def __aenter__(self) -> tuple[NodeStream, Leg]:
        leg = self._scope.__enter__()
        try:
            return await self._begin(), leg
        except BaseException as exc:
            self._scope.__exit__(type(exc), exc, exc.__traceback__)
            raise

    async def _begin(self) -> NodeStream:
        try:
            return await self._stream.__aenter__()
        except NodeTimeoutError as exc:
            if self._is_stream:
                raise
            raise DeadlineExceededError(
                f"{self._name} did not end an answer that is no stream within --whole-answer-timeout-seconds "
                f"{self._timeout_s:g}"
            ) from exc

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._stream.__aexit__(kind, error, traceback)
        finally:
            self._scope.__exit__(kind, error, traceback)


def judge(leg: Leg, status: int) -> None:
    """What a status says about the node. Full, draining, called off, and a peer that could not be read: nothing."""
    if status in (NodeUnavailableError.status, TransferError.status, QueueFullError.status, RequestAbortedError.status):
        return
    if status == 200 or 400 <= status < 500:
        leg.succeed()
    else:
        leg.fail(f"status {status}")


def status_reason(status: int) -> str:
    """``LegFailedError.reason`` of a status that is not the client's fault."""
    if status == TransferError.status:
        return "transfer"
    return "busy" if status in (QueueFullError.status, NodeUnavailableError.status) else "status"


class _LegScope:
    """Round one leg to ``node``: it counts there, its breaker hears how it went, the client's failures get this
    project's words."""

    __slots__ = ("_in_flight", "_leg", "_node")

    def __init__(self, node: Node) -> None:
        self._node = node
        self._in_flight = node.in_flight()
        self._leg = node.breaker.leg()

    def __enter__(self) -> Leg:
        self._in_flight.__enter__()
        return self._leg.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                _translate(self._node, self._leg, error)
        finally:
            self._leg.__exit__()
            self._in_flight.__exit__()


def _translate(node: Node, leg: Leg, error: BaseException) -> None:
    """Tells ``leg`` how it failed; raises what the client's failures are called here."""
    if isinstance(error, LegFailedError):
        if error.reason in ("broken", "garbage"):
            leg.fail(error.reason)
    elif isinstance(error, NodeRefusedError):
        leg.fail("refused")
        node.suspect(describe(error), down=True)
        text = f"{node.role.value} node {node.name} refused: {describe(error)}"
        raise LegFailedError(text, reason="refused") from error
    elif isinstance(error, NodeSilentError):
        leg.fail("silent")
        raise LegFailedError(f"{node.role.value} node {node.name} is lost: {error}") from error
    elif isinstance(error, NodeTimeoutError):
        leg.fail("slow")
        node.suspect(describe(error), down=False)
        text = f"{node.role.value} node {node.name} did not answer in time ({describe(error)})"
        raise DeadlineExceededError(text) from error
    elif isinstance(error, NodeClientError):
        leg.fail("broken")
        node.suspect(describe(error), down=False)
        text = f"{node.role.value} node {node.name} broke the connection: {describe(error)}"
        raise LegFailedError(text) from error
