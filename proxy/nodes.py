"""The node pool's names in one place; they live in ``proxy.node`` and ``proxy.node_pool``."""

from __future__ import annotations

from proxy.node import Node, NodeInfo, NodeRole, NodeState, describe
from proxy.node_pool import NodeListener, NodePool

__all__ = [
    "Node",
    "NodeInfo",
    "NodeListener",
    "NodePool",
    "NodeRole",
    "NodeState",
    "describe",
]
