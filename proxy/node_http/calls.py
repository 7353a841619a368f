"""Small questions of the proxy to a node, apart from requests' legs: one bounded answer within one deadline."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import TandemError
from proxy.node_http.errors import NodeClientError
from proxy.nodes.node import Node, describe


class NodeCallError(TandemError):
    """The node did not answer, not in time, or more than is wanted of it."""


@dataclass(frozen=True, slots=True)
class CallAnswer:
    status: int
    body: bytes
    etag: str | None


async def get(
    node: Node,
    path: str,
    *,
    params: Mapping[str, str],
    headers: Mapping[str, str],
    timeout_s: float,
    max_bytes: int,
) -> CallAnswer:
    """What ``node`` answers to GET ``path``, whatever its status. Raises NodeCallError."""
    route = f"{path}?{urllib.parse.urlencode(params)}" if params else path
    try:
        async with (
            asyncio.timeout(timeout_s),
            node.client.stream("GET", route, headers=headers, timeout_s=timeout_s) as answer,
        ):
            body = bytearray()
            async for chunk in answer.chunks(timeout_s):
                body += chunk
                if len(body) > max_bytes:
                    raise NodeCallError(f"{node.name} answers {path} with more than {max_bytes} bytes")
            return CallAnswer(answer.status, bytes(body), answer.headers.get("etag"))
    except TimeoutError as exc:
        raise NodeCallError(f"{node.name} did not answer {path} within {timeout_s:g} s") from exc
    except NodeClientError as exc:
        raise NodeCallError(f"{node.name} does not answer {path}: {describe(exc)}") from exc
