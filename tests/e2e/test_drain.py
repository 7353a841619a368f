"""Nodes that are asked to stop: nothing that was admitted is lost, and nothing takes longer than it must."""

from __future__ import annotations

import itertools
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support import foreign
from tests.support.client import completion_body, info, metric
from tests.support.hangup import OpenRequest, wait_until
from tests.support.models import checkpoint
from tests.support.reference import random_tokens
from tests.support.restart import start_again
from tests.support.service import Node, Service, start_node, wait_ready

ROUTE = "/v1/completions"
EXIT_S = 60.0
AT_ONCE_S = 15.0
"""On any machine: what these ends do not wait for lasts longer."""
"""Longer than any of these processes may need; tests that are about time say so."""


@pytest.fixture(scope="module")
def own_service() -> Iterator[Service]:
    """Its nodes are stopped; each test starts those again that it stopped."""
    flags = (*NODE_FLAGS, "--drain-timeout-seconds", "120")
    with Service(checkpoint(FAMILY), prefill_flags=flags, decode_flags=flags) as running:
        yield running


def ask_to_stop(node: Node) -> float:
    """When the signal was sent."""
    node.process.popen.send_signal(signal.SIGTERM)
    return time.monotonic()


def wait_draining(node: Node) -> None:
    wait_until(lambda: httpx.get(node.url + "/ready").status_code == 503, "the node to drain")
    assert httpx.get(node.url + "/ready").json()["status"] == "draining"
    assert httpx.get(node.url + "/health").status_code == 200


def test_prefill_node_when_drained_with_an_open_lease_then_it_waits_for_its_reader_and_exits_0(
    own_service: Service,
) -> None:
    prefill, decode = own_service.prefill[0], own_service.decode[0]
    body = completion_body(random_tokens(90, seed=9101), 4)
    params = foreign.prefill(prefill.url, body)
    ask_to_stop(prefill)
    wait_draining(prefill)
    refused = httpx.post(prefill.url + ROUTE, json=body)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) >= 1
    with pytest.raises(subprocess.TimeoutExpired):
        prefill.process.popen.wait(1.0)  # the lease is open
    answer = foreign.decode(decode.url, body, params)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tandem"]["transferred_blocks"] > 0
    assert prefill.process.popen.wait(EXIT_S) == 0
    start_again(own_service, prefill)


def test_decode_node_when_it_ends_before_a_prompt_has_come_from_its_peer_then_the_request_is_told(
    own_service: Service, tmp_path: Path
) -> None:
    node = start_node("decode", own_service.model, tmp_path, *NODE_FLAGS, "--drain-timeout-seconds", "0.3")
    try:
        wait_ready(node)
        body = completion_body(random_tokens(90, seed=9103), 4)
        nobodys = foreign.rendezvous(own_service.prefill[0].url, uuid.uuid4().hex)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(foreign.decode, node.url, body, nobodys)
            wait_until(lambda: metric(node, "requests_waiting_for_peer") == 1, "the request to wait for its prompt")
            ask_to_stop(node)
            answer = asked.result(EXIT_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down"), answer.text
        assert node.process.popen.wait(EXIT_S) == 0
    finally:
        node.process.stop()


@pytest.mark.full
def test_prefill_node_when_nobody_reads_then_it_ends_at_the_drain_timeout(own_service: Service, tmp_path: Path) -> None:
    node = start_node("prefill", own_service.model, tmp_path, *NODE_FLAGS, "--drain-timeout-seconds", "1")
    try:
        wait_ready(node)
        foreign.prefill(node.url, completion_body(random_tokens(90, seed=9102), 4))
        asked_s = ask_to_stop(node)
        assert node.process.popen.wait(EXIT_S) == 0
        assert 1.0 <= time.monotonic() - asked_s < 5.0
        assert "not drained" in node.process.tail()
    finally:
        node.process.stop()


@pytest.mark.full
def test_node_when_its_drain_is_undone_then_it_serves_again_unless_a_signal_came(
    own_service: Service, tmp_path: Path
) -> None:
    keys = tmp_path / "cluster"
    keys.write_text("cluster-secret\n")
    flags = (*NODE_FLAGS, "--cluster-key-file", str(keys), "--drain-timeout-seconds", "60")
    node = start_node("prefill", own_service.model, tmp_path, *flags)
    headers = {"X-Tandem-Cluster-Key": "cluster-secret"}
    body = completion_body(random_tokens(90, seed=9107), 4)
    try:
        wait_ready(node)
        assert httpx.post(node.url + "/internal/v1/drain", headers=headers).json()["status"] == "draining"
        assert httpx.get(node.url + "/ready").status_code == httpx.post(node.url + ROUTE, json=body).status_code == 503
        undone = httpx.delete(node.url + "/internal/v1/drain", headers=headers)
        assert (undone.status_code, undone.json()["status"]) == (200, "serving")
        assert httpx.get(node.url + "/ready").status_code == 200
        foreign.prefill(node.url, body)  # its lease keeps the node from ending
        ask_to_stop(node)
        wait_draining(node)
        refused = httpx.delete(node.url + "/internal/v1/drain", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "ending")
        assert httpx.get(node.url + "/ready").status_code == 503
    finally:
        node.process.stop()


@pytest.mark.full
def test_decode_node_when_drained_with_a_stream_then_the_stream_ends_and_the_proxy_stops_sending(
    own_service: Service,
) -> None:
    decode = own_service.decode[0]
    body = completion_body(random_tokens(60, seed=9103), 1200, stream=True)
    with OpenRequest(own_service.url, ROUTE, body) as stream:
        stream.read_events(2)
        ask_to_stop(decode)
        wait_draining(decode)
        wait_until(lambda: httpx.get(own_service.url + "/ready").status_code == 503, "the proxy to see it")
        assert "draining" in httpx.get(own_service.url + "/ready").text
        refused = httpx.post(own_service.url + ROUTE, json=completion_body("abc", 2))
        assert refused.status_code == 503
        rest = stream.read_to_end()
    assert b"data: [DONE]" in rest
    assert b"error" not in rest
    assert decode.process.popen.wait(EXIT_S) == 0
    start_again(own_service, decode)


def test_decode_node_when_requests_wait_for_a_prefill_node_then_they_are_counted_as_waiting(
    own_service: Service,
) -> None:
    prefill, decode = own_service.prefill[0], own_service.decode[0]
    wait_until(lambda: metric(own_service.proxy, "node_up") == 2, "the proxy to see both nodes")
    prompt = random_tokens(3500, seed=9106)
    thread = threading.Thread(
        target=lambda: httpx.post(own_service.url + ROUTE, json=completion_body(prompt, 2), timeout=120)
    )
    prefill.process.popen.send_signal(signal.SIGSTOP)
    try:
        thread.start()
        wait_until(lambda: info(decode)["waiting"] == 1, "the request to wait")
        assert metric(decode, "requests_waiting") == metric(decode, "requests_waiting_for_peer") == 1
    finally:
        prefill.process.popen.send_signal(signal.SIGCONT)
    thread.join()
    assert metric(decode, "requests_waiting") == metric(decode, "requests_waiting_for_peer") == 0


def test_nodes_when_idle_then_they_end_at_once_and_a_second_signal_ends_a_draining_one(own_service: Service) -> None:
    """The last one: it leaves nobody."""
    prefill, decode = own_service.prefill[0], own_service.decode[0]
    httpx.post(own_service.url + ROUTE, json=completion_body(random_tokens(50, seed=9104), 2), timeout=60)
    wait_until(lambda: prefill.check_cache()["leases"] == 0, "the lease's release")
    asked_s = ask_to_stop(decode)
    assert decode.process.popen.wait(EXIT_S) == 0
    assert time.monotonic() - asked_s < AT_ONCE_S
    foreign.prefill(prefill.url, completion_body(random_tokens(50, seed=9105), 2))
    ask_to_stop(prefill)
    wait_draining(prefill)
    asked_s = ask_to_stop(prefill)
    assert prefill.process.popen.wait(EXIT_S) == 1
    assert time.monotonic() - asked_s < AT_ONCE_S


@pytest.mark.full
def test_service_when_all_nodes_are_restarted_in_turn_under_load_then_no_request_is_lost() -> None:
    failures: list[str] = []
    num_done = itertools.count()
    is_over = threading.Event()

    def load(url: str, seed: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            for index in itertools.count():
                if is_over.is_set():
                    return
                body = completion_body(random_tokens(120, seed=seed * 1000 + index % 3), 24, stream=index % 2 == 0)
                answer = client.post(ROUTE, json=body)
                if answer.status_code != 200 or "error" in answer.text:
                    failures.append(f"{answer.status_code} {answer.text[-500:]}")
                elif body["stream"] and "data: [DONE]" not in answer.text:
                    failures.append(f"an unfinished stream: {answer.text[-200:]}")
                next(num_done)

    flags = {"prefill_flags": NODE_FLAGS, "decode_flags": NODE_FLAGS}
    with Service(checkpoint(FAMILY), **flags, num_prefill=2, num_decode=2) as service:
        threads = [threading.Thread(target=load, args=(service.url, 9200 + index)) for index in range(4)]
        for thread in threads:
            thread.start()
        try:
            for node in (*service.prefill, *service.decode):
                time.sleep(1.0)
                ask_to_stop(node)
                assert node.process.popen.wait(EXIT_S) == 0
                service.start_again(node)
                wait_ready(node)
                wait_until(lambda: metric(service.proxy, "node_up") == 4, "the proxy to see all nodes")
            time.sleep(1.0)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert failures == []
        total = next(num_done)
        assert total > 40
        answered = [metric(service.proxy, "requests_total", outcome=outcome) for outcome in ("stop", "length")]
        assert sum(answered) == total
        assert metric(service.proxy, "requests_total") == total
