"""Nodes that have ended, started again in a running service."""

from __future__ import annotations

from tests.support.client import metric
from tests.support.hangup import wait_until
from tests.support.service import Node, Service, wait_ready


def start_again(service: Service, *nodes: Node) -> None:
    """Returns when they are ready and the proxy, which asks now and then only, sends requests to all nodes."""
    for node in nodes:
        service.start_again(node)
    for node in nodes:
        wait_ready(node)
    num_nodes = len(service.prefill) + len(service.decode)
    wait_until(lambda: metric(service.proxy, "node_up") == num_nodes, "the proxy to see all nodes")
