"""Nodes that are servers of vLLM's kind: how their health is probed. The bodies of their legs are in
``proxy.legs.bodies``.

They speak the OpenAI routes, ``/health`` and ``kv_transfer_params`` as vLLM's NIXL connector and its example proxies
(tests/v1/kv_connector/nixl_integration/toy_proxy_server.py there) have them. Their parameters are opaque here: the
prefill node's go to one decode node, unchanged and once. Nothing of ours is sent to them: no rendezvous, pull sources,
leases, token ids or cluster key.
"""

from __future__ import annotations

from common.wire.routes import HEALTH_ROUTE, MODELS_ROUTE
from proxy.node_http.client import NodeClient
from proxy.nodes.node import NodeInfo, NodeKind


async def read_vllm_info(client: NodeClient, timeout_s: float) -> NodeInfo:
    """What a server says about itself. Raises ValueError when it is not healthy, and NodeClientError."""
    health = await client.request("GET", HEALTH_ROUTE, timeout_s=timeout_s)
    if health.status != 200:
        raise ValueError(f"/health answers {health.status}")
    answer = await client.request("GET", MODELS_ROUTE, timeout_s=timeout_s)
    if answer.status in (401, 403):
        return NodeInfo(kind=NodeKind.VLLM)  # it wants the client's key, which a probe does not have
    if answer.status != 200:
        raise ValueError(f"/v1/models answers {answer.status}")
    body = answer.json()
    entries = body.get("data") if isinstance(body, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("/v1/models is not a list of models")
    models = tuple(entry["id"] for entry in entries if isinstance(entry.get("id"), str))
    lengths = [entry["max_model_len"] for entry in entries if isinstance(entry.get("max_model_len"), int)]
    return NodeInfo(
        model=models[0] if models else None,
        more_models=models[1:],
        max_model_len=max(lengths, default=None),
        kind=NodeKind.VLLM,
    )
