"""The HTTP of the two legs of one request, with the client's failures translated into this project's.

A leg ends in one of four ways: an answer to use, an answer to hand to the client as it is (``RelayedAnswer``), a node
that could not be talked to or broke (``LegFailedError``: another node may be tried), or silence beyond the deadline
(``DeadlineExceededError``: nothing is tried again, the client has waited long enough).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.api.handoff import FIELD, prefill_leg_params
from common.api.source_hints import SOURCES_KEY
from common.errors import DeadlineExceededError, NodeUnavailableError
from proxy.node_client import NodeAnswer, NodeClientError, NodeRefusedError, NodeStream, NodeTimeoutError
from proxy.nodes import Node, describe

# Fields that only the decode leg needs; some servers check them against max_tokens 1 instead of ignoring them.
_DECODE_ONLY_FIELDS = ("stream_options", "max_completion_tokens", "min_tokens", "n", "best_of", "echo", "logprobs")


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A finished prefill leg: opaque ``params`` for the decode leg, and what names its lease on ``node``."""

    node: Node
    params: Mapping[str, Any]

    @property
    def lease_id(self) -> str | None:
        lease_id = self.params.get("tandem_lease_id")
        return lease_id if isinstance(lease_id, str) else None


class RelayedAnswer(Exception):  # noqa: N818 - not an error of ours: a node's own answer on its way to the client
    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.body = status, headers, body


class LegFailedError(NodeUnavailableError):
    """The node refused the connection, broke it, or answered what cannot be used."""


def prefill_body(
    body: Mapping[str, Any],
    prompt: Any | None,
    *,
    rendezvous_id: str | None = None,
    sources: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """The prefill leg's body for one prompt (``None``: the body's own, a chat), to be computed as ``rendezvous_id``.
    ``sources``: who may have part of it."""
    leg = {key: value for key, value in body.items() if key not in _DECODE_ONLY_FIELDS}
    leg |= {"stream": False, "max_tokens": 1, FIELD: prefill_leg_params(rendezvous_id)}
    if prompt is not None:
        leg["prompt"] = prompt
    if sources:
        leg[SOURCES_KEY] = list(sources)
    return encode(leg)


def decode_body(body: Mapping[str, Any], params: object, *, sources: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """The client's body with the handoff: one object, a list of objects, or None when no prefill leg was made.
    ``sources``: who may have part of the prompt."""
    leg = {key: value for key, value in body.items() if key != FIELD}
    if params is not None:
        leg[FIELD] = params
    if sources:
        leg[SOURCES_KEY] = list(sources)
    return encode(leg)


def encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


async def send_prefill_leg(
    node: Node, route: str, content: bytes, headers: Mapping[str, str], timeout_s: float
) -> Prefilled:
    """Let ``node`` compute one prompt. Raises RelayedAnswer for its 4xx, LegFailedError, DeadlineExceededError."""
    answer = await call(node, "POST", route, content, headers, timeout_s)
    if 400 <= answer.status < 500:
        raise RelayedAnswer(answer.status, answer.headers, answer.body)
    if answer.status != 200:
        raise LegFailedError(f"prefill node {node.name} answers {answer.status}")
    try:
        params = answer.json()[FIELD]
    except (ValueError, KeyError, TypeError) as exc:
        raise LegFailedError(f"prefill node {node.name} answers without {FIELD}") from exc
    if not isinstance(params, dict):
        raise LegFailedError(f"prefill node {node.name} answers without {FIELD}")
    return Prefilled(node, params)


async def call(
    node: Node, method: str, route: str, content: bytes, headers: Mapping[str, str], timeout_s: float
) -> NodeAnswer:
    """One whole answer of ``node`` within ``timeout_s``, whatever its status. Raises LegFailedError and
    DeadlineExceededError."""
    with node.in_flight():
        async with _translated(node):
            return await node.client.request(method, route, content=content, headers=headers, timeout_s=timeout_s)


@contextlib.asynccontextmanager
async def open_decode_leg(
    node: Node, route: str, content: bytes, headers: Mapping[str, str], timeout_s: float
) -> AsyncIterator[NodeStream]:
    """The decode node's answer, its head within ``timeout_s``, its body not yet read. Leaving closes the connection, on
    which the node aborts.

    Raises LegFailedError and DeadlineExceededError, also for what the caller does with the answer inside.
    """
    with node.in_flight():
        async with (
            _translated(node),
            node.client.stream("POST", route, content=content, headers=headers, timeout_s=timeout_s) as answer,
        ):
            yield answer


@contextlib.asynccontextmanager
async def _translated(node: Node) -> AsyncIterator[None]:
    try:
        yield
    except NodeRefusedError as exc:
        node.suspect(describe(exc), down=True)
        raise LegFailedError(f"{node.role.value} node {node.name} refused: {describe(exc)}") from exc
    except NodeTimeoutError as exc:
        node.suspect(describe(exc), down=False)
        raise DeadlineExceededError(
            f"{node.role.value} node {node.name} did not answer in time ({describe(exc)})"
        ) from exc
    except NodeClientError as exc:
        node.suspect(describe(exc), down=False)
        raise LegFailedError(f"{node.role.value} node {node.name} broke the connection: {describe(exc)}") from exc
