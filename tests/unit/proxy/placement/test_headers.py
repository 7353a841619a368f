"""What clients may say about placement, and what the default policy does with nodes that report nothing."""

from __future__ import annotations

import pytest

from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import StartCluster

BODY = {"prompt": [5, 6, 7], "max_tokens": 3}


@pytest.mark.parametrize("way", ["local", "remote", "LOCAL"])
def test_placement_header_when_given_then_that_way(start_cluster: StartCluster, way: str) -> None:
    cluster = start_cluster(policy="cost")
    answer = cluster.client.post("/v1/completions", json=BODY, headers={"X-Tandem-Placement": way})
    assert answer.status_code == 200
    assert len(cluster.prefill[0].bodies) == (way == "remote")
    assert len(cluster.decode[0].bodies) == 1
    expected = way.lower()
    assert cluster.metric("tandem_proxy_decisions_total", policy="cost", placement=expected) == 1


@pytest.mark.parametrize(
    ("header", "value", "words"),
    [
        ("X-Tandem-Placement", "there", ("X-Tandem-Placement", "there", "auto, local, remote")),
        ("X-Session-Id", "s" * 300, ("X-Session-Id", "300", "256")),
    ],
)
def test_header_when_it_makes_no_sense_then_400_that_names_it(
    start_cluster: StartCluster, header: str, value: str, words: tuple[str, ...]
) -> None:
    cluster = start_cluster()
    answer = cluster.client.post("/v1/completions", json=BODY, headers={header: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header
    assert all(word in answer.json()["error"]["message"] for word in words)
    assert cluster.decode[0].bodies == []


def test_cost_when_requests_end_then_nodes_that_report_nothing_are_used_alike(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2, 2, policy="cost")
    for _ in range(6):
        headers = {"X-Tandem-Placement": "remote"}
        assert cluster.client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    assert [len(node.bodies) for node in (*cluster.prefill, *cluster.decode)] == [3, 3, 3, 3]


def test_cost_when_a_stream_begins_then_estimate_and_ratio_are_counted(start_cluster: StartCluster) -> None:
    cluster = start_cluster(policy="cost")
    for way in ("remote", "local"):
        headers = {"X-Tandem-Placement": way}
        stream = {**BODY, "stream": True}
        assert cluster.client.post("/v1/completions", json=stream, headers=headers).status_code == 200
    assert cluster.client.post("/v1/completions", json=BODY).status_code == 200
    for name in ("tandem_proxy_predicted_ttft_seconds", "tandem_proxy_ttft_ratio"):
        for way in ("remote", "local"):
            wait_for(lambda n=name, w=way: cluster.metric(n + "_count", placement=w) == 1, name)  # type: ignore[misc]


def test_session_when_given_then_its_turns_stay_on_one_decode_node(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 3, policy="cost")
    for turn in range(4):
        body = {**BODY, "prompt": list(range(5, 9 + turn))}
        assert cluster.client.post("/v1/completions", json=body, headers={"X-Session-Id": "one"}).status_code == 200
    assert sorted(len(node.bodies) for node in cluster.decode) == [0, 0, 4]
