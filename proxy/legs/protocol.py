"""The HTTP of the two legs of one request, with the client's failures translated into this project's.

A leg ends in one of four ways: an answer to use, an answer to hand to the client as it is (``RelayedAnswer``), a node
that could not be talked to, broke or answered what is of no use (``LegFailedError``: another node may be tried), or
silence beyond the deadline (``DeadlineExceededError``: nothing is tried again, the client has waited long enough). How
it ended is told to the node's circuit breaker here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
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
    with node.in_flight(), node.breaker.leg() as leg:
        with _translated(node, leg):
            answer = await node.client.request(method, route, content=content, headers=headers, timeout_s=timeout_s)
            if check is not None and answer.status == 200:
                check(node, answer)
        judge(leg, answer.status)
        return answer


@contextlib.asynccontextmanager
async def open_decode_leg(
    node: Node, route: str, content: bytes, headers: Mapping[str, str], timeout_s: float
) -> AsyncIterator[tuple[NodeStream, Leg]]:
    """The decode node's answer, its head within ``timeout_s``, its body not yet read; and the leg, of which the caller
    says that it succeeded. Leaving closes the connection, on which the node aborts.

    Raises LegFailedError and DeadlineExceededError, also for what the caller does with the answer inside.
    """
    stream = node.client.stream("POST", route, content=content, headers=headers, timeout_s=timeout_s)
    del content  # see DecodeLegs.relay
    with node.in_flight(), node.breaker.leg() as leg, _translated(node, leg):
        async with stream as answer:
            yield answer, leg


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


@contextlib.contextmanager
def _translated(node: Node, leg: Leg) -> Iterator[None]:
    try:
        yield
    except LegFailedError as exc:
        if exc.reason in ("broken", "garbage"):
            leg.fail(exc.reason)
        raise
    except NodeRefusedError as exc:
        leg.fail("refused")
        node.suspect(describe(exc), down=True)
        raise LegFailedError(f"{node.role.value} node {node.name} refused: {describe(exc)}", reason="refused") from exc
    except NodeSilentError as exc:
        leg.fail("silent")
        raise LegFailedError(f"{node.role.value} node {node.name} is lost: {exc}") from exc
    except NodeTimeoutError as exc:
        leg.fail("slow")
        node.suspect(describe(exc), down=False)
        raise DeadlineExceededError(
            f"{node.role.value} node {node.name} did not answer in time ({describe(exc)})"
        ) from exc
    except NodeClientError as exc:
        leg.fail("broken")
        node.suspect(describe(exc), down=False)
        raise LegFailedError(f"{node.role.value} node {node.name} broke the connection: {describe(exc)}") from exc
