"""What ``tandem simulate --cluster`` makes of the benchmark's mixes: the same arrivals, targets and search, with the
speeds that the nodes have measured by then."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.goodput.clients import Targets
from benchmarks.goodput.search import find_goodput
from benchmarks.goodput.services import ALIKE, ELASTIC
from benchmarks.goodput.traffic import THINK_S, Arrival, Mix, draw_arrivals
from common.kv_cache.spec import KVCacheConfig
from common.simulate.simulate import read_plan
from common.wire.routes import INFO_ROUTE
from proxy.nodes.load import LoadReport
from proxy.nodes.node import NodeRole
from proxy.placement import estimate
from proxy.simulation.cluster import Cluster
from proxy.simulation.speeds import Speeds
from tests.support.service import Service

BLOCK_SIZE = 16
"""As nodes have it (``--block-size``)."""


def measured_speeds(service: Service) -> dict[NodeRole, Speeds]:
    """Of a role without nodes, those of the other one."""
    found: dict[NodeRole, Speeds] = {}
    for node in (*service.prefill, *service.decode):
        info = httpx.get(node.url + INFO_ROUTE, timeout=10).raise_for_status().json()
        report = LoadReport.from_json(info["load"])
        speeds = Speeds.of(report) if report is not None else None
        if speeds is not None:
            found[NodeRole(node.role)] = speeds
    known = next(iter(found.values()))
    return {role: found.get(role, known) for role in NodeRole}


def cache_of(model: Path, dtype: str, memory_bytes: int, max_num_seqs: int) -> KVCacheConfig:
    return read_plan(
        model,
        dtype,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=memory_bytes,
        block_size=BLOCK_SIZE,
        enable_events=True,
    ).config


async def predict_goodput(
    way: str,
    mixes: Sequence[Mix],
    targets: Mapping[Mix, Targets],
    *,
    cache: KVCacheConfig,
    speeds: Mapping[NodeRole, Speeds],
    seconds: float,
    vocab: int,
    start_rate: float,
    num_halvings: int,
) -> float:
    """As ``find_goodput`` of the service itself."""

    async def attainment(rate: float) -> float:
        arrivals = draw_arrivals(mixes, rate, seconds, vocab, seed=1)
        return simulate(way, arrivals, targets, cache=cache, speeds=speeds)

    return await find_goodput(attainment, start_rate, num_halvings)


def simulate(
    way: str,
    arrivals: Sequence[Arrival],
    targets: Mapping[Mix, Targets],
    *,
    cache: KVCacheConfig,
    speeds: Mapping[NodeRole, Speeds],
) -> float:
    """The part of the requests that keep both targets."""
    num_prefill, num_decode = (0, 2) if way == ALIKE else (1, 1)
    cluster = Cluster(num_prefill, num_decode, cache=cache, speeds=speeds, elastic=way == ELASTIC)
    for arrival in arrivals:
        cluster.at(arrival.at_s, functools.partial(_turn, cluster, arrival, targets[arrival.mix], 0, []))
    cluster.run()
    total = sum(len(arrival.prompts) for arrival in arrivals)
    return sum(served.is_in_time for served in cluster.served) / total if total else 0.0


def _turn(cluster: Cluster, arrival: Arrival, targets: Targets, turn: int, so_far: list[int]) -> None:
    prompt = [*so_far, *arrival.prompts[turn]]
    # Any tokens, as long as no other answer has them.
    answer = [(hash((arrival.at_s, turn)) + number) % 1_000_003 for number in range(arrival.mix.num_answer_tokens)]

    def go_on() -> None:
        if turn + 1 < len(arrival.prompts):
            longer: list[Any] = [*prompt, *answer]
            cluster.at(cluster.now + THINK_S, functools.partial(_turn, cluster, arrival, targets, turn + 1, longer))

    cluster.submit(prompt, answer, targets=estimate.Targets(targets.ttft_s, targets.itl_s), on_end=go_on)
