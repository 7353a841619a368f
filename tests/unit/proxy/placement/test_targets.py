"""Requests whose first token would be late, what is counted of targets, and the nodes that a load asks for."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common.wire.headers import ITL_TARGET_HEADER, TTFT_TARGET_HEADER
from common.wire.resume import RESUME_KEY
from proxy.metrics.proxy_metrics import ProxyMetrics
from proxy.nodes.load import Charge
from proxy.nodes.node import Node, NodeRole
from proxy.nodes.rates import RateTable
from proxy.placement.estimate import Targets
from proxy.placement.placer import LATE_SHARE, OVERLOAD_S
from proxy.placement.replicas import BUSY_SHARE, FADING_S, ReplicaAdvice
from proxy.placement.request import Avoided, Placement
from tests.support.http_server import wait_for
from tests.unit.proxy.conftest import FAST_POLL_S, StartCluster
from tests.unit.proxy.placement.world import DECODE_STEP_S, World, make_pool, make_request, report

LOAD = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "prefill": {"seconds_per_step": 0.001, "seconds_per_token": 0.001, "observations": 1e9},
    "decode": {"seconds_per_step": 0.001, "seconds_per_row": 0.0},
    "pull": {"seconds_per_pull": 0.001, "seconds_per_byte": 0, "observations": 1e9},
}


def tokens(count: int, seed: int) -> list[int]:
    return [seed * 100_000 + number for number in range(count)]


def place(world: World, seed: int, **fields: Any) -> float:
    return world.placer.place(make_request(tokens(1000, seed), **fields), Avoided()).late_s


def test_late_when_others_come_first_then_says_by_how_much() -> None:
    world = World(1, 1)
    alone_s = world.placer.place(make_request(tokens(1000, 1)), Avoided()).ttft_s
    targets = Targets(ttft_s=1.5 * alone_s)
    late = [place(world, seed, targets=targets) for seed in range(2, 8)]
    assert late[0] < late[-1]
    assert late == sorted(late)
    assert late[-1] > 2 * alone_s
    assert place(world, 9) == 0.0  # no target


def test_late_when_it_would_be_late_without_the_others_too_then_is_not_told() -> None:
    world = World(1, 1)
    for seed in range(6):
        assert place(world, seed, targets=Targets(ttft_s=0.01)) == 0.0


def test_late_when_it_has_waited_already_then_has_only_the_rest_of_its_target() -> None:
    alone_s = World(1, 1).placer.place(make_request(tokens(1000, 1)), Avoided()).ttft_s

    def late_s(num_before: int, waited_s: float) -> float:
        world = World(1, 1)
        world.now = 100.0
        for seed in range(num_before):
            place(world, seed)
        return place(world, 9, targets=Targets(ttft_s=3.5 * alone_s), arrival_s=100.0 - waited_s)

    assert late_s(2, 0.0) == 0.0
    assert 0.5 * alone_s < late_s(2, 1.5 * alone_s) < late_s(2, 10.0 * alone_s)
    assert late_s(0, 10.0 * alone_s) == 0.0  # late, but nobody is before it any more
    world = World(1, 1)
    world.now = 100.0
    resumed = make_request(tokens(1000, 3), targets=Targets(ttft_s=1.0), arrival_s=0.0, body={RESUME_KEY: {}})
    assert resumed.targets_left(100.0) == resumed.targets


def test_late_when_the_estimate_is_a_little_above_the_target_then_is_not_told() -> None:
    world = World(1, 1)
    place(world, 1)
    expected = world.placer.place(make_request(tokens(1000, 2)), Avoided())
    for share, is_late in ((0.99 * LATE_SHARE, False), (1.05 * LATE_SHARE, True)):
        other = World(1, 1)
        place(other, 1)
        assert (place(other, 2, targets=Targets(ttft_s=expected.ttft_s / share)) > 0) is is_late


def test_late_when_others_were_turned_away_lately_then_the_target_itself_is_the_bound() -> None:
    world = World(1, 1)
    numbers = itertools.count()

    def last_of(count: int, target_s: float | None) -> Placement:
        """Turned away if it would be late."""
        both = [make_request(tokens(1000, next(numbers)), targets=Targets(ttft_s=target_s)) for _ in range(count)]
        placed = [world.placer.place(each, Avoided()) for each in both]
        if placed[-1].late_s:
            world.placer.turned_away(both[-1])
        for each in both:
            world.placer.finished(each)
        return placed[-1]

    second_s = last_of(2, None).ttft_s
    target_s = second_s / 1.1
    assert not last_of(2, target_s).late_s
    assert last_of(2, second_s / 1.5).late_s  # a shorter target, which says nothing of longer ones
    assert not last_of(2, target_s).late_s
    assert last_of(4, target_s).late_s
    world.now += OVERLOAD_S / 2
    assert last_of(2, target_s).late_s
    assert not last_of(2, second_s / 0.9).late_s
    world.now += OVERLOAD_S
    assert not last_of(2, target_s).late_s


def test_request_when_it_would_be_late_then_429_says_when_and_nothing_reaches_a_node(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster(policy="cost", pull=True)
    for node in (*cluster.prefill, *cluster.decode):
        node.load = {**LOAD, "uncomputed_prompt_tokens": 7000}
    body = {"prompt": tokens(50, 1), "max_tokens": 2, "stream": True}
    headers = {TTFT_TARGET_HEADER: "1500", ITL_TARGET_HEADER: "1000"}
    wait_for(lambda: cluster.client.post("/v1/completions", json=body, headers=headers).status_code == 429, "a 429")
    num_bodies = sum(len(node.bodies) for node in (*cluster.prefill, *cluster.decode))
    answer = cluster.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "target_unreachable"
    assert TTFT_TARGET_HEADER in answer.json()["error"]["message"]
    assert answer.headers["X-Tandem-Dropped"] == "rejected-late"
    assert 3 <= int(answer.headers["Retry-After"]) <= 6
    assert sum(len(node.bodies) for node in (*cluster.prefill, *cluster.decode)) == num_bodies
    assert cluster.metric("tandem_requests_dropped_total", reason="rejected-late") >= 2
    assert cluster.metric("tandem_proxy_targets_total", target="ttft", kept="no") >= 2
    assert cluster.client.post("/v1/completions", json=body).status_code == 200


def test_request_when_late_ones_are_not_shed_then_is_served(start_cluster: StartCluster) -> None:
    cluster = start_cluster(policy="cost", pull=True, shed_late=False, ttft_target_ms=1500)
    for node in (*cluster.prefill, *cluster.decode):
        node.load = {**LOAD, "uncomputed_prompt_tokens": 7000}
    end_s = time.monotonic() + 20 * FAST_POLL_S
    while time.monotonic() < end_s:
        assert cluster.client.post("/v1/completions", json={"prompt": tokens(50, 1)}).status_code == 200


def test_streams_when_they_end_then_their_targets_are_counted_and_shown(start_cluster: StartCluster) -> None:
    cluster = start_cluster(ttft_target_ms=60_000, itl_target_ms=60_000)
    cluster.decode[0].has_choices = True
    with cluster.client.stream("POST", "/v1/completions", json={"prompt": "abc", "stream": True}) as answer:
        answer.read()
    late = {TTFT_TARGET_HEADER: "1"}
    cluster.decode[0].chunk_pause_s = 0.01
    with cluster.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}, headers=late) as answer:
        answer.read()
    cluster.client.post("/v1/completions", json={"prompt": "abc"})  # its first byte is its last

    def counted(target: str, kept: str) -> float:
        return cluster.metric("tandem_proxy_targets_total", target=target, kept=kept)

    wait_for(lambda: counted("ttft", "yes") + counted("ttft", "no") == 2, "both streams")
    assert counted("itl", "yes") == 2
    assert set(cluster.client.get("/status.json").json()["targets_kept"]) == {"ttft", "itl"}


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}])
def test_streams_when_they_have_several_choices_then_the_time_between_tokens_is_that_of_each(
    start_cluster: StartCluster, fields: dict[str, Any]
) -> None:
    cluster = start_cluster(itl_target_ms=200)
    [node] = cluster.decode
    node.has_choices, node.num_chunks, node.chunk_pause_s = True, 6, 0.1  # three tokens of each
    body = {"prompt": "abc", "stream": True, **fields}
    assert cluster.client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    late = {"target": "itl", "kept": "no"}
    wait_for(lambda: cluster.metric("tandem_proxy_targets_total", **late) == 1, "the stream to be counted as late")


def test_targets_when_kept_or_not_then_counted_as_that() -> None:
    metrics = ProxyMetrics()
    for seconds, target_s in ((0.5, 1.0), (2.0, 1.0), (None, 1.0), (9.0, None)):
        metrics.count_target("ttft", seconds, target_s)
    assert (metrics.targets.asked, metrics.targets.kept) == ({"ttft": 3}, {"ttft": 1})
    assert metrics.targets.share("ttft") == pytest.approx(1 / 3)
    assert metrics.targets.share("itl") is None


def test_stream_when_turned_away_for_another_reason_then_says_nothing_of_targets(start_cluster: StartCluster) -> None:
    cluster = start_cluster(ttft_target_ms=60_000, max_concurrency=1, max_queue_size=0)
    cluster.decode[0].chunk_pause_s = 0.5
    body = {"prompt": "abc", "stream": True}
    with cluster.client.stream("POST", "/v1/completions", json=body) as first:
        assert first.status_code == 200
        refused = cluster.client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["X-Tandem-Dropped"]) == (429, "rejected-queue-full")
        first.read()
    wait_for(lambda: cluster.metric("tandem_proxy_targets_total", target="ttft", kept="yes") == 1, "the first stream")
    assert cluster.metric("tandem_proxy_targets_total", target="ttft", kept="no") == 0


# --- replicas


class Rig:
    def __init__(self, num_prefill: int, num_decode: int, itl_target_s: float | None = None) -> None:
        self.now = 0.0
        self.pool = make_pool(num_prefill, num_decode)
        self.advice = ReplicaAdvice(self.pool, RateTable(), itl_target_s, clock=lambda: self.now)

    def nodes(self, role: NodeRole) -> Iterator[Node]:
        return (node for node in self.pool.nodes if node.role is role)

    def found(self) -> tuple[int | None, int | None]:
        found = self.advice.nodes()
        return found.get(NodeRole.PREFILL), found.get(NodeRole.DECODE)

    def settle(self) -> tuple[int | None, int | None]:
        """The same load for several minutes."""
        for _ in range(20):
            self.advice.nodes()
            self.now += FADING_S / 4
            for node in self.pool.nodes:
                node.load._busy_at_s = self.now
        return self.found()


def test_replicas_when_nothing_is_asked_then_one_of_each_role_there_is() -> None:
    assert Rig(2, 3).found() == (1, 1)
    assert Rig(0, 2).found() == (None, 1)
    assert Rig(0, 0).advice.nodes() == {}


def test_replicas_when_prompts_come_then_prefill_nodes_alone_are_asked_for() -> None:
    rig = Rig(1, 1)
    [node] = rig.nodes(NodeRole.PREFILL)
    node.load._busy_s = 2.4 * 5.0  # 2.4 seconds of work in each second
    assert rig.settle() == (math.ceil(2.4 / BUSY_SHARE), 1)


def test_replicas_when_streams_run_then_as_many_as_keep_their_target() -> None:
    rig = Rig(1, 2, itl_target_s=0.05)
    for node in rig.nodes(NodeRole.DECODE):
        node.load.update(report(decode=type(report().decode)(DECODE_STEP_S, 0.001), max_num_seqs=64), 0.0)
        node.load.num_streams = 50
    # (0.9 x 50 ms - 10 ms) / 1 ms = 35 streams a node.
    assert rig.settle() == (1, math.ceil(100 / (BUSY_SHARE * 35)))


def test_replicas_when_another_proxy_places_too_then_its_streams_count_here_and_its_prompts_do_not() -> None:
    """So over proxies prefill nodes add up, and of decode nodes the maximum counts."""
    for num_others, num_decode in ((0, 1), (100, math.ceil(140 / (BUSY_SHARE * 64)))):
        rig = Rig(1, 1)
        [prefill], [decode] = rig.nodes(NodeRole.PREFILL), rig.nodes(NodeRole.DECODE)
        prefill.load._busy_s = 2.4 * 5.0
        decode.load.num_streams = 40
        decode.load.update(report(num_running=40 + num_others, max_num_seqs=64), 0.0)
        assert rig.settle() == (math.ceil(2.4 / BUSY_SHARE), num_decode)


def test_replicas_when_the_load_jumps_then_follow_within_minutes() -> None:
    rig = Rig(1, 1)
    rig.found()
    [node] = rig.nodes(NodeRole.PREFILL)
    node.load.charge(Charge(1000, 100.0), rig.now)
    rig.now += 1.0
    assert rig.found()[0] == 1
    assert 0.0 < rig.advice.wanted()[NodeRole.PREFILL] < 1.0  # two such proxies ask for one node
    node.load._busy_s = 5.0 * 5.0
    assert rig.settle()[0] == pytest.approx(5.0 / BUSY_SHARE + 100 / 30 / BUSY_SHARE, abs=6)


def test_gauge_when_scraped_then_names_both_roles(start_cluster: StartCluster) -> None:
    cluster = start_cluster(2, 1)
    for role in ("prefill", "decode"):
        assert cluster.metric("tandem_proxy_recommended_nodes", node_role=role) == 0  # idle
    assert json.loads(cluster.client.get("/status.json").text)["recommended_nodes"] == {"prefill": 1, "decode": 1}
