"""Placement over many requests, in simulated time: who gets what, and what is computed twice."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.proxy.placement.world import Outcome, SimNode, World

NUM_SESSIONS, NUM_TURNS, FIRST, GROWTH, ANSWER = 40, 6, 300, 80, 16
LONGEST = FIRST + (NUM_TURNS - 1) * GROWTH + ANSWER
ROOM = 1.25  # times what all sessions need once: they fit, but not on every node


def run_sessions(num_nodes: int, policy: str, decode_share: float = ROOM, seed: int = 1, **config: Any) -> World:
    """Sessions turn by turn, as in ``benchmarks.placement``; all nodes of a role together have the same memory."""
    tokens = NUM_SESSIONS * LONGEST / num_nodes
    world = World(
        num_nodes,
        num_nodes,
        policy,
        prefill_tokens=ROOM * tokens,
        decode_tokens=decode_share * tokens,
        **config,
    )
    draw = random.Random(seed)
    prompts = [[draw.randrange(1000) for _ in range(FIRST)] for _ in range(NUM_SESSIONS)]

    def submit(session: int) -> None:
        def grow(whole: list[int]) -> None:
            prompts[session] = [*whole, *draw.choices(range(1000), k=GROWTH - ANSWER)]

        world.submit(session, prompts[session], ANSWER, grow)

    time_s = 0.0
    for _ in range(NUM_TURNS):
        for session in draw.sample(range(NUM_SESSIONS), NUM_SESSIONS):
            time_s += draw.expovariate(1 / 0.06)
            world.at(time_s, lambda session=session: submit(session))  # type: ignore[misc]
        time_s += 2.0
    world.run()
    return world


def spread(nodes: Sequence[SimNode]) -> float:
    """How far the busiest is above the mean, in requests."""
    return max(node.num_requests for node in nodes) / statistics.mean(node.num_requests for node in nodes) - 1


@pytest.mark.parametrize("decode_share", [ROOM, 0.5])
def test_cost_when_sessions_interleave_then_caches_as_one_pair_and_spreads(decode_share: float) -> None:
    pair = run_sessions(1, "cost", decode_share).outcome.num_cached_tokens
    cost = run_sessions(2, "cost", decode_share)
    turns = run_sessions(2, "round_robin", decode_share, prefix_sources=False)
    assert cost.outcome.num_cached_tokens >= 0.95 * pair
    assert cost.outcome.num_cached_tokens >= 1.5 * turns.outcome.num_cached_tokens
    assert spread(cost.decode) <= 0.25
    assert spread(cost.prefill) <= 0.25


def test_estimates_when_nodes_do_what_they_report_then_are_right() -> None:
    ratios = run_sessions(2, "cost").outcome.ratios
    assert len(ratios) == NUM_SESSIONS * NUM_TURNS
    assert 0.7 < statistics.median(ratios) < 1.3
    assert sum(0.5 < ratio < 2 for ratio in ratios) > 0.9 * len(ratios)


def run_mixed(policy: str, seed: int, **config: Any) -> World:
    """8 + 8 nodes: 60 conversations of a few turns, and cold single prompts of very different lengths."""
    world = World(8, 8, policy, prefill_tokens=60_000, decode_tokens=60_000, **config)
    draw = random.Random(seed)

    def cold(number: int) -> None:
        world.submit(number, draw.choices(range(1000), k=draw.choice((50, 200, 1000, 4000))), 30)

    def turn(number: int, prompt: list[int], left: int) -> None:
        def go_on(whole: list[int]) -> None:
            if left:
                longer = [*whole, *draw.choices(range(1000), k=draw.randrange(20, 150))]
                world.at(world.now + draw.uniform(0.5, 2.0), lambda: turn(number, longer, left - 1))

        world.submit(number, prompt, draw.randrange(10, 60), go_on)

    for number in range(160):
        world.at(draw.uniform(0, 20), lambda number=number: cold(number))  # type: ignore[misc]
    for number in range(1000, 1060):
        prompt = [draw.randrange(1000) for _ in range(draw.randrange(200, 800))]
        world.at(draw.uniform(0, 10), lambda number=number, prompt=prompt: turn(number, prompt, 4))  # type: ignore[misc]
    world.run()
    return world


def p95(outcome: Outcome) -> float:
    return sorted(outcome.ttft_s)[int(0.95 * len(outcome.ttft_s))]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_cost_when_traffic_is_mixed_then_beats_the_others_in_hits_and_in_time(seed: int) -> None:
    cost = run_mixed("cost", seed)
    others = [run_mixed(policy, seed, prefix_sources=False).outcome for policy in ("least_loaded", "power_of_two")]
    hits = cost.outcome.num_cached_tokens / cost.outcome.num_prompt_tokens
    assert all(hits > 1.2 * each.num_cached_tokens / each.num_prompt_tokens for each in others)
    assert all(statistics.mean(cost.outcome.ttft_s) < statistics.mean(each.ttft_s) for each in others)
    assert all(p95(cost.outcome) <= 1.1 * p95(each) for each in others)
    assert all(node.num_requests > 0 for node in (*cost.prefill, *cost.decode))
    assert spread(cost.decode) < 0.6
    assert {"local", "remote"} == set(cost.outcome.placements)


def test_cost_when_64_cold_prompts_come_at_once_then_every_node_gets_its_share() -> None:
    world = World(8, 8)
    draw = random.Random(2)
    placed = [world.submit(number, draw.choices(range(1000), k=1000), 100) for number in range(64)]
    by_prefill = [sum(1 for each in placed if node.node in each.prefill) for node in world.prefill]
    by_decode = [node.num_requests for node in world.decode]
    # A decode node without streams is as fast as a prefill node: it may get its share of the computing.
    work = [
        count + sum(1 for each in placed if each.is_local and each.decode is node.node)
        for count, node in zip(by_prefill, world.decode, strict=True)
    ]
    assert min(by_prefill) >= 4, by_prefill
    assert max(by_decode) <= 12, by_decode
    assert sum(work) == 64
