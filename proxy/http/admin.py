"""Routes for the operator: who is in the pool, and who joins, drains or leaves it while it runs.

All of them need the cluster key, and a proxy that has none refuses them: they decide whom clients' prompts are sent to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request

from common.config.values import parse_url
from common.errors import InvalidRequestError, NodeNotFoundError
from common.server.drain import require_cluster_key
from common.server.json_body import read_json_object
from common.wire.fields import Fields, shown
from common.wire.routes import NODES_ROUTE
from proxy.nodes.node import Node, NodeRole
from proxy.nodes.pool import NodePool

ORIGIN = "operator"
"""``Node.origin`` of the nodes that were added here."""


def add_node_routes(app: FastAPI, *, has_cluster_key: bool) -> None:
    """Give ``app`` the routes; the pool is that of ``app.state.service``."""

    def pool() -> NodePool:
        require_cluster_key(has_cluster_key)
        found: NodePool = app.state.service.pool
        return found

    @app.get(NODES_ROUTE)
    async def nodes() -> dict[str, Any]:
        members = pool()
        return {"nodes": [describe_node(node) for node in members.nodes], "reasons": members.reasons()}

    @app.post(f"{NODES_ROUTE}/add")
    async def add(request: Request) -> dict[str, Any]:
        """``{"url", "role"}``. A node that drains or leaves is taken back."""
        members = pool()
        body = await read_json_object(request)
        role = Fields(body).string("role")
        if role not in [each.value for each in NodeRole]:
            raise InvalidRequestError(f"role must be prefill or decode, got {shown(role)}", param="role")
        return describe_node(members.add(_url(body), NodeRole(role), origin=ORIGIN))

    @app.post(f"{NODES_ROUTE}/drain")
    async def drain(request: Request) -> dict[str, Any]:
        """``{"url"}``: nothing new goes there; it stays in the pool until it is added again or removed."""
        members = pool()
        node = _find(members, await read_json_object(request))
        members.drain(node, "drained by the operator")
        return describe_node(node)

    @app.post(f"{NODES_ROUTE}/remove")
    @app.delete(NODES_ROUTE)
    async def remove(request: Request) -> dict[str, Any]:
        """``{"url"}``: as drain, and it is gone when its last request has ended."""
        members = pool()
        node = _find(members, await read_json_object(request))
        members.remove(node, "removed by the operator")
        return describe_node(node)


def describe_node(node: Node) -> dict[str, Any]:
    """What the list says about one node."""
    info = node.info
    return {
        "url": node.url,
        "name": node.name,
        "role": node.role.value,
        "state": node.state.value,
        "reason": node.reason,
        "is_usable": node.is_usable,
        "is_leaving": node.is_leaving,
        "origin": node.origin,
        "in_flight": node.num_in_flight,
        "epoch": info.epoch,
        "model": info.model,
        "fingerprint": info.fingerprint,
        "limits": {"max_model_len": info.max_model_len, "max_num_seqs": info.max_num_seqs},
    }


def _url(body: Mapping[str, Any]) -> str:
    given = Fields(body).string("url")
    try:
        return parse_url(given or "")
    except ValueError as exc:
        raise InvalidRequestError(f"url {shown(given)} is {exc}", param="url") from exc


def _find(pool: NodePool, body: Mapping[str, Any]) -> Node:
    url = _url(body)
    node = pool.find(url)
    if node is None:
        raise NodeNotFoundError(f"url {url} is not in the pool", param="url")
    return node
