"""The node pool: when a node is up, and why it is not."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from proxy.node_client import NodeClient
from proxy.nodes import Node, NodeRole
from proxy.placement import LeastLoaded, RoundRobin, create_policy, pick
from tests.support.http_server import AppServer, wait_for
from tests.unit.proxy.conftest import StartCluster
from tests.unit.proxy.fake_node import FakeNode


def make_nodes(count: int) -> list[Node]:
    return [
        Node(f"http://node-{index}", NodeRole.DECODE, NodeClient(f"http://node-{index}", connect_timeout_s=1))
        for index in range(count)
    ]


def test_node_when_not_ready_then_reason_says_so_and_it_recovers(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.decode[0].is_ready = False
    wait_for(lambda: cluster.client.get("/ready").status_code == 503, "the node to be seen as not ready")
    (reason,) = cluster.client.get("/ready").json()["reasons"]
    assert "no decode node is ready" in reason
    assert "loading" in reason
    cluster.decode[0].is_ready = True
    wait_for(lambda: cluster.client.get("/ready").status_code == 200, "the node to be seen as ready")


def test_node_when_restarted_on_its_port_then_it_is_used_again(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    port = cluster.servers["decode-0"].port
    cluster.stop_node(cluster.decode[0])
    wait_for(lambda: cluster.client.get("/ready").status_code == 503, "the node to be seen as gone")
    successor = FakeNode("decode-new")
    server = AppServer(successor.app(), port)
    try:
        wait_for(lambda: cluster.client.get("/ready").status_code == 200, "the node to be seen as back")
        assert cluster.client.post("/v1/completions", json={"prompt": "abc"}).json()["node"] == "decode-new"
    finally:
        server.stop()


def test_node_when_its_fingerprint_differs_then_it_is_refused_with_both(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.decode[0].fingerprint = "beef"
    wait_for(lambda: cluster.client.get("/ready").status_code == 503, "the node to be refused")
    (reason,) = cluster.client.get("/ready").json()["reasons"]
    assert "beef" in reason
    assert "f00d" in reason


def test_proxy_when_no_node_answers_then_alive_but_not_ready(start_cluster: StartCluster) -> None:
    cluster = start_cluster(0, 1)
    cluster.stop_node(cluster.decode[0])
    wait_for(lambda: cluster.client.get("/ready").status_code == 503, "the node to be seen as gone")
    assert cluster.client.get("/health").status_code == 200
    assert cluster.client.get("/v1/models").json()["error"]["code"] == "no_node"


def test_least_loaded_when_loads_differ_then_the_smallest_and_ties_in_turn() -> None:
    nodes = make_nodes(3)
    policy = LeastLoaded()
    with nodes[0].in_flight():
        assert {policy.choose(nodes) for _ in range(4)} == {nodes[1], nodes[2]}
        with nodes[1].in_flight(), nodes[2].in_flight(), nodes[2].in_flight():
            assert {policy.choose(nodes) for _ in range(4)} == {nodes[0], nodes[1]}


def test_pick_when_all_were_tried_then_none() -> None:
    nodes = make_nodes(2)
    policy = RoundRobin()
    assert pick(policy, nodes, tried=[nodes[0]]) is nodes[1]
    assert pick(policy, nodes, tried=nodes) is None


def test_create_policy_when_unknown_then_config_error() -> None:
    with pytest.raises(ConfigError, match="--policy fastest"):
        create_policy("fastest")
