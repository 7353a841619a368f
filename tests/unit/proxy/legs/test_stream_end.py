"""The end of a stream: nothing follows the [DONE], and what has ended is not begun again, wherever the node breaks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from proxy.legs.stream_progress import ResumableProgress, StreamProgress
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import StartCluster
from tests.unit.proxy.fake_node import NUM_CHUNKS
from tests.unit.proxy.raw_node import INFO, RawNode, chunked

DONE = b"data: [DONE]\n\n"
AFTER = b'data: {"index":99,"node":"raw"}\n\n'


def recorded(is_resumable: bool) -> list[bytes]:
    """The events of a fake node's stream (``FakeNode._events``), by a node that tells more after its end."""
    events = []
    for index in range(NUM_CHUNKS):
        state: dict[str, object] = {"token_ids": [10 * index, 10 * index + 1]}
        state |= {"created": 7, "num_cached_tokens": 3} if not index else {}
        state |= {"end": True} if index == NUM_CHUNKS - 1 else {}
        line = f": tandem {json.dumps(state)}\n" if is_resumable else ""
        events.append(f"{line}data: {json.dumps({'index': index, 'node': 'raw'})}\n\n".encode())
    return [*events, b'data: {"usage":{}}\n\n', DONE, AFTER]


END = NUM_CHUNKS + 2  # events up to the [DONE]


@pytest.fixture
def raw() -> Iterator[RawNode]:
    node = RawNode(INFO.replace(b"{", b'{"resume":true,', 1))
    yield node
    node.close()


def data_of(events: list[bytes]) -> bytes:
    return b"".join(event[event.index(b"data: ") :] for event in events)


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("limit", [0, 3], ids=["stays", "may move"])
def test_stream_when_its_node_breaks_after_any_event_then_the_client_has_each_event_once(
    start_cluster: StartCluster, raw: RawNode, limit: int, resets: bool
) -> None:
    cluster = start_cluster(0, 1, more_decode=[raw.url], resume=True, migration_limit=limit, breaker_failures=100)
    raw.resets = resets
    events = recorded(bool(limit))
    for cut in range(len(events) + 1):
        raw.content = chunked(*events[:cut], is_whole=False)
        num_legs, resumed = raw.num_legs, cluster.metric("tandem_proxy_migrations_total", outcome="resumed")
        texts = []
        while raw.num_legs == num_legs:  # it goes to the other one first every second time
            texts.append(cluster.client.post("/v1/completions", json={"prompt": "a", "stream": True}).content)
        moved = cluster.metric("tandem_proxy_migrations_total", outcome="resumed") - resumed
        text = texts[-1]
        assert b"99" not in text
        if cut >= END:
            assert text == data_of(events[:END]), cut
            assert moved == 0, "a stream that is complete has nowhere to go"
        elif limit:
            indices = [
                json.loads(each[6:]).get("index") for each in text.split(b"\n\n") if each and each + b"\n\n" != DONE
            ]
            assert [each for each in indices if each is not None] == list(range(NUM_CHUNKS)), cut
            assert text.endswith(DONE)
            assert text.count(DONE) == 1
            assert moved == (cut > 0), cut
        elif cut:
            assert text.startswith(data_of(events[:cut]) + b'data: {"error":'), cut
            assert DONE not in text
    wait_for(lambda: cluster.metric("tandem_requests_running") == 0, "everything to have ended")


def test_stream_when_its_node_lingers_after_the_end_then_the_client_and_the_slot_do_not(
    start_cluster: StartCluster, raw: RawNode
) -> None:
    """The connection stays open without an end: the answer has one all the same."""
    cluster = start_cluster(0, 0, more_decode=[raw.url], wait=False, max_concurrency=1, max_queue_size=1)
    wait_for(lambda: cluster.client.get("/ready").status_code == 200, "the proxy to be ready")
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 100000\r\n\r\n"
    raw.content, raw.lingers = head + DONE, True
    for _ in range(2):
        answer = cluster.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert answer.content == DONE
    wait_for(lambda: cluster.metric("tandem_requests_total", outcome="stop") == 2, "both to be counted")


@pytest.mark.parametrize("kind", [StreamProgress, ResumableProgress])
def test_progress_when_the_stream_comes_in_any_two_pieces_then_the_same_is_the_clients(
    kind: type[StreamProgress],
) -> None:
    events = recorded(kind.may_go_on)
    stream = b"".join(events)
    for cut in range(len(stream) + 1):
        progress = kind()
        passed = progress.feed(stream[:cut])
        if not progress.is_complete:
            passed += progress.feed(stream[cut:])
        assert passed == data_of(events[:END]), cut
        assert progress.is_complete
        assert progress.failure is None


@pytest.mark.parametrize("kind", [StreamProgress, ResumableProgress])
def test_progress_when_an_error_event_comes_in_any_two_pieces_then_nothing_after_it_is_the_clients(
    kind: type[StreamProgress],
) -> None:
    first = b'data: {"index":0}\n\n'
    error = b'data: {"error":{"message":"m","type":"server_error","param":null,"code":"c"}}\n\n'
    stream = first + error + AFTER + DONE
    for cut in range(len(stream) + 1):
        progress = kind()
        passed = progress.feed(stream[:cut])
        if progress.failure is None:
            passed += progress.feed(stream[cut:])
        assert progress.failure is not None
        assert not progress.is_complete
        assert (str(progress.failure), progress.failure.code, progress.failure.status) == ("m", "c", 500)
        # Of a stream that may go on elsewhere the client need not hear of it.
        assert passed == (first if kind.may_go_on else first + error), cut
        assert progress.failure.is_told is not kind.may_go_on
