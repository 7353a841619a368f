"""Which addresses a node calls: those of its peers and no other, whatever a request says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import pytest_asyncio

from common.config import dns
from common.errors import InvalidRequestError, TransferError
from common.node.peers import directory as directory_module
from common.node.peers.directory import PeerDirectory
from common.node.peers.names import PeerNames
from common.transfer.testing.inprocess import InProcessBackend, InProcessHub
from tests.support.fake_dns import FakeDns, refuse_loop_threads
from tests.support.service import free_port

ANYBODY: tuple[str, ...] = ()


@pytest_asyncio.fixture
async def directory(request: pytest.FixtureRequest) -> AsyncIterator[PeerDirectory]:
    backend = InProcessBackend(InProcessHub(), engine_id="me", epoch=1)
    made = PeerDirectory(backend, getattr(request, "param", ANYBODY), cluster_key=None)
    yield made
    await made.close()
    backend.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://localhost:8100", "http://[::1]:8100", "http://127.9.9.9:1"]
)
async def test_loopback_when_no_peers_are_configured_is_allowed(directory: PeerDirectory, url: str) -> None:
    directory.check_allowed(url, is_from_peer=True)
    # What is asked there carries the cluster key: nobody without it says where to.
    with pytest.raises(InvalidRequestError, match="X-Tandem-Cluster-Key") as caught:
        directory.check_allowed(url, is_from_peer=False)
    assert caught.value.param == "kv_transfer_params.remote_host"


@pytest.mark.asyncio
@pytest.mark.parametrize("is_from_peer", [True, False])
@pytest.mark.parametrize(
    "url",
    [
        *("http://10.0.0.1:8100", "http://169.254.169.254:80", "http://example.org:80"),
        *("http://127.0.0.1.example.org:80", "http://[:8100", "http://]:8100", "http://[::1]]:8100"),
        *("http://[[::1]:8100", "http://[localhost:]:8100", "http://[127.0.0.1:80]:8100", "http://127.0.0.1%:8100"),
    ],
)
async def test_other_hosts_when_no_peers_are_configured_are_refused(
    directory: PeerDirectory, url: str, is_from_peer: bool
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        directory.check_allowed(url, is_from_peer=is_from_peer)
    assert url in caught.value.message


@pytest.mark.asyncio
@pytest.mark.parametrize("directory", [("http://10.0.0.7:8100/",)], indirect=True)
@pytest.mark.parametrize("is_from_peer", [True, False])
async def test_hosts_when_peers_are_configured_must_be_among_them(directory: PeerDirectory, is_from_peer: bool) -> None:
    directory.check_allowed("http://10.0.0.7:8100", is_from_peer=is_from_peer)
    for url in ("http://10.0.0.7:8101", "http://127.0.0.1:8100"):
        with pytest.raises(InvalidRequestError, match="--peers"):
            directory.check_allowed(url, is_from_peer=is_from_peer)


@pytest.mark.asyncio
async def test_connect_when_nobody_listens_is_a_typed_transfer_error(directory: PeerDirectory) -> None:
    with pytest.raises(TransferError) as caught:
        await directory.connect(f"http://127.0.0.1:{free_port()}", "engine", 5)
    assert caught.value.code == "peer_unreachable"


@pytest.mark.asyncio
async def test_calls_when_the_address_is_no_url_then_typed_transfer_errors(directory: PeerDirectory) -> None:
    """Whoever calls has checked it; a background task that did not must not end of it."""
    for call in (
        directory.post("http://[::1]]:1", "/x", {}, 1.0),
        directory.query("http://[::1]]:1", "/x", {}, 1.0),
        directory.meet("http://[::1]]:1"),
    ):
        with pytest.raises(TransferError) as caught:
            await call
        assert caught.value.code == "peer_unreachable"


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [{"id": "a"}, b'{"id":"a"}'])
async def test_query_when_it_is_an_object_or_its_json_then_is_sent_as_json(
    directory: PeerDirectory, body: dict[str, str] | bytes
) -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json={"final": True})

    await directory._http.aclose()
    directory._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    assert await directory.query("http://127.0.0.1:1", "/x", body, 1.0) == {"final": True}
    assert sent[0].content == b'{"id":"a"}'
    assert sent[0].headers["content-type"] == "application/json"


@pytest.mark.asyncio
async def test_meet_when_many_wait_for_a_silent_peer_then_all_give_up_with_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One handshake at a time, and not one after the other for each who waits: the tenth would wait ten times as
    long."""
    monkeypatch.setattr(directory_module, "HANDSHAKE_TIMEOUT_S", 0.2)
    tried: list[asyncio.StreamWriter] = []

    async def say_nothing(_: asyncio.StreamReader, writing: asyncio.StreamWriter) -> None:
        tried.append(writing)

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    backend = InProcessBackend(InProcessHub(), engine_id="me", epoch=1)
    directory = PeerDirectory(backend, ANYBODY, cluster_key=None)
    try:
        met = await asyncio.gather(
            *(directory.meet(url) for _ in range(5)),
            *(directory.connect(url, "holder", 77) for _ in range(5)),
            return_exceptions=True,
        )
        assert [getattr(each, "code", each) for each in met] == ["peer_unreachable"] * 10
        assert len(tried) == 1
        with pytest.raises(TransferError):  # whoever comes later tries again
            await directory.meet(url)
        assert len(tried) == 2
    finally:
        await directory.close()
        backend.close()
        server.close()
        for writing in tried:
            writing.close()
        await asyncio.gather(*(writing.wait_closed() for writing in tried), return_exceptions=True)


@pytest.mark.asyncio
async def test_peers_when_they_are_a_name_then_are_the_nodes_at_its_addresses_as_they_change() -> None:
    answers: list[set[str]] = [{"10.0.0.7", "fd00::7"}]

    async def resolve(host: str, port: int) -> set[str]:
        assert (host, port) == ("prefill", 8100)
        if not answers[0]:
            raise OSError("no such name")
        return answers[0]

    names = PeerNames(["http://10.0.0.1:8100", "dns+http://prefill:8100"], interval_s=0.01, resolve=resolve)
    assert "http://10.0.0.7:8100" not in names
    names.start()
    try:
        await until(lambda: "http://10.0.0.7:8100" in names)
        assert "http://[fd00::7]:8100" in names
        for other in ("http://10.0.0.1:8100", "http://10.0.0.7:8200", "http://prefill:8100", "http://10.0.0.8:8100"):
            assert other not in names
        answers[0] = set()
        await asyncio.sleep(0.1)
        assert "http://10.0.0.7:8100" in names  # DNS that is down parts nobody
        answers[0] = {"10.0.0.8"}
        await until(lambda: "http://10.0.0.8:8100" in names)
        assert "http://10.0.0.7:8100" not in names
    finally:
        await names.close()


@pytest.mark.asyncio
async def test_peers_when_dns_hangs_then_stay_and_no_thread_of_the_event_loop_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_loop_threads()
    fake = FakeDns(monkeypatch, prefill=["10.0.0.7"])
    names = PeerNames(["dns+http://prefill:8100"], interval_s=0.01)
    names.start()
    try:
        await until(lambda: "http://10.0.0.7:8100" in names)
        monkeypatch.setattr(dns, "RESOLVE_TIMEOUT_S", 0.01)
        fake.hanging.add("prefill")
        num_asked = len(fake.asked)
        await until(lambda: len(fake.asked) > num_asked)
        assert "http://10.0.0.7:8100" in names
        fake.answers["prefill"] = ["10.0.0.8"]
        fake.go_on.set()
        await until(lambda: "http://10.0.0.8:8100" in names)
    finally:
        await names.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
@pytest.mark.parametrize("directory", [("dns+http://localhost:8100",)], indirect=True)
async def test_directory_when_peers_are_a_name_then_allows_its_addresses_alone(
    directory: PeerDirectory,
) -> None:
    with pytest.raises(InvalidRequestError):
        directory.check_allowed("http://127.0.0.1:8100", is_from_peer=True)
    directory.names.start()
    await until(lambda: "http://127.0.0.1:8100" in directory.names)
    directory.check_allowed("http://127.0.0.1:8100", is_from_peer=False)
    with pytest.raises(InvalidRequestError, match="--peers"):
        directory.check_allowed("http://127.0.0.1:8200", is_from_peer=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("directory", [("dns+http://tandem-prefill:8100", "dns+http://[::1]:80")], indirect=True)
async def test_directory_when_peers_are_a_name_then_our_own_processes_may_name_hosts_below_it(
    directory: PeerDirectory,
) -> None:
    for index in (0, 11):
        url = f"http://tandem-prefill-{index}.tandem-prefill:8100"
        directory.check_allowed(url, is_from_peer=True)
        with pytest.raises(InvalidRequestError, match="--peers"):
            directory.check_allowed(url, is_from_peer=False)
    for url in (
        *("http://a.tandem-prefill:8200", "http://a.b.tandem-prefill:8100", "http://.tandem-prefill:8100"),
        *("http://tandem-prefill:8100", "http://a.tandem-prefill", "https://a.tandem-prefill:8100"),
        *("http://a.other-tandem-prefill:8100", "http://a.tandem-prefill:8100.example.org:80", "http://a.[::1]:80"),
    ):
        with pytest.raises(InvalidRequestError, match="--peers"):
            directory.check_allowed(url, is_from_peer=True)


def test_own_host_when_a_process_listens_everywhere_then_is_its_names_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ["127.0.1.1", "fd00::5", "10.0.0.5"]
    monkeypatch.setattr(dns.socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (each, 0)) for each in found])
    assert dns.own_host("10.9.9.9") == "10.9.9.9"
    assert dns.own_host("0.0.0.0") == "10.0.0.5"
    found[:] = ["127.0.1.1"]
    assert dns.own_host("0.0.0.0") == "0.0.0.0"
