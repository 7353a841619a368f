"""How the proxy counts each way in which a request ends: a failure is an error, a client's own fault is none."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from common.metrics.outcomes import Outcome
from common.openai.responses import SSE_DONE
from common.wire.headers import REPORT_HEADER
from common.wire.json_text import LONG_BYTES
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import Fault
from tests.unit.proxy.raw_node import RawNode, answer, chunked

WHOLE = {"prompt": "abc", "max_tokens": 4}
STREAM = {**WHOLE, "stream": True}


def post(cluster: Cluster, body: object = None, **headers: str) -> httpx.Response:
    return cluster.client.post("/v1/completions", json=WHOLE if body is None else body, headers=headers)


def assert_counted(cluster: Cluster, outcome: str) -> None:
    """Once, and nothing else."""

    def counts() -> dict[str, float]:
        found = {str(each): cluster.metric("tandem_requests_total", outcome=each) for each in Outcome}
        return {each: count for each, count in found.items() if count}

    wait_for(lambda: counts(), "the request to be counted")
    assert counts() == {outcome: 1}


def test_stream_when_its_node_tells_an_error_then_counts_as_an_error(start_cluster: StartCluster) -> None:
    cluster = start_cluster(0, 1)
    cluster.decode[0].fault = Fault.TELL_ERROR
    events = [json.loads(line[6:]) for line in post(cluster, STREAM).text.splitlines() if line]
    assert [event.get("error", {}).get("code") for event in events] == [None, "luck"]
    assert_counted(cluster, "error")


@pytest.mark.parametrize(
    ("num_bytes", "report", "outcome"),
    [
        (2 * LONG_BYTES, {"usage": {}, "choices": [{"finish_reason": "length"}]}, "length"),
        (2 * LONG_BYTES, {"prompt_tokens": 3}, "stop"),
        (0, {"usage": {}, "choices": [{"finish_reason": "length"}]}, "stop"),
    ],
)
def test_whole_answer_when_it_is_long_and_its_node_reports_then_that_counts_and_is_not_looked_for_in_it(
    start_cluster: StartCluster, num_bytes: int, report: dict[str, object], outcome: str
) -> None:
    cluster = start_cluster(0, 1)
    cluster.decode[0].padding_bytes, cluster.decode[0].report = num_bytes, json.dumps(report)
    answer = post(cluster)
    assert len(answer.json().get("padding", "")) == num_bytes
    assert REPORT_HEADER not in answer.headers
    assert_counted(cluster, outcome)


@pytest.mark.parametrize(
    ("kind", "outcome"), [("server_error", "error"), ("invalid_request_error", "rejected"), ("odd", "error")]
)
def test_stream_when_it_ends_with_an_error_event_then_the_events_type_counts_and_its_bytes_pass(
    start_cluster: StartCluster, kind: str, outcome: str
) -> None:
    node = RawNode()
    try:
        cluster = start_cluster(0, 0, more_decode=[node.url], wait=False)
        wait_for(lambda: cluster.client.get("/ready").status_code == 200, "the proxy to be ready")
        events = b'data: {"a":1}\n\ndata: {"error": {"message": "so", "type": "%s", "code": 7}}\n\n' % kind.encode()
        # Bytes as they come, whole events at a time; nothing after the error.
        node.content = chunked(events[:9], events[9:30], events[30:], b'data: {"b":2}\n\n', SSE_DONE)
        assert post(cluster, STREAM).content == events
        assert_counted(cluster, outcome)
    finally:
        node.close()


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (400, "invalid_value", "rejected"),
        (413, "body_too_large", "rejected"),
        (429, "queue_full", "capacity"),
        (500, "internal_error", "error"),
        (502, "transfer_failed", "error"),
        (503, "no_node", "error"),
    ],
)
def test_node_when_all_say_no_then_what_they_say_counts(
    start_cluster: StartCluster, status: int, code: str, outcome: str
) -> None:
    cluster = start_cluster(0, 2)
    for node in cluster.decode:
        node.fault, node.status, node.code = Fault.STATUS, status, code
    assert post(cluster).status_code == status
    assert_counted(cluster, outcome)


@pytest.mark.parametrize("body", [WHOLE, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(("reason", "outcome"), [("length", "length"), ("stop", "stop")])
def test_answer_when_it_is_whole_then_its_finish_reason_counts(
    start_cluster: StartCluster, reason: str, outcome: str, body: dict[str, object]
) -> None:
    node = RawNode()
    try:
        cluster = start_cluster(0, 0, more_decode=[node.url], wait=False)
        wait_for(lambda: cluster.client.get("/ready").status_code == 200, "the proxy to be ready")
        # A text that looks like the end of an answer is none.
        choices = [{"text": '"finish_reason":"length"', "finish_reason": "stop"}, {"text": "", "finish_reason": reason}]
        data = json.dumps({"choices": choices}, separators=(",", ":")).encode()
        node.content = answer(data) if body is WHOLE else chunked(b"data: " + data + b"\n\n", SSE_DONE)
        assert post(cluster, body).status_code == 200
        assert_counted(cluster, outcome)
    finally:
        node.close()


def test_request_when_it_is_beyond_its_keys_token_limit_then_is_the_clients_fault(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    keys, limits = tmp_path / "keys", tmp_path / "limits.json"
    keys.write_text("small\n")
    limits.write_text(json.dumps({"keys": {"small": {"tokens_per_minute": 10}}}))
    cluster = start_cluster(0, wait=False, api_key_file=str(keys), api_key_limits_file=str(limits))
    wait_for(lambda: cluster.client.get("/ready").status_code == 200, "the proxy to be ready")
    cluster.client.headers["authorization"] = "Bearer small"
    refused = post(cluster, {**WHOLE, "max_tokens": 1000})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "over_token_limit")
    assert_counted(cluster, "rejected")


@pytest.mark.parametrize("body", [WHOLE, STREAM], ids=["whole", "stream"])
def test_request_when_its_own_deadline_passes_then_is_no_error(
    start_cluster: StartCluster, body: dict[str, object]
) -> None:
    cluster = start_cluster(0)
    cluster.decode[0].fault = Fault.HANG if body is WHOLE else Fault.STALL
    headers = {"X-Request-Deadline-Ms": "700"}
    assert post(cluster, body, **headers).status_code == (504 if body is WHOLE else 200)
    assert_counted(cluster, "deadline")


def test_request_when_a_node_is_silent_for_too_long_then_is_an_error(start_cluster: StartCluster) -> None:
    cluster = start_cluster(0, whole_answer_timeout_seconds=0.2)
    cluster.decode[0].fault = Fault.HANG
    assert post(cluster).status_code == 504
    assert_counted(cluster, "error")


def test_request_when_malformed_or_the_proxy_drains_then_is_counted_before_it_is_admitted(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(0)
    assert post(cluster, {"prompt": "abc", "max_tokens": "many"}).status_code == 400
    assert_counted(cluster, "rejected")
    cluster.end_drain()
    assert post(cluster).status_code == 503
    assert cluster.metric("tandem_requests_total", outcome="capacity") == 1
    assert cluster.metric("tandem_requests_total", outcome="error") == 0
