"""Requests that any one node can answer (models, tokenize, detokenize): they are forwarded whole, and one other node is
tried when a connection breaks."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from common.errors import NodeUnavailableError
from proxy.legs.client_stream import relayed_headers
from proxy.legs.errors import LegFailedError
from proxy.legs.protocol import call
from proxy.nodes.node import NodeRole
from proxy.nodes.pool import NodePool

TIMEOUT_S = 30.0
"""Seconds for a node's whole answer, far more than it takes to tokenise a text that fills the context."""
MAX_TRIES = 2
"""Nodes that are tried: more would only make the client wait for the same failure."""


async def forward(
    pool: NodePool,
    method: str,
    route: str,
    *,
    headers: Mapping[str, str],
    own_headers: Mapping[str, str],
    content: bytes = b"",
) -> Response:
    """A usable node's answer, decode nodes first, of each role the one with the fewest open legs of this proxy.
    ``own_headers``: what nodes get beside; our own keys are not for servers of another make. Raises
    NodeUnavailableError and DeadlineExceededError."""
    roles = (NodeRole.DECODE, NodeRole.PREFILL)
    nodes = [node for role in roles for node in sorted(pool.usable(role), key=lambda node: node.num_in_flight)]
    failure: NodeUnavailableError = NodeUnavailableError("; ".join(pool.reasons()) or "no node is ready")
    for node in nodes[:MAX_TRIES]:
        sent = headers if node.is_vllm else {**headers, **own_headers}
        try:
            answer = await call(node, method, route, content, sent, TIMEOUT_S)
        except LegFailedError as exc:
            failure = exc
            continue
        return Response(answer.body, answer.status, relayed_headers(answer.headers))
    raise failure
