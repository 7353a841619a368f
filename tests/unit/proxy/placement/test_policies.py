"""Policies that choose one node for one role."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, cast

import pytest

from common.config.proxy import PLACEMENT_POLICIES
from common.errors import ConfigError
from proxy.nodes.load import Charge
from proxy.nodes.node import Node, NodeRole
from proxy.placement.policies import MAX_AHEAD, LeastLoaded, PowerOfTwo, PrefixAware, RoundRobin, create_policy, pick


def make_nodes(count: int) -> list[Node]:
    return [Node(f"http://node-{index}", NodeRole.DECODE, cast("Any", None)) for index in range(count)]


def load(node: Node, num_requests: int) -> None:
    for _ in range(num_requests):
        node.load.charge(Charge(100, 0.1, is_stream=True), 0.0)


def test_least_loaded_when_loads_differ_then_the_smallest_and_ties_in_turn() -> None:
    nodes = make_nodes(3)
    policy = LeastLoaded()
    with nodes[0].in_flight():
        assert {policy.choose(nodes) for _ in range(4)} == {nodes[1], nodes[2]}
        with nodes[1].in_flight(), nodes[2].in_flight(), nodes[2].in_flight():
            assert {policy.choose(nodes) for _ in range(4)} == {nodes[0], nodes[1]}


def test_least_loaded_when_a_request_is_placed_and_its_leg_not_open_yet_then_it_counts() -> None:
    nodes = make_nodes(2)
    load(nodes[0], 1)
    assert {LeastLoaded().choose(nodes) for _ in range(4)} == {nodes[1]}


def test_power_of_two_when_one_node_is_busy_then_it_is_never_the_better_of_two() -> None:
    nodes = make_nodes(4)
    load(nodes[0], 3)
    policy = PowerOfTwo(random.Random(1))
    counts = Counter(policy.choose(nodes).url for _ in range(600))
    assert nodes[0].url not in counts
    assert all(150 < counts[node.url] < 250 for node in nodes[1:])
    assert policy.choose(nodes[:1]) is nodes[0]


def test_prefix_aware_when_somebody_has_most_then_that_one_unless_far_busier() -> None:
    nodes = make_nodes(3)
    policy = PrefixAware()
    have = {nodes[1].url: 320, nodes[2].url: 160}
    assert {policy.choose(nodes, have) for _ in range(3)} == {nodes[1]}
    load(nodes[1], MAX_AHEAD)
    assert policy.choose(nodes, have) is nodes[1]
    load(nodes[1], 1)
    assert {policy.choose(nodes, have) for _ in range(4)} == {nodes[0], nodes[2]}


def test_prefix_aware_when_nobody_has_any_then_the_least_loaded_in_turn() -> None:
    nodes = make_nodes(3)
    load(nodes[2], 1)
    policy = PrefixAware()
    assert Counter(policy.choose(nodes).url for _ in range(10)) == {nodes[0].url: 5, nodes[1].url: 5}


def test_pick_when_all_were_tried_then_none() -> None:
    nodes = make_nodes(2)
    policy = RoundRobin()
    assert pick(policy, nodes, tried=[nodes[0]]) is nodes[1]
    assert pick(policy, nodes, tried=nodes) is None


def test_create_policy_when_named_in_the_flags_then_there_is_one() -> None:
    assert [create_policy(name).name for name in PLACEMENT_POLICIES] == list(PLACEMENT_POLICIES)


def test_create_policy_when_unknown_then_config_error() -> None:
    with pytest.raises(ConfigError, match="--policy fastest"):
        create_policy("fastest")
