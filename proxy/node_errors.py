"""What a call to a node can end with instead of an answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import aiohttp


class NodeClientError(Exception):
    """The base of what ``NodeClient`` raises."""


class NodeRefusedError(NodeClientError):
    """No connection: refused, not resolved, or not accepted in time."""


class NodeTimeoutError(NodeClientError):
    """No answer, or no more of it, in time."""


class NodeSilentError(NodeClientError):
    """The node gives no sign of life (``NodeClient.give_up``)."""


class NodeBrokenError(NodeClientError):
    """The connection broke, or what came is no usable HTTP."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """aiohttp's and the system's errors inside the block leave it as those above."""
    try:
        yield
    except NodeClientError:
        raise
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as exc:
        raise NodeRefusedError(_text(exc)) from exc
    except TimeoutError as exc:
        raise NodeTimeoutError("no answer in time") from exc
    except (aiohttp.ClientError, OSError) as exc:
        raise NodeBrokenError(_text(exc)) from exc


def _text(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
