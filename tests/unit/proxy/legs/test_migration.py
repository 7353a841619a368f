"""Streams that go on at another decode node after the first byte: what the client sees, and what the nodes are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import NUM_CHUNKS, Fault

STREAM: dict[str, Any] = {"prompt": "abc", "stream": True, "max_tokens": 2 * NUM_CHUNKS}
RESUME = {"output_token_ids": [0, 1], "created": 7, "num_cached_tokens": 3}


def events(cluster: Cluster, body: dict[str, Any] = STREAM) -> list[Any]:
    """The client's events; nothing else may be in the stream."""
    answer = cluster.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    blocks = [block for block in answer.text.split("\n\n") if block]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), answer.text
    return [block if block.endswith("[DONE]") else json.loads(block[6:]) for block in blocks]


def first_and_second(cluster: Cluster) -> tuple[dict[str, Any], dict[str, Any]]:
    [first] = cluster.decode[0].bodies
    [second] = cluster.decode[1].bodies
    return first, second


@pytest.mark.parametrize("pull", [False, True], ids=["sequential", "concurrent"])
@pytest.mark.parametrize("fault", [Fault.BREAK_LATE, Fault.STALL, Fault.END_EARLY, Fault.TELL_ERROR])
def test_stream_when_its_node_fails_then_goes_on_elsewhere_without_a_seam(
    start_cluster: StartCluster, fault: Fault, pull: bool
) -> None:
    # The node that goes on may be late too, on a busy machine.
    idle_s = 1.5 if fault is Fault.STALL else 20.0
    cluster = start_cluster(1, 2, pull=pull, resume=True, migration_limit=1, stream_idle_timeout_seconds=idle_s)
    cluster.decode[0].fault = fault
    got = events(cluster)
    assert [event["index"] for event in got[:-1]] == list(range(NUM_CHUNKS))
    assert [event["node"] for event in got[:-1]] == ["decode-0"] + ["decode-1"] * (NUM_CHUNKS - 1)
    assert got[-1] == "data: [DONE]"
    first, second = first_and_second(cluster)
    assert "tandem_resume" not in first
    assert second["tandem_resume"] == RESUME
    assert first["tandem_stream_state"] is second["tandem_stream_state"] is True
    assert [body.get("tandem_resume") for body in cluster.prefill[0].bodies] == [None, RESUME]
    assert cluster.metric("tandem_proxy_migrations_total", outcome="resumed") == 1
    assert cluster.metric("tandem_proxy_retries_total", reason="broken") == 0
    # Both nodes' work counts as done from their first byte on, not only when the whole stream has ended.
    starts = [cluster.metric("tandem_proxy_ttft_ratio_count", placement=way) for way in ("local", "remote")]
    assert sum(starts) == 2


def test_stream_when_only_its_end_is_missing_then_the_last_chunk_is_not_told_twice(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2, resume=True, migration_limit=1)
    cluster.decode[0].fault = Fault.BREAK_LAST
    got = events(cluster)
    assert [event["index"] for event in got[:-1]] == list(range(NUM_CHUNKS))
    assert got[-1] == "data: [DONE]"


def test_stream_when_its_nodes_fail_more_often_than_the_limit_then_error_event(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 3, resume=True, migration_limit=1)
    for node in cluster.decode:
        node.fault = Fault.TELL_ERROR
    got = events(cluster)
    assert [event.get("index") for event in got] == [0, 1, None]
    assert got[-1]["error"] == {
        "message": "decode-1 is out of luck",
        "type": "server_error",
        "param": None,
        "code": "luck",
    }
    assert sum(len(node.bodies) for node in cluster.decode) == 2
    assert cluster.metric("tandem_proxy_migrations_total", outcome="gave_up") == 1


def test_stream_when_limit_is_two_and_two_nodes_fail_then_the_third_ends_it(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 3, resume=True, migration_limit=2)
    for node in cluster.decode[:2]:
        node.fault = Fault.BREAK_LATE
    assert [event["index"] for event in events(cluster)[:-1]] == list(range(NUM_CHUNKS))
    assert cluster.decode[2].bodies[0]["tandem_resume"]["output_token_ids"] == [0, 1, 10, 11]


@pytest.mark.parametrize(
    ("fields", "resume", "limit"),
    [({}, True, 0), ({"n": 2}, True, 1), ({"prompt": ["a", "b"]}, True, 1), ({}, False, 1)],
    ids=["limit 0", "n 2", "two prompts", "nodes that cannot"],
)
def test_stream_when_it_cannot_go_on_then_error_event_and_nothing_was_asked_for(
    start_cluster: StartCluster, fields: dict[str, Any], resume: bool, limit: int
) -> None:
    cluster = start_cluster(1, 2, resume=resume, migration_limit=limit)
    for node in cluster.decode:
        node.fault = Fault.BREAK_LATE
    got = events(cluster, {**STREAM, **fields})
    assert [("error" in event) for event in got] == [False, True]
    [body] = [body for node in cluster.decode for body in node.bodies]
    assert "tandem_stream_state" not in body


@pytest.mark.parametrize("pull", [False, True], ids=["sequential", "concurrent"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_stream_when_a_node_refuses_to_go_on_with_it_then_error_event(
    start_cluster: StartCluster, role: str, pull: bool
) -> None:
    cluster = start_cluster(1, 2, pull=pull, resume=True, migration_limit=1)
    cluster.decode[0].fault = Fault.BREAK_LATE
    for node in cluster.prefill if role == "prefill" else cluster.decode:
        node.refuses_resume = True
    got = events(cluster)
    if role == "prefill" and pull:  # its reader hears of it, and computes the prompt itself
        assert got[-1] == "data: [DONE]"
    else:
        assert [("error" in event) for event in got] == [False, True]


def test_stream_when_nobody_else_is_there_then_error_event(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 1, resume=True, migration_limit=3)
    cluster.decode[0].fault = Fault.BREAK_LATE
    got = events(cluster)
    assert "error" in got[-1]
    assert cluster.metric("tandem_proxy_migrations_total", outcome="gave_up") == 1


def test_resume_fields_when_a_client_sends_them_then_no_node_sees_them(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 1, resume=True)
    events(cluster, {**STREAM, "tandem_resume": RESUME, "tandem_stream_state": True})
    assert cluster.decode[0].bodies[0].keys() == {*STREAM, "kv_transfer_params"}
