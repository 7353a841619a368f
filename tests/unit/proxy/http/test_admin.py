"""Nodes that join and leave while the proxy runs: by the operator, and by DNS."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.config.proxy import ProxyConfig
from common.errors import ConfigError
from proxy.app import create_app
from tests.support.http_server import AppServer, serving, wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import FakeNode

BODY = {"prompt": "abc"}
KEY = {"X-Tandem-Cluster-Key": "cluster-secret"}
ROUTE = "/internal/v1/nodes"


@pytest.fixture
def cluster(start_cluster: StartCluster, tmp_path: Path) -> Cluster:
    path = tmp_path / "cluster"
    path.write_text(KEY["X-Tandem-Cluster-Key"] + "\n")
    return start_cluster(0, 1, cluster_key_file=str(path))


def order(cluster: Cluster, what: str, **body: Any) -> httpx.Response:
    return cluster.client.post(f"{ROUTE}/{what}", json=body, headers=KEY)


def listed(cluster: Cluster) -> dict[str, dict[str, Any]]:
    answer = cluster.client.get(ROUTE, headers=KEY)
    assert answer.status_code == 200
    return {node["name"]: node for node in answer.json()["nodes"]}


def test_node_when_added_drained_and_removed_then_it_serves_meanwhile_only(cluster: Cluster) -> None:
    joining = FakeNode("decode-new")
    with serving(joining.app()) as server:
        assert order(cluster, "add", url=server.url + "/", role="decode").json()["state"] == "new"
        wait_for(lambda: listed(cluster).get("decode-new", {}).get("state") == "ready", "the new node")
        assert order(cluster, "drain", url=cluster.servers["decode-0"].url).json()["state"] == "draining"
        for _ in range(3):
            assert cluster.client.post("/v1/completions", json=BODY).json()["node"] == "decode-new"
        shown = listed(cluster)["decode-0"]
        assert (shown["state"], shown["reason"]) == ("draining", "drained by the operator")
        assert shown["limits"]["max_model_len"] == 128
        assert (shown["fingerprint"], shown["in_flight"], shown["role"]) == ("f00d", 0, "decode")
        order(cluster, "add", url=cluster.servers["decode-0"].url, role="decode")
        wait_for(lambda: listed(cluster)["decode-0"]["state"] == "ready", "the drained node to be back")
        assert order(cluster, "remove", url=server.url).json()["state"] == "gone"
        assert set(listed(cluster)) == {"decode-0"}
        num_answered = len(joining.bodies)
        assert cluster.client.post("/v1/completions", json=BODY).json()["node"] == "decode-0"
        assert len(joining.bodies) == num_answered


def test_node_when_of_another_model_then_refused_with_both_values(cluster: Cluster) -> None:
    with serving(FakeNode("decode-new", fingerprint="beef").app()) as server:
        order(cluster, "add", url=server.url, role="decode")
        wait_for(lambda: listed(cluster).get("decode-new", {}).get("state") == "suspect", "the refusal")
        shown = listed(cluster)["decode-new"]
        assert "beef" in shown["reason"]
        assert "f00d" in shown["reason"]
        answer = cluster.client.request("DELETE", ROUTE, json={"url": server.url}, headers=KEY)
        assert answer.json()["state"] == "gone"


@pytest.mark.parametrize(
    ("what", "body", "status", "param"),
    [
        ("add", {"url": "ftp://x", "role": "decode"}, 400, "url"),
        ("add", {"url": "http://127.0.0.1:9", "role": "proxy"}, 400, "role"),
        ("add", {"role": "decode"}, 400, "url"),
        ("drain", {"url": "http://127.0.0.1:9"}, 404, "url"),
        ("remove", {"url": 5}, 400, "url"),
    ],
)
def test_order_when_wrong_then_the_field_is_named(
    cluster: Cluster, what: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = order(cluster, what, **body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_routes_when_the_key_is_missing_then_refused(cluster: Cluster, start_cluster: StartCluster) -> None:
    url = cluster.servers["decode-0"].url
    for path in ("add", "drain", "remove"):
        assert cluster.client.post(f"{ROUTE}/{path}", json={"url": url, "role": "decode"}).status_code == 401
    assert cluster.client.get(ROUTE).status_code == 401
    keyless = start_cluster(0, 1)
    url = keyless.servers["decode-0"].url
    for path in ("add", "drain", "remove"):
        answer = keyless.client.post(f"{ROUTE}/{path}", json={"url": url, "role": "decode"})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "cluster_key_required"
    assert keyless.client.get(ROUTE).status_code == 403
    assert keyless.client.get("/ready").status_code == 200


# --- DNS


class FakeDns:
    """Answers with loopback addresses; each can have a node of its own on the one port."""

    def __init__(self) -> None:
        self.answer: set[str] = set()
        self.is_broken = False
        self.num_asked = 0

    async def resolve(self, host: str, port: int) -> set[str]:
        assert host == "tandem-decode"
        self.num_asked += 1
        if self.is_broken:
            raise socket.gaierror(-3, "temporary failure")
        return set(self.answer)

    def wait_asked(self) -> None:
        seen = self.num_asked
        wait_for(lambda: self.num_asked >= seen + 2, "another answer of DNS")


@contextlib.contextmanager
def named_nodes(*addresses: str) -> Iterator[tuple[int, dict[str, FakeNode]]]:
    """A node at the same port of each loopback address."""
    nodes = {address: FakeNode(f"at-{address}") for address in addresses}
    servers: list[AppServer] = []
    try:
        port = 0
        for address, node in nodes.items():
            servers.append(AppServer(node.app(), port, host=address))
            port = servers[0].port
        yield port, nodes
    finally:
        for server in servers:
            server.stop()


def test_dns_when_addresses_come_and_go_then_nodes_do(tmp_path: Path) -> None:
    first, second = "127.0.0.1", "127.0.0.2"
    key = tmp_path / "cluster"
    key.write_text(KEY["X-Tandem-Cluster-Key"])
    dns = FakeDns()
    with named_nodes(first, second) as (port, nodes):
        config = ProxyConfig(
            decode=(f"dns+http://tandem-decode:{port}",),
            dns_interval_seconds=0.03,
            health_interval_seconds=0.03,
            cluster_key_file=str(key),
        )
        with (
            serving(create_app(config, resolve=dns.resolve)) as proxy,
            httpx.Client(base_url=proxy.url, trust_env=False) as client,
        ):

            def urls() -> set[str]:
                return {node["url"] for node in client.get(ROUTE, headers=KEY).json()["nodes"]}

            def ready() -> httpx.Response:
                return client.get("/ready")

            wait_for(lambda: "no address" in ready().text, "DNS to be asked")
            assert ready().status_code == 503
            dns.answer = {first, second}
            wait_for(lambda: urls() == {f"http://{first}:{port}", f"http://{second}:{port}"}, "both nodes")
            wait_for(lambda: ready().status_code == 200, "the nodes to be used")
            dns.is_broken = True
            dns.wait_asked()
            assert len(urls()) == 2  # a resolver that fails takes nobody away
            dns.is_broken = False
            nodes[first].may_answer.clear()
            nodes[second].may_answer.clear()
            answers: list[httpx.Response] = []
            threads = [
                threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=BODY, timeout=20)))
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            wait_for(lambda: nodes[first].bodies and nodes[second].bodies, "a leg on each")
            dns.answer = {first}
            dns.wait_asked()
            [leaving] = [node for node in client.get(ROUTE, headers=KEY).json()["nodes"] if second in node["url"]]
            assert (leaving["state"], leaving["in_flight"]) == ("draining", 1)
            assert "has left dns+http://tandem-decode" in leaving["reason"]
            for node in nodes.values():
                node.may_answer.set()
            for thread in threads:
                thread.join()
            assert [answer.status_code for answer in answers] == [200, 200]
            wait_for(lambda: urls() == {f"http://{first}:{port}"}, "the one that left to be gone")
            client.post(f"{ROUTE}/remove", json={"url": f"http://{first}:{port}"}, headers=KEY)
            dns.wait_asked()
            assert urls() == set()  # DNS does not bring back what the operator removed


def test_dns_when_an_address_is_a_node_of_the_other_role_then_the_rest_joins_and_the_name_is_asked_on() -> None:
    first, second = "127.0.0.1", "127.0.0.2"
    dns = FakeDns()
    with named_nodes(first, second) as (port, _nodes):
        config = ProxyConfig(
            prefill=(f"http://{first}:{port}",),
            decode=(f"dns+http://tandem-decode:{port}",),
            dns_interval_seconds=0.03,
            health_interval_seconds=0.03,
        )
        dns.answer = {first}
        with (
            serving(create_app(config, resolve=dns.resolve)) as proxy,
            httpx.Client(base_url=proxy.url, trust_env=False) as client,
        ):
            wait_for(lambda: "is a prefill node already" in client.get("/ready").text, "DNS to be asked")
            dns.answer = {first, second}
            wait_for(lambda: client.get("/ready").status_code == 200, "the other address to be used")


@pytest.mark.parametrize("url", ["dns+https://name:8200", "dns+http://name:8200/path", "dns+http://", "dns+name:8200"])
def test_dns_flag_when_malformed_then_config_error_names_it(url: str) -> None:
    from common.config.command_line import parse_config

    with pytest.raises(ConfigError, match="--decode"):
        parse_config(ProxyConfig, ["--decode", url], {}, prog="tandem proxy")
