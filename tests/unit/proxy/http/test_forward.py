"""Requests that any node can answer: who gets them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import StartCluster
from tests.unit.proxy.fake_node import Fault

STREAM = {"prompt": "abc", "stream": True}


def test_texts_when_the_first_node_is_busy_then_go_to_the_one_that_is_not(start_cluster: StartCluster) -> None:
    cluster = start_cluster(0, 2)
    busy, free = cluster.decode
    busy.fault = Fault.STALL
    lines: list[Iterator[str]] = []
    with contextlib.ExitStack() as stack:
        for _ in cluster.decode:
            answer = stack.enter_context(cluster.client.stream("POST", "/v1/completions", json=STREAM))
            lines.append(answer.iter_lines())  # whose end would be that of the stream
            next(lines[-1])
        assert [len(node.bodies) for node in cluster.decode] == [1, 1]
        wait_for(lambda: cluster.metric("tandem_requests_running") == 1, "the other stream to end")
        for _ in range(2):
            assert cluster.client.post("/tokenize", json={"prompt": "abc"}).json()["node"] == free.name
    assert cluster.client.get("/v1/models").json()["data"][0]["id"] == busy.model
