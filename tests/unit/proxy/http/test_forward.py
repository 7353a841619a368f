"""Requests that any node can answer: who gets them."""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import Iterator

import pytest

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


@pytest.mark.parametrize("name", ["org/model", "a%20b", "a%00b", "a%3Fb", "a%25b", "%C3%BC"])
def test_model_when_its_name_is_quoted_then_the_node_is_asked_for_the_same_one(
    start_cluster: StartCluster, name: str
) -> None:
    cluster = start_cluster(0, 1)
    assert cluster.client.get(f"/v1/models/{name}").status_code == 404
    assert cluster.decode[0].asked_models == [urllib.parse.unquote(name)]
