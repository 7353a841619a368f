"""What the client sees, and what is cleaned up, when something goes wrong."""

from __future__ import annotations

import contextlib
import json
import threading

import httpx
import pytest

from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import Fault

BODY = {"prompt": "abc"}
STREAM = {"prompt": "abc", "stream": True}
NEVER_POLL_AGAIN = 3600.0


def post(cluster: Cluster, body: object = None) -> httpx.Response:
    return cluster.client.post("/v1/completions", json=BODY if body is None else body)


@contextlib.contextmanager
def abandoned(cluster: Cluster, body: object):  # type: ignore[no-untyped-def]
    """A request whose client closes its connection at the end of the block without having got an answer."""
    client = httpx.Client(base_url=cluster.client.base_url, timeout=20, trust_env=False)

    def send() -> None:
        with contextlib.suppress(httpx.HTTPError, OSError):
            client.post("/v1/completions", json=body, timeout=httpx.Timeout(20, read=0.8))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        client.close()


def test_prefill_leg_when_refused_with_4xx_then_the_answer_is_relayed(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    for node in cluster.prefill:
        node.fault, node.status = Fault.STATUS, 422
    answer = post(cluster)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].endswith("says no")
    assert sum(len(node.bodies) for node in cluster.prefill) == 1
    assert cluster.decode[0].bodies == []
    assert cluster.metric("tandem_requests_total", route="completions", outcome="rejected") == 1


@pytest.mark.parametrize("fault", [Fault.STATUS, Fault.NO_PARAMS])
def test_prefill_leg_when_it_fails_then_another_node_is_tried(start_cluster: StartCluster, fault: Fault) -> None:
    cluster = start_cluster(2)
    cluster.prefill[0].fault = fault
    for _ in range(2):  # one of the two starts at the broken node
        assert post(cluster).status_code == 200
    assert len(cluster.prefill[0].bodies) == 1
    assert len(cluster.prefill[1].bodies) == 2
    assert all(body["kv_transfer_params"]["remote_host"] == "prefill-1" for body in cluster.decode[0].bodies)


def test_prefill_leg_when_all_nodes_fail_then_decode_goes_local(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2)
    for node in cluster.prefill:
        node.fault = Fault.STATUS
    assert post(cluster).status_code == 200
    assert cluster.decode[0].bodies == [BODY]
    assert cluster.metric("tandem_proxy_decisions_total", policy="round_robin", placement="local") == 1


def test_prefill_node_when_gone_then_decode_goes_local_and_node_is_down(start_cluster: StartCluster) -> None:
    cluster = start_cluster(health_interval_seconds=NEVER_POLL_AGAIN)
    cluster.stop_node(cluster.prefill[0])
    assert post(cluster).status_code == 200
    assert "kv_transfer_params" not in cluster.decode[0].bodies[0]
    assert cluster.metric("tandem_node_up", node=cluster.servers["prefill-0"].url) == 0
    answer = cluster.client.get("/ready")
    assert answer.status_code == 503
    assert "no prefill node is ready" in answer.json()["reasons"][0]
    assert answer.json()["reason"] == answer.json()["reasons"][0]


def test_prefill_leg_when_silent_then_504(start_cluster: StartCluster) -> None:
    cluster = start_cluster(prefill_timeout_seconds=0.2)
    cluster.prefill[0].fault = Fault.HANG
    answer = post(cluster)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    wait_for(lambda: cluster.prefill[0].num_aborted == 1, "the prefill leg's connection to be closed")


def test_prompt_list_when_one_is_refused_then_the_others_leases_are_released(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1)
    cluster.prefill[0].refused_prompts = ["bad"]
    answer = post(cluster, {"prompt": ["good", "bad"]})
    assert answer.status_code == 400
    granted = next(cluster.prefill[0].num_leases)
    wait_for(lambda: len(cluster.prefill[0].released) == granted, "the lease's release")
    assert cluster.decode[0].bodies == []


def test_decode_node_when_none_is_up_then_503(start_cluster: StartCluster) -> None:
    cluster = start_cluster(health_interval_seconds=NEVER_POLL_AGAIN)
    cluster.stop_node(cluster.decode[0])
    assert post(cluster).status_code == 503  # found out by this very request
    wait_for(lambda: cluster.prefill[0].released == ["prefill-0-lease-0"], "the lease's release")
    answer = post(cluster)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_node"
    assert len(cluster.prefill[0].bodies) == 1, "no prefill leg when nobody can decode"


def test_decode_node_when_connection_is_refused_then_another_takes_over(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2, health_interval_seconds=NEVER_POLL_AGAIN)
    cluster.stop_node(cluster.decode[0])
    for _ in range(2):
        assert post(cluster).json()["node"] == "decode-1"
    assert cluster.prefill[0].released == []


def test_decode_leg_when_broken_before_the_first_byte_then_another_takes_over(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2)
    cluster.decode[0].fault = Fault.BREAK_EARLY
    for _ in range(2):
        answer = post(cluster, STREAM)
        assert answer.text.endswith("data: [DONE]\n\n")
    [given] = (body["kv_transfer_params"]["tandem_lease_id"] for body in cluster.decode[0].bodies)
    wait_for(lambda: cluster.prefill[0].released == [given], "the lease that a dead node may have kept")


def test_decode_leg_when_all_answer_500_then_it_is_relayed_and_lease_released(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2)
    for node in cluster.decode:
        node.fault = Fault.STATUS
    answer = post(cluster, STREAM)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "no"
    assert sum(len(node.bodies) for node in cluster.decode) == 2
    wait_for(lambda: cluster.prefill[0].releasing_ids, "the lease's release")
    assert cluster.prefill[0].releasing_ids == [answer.headers["x-request-id"]]


def test_decode_leg_when_broken_after_the_first_byte_then_error_event_without_done(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2)
    for node in cluster.decode:
        node.fault = Fault.BREAK_LATE
    answer = post(cluster, STREAM)
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert events[0]["index"] == 0
    assert events[1]["error"]["type"] == "server_error"
    assert len(events) == 2
    assert sum(len(node.bodies) for node in cluster.decode) == 1
    assert cluster.metric("tandem_requests_total", route="completions", outcome="error") == 1


def test_decode_leg_when_silent_after_the_first_byte_then_error_event(start_cluster: StartCluster) -> None:
    cluster = start_cluster(stream_idle_timeout_seconds=1.0)
    cluster.decode[0].fault = Fault.STALL
    answer = post(cluster, STREAM)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert [event.get("error", {}).get("code") for event in events] == [None, "deadline_exceeded"]
    wait_for(lambda: cluster.decode[0].num_aborted == 1, "the decode leg's connection to be closed")


def test_decode_leg_when_silent_before_the_first_byte_then_504(start_cluster: StartCluster) -> None:
    cluster = start_cluster(stream_idle_timeout_seconds=0.2, prefill_timeout_seconds=0.2)
    cluster.decode[0].fault = Fault.HANG
    assert post(cluster, STREAM).status_code == 504
    wait_for(lambda: cluster.decode[0].num_aborted == 1, "the decode leg's connection to be closed")


def test_whole_answer_when_it_takes_longer_than_a_stream_may_be_silent_then_it_is_waited_for(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(0, stream_idle_timeout_seconds=0.3, prefill_timeout_seconds=0.3)
    [node] = cluster.decode
    node.may_answer.clear()
    timer = threading.Timer(1.0, node.may_answer.set)
    timer.start()
    answer = post(cluster)
    timer.join()
    assert answer.status_code == 200, answer.text


def test_whole_answer_when_it_takes_longer_than_any_may_then_504_names_the_flag_and_its_node_is_not_blamed(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(0, whole_answer_timeout_seconds=0.2, breaker_failures=1)
    cluster.decode[0].fault = Fault.HANG
    for _ in range(2):
        answer = post(cluster)
        assert answer.status_code == 504, answer.text
        error = answer.json()["error"]
        assert error["code"] == "deadline_exceeded"
        assert "decode node decode-0" in error["message"]
        assert error["message"].endswith("--whole-answer-timeout-seconds 0.2")
    wait_for(lambda: cluster.decode[0].num_aborted == 2, "the decode legs' connections to be closed")


def test_client_when_gone_during_prefill_then_the_leg_is_closed(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.prefill[0].fault = Fault.HANG
    with abandoned(cluster, BODY):
        wait_for(lambda: cluster.prefill[0].received, "the prefill leg")
    wait_for(lambda: cluster.prefill[0].num_aborted == 1, "the prefill leg's connection to be closed")
    wait_for(lambda: cluster.metric("tandem_requests_running") == 0, "the request to end")
    assert cluster.decode[0].bodies == []
    assert cluster.metric("tandem_requests_total", route="completions", outcome="abort") == 1


def test_client_when_gone_between_prompts_then_finished_ones_are_released(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.prefill[0].hanging_prompts = ["slow"]
    with abandoned(cluster, {"prompt": ["quick", "slow"]}):
        wait_for(lambda: len(cluster.prefill[0].received) == 2, "both prefill legs")
    wait_for(lambda: cluster.prefill[0].released == ["prefill-0-lease-0"], "the lease's release")
    wait_for(lambda: cluster.prefill[0].num_aborted == 1, "the slow leg's connection to be closed")


def test_client_when_gone_before_decode_answers_then_lease_is_released(start_cluster: StartCluster) -> None:
    cluster = start_cluster()
    cluster.decode[0].fault = Fault.HANG
    with abandoned(cluster, STREAM):
        wait_for(lambda: cluster.decode[0].received, "the decode leg")
    wait_for(lambda: cluster.decode[0].num_aborted == 1, "the decode leg's connection to be closed")
    wait_for(lambda: cluster.prefill[0].released == ["prefill-0-lease-0"], "the lease's release")


def test_client_when_gone_while_streaming_then_decode_is_aborted_and_what_it_was_given_is_released(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster()
    cluster.decode[0].fault = Fault.STALL
    with cluster.client.stream("POST", "/v1/completions", json={**STREAM, "prompt": ["a", "b"]}) as answer:
        lines = answer.iter_lines()  # dropping the iterator would close the stream
        assert next(lines)
        assert cluster.prefill[0].released == []
    wait_for(lambda: cluster.decode[0].num_aborted == 1, "the decode leg's connection to be closed")
    wait_for(lambda: len(cluster.prefill[0].released) == 2, "the leases' release")
    assert set(cluster.prefill[0].released) == {"prefill-0-lease-0", "prefill-0-lease-1"}
    wait_for(lambda: cluster.metric("tandem_requests_running") == 0, "the request to end")


def test_concurrency_when_at_its_limit_then_429_with_retry_after(start_cluster: StartCluster) -> None:
    cluster = start_cluster(max_concurrency=1, max_queue_size=0)
    cluster.decode[0].fault = Fault.STALL
    with cluster.client.stream("POST", "/v1/completions", json=STREAM) as answer:
        lines = answer.iter_lines()  # dropping the iterator would close the stream
        assert next(lines)
        refused = post(cluster)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-tandem-dropped"] == "rejected-queue-full"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": "abc", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": []}, 400, "prompt"),
        ({}, 400, "prompt"),
        ({"prompt": "abc", "model": "other"}, 404, "model"),
        ({"prompt": "abc", "suffix": "x"}, 400, "suffix"),
    ],
)
def test_body_when_wrong_then_refused_before_any_leg(
    start_cluster: StartCluster, body: object, status: int, param: str
) -> None:
    cluster = start_cluster()
    answer = post(cluster, body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert cluster.prefill[0].bodies == []
    assert cluster.metric("tandem_requests_total", route="completions", outcome="rejected") == 1


def test_body_when_not_json_or_too_large_then_400_and_413(start_cluster: StartCluster) -> None:
    cluster = start_cluster(max_body_bytes=2048)
    assert cluster.client.post("/v1/completions", content=b"{").status_code == 400
    assert post(cluster, {"prompt": "x" * 4096}).status_code == 413


def test_api_key_when_configured_then_needed(start_cluster: StartCluster, tmp_path) -> None:  # type: ignore[no-untyped-def]
    key_file = tmp_path / "keys"
    key_file.write_text("one\ntwo\n")
    cluster = start_cluster(api_key_file=str(key_file))
    assert post(cluster).status_code == 401
    answer = cluster.client.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer two"})
    assert answer.status_code == 200
