"""Both legs at once: what each carries, who is tried next, and what every way out does to the other leg."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest

from common.wire.handoff import prefill_leg_params
from common.wire.headers import LEG_HEADER
from common.wire.routes import COMPLETIONS_ROUTE
from proxy.legs.client_stream import ClientStream
from proxy.legs.concurrent import ConcurrentLegs
from proxy.legs.errors import RelayedAnswer
from proxy.legs.job import Job
from proxy.legs.leases import LeaseReleaser
from proxy.legs.stream_progress import StreamProgress
from proxy.metrics.proxy_metrics import ProxyMetrics
from proxy.node_http.client import NodeAnswer
from proxy.nodes.node import Node, NodeRole
from proxy.placement.request import Placement
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import Cluster, StartCluster
from tests.unit.proxy.fake_node import FakeNode, Fault
from tests.unit.proxy.legs.test_failures import NEVER_POLL_AGAIN, abandoned

BODY = {"prompt": "abc"}
STREAM = {"prompt": "abc", "stream": True}


def post(cluster: Cluster, body: object = None, **headers: str) -> httpx.Response:
    return cluster.client.post("/v1/completions", json=BODY if body is None else body, headers=headers)


def pull_source(node: FakeNode) -> dict[str, str]:
    return {"url": f"http://127.0.0.1:{node.port}", "epoch": "77"}


def test_legs_when_both_nodes_can_pull_then_are_sent_at_once_under_one_name(start_cluster: StartCluster) -> None:
    cluster = start_cluster(pull=True)
    [prefill], [decode] = cluster.prefill, cluster.decode
    prefill.may_finish = False  # the decode leg does not wait for it
    body = {"prompt": "abc", "max_tokens": 7, "min_tokens": 3, "n": 2, "user": "me"}
    answer = post(cluster, body, **{"X-Request-Id": "abc-1"})
    assert (answer.status_code, answer.json()["node"]) == (200, "decode-0")
    [name] = prefill.names
    assert prefill.bodies == [
        {
            "prompt": "abc",
            "user": "me",
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": prefill_leg_params(name),
            "tandem_sources": [pull_source(decode)],
        }
    ]
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": "127.0.0.1",
        "remote_port": prefill.port,
        "tandem_rendezvous": name,
    }
    assert decode.bodies == [{**body, "kv_transfer_params": params}]
    assert decode.received[0].headers["x-tandem-prefill-node"] == "prefill-0"
    assert [leg.headers["x-request-id"] for leg in (prefill.received[0], decode.received[0])] == ["abc-1", "abc-1"]
    wait_for(lambda: prefill.num_aborted == 1, "the leg that nobody waits for to be closed")
    assert prefill.released == [], "the decode node owns the lease"
    assert cluster.metric("tandem_proxy_decisions_total", policy="round_robin", placement="remote") == 1


def test_list_of_prompts_when_sent_then_each_has_its_name_in_order(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2, pull=True)
    prompts = [[1, 2], [3], [4, 5]]
    assert post(cluster, {"prompt": prompts}).status_code == 200
    by_prompt = {
        tuple(body["prompt"]): (node.port, body["kv_transfer_params"]["tandem_rendezvous"])
        for node in cluster.prefill
        for body in node.bodies
    }
    params = cluster.decode[0].bodies[0]["kv_transfer_params"]
    assert [(each["remote_port"], each["tandem_rendezvous"]) for each in params] == [
        by_prompt[tuple(prompt)] for prompt in prompts
    ]
    assert {port for port, _ in by_prompt.values()} == {node.port for node in cluster.prefill}


def test_list_of_prompts_when_longer_than_what_is_sent_together_then_legs_go_one_after_the_other(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(pull=True)
    prompts = [[index + 1] for index in range(17)]
    assert post(cluster, {"prompt": prompts}).status_code == 200
    assert all("tandem_lease_id" in each for each in cluster.decode[0].bodies[0]["kv_transfer_params"])


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_legs_when_one_of_the_nodes_cannot_pull_then_go_one_after_the_other(
    start_cluster: StartCluster, who: str
) -> None:
    cluster = start_cluster(pull=True)
    foreign = getattr(cluster, who)[0]
    foreign.pull = False
    wait_for(lambda: _is_in_turn(cluster), "the proxy to see it")


def _is_in_turn(cluster: Cluster) -> bool:
    cluster.decode[0].received.clear()
    assert post(cluster).status_code == 200
    return "tandem_lease_id" in cluster.decode[0].bodies[0]["kv_transfer_params"]


def test_sources_when_there_is_another_decode_node_then_the_chosen_one_comes_first(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 3, pull=True)
    chosen = next(node for node in cluster.decode if node.name == post(cluster).json()["node"])
    [first, second] = cluster.prefill[0].bodies[0]["tandem_sources"]
    assert first == pull_source(chosen)
    assert second in [pull_source(node) for node in cluster.decode if node is not chosen]


def test_sources_when_placed_locally_then_another_decode_node_and_never_the_clients_own(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(0, 2, pull=True)
    forged = [{"url": "http://10.0.0.1:80", "epoch": "1"}]
    chosen = post(cluster, {**BODY, "tandem_sources": forged}).json()["node"]
    [node], [other] = ([node for node in cluster.decode if (node.name == chosen) is wanted] for wanted in (True, False))
    assert node.bodies == [{**BODY, "tandem_sources": [pull_source(other)]}]


@pytest.mark.parametrize("status", [400, 404, 413, 429])
def test_prefill_leg_when_refused_then_the_client_hears_it_and_the_decode_leg_is_closed(
    start_cluster: StartCluster, status: int
) -> None:
    cluster = start_cluster(2, pull=True)
    for node in cluster.prefill:
        node.fault, node.status = Fault.STATUS, status
    cluster.decode[0].fault = Fault.HANG
    answer = post(cluster)
    assert answer.status_code == status
    assert answer.json()["error"]["message"].startswith("prefill-")
    [decode] = cluster.decode
    wait_for(lambda: decode.num_aborted == len(decode.received), "the decode leg, if it was sent, to be closed")
    assert sum(len(node.bodies) for node in cluster.prefill) == (2 if status == 429 else 1)
    outcome = "capacity" if status == 429 else "rejected"
    assert cluster.metric("tandem_requests_total", route="completions", outcome=outcome) == 1


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_decode_leg_when_all_refuse_then_the_client_hears_it_and_the_prefill_leg_is_aborted(
    start_cluster: StartCluster, status: int
) -> None:
    cluster = start_cluster(1, 2, pull=True)
    cluster.prefill[0].may_finish = False
    for node in cluster.decode:
        node.fault, node.status = Fault.STATUS, status
    answer = post(cluster)
    assert answer.status_code == status
    assert answer.json()["error"]["message"].startswith("decode-")
    [prefill] = cluster.prefill
    # A leg that was called off at once need not have come.
    wait_for(lambda: prefill.released and set(prefill.names) <= set(prefill.released), "the lease's release")
    assert sum(len(node.bodies) for node in cluster.decode) == (1 if status == 400 else 2)


def test_prefill_node_when_full_and_the_decode_node_says_so_first_then_another_prefill_node_is_tried(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(2, 2, pull=True)
    full, free = cluster.prefill
    full.fault = Fault.HANG  # what it says itself comes later
    for node in cluster.decode:
        node.full = [full]
    for _ in cluster.prefill:
        assert post(cluster).status_code == 200
    ports = [body["kv_transfer_params"]["remote_port"] for node in cluster.decode for body in node.bodies]
    assert full.port in ports
    assert ports.count(free.port) == len(cluster.prefill)


def test_prefill_node_when_full_and_there_is_no_other_then_the_client_hears_what_the_decode_node_relays(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 2, pull=True)
    cluster.prefill[0].fault = Fault.HANG
    for node in cluster.decode:
        node.full = cluster.prefill
    answer = post(cluster)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert answer.headers["Retry-After"] == "3"
    assert LEG_HEADER not in answer.headers
    assert sum(len(node.bodies) for node in cluster.decode) == 1, "another decode node would ask the same prefill node"


@pytest.mark.parametrize("fault", [Fault.STATUS, Fault.NO_PARAMS])
def test_prefill_leg_when_it_fails_then_the_decode_node_decides(start_cluster: StartCluster, fault: Fault) -> None:
    """It hears of the failure through its pull, and computes the prompt or says 502."""
    cluster = start_cluster(2, pull=True)
    for node in cluster.prefill:
        node.fault = fault
    assert post(cluster).status_code == 200
    assert len(cluster.decode[0].bodies) == 1


def test_prefill_node_when_gone_then_the_decode_node_decides(start_cluster: StartCluster) -> None:
    cluster = start_cluster(pull=True, health_interval_seconds=NEVER_POLL_AGAIN)
    cluster.stop_node(cluster.prefill[0])
    assert post(cluster).json()["node"] == "decode-0"
    wait_for(
        lambda: cluster.metric("tandem_node_up", node=cluster.servers["prefill-0"].url) == 0, "the node to be down"
    )
    assert post(cluster).status_code == 200
    assert "kv_transfer_params" not in cluster.decode[0].bodies[1]


def no_transfer(node: FakeNode) -> None:
    node.fault, node.status, node.code = Fault.STATUS, 502, "transfer_failed"


def test_decode_leg_when_it_could_not_pull_then_another_prefill_node_is_tried(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2, 1, pull=True)
    no_transfer(cluster.decode[0])
    answer = post(cluster)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "transfer_failed")
    assert [len(node.bodies) for node in cluster.prefill] == [1, 1]
    ports = [body["kv_transfer_params"]["remote_port"] for body in cluster.decode[0].bodies]
    assert sorted(ports) == sorted(node.port for node in cluster.prefill)
    for node in cluster.prefill:
        wait_for(lambda node=node: node.released == node.names, "the lease's release")  # type: ignore[misc]
    assert cluster.metric("tandem_requests_total", route="completions", outcome="error") == 1


def test_decode_leg_when_it_could_not_pull_from_the_only_prefill_node_then_another_decode_node_is_tried(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(1, 2, pull=True)
    no_transfer(cluster.decode[0])
    for _ in range(2):
        assert post(cluster).json()["node"] == "decode-1"
    assert len(cluster.decode[0].bodies) == 1


def test_decode_leg_when_it_could_not_pull_and_there_is_no_other_pair_then_what_it_says(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(pull=True)
    no_transfer(cluster.decode[0])
    assert post(cluster, STREAM).status_code == 502
    assert len(cluster.decode[0].bodies) == 1


def test_decode_node_when_it_breaks_before_the_first_byte_then_another_follows_the_same_prefill_node(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(2, 2, pull=True)
    cluster.decode[0].fault = Fault.BREAK_EARLY
    answers = [post(cluster, STREAM) for _ in range(2)]
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    broken = cluster.decode[0].bodies[0]["kv_transfer_params"]
    retried = [
        body["kv_transfer_params"]
        for body in cluster.decode[1].bodies
        if body["kv_transfer_params"]["remote_port"] == broken["remote_port"]
    ]
    assert retried, "what the prefill node has begun is cached there"
    assert broken["tandem_rendezvous"] not in [each["tandem_rendezvous"] for each in retried]


def test_decode_node_when_it_breaks_after_the_first_byte_then_error_event(start_cluster: StartCluster) -> None:
    cluster = start_cluster(1, 2, pull=True)
    for node in cluster.decode:
        node.fault = Fault.BREAK_LATE
    events = [json.loads(line[6:]) for line in post(cluster, STREAM).text.splitlines() if line]
    assert [event.get("error", {}).get("type") for event in events] == [None, "server_error"]
    assert sum(len(node.bodies) for node in cluster.decode) == 1
    [prefill] = cluster.prefill
    wait_for(lambda: prefill.released and prefill.released == prefill.names, "the lease that a dead node may have kept")


def test_prefill_leg_when_refused_after_the_first_byte_then_the_stream_goes_on(start_cluster: StartCluster) -> None:
    cluster = start_cluster(pull=True)
    [prefill], [decode] = cluster.prefill, cluster.decode
    prefill.may_finish = False
    decode.fault = Fault.STALL
    with cluster.client.stream("POST", "/v1/completions", json=STREAM) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        prefill.late_status = 400
        prefill.may_finish = True
        wait_for(lambda: prefill.num_answered == 1, "the refusal")
        assert cluster.metric("tandem_requests_running") == 1
    wait_for(lambda: decode.num_aborted == 1, "the decode leg to be closed")
    assert cluster.metric("tandem_requests_total", route="completions", outcome="abort") == 1


def test_prefill_leg_when_called_off_by_its_reader_then_nobody_minds(start_cluster: StartCluster) -> None:
    cluster = start_cluster(pull=True)
    [prefill], [decode] = cluster.prefill, cluster.decode
    prefill.fault, prefill.status = Fault.STATUS, 499
    assert post(cluster).json()["node"] == decode.name
    finished = {"route": "completions", "outcome": "stop"}
    wait_for(lambda: cluster.metric("tandem_requests_total", **finished) == 1, "the request to end")


def test_legs_when_silent_then_504_and_both_are_closed(start_cluster: StartCluster) -> None:
    cluster = start_cluster(pull=True, prefill_timeout_seconds=0.2, stream_idle_timeout_seconds=0.2)
    [prefill], [decode] = cluster.prefill, cluster.decode
    prefill.may_finish = False
    decode.fault = Fault.HANG
    answer = post(cluster)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    wait_for(lambda: decode.num_aborted == 1, "the decode leg to be closed")
    wait_for(lambda: prefill.released == prefill.names, "the lease's release")


@pytest.mark.parametrize("is_streaming", [False, True])
def test_client_when_gone_before_the_answer_then_both_legs_are_closed_and_the_names_given_up(
    start_cluster: StartCluster, is_streaming: bool
) -> None:
    cluster = start_cluster(pull=True)
    [prefill], [decode] = cluster.prefill, cluster.decode
    prefill.may_finish = False
    decode.fault = Fault.HANG
    with abandoned(cluster, {**STREAM, "stream": is_streaming}):
        wait_for(lambda: prefill.received and decode.received, "both legs")
    wait_for(lambda: decode.num_aborted == 1, "the decode leg to be closed")
    wait_for(lambda: prefill.released == prefill.names, "the names to be given up")
    wait_for(lambda: cluster.metric("tandem_requests_running") == 0, "the request to end")
    assert cluster.metric("tandem_requests_total", route="completions", outcome="abort") == 1


class RefusingLegs:
    """``DecodeLegs`` whose answer is a refusal, once ``may_refuse``."""

    def __init__(self) -> None:
        self.may_refuse = asyncio.Event()

    async def relay(self, *_: object) -> None:
        await self.may_refuse.wait()
        raise RelayedAnswer(400, {}, b"decode")


class RefusingClient:
    """``NodeClient`` of a prefill node, on which the request ends at the very moment at which its decode leg is refused
    too: it refuses, or the client leaves."""

    def __init__(self, decode: RefusingLegs, leave: Callable[[], object] | None) -> None:
        self._decode, self._leave = decode, leave

    async def request(self, method: str, route: str, **_: object) -> NodeAnswer:
        if route != COMPLETIONS_ROUTE:
            return NodeAnswer(200, {}, b"")
        self._decode.may_refuse.set()
        if self._leave is not None:
            asyncio.get_running_loop().call_soon(self._leave)
            await asyncio.Event().wait()
        return NodeAnswer(400, {}, b"prefill")


@pytest.mark.asyncio
@pytest.mark.parametrize("is_gone", [False, True])
async def test_decode_leg_when_refused_as_the_request_ends_otherwise_then_its_error_is_taken(is_gone: bool) -> None:
    untold: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: untold.append(context))
    decode: Any = RefusingLegs()

    async def run() -> None:
        request = asyncio.current_task()
        assert request is not None
        client: Any = RefusingClient(decode, request.cancel if is_gone else None)
        node = Node("http://127.0.0.1:1", NodeRole.PREFILL, client)
        job = Job(
            body=BODY,
            prompts=["abc"],
            is_local=False,
            is_stream=False,
            route=COMPLETIONS_ROUTE,
            headers={},
            request_id="r",
            arrival_s=0.0,
        )
        releaser, nobody = LeaseReleaser({}), cast(Any, None)
        legs = ConcurrentLegs(decode, releaser, ProxyMetrics(), 20.0)
        try:
            await legs.run(job, Placement(node, [node]), {}, {}, ClientStream(nobody, "r"), StreamProgress())
        finally:
            await releaser.close()

    with pytest.raises(asyncio.CancelledError if is_gone else RelayedAnswer) as ended:
        await asyncio.create_task(run())
    assert is_gone or ended.value.body == b"prefill"
    del ended
    await asyncio.sleep(0)  # the loop lets go of the task
    gc.collect()
    assert untold == []
