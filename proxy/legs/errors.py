"""The ways in which a leg ends without an answer to use."""

from __future__ import annotations

import json
from collections.abc import Mapping

from common.errors import NodeUnavailableError, TandemError
from common.openai.errors import read_error
from proxy.nodes.node import Node


class RelayedAnswer(Exception):  # noqa: N818 - not an error of ours: a node's own answer on its way to the client
    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.body = status, headers, body

    @property
    def error(self) -> TandemError:
        """What it says, as the node raised it."""
        try:
            return read_error(json.loads(self.body), self.status)
        except ValueError:
            error = TandemError(str(self))
            error.status = self.status
            return error


class LegFailedError(NodeUnavailableError):
    """The node refused the connection, broke it, or answered what cannot be used.

    ``reason``: refused, broken, garbage, status, busy (full or draining), transfer: a metric's label. ``answer``: what
    the node said, for the client when no other node can be tried. ``is_told``: the client has it already, as an event.
    """

    def __init__(
        self, message: str, *, reason: str = "broken", answer: RelayedAnswer | None = None, is_told: bool = False
    ) -> None:
        super().__init__(message)
        self.reason, self.answer, self.is_told = reason, answer, is_told


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
