"""Draining: nodes that say so get nothing new and are nobody's failure; the proxy itself finishes what it has."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import httpx
import pytest

from common.errors import NodeUnavailableError
from proxy.admission.request import AdmissionRequest
from proxy.http.time_limits import TimeLimits
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import Fault

BODY = {"prompt": "abc"}
STREAM = {"prompt": "abc", "stream": True}
NEVER_POLL_AGAIN = 3600.0
KEY = "cluster-secret"


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "cluster"
    path.write_text(KEY + "\n")
    return str(path)


def post(cluster: Cluster, body: object = None) -> httpx.Response:
    return cluster.client.post("/v1/completions", json=BODY if body is None else body)


def drain(cluster: Cluster) -> httpx.Response:
    return cluster.client.post("/internal/v1/drain", headers={"X-Tandem-Cluster-Key": KEY})


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_leg_when_refused_as_draining_then_another_node_has_it(
    start_cluster: StartCluster, role: str, pull: bool
) -> None:
    cluster = start_cluster(2, 2, pull=pull, health_interval_seconds=NEVER_POLL_AGAIN)
    nodes = cluster.prefill if role == "prefill" else cluster.decode
    nodes[0].refuses_as_draining = True
    for _ in range(4):
        answer = post(cluster)
        assert answer.status_code == 200
    assert nodes[0].num_refused == 1  # from then on it is not asked
    assert len(nodes[1].bodies) == 4
    assert cluster.metric("tandem_proxy_decisions_total", placement="local") == 0
    assert cluster.metric("tandem_node_up", node=cluster.servers[nodes[0].name].url) == 1


def test_leg_when_all_nodes_of_a_role_refuse_as_draining_then_503_at_once(start_cluster: StartCluster) -> None:
    cluster = start_cluster(0, 3, health_interval_seconds=NEVER_POLL_AGAIN)
    for node in cluster.decode:
        node.refuses_as_draining = True
    answer = post(cluster)
    assert answer.status_code == 503
    assert [node.num_refused for node in cluster.decode] == [1, 1, 1]
    shown = cluster.client.get("/ready").json()
    assert "draining" in shown["reasons"][0]
    assert shown["reason"] == "; ".join(shown["reasons"])


@pytest.mark.parametrize("pull", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_leg_when_nodes_refuse_as_draining_and_say_that_they_are_ready_then_each_is_asked_once(
    start_cluster: StartCluster, role: str, pull: bool
) -> None:
    cluster = start_cluster(2, 2, pull=pull, health_interval_seconds=0.01)
    nodes = cluster.prefill if role == "prefill" else cluster.decode
    for node in nodes:
        node.refuses_as_draining = True
    answer = post(cluster)
    assert answer.status_code == (200 if role == "prefill" else 503), answer.text
    assert all(node.num_refused <= 1 for node in nodes)


def test_proxy_when_draining_then_unready_and_refusing_but_streams_finish(
    start_cluster: StartCluster, key_file: str
) -> None:
    cluster = start_cluster(1, 1, pull=True, cluster_key_file=key_file)
    cluster.prefill[0].may_finish = False
    cluster.decode[0].follows = []
    answers: list[httpx.Response] = []
    cluster.decode[0].may_answer.clear()
    thread = threading.Thread(target=lambda: answers.append(post(cluster, STREAM)))
    thread.start()
    wait_for(lambda: cluster.decode[0].bodies, "the stream's leg")
    assert drain(cluster).json() == {"status": "draining", "open": 1, "held": 0}
    ready = cluster.client.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    assert cluster.client.get("/health").status_code == 200
    tokenize = cluster.client.post("/tokenize", json={"prompt": "abc"})
    for refused in (post(cluster), tokenize):
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
    cluster.decode[0].may_answer.set()
    thread.join()
    assert answers[0].text.rstrip().endswith("data: [DONE]")
    wait_for(lambda: drain(cluster).json()["open"] == 0, "the drain to end")


def test_proxy_when_cut_off_then_streams_end_with_an_error_event(start_cluster: StartCluster, key_file: str) -> None:
    cluster = start_cluster(1, 1, cluster_key_file=key_file, max_concurrency=1, drain_timeout_seconds=0.3)
    cluster.decode[0].fault = Fault.STALL
    answers: dict[str, httpx.Response] = {}

    def send(name: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.update({name: post(cluster, STREAM)}))
        thread.start()
        return thread

    threads = [send("streaming")]
    wait_for(lambda: cluster.decode[0].bodies, "the stream's leg")
    threads.append(send("waiting"))
    wait_for(lambda: cluster.metric("tandem_requests_waiting") == 1, "the second to wait")
    cluster.end_drain()
    for thread in threads:
        thread.join()
    assert "[DONE]" not in answers["streaming"].text
    assert json.loads(answers["streaming"].text.rpartition("data: ")[2])["error"]["code"] == "shutting_down"
    assert answers["waiting"].status_code == 503
    wait_for(lambda: cluster.decode[0].num_aborted == 1, "the leg to be closed")


def test_request_when_it_begins_after_all_were_cut_off_then_ends_as_they_did() -> None:
    error = NodeUnavailableError("the proxy ends", code="shutting_down")

    async def serve() -> None:
        limits = TimeLimits(lambda reason: None)
        limits.cut_off(error)
        async with asyncio.timeout(20), limits.bounded(AdmissionRequest(arrival_s=0.0)):
            await asyncio.Event().wait()

    with pytest.raises(NodeUnavailableError) as caught:
        asyncio.run(serve())
    assert caught.value is error


def test_proxy_when_its_drain_is_undone_then_it_is_ready_and_serves(start_cluster: StartCluster, key_file: str) -> None:
    cluster = start_cluster(1, 1, cluster_key_file=key_file)
    headers = {"X-Tandem-Cluster-Key": KEY}
    assert drain(cluster).status_code == 200
    assert post(cluster).status_code == 503
    undone = cluster.client.delete("/internal/v1/drain", headers=headers)
    assert undone.json() == {"status": "serving", "open": 0, "held": 0}
    assert cluster.client.get("/ready").status_code == 200
    assert post(cluster).status_code == 200
    assert cluster.client.delete("/internal/v1/drain").status_code == 401


def test_drain_route_when_there_is_no_cluster_key_then_refused(start_cluster: StartCluster, key_file: str) -> None:
    cluster = start_cluster(0)
    answer = cluster.client.post("/internal/v1/drain")
    assert answer.status_code == 403
    assert "--cluster-key-file" in answer.json()["error"]["message"]
    assert cluster.client.delete("/internal/v1/drain").status_code == 403
    guarded = start_cluster(0, cluster_key_file=key_file)
    assert guarded.client.post("/internal/v1/drain").status_code == 401
    assert cluster.client.get("/ready").status_code == guarded.client.get("/ready").status_code == 200
