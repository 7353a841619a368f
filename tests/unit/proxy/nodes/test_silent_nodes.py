"""Nodes that are there and say nothing: no connection breaks, and nobody may wait for long all the same."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from typing import Any

import httpx
import pytest

from proxy.node_http.client import NodeClient
from proxy.nodes import health_probe
from proxy.nodes.health_probe import probe
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import NUM_CHUNKS, FakeNode, Fault

STREAM: dict[str, Any] = {"prompt": "abc", "stream": True, "max_tokens": 2 * NUM_CHUNKS}
SILENCE_S = 0.6
SOON_S = 8.0
"""Far below the minutes that a stream may be silent, far above what a busy machine needs."""


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And slow enough that the nodes that are well answer them on a busy machine: one probe missed takes a node out."""
    monkeypatch.setattr(health_probe, "PROBE_TIMEOUT_S", 0.5)


def freeze(node: FakeNode, fault: Fault) -> None:
    node.fault = fault
    node.is_silent = True


def complete(cluster: Cluster, body: dict[str, Any] = STREAM) -> tuple[float, list[Any]]:
    """Seconds, and the events or the answer."""
    started_s = time.monotonic()
    answer = cluster.client.post("/v1/completions", json=body)
    blocks = [block.removeprefix("data: ") for block in answer.text.split("\n\n") if block]
    return time.monotonic() - started_s, [block if block == "[DONE]" else json.loads(block) for block in blocks]


@pytest.mark.parametrize("pull", [False, True], ids=["sequential", "concurrent"])
def test_stream_when_its_node_goes_silent_then_goes_on_elsewhere_soon(start_cluster: StartCluster, pull: bool) -> None:
    cluster = start_cluster(1, 2, pull=pull, resume=True, migration_limit=1, node_silence_seconds=SILENCE_S)
    freeze(cluster.decode[0], Fault.STALL)
    seconds, events = complete(cluster)
    assert seconds < SOON_S
    assert [event["index"] for event in events[:-1]] == list(range(NUM_CHUNKS))
    assert [event["node"] for event in events[:-1]] == ["decode-0"] + ["decode-1"] * (NUM_CHUNKS - 1)
    assert events[-1] == "[DONE]"


def test_stream_when_its_node_goes_silent_and_it_may_not_move_then_error_event_soon(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 2, node_silence_seconds=SILENCE_S)
    freeze(cluster.decode[0], Fault.STALL)
    seconds, events = complete(cluster)
    assert seconds < SOON_S
    assert events[-1]["error"]["code"] == "no_node"
    assert "no sign of life" in events[-1]["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_request_when_its_node_goes_silent_before_the_first_byte_then_another_one_answers(
    start_cluster: StartCluster, stream: bool
) -> None:
    cluster = start_cluster(1, 2, node_silence_seconds=SILENCE_S)
    freeze(cluster.decode[0], Fault.HANG)
    seconds, events = complete(cluster, {**STREAM, "stream": stream})
    assert seconds < SOON_S
    assert all("error" not in event for event in events)
    assert len(cluster.decode[1].bodies) == 1
    assert cluster.metric("tandem_proxy_retries_total", reason="broken") == 1


def test_request_when_its_prefill_node_goes_silent_then_another_one_computes_it(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2, 1, node_silence_seconds=SILENCE_S)
    freeze(cluster.prefill[0], Fault.HANG)
    seconds, events = complete(cluster)
    assert seconds < SOON_S
    assert events[-1] == "[DONE]"
    assert len(cluster.prefill[1].bodies) == 1


def test_stream_when_its_node_is_slow_to_say_something_and_answers_probes_then_is_waited_for(
    start_cluster: StartCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two probes that a busy machine misses last longer than the silence below.
    monkeypatch.setattr(health_probe, "PROBE_TIMEOUT_S", 2.0)
    cluster = start_cluster(1, 2, migration_limit=1, resume=True, node_silence_seconds=0.1)
    cluster.decode[0].fault = Fault.HANG
    started_s = time.monotonic()
    with pytest.raises(httpx.ReadTimeout):
        cluster.client.post("/v1/completions", json=STREAM, timeout=2.0)
    assert time.monotonic() - started_s >= 2.0
    assert cluster.decode[1].bodies == []


def test_stream_when_its_node_answers_no_probes_and_goes_on_streaming_then_is_not_given_up(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 2, migration_limit=1, resume=True, node_silence_seconds=1.8)
    node = cluster.decode[0]
    node.chunk_pause_s = 0.8
    with cluster.client.stream("POST", "/v1/completions", json=STREAM) as answer:
        lines = []
        for line in answer.iter_lines():
            node.is_silent = True
            lines += [line] if line else []
    assert ['"decode-0"' in line for line in lines[:-1]] == [True] * NUM_CHUNKS
    assert lines[-1] == "data: [DONE]"


def test_node_when_it_answers_again_then_gets_requests_again(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 1, node_silence_seconds=SILENCE_S)
    freeze(cluster.decode[0], Fault.STALL)
    assert "error" in complete(cluster)[1][-1]
    cluster.decode[0].is_silent, cluster.decode[0].fault = False, Fault.NONE
    deadline_s = time.monotonic() + 10
    while cluster.client.get("/ready").status_code != 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert complete(cluster)[1][-1] == "[DONE]"


def wait_for_silence(cluster: Cluster, node: FakeNode) -> None:
    deadline_s = time.monotonic() + 10
    while cluster.metric("tandem_node_up", node=cluster.servers[node.name].url) != 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_request_when_the_only_decode_node_has_missed_a_probe_then_it_is_asked_all_the_same(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 1, node_silence_seconds=30)
    node = cluster.decode[0]
    node.is_silent = True
    wait_for_silence(cluster, node)
    assert cluster.client.get("/ready").status_code == 200
    assert complete(cluster)[1][-1] == "[DONE]"
    assert len(node.bodies) == 1


def test_request_when_another_decode_node_answers_probes_then_the_late_one_is_not_asked(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 2, node_silence_seconds=30)
    late, well = cluster.decode
    late.is_silent = True
    wait_for_silence(cluster, late)
    for _ in range(4):
        assert complete(cluster)[1][-1] == "[DONE]"
    assert (len(late.bodies), len(well.bodies)) == (0, 4)


def test_request_when_the_only_decode_node_misses_probes_for_long_and_goes_on_streaming_then_it_is_asked(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 1, node_silence_seconds=1.8)
    node = cluster.decode[0]
    node.chunk_pause_s = 1.0
    with cluster.client.stream("POST", "/v1/completions", json=STREAM) as answer:
        begin_s = time.monotonic()
        for line in answer.iter_lines():
            node.is_silent = True
            if line and time.monotonic() - begin_s > 1.8:
                assert cluster.metric("tandem_node_up", node=cluster.servers[node.name].url) == 0
                assert cluster.client.get("/ready").status_code == 200
                break
        else:
            pytest.fail("the stream was too short")


def test_request_when_the_only_decode_node_is_silent_for_too_long_or_drains_then_refused(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 1, node_silence_seconds=SILENCE_S)
    cluster.decode[0].is_silent = True
    wait_for_silence(cluster, cluster.decode[0])
    deadline_s = time.monotonic() + 10
    while cluster.client.get("/ready").status_code == 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert complete(cluster)[1][-1]["error"]["code"] == "no_node"
    assert cluster.decode[0].bodies == []


@pytest.mark.parametrize(
    ("number", "is_silent"), [(errno.EHOSTUNREACH, True), (errno.ETIMEDOUT, True), (errno.ECONNREFUSED, False)]
)
def test_probe_when_the_network_finds_nobody_there_then_is_silent_and_when_refused_then_not(
    monkeypatch: pytest.MonkeyPatch, number: int, is_silent: bool
) -> None:
    async def connect(*address: object) -> None:
        raise OSError(number, os.strerror(number))

    async def work() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connect)
        monkeypatch.setattr(health_probe, "PROBE_TIMEOUT_S", 60)  # the network answers, not the clock
        client = NodeClient("http://127.0.0.1:9", connect_timeout_s=5)
        try:
            probed = await probe(client, "auto", {})
        finally:
            await client.close()
        assert (probed.info, probed.is_silent) == (None, is_silent), probed.problem

    asyncio.run(work())
