"""One health probe of a node: is it ready, does it drain, what does it say about itself, is anybody there at all."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass

from common.wire.routes import INFO_ROUTE, READY_ROUTE
from proxy.node_http.client import NodeAnswer, NodeClient
from proxy.node_http.errors import REASON_LENGTH, NodeClientError, NodeRefusedError, NodeTimeoutError, describe
from proxy.nodes.node import NodeInfo, NodeKind
from proxy.nodes.vllm import read_vllm_info

PROBE_TIMEOUT_S = 2.0
"""Seconds for each of a probe's two requests."""
PROBE_LIMIT_S = 2 * PROBE_TIMEOUT_S
NOBODY_THERE = frozenset({errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ETIMEDOUT})
"""Errors of a connection that the network gives up: the machine is gone. When only the process is gone, its machine
refuses the connection."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """``info``: of a node that is ready; else ``problem`` says why it is not. ``is_silent``: nothing came from it, and
    nothing refused the connection either."""

    info: NodeInfo | None = None
    problem: str = ""
    is_draining: bool = False
    is_silent: bool = False


async def probe(client: NodeClient, kind: str, headers: Mapping[str, str]) -> ProbeResult:
    """``kind`` as in ``--node-kind``. Never raises on what the node does."""
    try:
        if kind == NodeKind.VLLM.value:
            return ProbeResult(await read_vllm_info(client, PROBE_TIMEOUT_S))
        answer = await client.request("GET", READY_ROUTE, timeout_s=PROBE_TIMEOUT_S)
        if answer.status == 404 and kind == "auto":
            return ProbeResult(await read_vllm_info(client, PROBE_TIMEOUT_S))
        if answer.status != 200:
            if is_draining_answer(answer.status, answer.body):
                return ProbeResult(problem="it says that it is draining", is_draining=True)
            return ProbeResult(problem=_not_ready_reason(answer))
        return ProbeResult(await _read_info(client, headers))
    except (NodeClientError, ValueError, RecursionError) as exc:
        return ProbeResult(problem=describe(exc), is_silent=_is_silence(exc))


async def _read_info(client: NodeClient, headers: Mapping[str, str]) -> NodeInfo:
    answer = await client.request("GET", INFO_ROUTE, headers=headers, timeout_s=PROBE_TIMEOUT_S)
    if answer.status == 200:
        body = answer.json()
        if not isinstance(body, dict):
            raise ValueError(f"{INFO_ROUTE} is not a JSON object")
        return NodeInfo.from_json(body)
    if answer.status != 404:
        raise ValueError(f"{INFO_ROUTE} answers {answer.status}")
    return NodeInfo()


def _is_silence(error: Exception) -> bool:
    if not isinstance(error, NodeRefusedError):
        return isinstance(error, NodeTimeoutError)
    cause = error.__cause__
    return isinstance(cause, TimeoutError) or (isinstance(cause, OSError) and cause.errno in NOBODY_THERE)


def is_draining_answer(status: int, body: bytes) -> bool:
    """Whether a 503 says that the node drains: of ``/ready`` (``status``) or of a request (``error.code``)."""
    if status != 503:
        return False
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(answer, dict):
        return False
    error = answer.get("error")
    return answer.get("status") == "draining" or (isinstance(error, dict) and error.get("code") == "draining")


def _not_ready_reason(answer: NodeAnswer) -> str:
    return f"/ready answers {answer.status} {answer.body[:REASON_LENGTH].decode(errors='replace')}".rstrip()
