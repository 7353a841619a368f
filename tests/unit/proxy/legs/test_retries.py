"""Nodes that answer nonsense, errors or nothing: who is asked instead, how often, and when a node is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from proxy.legs.retry_budget import FLOOR, WINDOW_S
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import Fault
from tests.unit.proxy.raw_node import GOOD_STREAM, GOOD_WHOLE, NO_ANSWERS, RawNode, answer

WHOLE = {"prompt": "abc"}
STREAM = {"prompt": "abc", "stream": True}
OPEN_S = 1.5
FOREVER_S = 3600.0


@pytest.fixture
def raw() -> Iterator[RawNode]:
    node = RawNode()
    yield node
    node.close()


def post(cluster: Cluster, body: object) -> httpx.Response:
    return cluster.client.post("/v1/completions", json=body)


def assert_answered(response: httpx.Response) -> None:
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n") or "node" in response.json()


NO_STREAMS = {"JSON": GOOD_WHOLE}
NO_WHOLES = {"a stream": GOOD_STREAM}


@pytest.mark.parametrize("body", [WHOLE, STREAM], ids=["whole", "stream"])
def test_decode_node_when_it_answers_nonsense_then_others_are_asked_and_its_breaker_opens_and_closes(
    start_cluster: StartCluster, raw: RawNode, body: dict[str, object]
) -> None:
    kinds = NO_ANSWERS | (NO_STREAMS if body is STREAM else NO_WHOLES)
    # It opens if each of them counts as a failure.
    cluster = start_cluster(
        1, 1, more_decode=[raw.url], breaker_failures=len(kinds), breaker_open_seconds=OPEN_S, retry_budget=1.0
    )

    def ask_until(is_done: Callable[[httpx.Response], bool]) -> bool:
        """They take turns, but a node that is slow to answer a health probe is left out of some."""
        for _ in range(50):
            response = post(cluster, body)
            assert_answered(response)
            if is_done(response):
                return True
            time.sleep(0.01)
        return False

    for number, (kind, raw.content) in enumerate(kinds.items(), 1):
        assert cluster.metric("tandem_breaker_state", node=raw.url) == 0, kind
        assert ask_until(lambda _, number=number: raw.num_legs == number), kind
    assert cluster.metric("tandem_breaker_state", node=raw.url) == 2
    for _ in range(3):
        assert_answered(post(cluster, body))
    assert raw.num_legs == len(kinds)
    raw.content = GOOD_STREAM if body is STREAM else GOOD_WHOLE
    time.sleep(OPEN_S)
    assert cluster.metric("tandem_breaker_state", node=raw.url) == 1
    assert ask_until(lambda response: "raw" in response.text)
    assert cluster.metric("tandem_breaker_state", node=raw.url) == 0
    assert cluster.metric("tandem_breaker_opened_total", node=raw.url) == 1


def test_prefill_node_when_it_answers_nonsense_then_others_are_asked_and_its_breaker_opens(
    start_cluster: StartCluster, raw: RawNode
) -> None:
    cluster = start_cluster(1, 1, more_prefill=[raw.url], breaker_failures=3, breaker_open_seconds=FOREVER_S)
    raw.content = answer(b'{"kv_transfer_params": "none"}')
    for _ in range(8):
        assert_answered(post(cluster, WHOLE))
    assert raw.num_legs == 3
    assert cluster.metric("tandem_breaker_state", node=raw.url) == 2
    assert cluster.metric("tandem_proxy_retries_total", reason="garbage") == 3
    assert all(body["kv_transfer_params"]["remote_host"] == "prefill-0" for body in cluster.decode[0].bodies)


def test_prefill_nodes_when_all_breakers_are_open_then_decode_goes_local(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 1, breaker_failures=2, breaker_open_seconds=FOREVER_S)
    cluster.prefill[0].fault = Fault.STATUS
    for _ in range(5):
        assert_answered(post(cluster, WHOLE))
    assert len(cluster.prefill[0].bodies) == 2
    assert cluster.decode[0].bodies == [WHOLE] * 5


def test_decode_nodes_when_all_breakers_are_open_then_503_at_once_with_the_reasons(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2, breaker_failures=2, breaker_open_seconds=FOREVER_S)
    for node in cluster.decode:
        node.fault = Fault.STATUS
    assert [post(cluster, STREAM).status_code for _ in range(2)] == [500, 500]
    refused = post(cluster, STREAM)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_node")
    assert refused.json()["error"]["message"].count("circuit breaker open for") == 2
    assert "last: status 500" in refused.json()["error"]["message"]
    assert [len(node.bodies) for node in cluster.decode] == [2, 2]
    assert cluster.client.get("/ready").status_code == 503


def test_breaker_when_half_open_then_one_leg_probes(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 1, breaker_failures=2, breaker_open_seconds=OPEN_S)
    [decode] = cluster.decode
    decode.fault = Fault.STATUS
    for _ in range(2):
        post(cluster, STREAM)
    time.sleep(OPEN_S)
    decode.fault = Fault.HANG
    with ThreadPoolExecutor(6) as clients:
        waiting = clients.submit(post, cluster, STREAM)
        wait_for(lambda: len(decode.bodies) == 3, "the probe")
        assert all(post(cluster, STREAM).status_code == 503 for _ in range(3))
        cluster.stop_node(decode)
        assert waiting.result().status_code == 503
    assert len(decode.bodies) == 3


def test_slow_node_when_beyond_the_deadline_then_504_until_its_breaker_opens(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 1, breaker_failures=3, breaker_open_seconds=FOREVER_S, prefill_timeout_seconds=0.2)
    cluster.prefill[0].fault = Fault.HANG
    assert [post(cluster, WHOLE).status_code for _ in range(5)] == [504, 504, 504, 200, 200]


@pytest.mark.parametrize("status", [429, 503])
def test_node_when_full_or_draining_then_others_are_asked_and_its_breaker_stays_closed(
    start_cluster: StartCluster, status: int
) -> None:
    cluster = start_cluster(1, 2, breaker_failures=1)
    cluster.decode[0].fault, cluster.decode[0].status = Fault.STATUS, status
    for _ in range(4):
        assert_answered(post(cluster, STREAM))
    assert len(cluster.decode[0].bodies) == 2
    assert cluster.metric("tandem_breaker_opened_total", node=cluster.servers["decode-0"].url) == 0
    assert cluster.metric("tandem_proxy_retries_total", reason="busy") == 2


def test_retries_when_everything_fails_then_stay_within_their_budget(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2, breaker_failures=1000, retry_budget=0.1)
    for node in cluster.decode:
        node.fault = Fault.STATUS
    begin_s = time.monotonic()
    assert [post(cluster, STREAM).status_code for _ in range(40)] == [500] * 40
    # One, unless the machine is very busy; it moves on in steps of a tenth.
    num_windows = 1 + (time.monotonic() - begin_s) // (0.9 * WINDOW_S)
    num_retries = cluster.metric("tandem_proxy_retries_total", reason="status")
    assert sum(len(node.bodies) for node in cluster.decode) == 40 + num_retries
    assert FLOOR <= num_retries <= min((FLOOR + 4) * num_windows, 40)
    assert cluster.metric("tandem_proxy_retries_refused_total") == 40 - num_retries


def test_retries_when_their_budget_is_0_then_the_first_failure_is_the_answer(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2, 2, retry_budget=0.0)
    cluster.decode[0].fault = Fault.STATUS
    assert sorted(post(cluster, STREAM).status_code for _ in range(2)) == [200, 500]
    assert cluster.metric("tandem_proxy_retries_total", reason="status") == 0


def test_handoff_when_its_first_reader_broke_then_the_second_computes_the_prompt(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2)
    cluster.decode[0].fault = Fault.BREAK_EARLY
    for _ in range(2):
        assert_answered(post(cluster, STREAM))
    bodies = cluster.decode[1].bodies
    assert sorted("kv_transfer_params" in body for body in bodies) == [False, True]


def test_streams_when_they_end_in_errors_then_the_client_is_told_and_the_breaker_opens(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 1, breaker_failures=2, breaker_open_seconds=FOREVER_S)
    cluster.decode[0].fault = Fault.TELL_ERROR
    for _ in range(2):
        text = post(cluster, STREAM).text
        assert text.count('"error"') == 1
        assert text.endswith('"code": "luck"}}\n\n')
    assert post(cluster, STREAM).status_code == 503
    assert cluster.metric("tandem_proxy_retries_total", reason="status") == 0


def test_stream_when_it_ends_early_then_the_client_is_told(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2)
    for node in cluster.decode:
        node.fault = Fault.END_EARLY
    text = post(cluster, STREAM).text
    assert "ended its stream early" in text
    assert "[DONE]" not in text
    assert sum(len(node.bodies) for node in cluster.decode) == 1
