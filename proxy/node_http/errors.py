"""What a call to a node can end with instead of an answer."""

from __future__ import annotations

REASON_LENGTH = 300
"""Characters of a node's or the system's words that go into a log line or a reason."""


class NodeClientError(Exception):
    """The base of what ``NodeClient`` raises."""


class NodeRefusedError(NodeClientError):
    """No connection: refused, not resolved, or not accepted in time. The system's own error is its cause."""


class NodeTimeoutError(NodeClientError):
    """No answer, or no more of it, in time."""


class NodeSilentError(NodeClientError):
    """The node gives no sign of life (``NodeClient.give_up``)."""


class NodeBrokenError(NodeClientError):
    """The connection broke, or what came is no usable HTTP."""


def describe(exc: Exception) -> str:
    """One line about a failed call."""
    return f"{type(exc).__name__}: {exc}".rstrip(": ")[:REASON_LENGTH]
