"""The node pool: when a node is up, and why it is not."""

from __future__ import annotations

import pytest

from tests.support.http_server import AppServer, wait_for
from tests.unit.proxy.conftest import StartCluster
from tests.unit.proxy.fake_node import FakeNode


def test_node_when_not_ready_then_reason_says_so_and_it_recovers(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.decode[0].is_ready = False
    wait_for(lambda: cluster.client.get("/ready").status_code == 503, "the node to be seen as not ready")
    (reason,) = cluster.client.get("/ready").json()["reasons"]
    assert "no decode node is ready" in reason
    assert "loading" in reason
    cluster.decode[0].is_ready = True
    wait_for(lambda: cluster.client.get("/ready").status_code == 200, "the node to be seen as ready")


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_ready_when_a_role_has_no_node_then_may_be_degraded_as_long_as_anybody_may_generate(
    start_cluster: StartCluster, role: str, elastic: bool
) -> None:
    cluster = start_cluster(1, 1, pull=True, policy="cost", elastic=elastic)
    lost = cluster.prefill[0] if role == "prefill" else cluster.decode[0]
    cluster.stop_node(lost)
    url = cluster.servers[lost.name].url
    wait_for(lambda: cluster.metric("tandem_node_up", node=url) == 0, "the node to be seen as gone")
    whole, degraded = cluster.client.get("/ready"), cluster.client.get("/ready?degraded=ok")
    serves = role == "prefill" or elastic
    [reason] = whole.json()["reasons"]
    assert reason.startswith(f"no {role} node is ready ({url}: ")
    assert (whole.status_code, degraded.status_code) == (503, 200 if serves else 503)
    assert degraded.json() == ({"status": "ready", "degraded": [reason]} if serves else whole.json())
    assert cluster.client.post("/v1/completions", json={"prompt": [1, 2, 3]}).status_code == degraded.status_code


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
