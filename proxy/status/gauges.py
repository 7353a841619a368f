"""What is true of the proxy at the moment of a scrape: requests, nodes, breakers, entries of the prefix index."""

from __future__ import annotations

from common.grammar.checker import GrammarChecker
from common.metrics.metrics import Samples
from proxy.admission.queue import AdmissionQueue
from proxy.nodes.pool import NodePool
from proxy.placement.replicas import ReplicaAdvice
from proxy.prefix_index.index import PrefixIndex


def read_gauges(
    pool: NodePool,
    index: PrefixIndex,
    admission: AdmissionQueue,
    grammars: GrammarChecker,
    replicas: ReplicaAdvice,
) -> Samples:
    """A source for ``Metrics.set_source``."""
    nodes = pool.nodes
    return {
        "requests_running": {(): admission.num_running},
        "requests_waiting": {(): admission.num_waiting},
        "grammars_waiting": {(): grammars.num_waiting},
        "node_up": {(node.url,): float(node.is_up) for node in nodes},
        "breaker_state": {(node.url,): float(node.breaker.state.value) for node in nodes},
        "breaker_opened_total": {(node.url,): float(node.breaker.num_opened) for node in nodes},
        "proxy_recommended_nodes": {(role.value,): num for role, num in replicas.wanted().items()},
        "prefix_index_entries": {(node.url,): index.num_entries(node.url) for node in nodes},
    }
