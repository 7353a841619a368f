"""The ways in which a leg ends without an answer to use."""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import NodeUnavailableError
from proxy.nodes.node import Node


class RelayedAnswer(Exception):  # noqa: N818 - not an error of ours: a node's own answer on its way to the client
    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.body = status, headers, body


class LegFailedError(NodeUnavailableError):
    """The node refused the connection, broke it, or answered what cannot be used.

    ``reason``: refused, broken, garbage, status, busy (full or draining), transfer: a metric's label. ``answer``: what
    the node said, for the client when no other node can be tried.
    """

    def __init__(self, message: str, *, reason: str = "broken", answer: RelayedAnswer | None = None) -> None:
        super().__init__(message)
        self.reason, self.answer = reason, answer


class NodeDrainingError(LegFailedError):
    """The node takes nothing new, and has done nothing: nobody's failure, and not one of a request's tries."""

    def __init__(self, node: Node) -> None:
        super().__init__(f"{node.role.value} node {node.name} is draining")
        self.node = node


class TransferFailedError(LegFailedError):
    """The decode node could not get the prompt from its prefill node; ``answer`` is what it said."""

    def __init__(self, node: Node, answer: RelayedAnswer) -> None:
        message = f"decode node {node.name} could not get its prompt: {answer.body[:200]!r}"
        super().__init__(message, reason="transfer", answer=answer)


class PrefillBusyError(LegFailedError):
    """The prefill node's queue is full: another one may have room."""
