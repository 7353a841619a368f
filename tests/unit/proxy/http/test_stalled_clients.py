"""Clients that stop reading in the middle of their stream, on real sockets with small buffers."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from common.server import stall
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import Fault

STALL_S = 1.0
EVENT_BYTES = 16 * 2**10
NUM_CLIENTS = 3


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "STALL_S", STALL_S)


@contextlib.contextmanager
def reader(cluster: Cluster, **fields: object) -> Iterator[socket.socket]:
    """A client that has read the beginning of its stream, and whose system buffers next to nothing."""
    assert cluster.proxy is not None
    content = json.dumps({"prompt": "abc", "stream": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", cluster.proxy.port))
        sock.sendall(head + content)
        assert sock.recv(12) == b"HTTP/1.1 200"
        yield sock


def test_clients_when_they_stop_reading_then_are_disconnected_and_everything_is_given_back(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 1, pull=True, max_concurrency=NUM_CLIENTS, max_queue_size=0)
    [decode] = cluster.decode
    decode.endless_bytes = EVENT_BYTES
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(reader(cluster)) for _ in range(NUM_CLIENTS)]
        wait_for(lambda: cluster.metric("tandem_requests_running") == 0, "their places to be free")
        wait_for(lambda: decode.num_aborted == NUM_CLIENTS, "their streams at the node to be closed")
        assert cluster.metric("tandem_requests_total", outcome="stall") == NUM_CLIENTS
        assert cluster.metric("tandem_requests_total", outcome="error") == 0
        shown = cluster.client.get("/status.json").json()["requests"]
        assert [each["outcome"] for each in shown] == ["stall"] * NUM_CLIENTS
        decode.endless_bytes = 0
        assert cluster.client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200
        for sock in socks:
            with contextlib.suppress(ConnectionError):
                while sock.recv(2**16):
                    pass


def test_client_when_it_leaves_instead_then_is_an_abort(start_cluster: StartCluster) -> None:
    cluster = start_cluster(0, 1)
    cluster.decode[0].endless_bytes = EVENT_BYTES
    with reader(cluster):
        pass
    wait_for(lambda: cluster.metric("tandem_requests_total", outcome="abort") == 1, "the request to be counted")
    assert cluster.metric("tandem_requests_total", outcome="stall") == 0


def test_client_when_it_reads_slowly_then_stays(start_cluster: StartCluster) -> None:
    cluster = start_cluster(0, 1)
    cluster.decode[0].endless_bytes = EVENT_BYTES
    with reader(cluster) as sock:
        end_s = time.monotonic() + 3 * STALL_S
        while time.monotonic() < end_s:
            for _ in range(64):
                assert sock.recv(2**14)
            time.sleep(STALL_S / 50)
        assert cluster.metric("tandem_requests_running") == 1
    wait_for(lambda: cluster.metric("tandem_requests_total", outcome="abort") == 1, "the request to be counted")


def test_client_when_its_node_has_nothing_for_it_then_stays(start_cluster: StartCluster) -> None:
    cluster = start_cluster(0, 1)
    cluster.decode[0].fault = Fault.STALL
    with reader(cluster):
        time.sleep(2 * STALL_S)
        assert cluster.metric("tandem_requests_running") == 1
    wait_for(lambda: cluster.metric("tandem_requests_total", outcome="abort") == 1, "the request to be counted")
