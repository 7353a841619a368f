"""Who may call what when keys are set: clients with an API key, the service's own processes with the cluster key."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.conftest import FAMILY, NODE_FLAGS
from tests.support import foreign
from tests.support.models import checkpoint
from tests.support.reference import random_tokens
from tests.support.service import Service

FIRST_KEY, SECOND_KEY, CLUSTER_KEY = "sk-first-key", "sk-second-key", "ck-between-processes"
PROMPT = random_tokens(40, seed=321)
BODY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
KEYED_ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]
INTERNAL_ROUTES = [
    ("GET", "/internal/v1/info"),
    ("GET", "/internal/v1/transfer"),
    ("GET", "/internal/v1/cache/check"),
    ("GET", "/internal/v1/cache/events"),
    ("GET", "/internal/v1/tokenizer"),
    ("POST", "/internal/v1/leases/renew"),
    ("POST", "/internal/v1/leases/release"),
]


@dataclass(frozen=True)
class Keyed:
    service: Service

    def urls(self) -> list[str]:
        return [node.url for node in self.service.nodes]

    def node_urls(self) -> list[str]:
        return [node.url for node in (*self.service.prefill, *self.service.decode)]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text(f"# two clients\n{FIRST_KEY}\n\n{SECOND_KEY}\n")
    (folder / "cluster").write_text(CLUSTER_KEY + "\n")
    flags = ("--api-key-file", str(folder / "api"), "--cluster-key-file", str(folder / "cluster"))
    node_flags = (*NODE_FLAGS, *flags)
    with Service(checkpoint(FAMILY), prefill_flags=node_flags, decode_flags=node_flags, proxy_flags=flags) as service:
        yield Keyed(service)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers", [{}, bearer("sk-wrong"), {"Authorization": "Bearer"}, {"Authorization": f"Basic {FIRST_KEY}"}]
)
@pytest.mark.parametrize(("method", "route"), KEYED_ROUTES)
def test_public_route_when_key_is_missing_or_wrong_then_is_401(
    keyed: Keyed, method: str, route: str, headers: dict[str, str]
) -> None:
    for url in keyed.urls():
        response = httpx.request(method, url + route, headers=headers, json=BODY if method == "POST" else None)
        assert response.status_code == 401, (url, response.text)
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert FIRST_KEY not in response.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
def test_probe_when_asked_without_a_key_then_is_open(keyed: Keyed, path: str) -> None:
    assert [httpx.get(url + path).status_code for url in keyed.urls()] == [200, 200, 200]


@pytest.mark.parametrize("headers", [{}, bearer(FIRST_KEY), {"X-Tandem-Cluster-Key": "ck-wrong"}])
@pytest.mark.parametrize(("method", "route"), INTERNAL_ROUTES)
def test_internal_route_when_called_without_the_cluster_key_then_is_401(
    keyed: Keyed, method: str, route: str, headers: dict[str, str]
) -> None:
    for url in keyed.node_urls():
        response = httpx.request(
            method, url + route, headers=headers, json={"lease_ids": []} if method == "POST" else None
        )
        assert response.status_code == 401, (url, response.text)
        assert response.json()["error"]["code"] == "invalid_cluster_key"


def test_internal_route_when_called_with_the_cluster_key_then_answers(keyed: Keyed) -> None:
    for url in keyed.node_urls():
        for method, route in INTERNAL_ROUTES:
            response = httpx.request(
                method,
                url + route,
                headers={"X-Tandem-Cluster-Key": CLUSTER_KEY},
                json={"lease_ids": []} if method == "POST" else None,
            )
            assert response.status_code == 200, (url, route, response.text)


@pytest.mark.parametrize("key", [FIRST_KEY, SECOND_KEY])
def test_request_when_key_is_right_then_is_handed_over_and_its_lease_released(keyed: Keyed, key: str) -> None:
    headers = bearer(key) | {"X-Tandem-Trace": "1"}
    response = httpx.post(
        keyed.service.url + "/v1/completions", json={**BODY, "cache_salt": key}, headers=headers, timeout=60
    )
    assert response.status_code == 200, response.text
    trace = response.json()["tandem"]
    assert trace["placement"] == "remote"
    assert trace["transferred_states"] == 1
    states = [
        httpx.get(url + "/internal/v1/cache/check", headers={"X-Tandem-Cluster-Key": CLUSTER_KEY}).json()
        for url in keyed.node_urls()
    ]
    assert all(state["ok"] for state in states), states
    assert keyed.service.prefill[0].process.tail().count("not released") == 0
    assert keyed.service.decode[0].process.tail().count("not renewed") == 0


def test_openai_client_when_key_is_wrong_then_raises_authentication_error(keyed: Keyed) -> None:
    with openai.OpenAI(base_url=keyed.service.url + "/v1", api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model=str(keyed.service.model), prompt=PROMPT, max_tokens=1)
        assert caught.value.code == "invalid_api_key"
        right = client.with_options(api_key=SECOND_KEY)
        assert right.completions.create(model=str(keyed.service.model), prompt=PROMPT, max_tokens=1).usage is not None


def test_keys_when_processes_run_then_are_in_no_command_line_and_no_log(keyed: Keyed) -> None:
    for node in keyed.service.nodes:
        command_line = Path(f"/proc/{node.process.pid}/cmdline").read_text()
        for key in (FIRST_KEY, SECOND_KEY, CLUSTER_KEY):
            assert key not in command_line
            assert key not in node.process.log.read_text(errors="replace")


def test_tandem_prompt_when_the_cluster_key_is_missing_then_it_is_an_unknown_field(keyed: Keyed) -> None:
    url = keyed.service.decode[0].url + "/v1/chat/completions"
    ids = {"tandem_prompt": {"token_ids": PROMPT}, "max_tokens": 2}
    given = {**ids, "messages": [{"role": "user", "content": "hello"}]}
    alone = httpx.post(url, json=ids, headers=bearer(FIRST_KEY), timeout=60)
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "messages")
    answers = [
        httpx.post(url, json=given, headers=headers, timeout=60).json()["usage"]["prompt_tokens"]
        for headers in (bearer(FIRST_KEY), {"X-Tandem-Cluster-Key": CLUSTER_KEY})
    ]
    assert answers[0] != answers[1] == len(PROMPT)


def test_handoff_when_its_caller_has_no_cluster_key_and_there_are_no_peers_then_no_address_is_called(
    keyed: Keyed,
) -> None:
    """What a node asks its peers carries the cluster key: who has none must not say where to."""
    decode = keyed.service.decode[0].url
    asked: list[object] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.5)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    leg = foreign.rendezvous(url, "r" * 32)
    sources = [{"url": url, "epoch": "1"}]
    with listener:
        refused = httpx.post(
            decode + "/v1/completions", json={**BODY, "kv_transfer_params": leg}, headers=bearer(FIRST_KEY), timeout=60
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params.remote_host")
        ignored = httpx.post(
            decode + "/v1/completions",
            json={**BODY, "tandem_sources": sources, "cache_salt": "sources"},
            headers=bearer(FIRST_KEY),
            timeout=60,
        )
        assert ignored.status_code == 200, ignored.text
        with contextlib.suppress(TimeoutError):
            asked.append(listener.accept())
    assert asked == []


def listening_addresses(pid: int) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Of the TCP sockets of a process."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in sockets:
                raw = bytes.fromhex(local.partition(":")[0])  # words of four bytes, the last one first
                found.add(ipaddress.ip_address(b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))))
    return found


def test_processes_when_on_loopback_then_their_transports_listen_nowhere_else(keyed: Keyed) -> None:
    for node in keyed.service.nodes:
        addresses = listening_addresses(node.process.pid)
        assert addresses, node.role
        assert all(address.is_loopback for address in addresses), (node.role, addresses)
