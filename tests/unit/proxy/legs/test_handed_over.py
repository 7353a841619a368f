"""Streams that a prefill node begins and a decode node ends: what the client sees, and what the nodes are told."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from common.config.values import PriorityTargets
from common.images.rules import ImageRules
from common.node.routes.tokenizer_route import take_apart
from common.openai.prompt_ids import read_prompt_images
from common.text.tokenizer import TextCodec
from common.text.tokenizer_document import TokenizerDocument
from common.wire.headers import ITL_TARGET_HEADER, TTFT_TARGET_HEADER
from proxy.nodes.load import LoadReport
from proxy.nodes.node import Node
from proxy.placement.guests import LOOK_S
from tests.support.http_server import wait_for
from tests.unit.images.test_security import png_of
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import FakeNode, Fault
from tests.unit.text.vocabulary import train_byte_level

NUM_CHUNKS = 60
PAUSE_S = 0.2
"""Between two chunks, until the test has seen what it waits for: a busy machine takes seconds for that."""
STREAM: dict[str, Any] = {"prompt": [1, 2, 3], "stream": True, "max_tokens": 2 * NUM_CHUNKS}
FAST = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "prefill": {"seconds_per_step": 0.001, "seconds_per_token": 0.001, "observations": 1e9},
    "decode": {"seconds_per_step": 0.05, "seconds_per_row": 0.0},
    "pull": {"seconds_per_pull": 0.001, "seconds_per_byte": 0, "observations": 1e9},
}
BUSY = {**FAST, "uncomputed_prompt_tokens": 20_000}


class Reader(threading.Thread):
    """A client of one stream."""

    def __init__(self, cluster: Cluster, body: dict[str, Any]) -> None:
        super().__init__()
        self.cluster, self.body = cluster, body
        self.events: list[Any] = []
        self.is_done = False

    def run(self) -> None:
        route = "/v1/chat/completions" if "messages" in self.body else "/v1/completions"
        with self.cluster.client.stream("POST", route, json=self.body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))
                self.is_done |= line == "data: [DONE]"

    @property
    def nodes(self) -> list[str]:
        return [event["node"] for event in self.events if "node" in event]


@contextmanager
def guest(
    start_cluster: StartCluster,
    body: dict[str, Any] = STREAM,
    num_decode: int = 1,
    hands_over: bool = True,
    **config: Any,
) -> Iterator[tuple[Cluster, Reader]]:
    """A stream that the prefill node generates, because there was no decode node when it came; now there is one."""
    cluster = start_cluster(1, num_decode, pull=True, resume=True, policy="cost", **config)
    nodes = [*cluster.prefill, *cluster.decode]
    for node in nodes:
        node.load, node.num_chunks, node.chunk_pause_s = FAST, NUM_CHUNKS, PAUSE_S
        node.hands_over = hands_over
    urls = [cluster.servers[node.name].url for node in cluster.decode]

    def decode_nodes(*, are_ready: bool) -> None:
        for node in cluster.decode:
            node.is_ready = are_ready
        wait_for(lambda: {cluster.metric("tandem_node_up", node=url) for url in urls} == {are_ready}, "decode nodes")

    decode_nodes(are_ready=False)
    reader = Reader(cluster, body)
    reader.start()
    wait_for(lambda: reader.events, "the first event")
    decode_nodes(are_ready=True)
    try:
        yield cluster, reader
    finally:
        for node in nodes:
            node.chunk_pause_s = 0.001
        reader.join()


def handed_over(cluster: Cluster) -> float:
    return cluster.metric("tandem_proxy_migrations_total", outcome="handed_over")


@pytest.mark.parametrize(
    ("migration_limit", "hands_over", "prefix_sources"),
    [(0, True, True), (1, True, True), (0, False, True), (0, True, False)],
)
def test_stream_when_prompts_wait_at_its_prefill_node_then_a_decode_node_goes_on_without_a_seam(
    start_cluster: StartCluster, migration_limit: int, hands_over: bool, prefix_sources: bool
) -> None:
    config = {"migration_limit": migration_limit, "prefix_sources": prefix_sources}
    with guest(start_cluster, hands_over=hands_over, **config) as (cluster, reader):
        [prefill], [decode] = cluster.prefill, cluster.decode
        prefill.load = BUSY
        wait_for(lambda: handed_over(cluster) == 1, "the stream to be handed over")
    assert reader.is_done
    assert [event["index"] for event in reader.events] == list(range(NUM_CHUNKS))
    num = reader.nodes.count(prefill.name)
    assert 0 < num < NUM_CHUNKS
    assert reader.nodes == [prefill.name] * num + [decode.name] * (NUM_CHUNKS - num)
    [body] = decode.bodies
    assert len(body["tandem_resume"]["output_token_ids"]) == 2 * num
    assert handed_over(cluster) == 1
    assert cluster.metric("tandem_proxy_migrations_total", outcome="resumed") == 0
    if hands_over and prefix_sources:
        [asked] = prefill.handed_over
        [source, *_] = body["tandem_sources"]
        assert source == {"url": f"http://127.0.0.1:{prefill.port}", "epoch": "77", "lease_id": asked["lease_id"]}
        assert (prefill.num_aborted, prefill.released) == (0, [])  # it was read to its end; who goes on has the lease
    else:
        assert (prefill.handed_over, body.get("tandem_sources")) == ([], None)
        wait_for(lambda: prefill.num_aborted == 1, "the prefill node's leg to be closed")


def test_stream_when_its_last_tokens_were_not_shown_then_who_goes_on_is_told_them(start_cluster: StartCluster) -> None:
    with guest(start_cluster) as (cluster, reader):
        [prefill], [decode] = cluster.prefill, cluster.decode
        prefill.hidden_ids = [5, 6]
        prefill.load = BUSY
        wait_for(lambda: handed_over(cluster) == 1, "the stream to be handed over")
    assert reader.is_done
    shown = 10 * reader.nodes.count(prefill.name) - 9
    assert decode.bodies[0]["tandem_resume"]["output_token_ids"][-3:] == [shown, 5, 6]


@pytest.mark.parametrize("migration_limit", [0, 1])
def test_stream_when_its_prefill_node_is_asked_and_breaks_then_as_any_that_breaks_and_its_lease_is_released(
    start_cluster: StartCluster, migration_limit: int
) -> None:
    with guest(start_cluster, migration_limit=migration_limit) as (cluster, reader):
        [prefill], [decode] = cluster.prefill, cluster.decode
        prefill.breaks_when_asked = True
        prefill.load = BUSY
        wait_for(lambda: prefill.handed_over, "the prefill node to be asked")
        [asked] = prefill.handed_over
        decode.chunk_pause_s = 0.001
        wait_for(lambda: prefill.released == [asked["lease_id"]], "the lease to be released")
    assert reader.is_done == bool(migration_limit)
    assert ("error" in reader.events[-1]) == (not migration_limit)
    assert [body.get("tandem_sources") for body in decode.bodies] == [None] * migration_limit


def test_stream_when_its_prefill_node_does_not_say_that_it_leases_then_leaves_and_what_may_be_leased_is_released(
    start_cluster: StartCluster,
) -> None:
    with guest(start_cluster) as (cluster, reader):
        [prefill], [decode] = cluster.prefill, cluster.decode
        prefill.hand_over_status = 504
        prefill.load = BUSY
        wait_for(lambda: handed_over(cluster) == 1, "the stream to be handed over")
        [asked] = prefill.handed_over
        wait_for(lambda: prefill.released == [asked["lease_id"]], "the lease to be released")
    assert reader.is_done
    assert [event["index"] for event in reader.events] == list(range(NUM_CHUNKS))
    assert [body.get("tandem_sources") for body in decode.bodies] == [None]


PLACEHOLDER = "<image>"
IMAGE_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '<image>' }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def image_document() -> dict[str, Any]:
    """Of nodes whose model takes images: the template writes a placeholder for each."""
    tokenizer: Any = train_byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": [PLACEHOLDER]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = IMAGE_TEMPLATE
    rules = ImageRules(tokenizer.convert_tokens_to_ids(PLACEHOLDER), None, 8, 2, 1024, 65536, "00")
    codec = TextCodec(tokenizer, vocab_size=len(tokenizer), image_rules=rules)
    parts = take_apart(codec)
    document = TokenizerDocument("f00d", b"root", 16, codec.vocab_size, 4096, False, parts=parts, image_rules=rules)
    return document.to_json()


def test_images_when_a_prefill_node_generates_then_it_gets_them_and_who_takes_over_does_not(
    start_cluster: StartCluster,
) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png_of(32, 32)).decode()}"
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], "stream": True, "max_tokens": 2 * NUM_CHUNKS}
    with guest(start_cluster, body, documents={"tokenizer": image_document()}) as (cluster, reader):
        [prefill], [decode] = cluster.prefill, cluster.decode
        prefill.load = BUSY
        wait_for(lambda: handed_over(cluster) == 1, "the stream to be handed over")
    assert reader.is_done
    [first], [last] = prefill.bodies, decode.bodies
    assert [source.url for source in read_prompt_images(first)] == [url]
    assert read_prompt_images(last) == ()
    assert first["tandem_prompt"] == last["tandem_prompt"]
    assert len(first["tandem_prompt"]["images"]) == 1
    assert last["tandem_resume"]["output_token_ids"]


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": [[1, 2], [3, 4]]}], ids=["n 2", "two prompts"])
def test_stream_when_it_cannot_go_on_elsewhere_then_stays(start_cluster: StartCluster, fields: dict[str, Any]) -> None:
    with guest(start_cluster, {**STREAM, **fields}) as (cluster, reader):
        cluster.prefill[0].load = BUSY
        time.sleep(4 * LOOK_S)
    assert reader.is_done
    assert set(reader.nodes) == {cluster.prefill[0].name}
    assert handed_over(cluster) == 0


def test_stream_when_its_prefill_node_has_no_other_work_then_stays(start_cluster: StartCluster) -> None:
    with guest(start_cluster) as (cluster, reader):
        time.sleep(4 * LOOK_S)
    assert reader.is_done
    assert set(reader.nodes) == {cluster.prefill[0].name}
    assert handed_over(cluster) == 0


REFUSALS: dict[str, dict[str, Any]] = {
    "draining": {"refuses_as_draining": True},
    "full": {"fault": Fault.STATUS, "status": 429},
    "400": {"refuses_resume": True},
    "breaks": {"fault": Fault.BREAK_EARLY},
}


def proxy_nodes(cluster: Cluster) -> Sequence[Node]:
    assert cluster.proxy is not None
    nodes: Sequence[Node] = cluster.proxy.app.state.service.pool.nodes
    return nodes


def refuse(node: FakeNode, refusal: str) -> None:
    for name, value in REFUSALS[refusal].items():
        setattr(node, name, value)


@pytest.mark.parametrize(("num_decode", "migration_limit"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("refusal", REFUSALS)
def test_stream_when_nobody_takes_it_over_then_its_prefill_node_goes_on_without_a_seam(
    start_cluster: StartCluster, refusal: str, num_decode: int, migration_limit: int
) -> None:
    with guest(start_cluster, num_decode=num_decode, migration_limit=migration_limit) as (cluster, reader):
        [prefill] = cluster.prefill
        for node in cluster.decode:
            refuse(node, refusal)
        prefill.load = BUSY
        wait_for(lambda: len(prefill.bodies) == 2, "the stream to be back")
        assert not reader.is_done
    assert reader.is_done
    assert [event["index"] for event in reader.events] == list(range(NUM_CHUNKS))
    assert set(reader.nodes) == {prefill.name}
    assert len(prefill.bodies) == 2
    assert [node.num_refused + len(node.bodies) for node in cluster.decode] == [1] * num_decode
    assert handed_over(cluster) == 1
    wait_for(lambda: prefill.released == [each["lease_id"] for each in prefill.handed_over], "its lease to end")
    for node in proxy_nodes(cluster):
        wait_for(
            lambda node=node: node.num_in_flight == node.load.num_charges == 0, "what was charged to be given back"
        )


def test_stream_when_another_decode_node_takes_it_over_and_breaks_then_that_alone_is_a_migration(
    start_cluster: StartCluster,
) -> None:
    slow = {**FAST, "decode": {"seconds_per_step": 0.1, "seconds_per_row": 0.0}}
    with guest(start_cluster, num_decode=2, migration_limit=1) as (cluster, reader):
        [prefill], [full, other] = cluster.prefill, cluster.decode
        refuse(full, "full")
        other.load, other.fault = slow, Fault.BREAK_LATE
        wait_for(
            lambda: LoadReport.from_json(slow) in [node.info.load for node in proxy_nodes(cluster)], "the slow one"
        )
        prefill.load = BUSY
        wait_for(lambda: len(prefill.bodies) == 2, "the stream to be back")
    assert reader.is_done
    assert [event["index"] for event in reader.events] == list(range(NUM_CHUNKS))
    num = reader.nodes.index(other.name)
    assert reader.nodes == [prefill.name] * num + [other.name] + [prefill.name] * (NUM_CHUNKS - num - 1)
    assert [len(node.bodies) for node in (full, other)] == [1, 1]


def test_stream_when_its_prefill_node_does_not_take_it_back_either_then_error_event(
    start_cluster: StartCluster,
) -> None:
    with guest(start_cluster) as (cluster, reader):
        [prefill], [decode] = cluster.prefill, cluster.decode
        prefill.refuses_resume = decode.refuses_resume = True
        prefill.load = BUSY
        wait_for(lambda: len(prefill.bodies) == 2, "the stream to be back")
    assert not reader.is_done
    assert "error" in reader.events[-1]
    assert (len(prefill.bodies), len(decode.bodies)) == (2, 1)


def test_stream_when_who_took_it_over_breaks_later_then_error_event(start_cluster: StartCluster) -> None:
    with guest(start_cluster) as (cluster, reader):
        [prefill], [decode] = cluster.prefill, cluster.decode
        decode.fault = Fault.BREAK_LATE
        prefill.load = BUSY
        wait_for(lambda: handed_over(cluster) == 1, "the stream to be handed over")
    assert "error" in reader.events[-1]
    assert reader.nodes[-1] == decode.name
    assert len(prefill.bodies) == 1


def test_legs_when_a_request_has_targets_then_nodes_are_told_what_is_left_of_them(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 1, pull=True, ttft_target_ms=50_000)
    headers = {ITL_TARGET_HEADER: "70"}
    cluster.client.post("/v1/completions", json={"prompt": "abc"}, headers=headers).raise_for_status()
    for node in (*cluster.prefill, *cluster.decode):
        [got] = node.received
        assert 30_000 < int(got.headers[TTFT_TARGET_HEADER.lower()]) <= 50_000
        assert got.headers[ITL_TARGET_HEADER.lower()] == "70"


def test_legs_when_a_priority_has_targets_then_they_are_its_requests_unless_a_header_says_otherwise(
    start_cluster: StartCluster,
) -> None:
    rules = (PriorityTargets(-1, 40_000, 20), PriorityTargets(5, None, 900))
    cluster = start_cluster(0, 1, ttft_target_ms=50_000, itl_target_ms=100, priority_targets=rules)
    [node] = cluster.decode

    def told(priority: int, **headers: str) -> tuple[int, str]:
        body = {"prompt": "abc", "priority": priority}
        cluster.client.post("/v1/completions", json=body, headers=headers).raise_for_status()
        got = node.received[-1].headers
        return round(int(got[TTFT_TARGET_HEADER.lower()]), -4), got[ITL_TARGET_HEADER.lower()]

    assert told(0) == (50_000, "100")
    assert told(-1) == (40_000, "20")
    assert told(5) == (50_000, "900")
    assert told(-1, **{ITL_TARGET_HEADER: "33"}) == (40_000, "33")
    assert told(-1, **{ITL_TARGET_HEADER: "12.345"}) == (40_000, "12.345")
    assert told(-1, **{ITL_TARGET_HEADER: "12.300"}) == (40_000, "12.3")
