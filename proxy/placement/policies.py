"""Which node gets the next leg: pure choice among usable nodes, no waiting, no I/O.

``cost`` compares whole requests (``proxy.placement.cost``); the other policies choose one node at a time, here.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from common.errors import ConfigError
from proxy.nodes.node import Node

NOTHING_KNOWN: Mapping[str, int] = {}
MAX_AHEAD = 16
"""``prefix_aware``: open requests that the node with the longest prefix may have more than the least loaded one. As in
SGLang's cache-aware gateway, for nodes of 64 sequences instead of 256."""
MAX_RATIO = 1.5
"""``prefix_aware``: and as a multiple of the least loaded node's; the prefix loses when both limits are exceeded. As in
SGLang's cache-aware gateway."""


class PlacementPolicy(ABC):
    """Chooses one of ``nodes`` (never empty). One instance per role; called from the event loop only."""

    name: str

    @abstractmethod
    def choose(self, nodes: Sequence[Node], prefix_tokens: Mapping[str, int] = NOTHING_KNOWN) -> Node:
        """``prefix_tokens``: by node URL, how much of the prompt a node has that is of use to it in its role."""


class RoundRobin(PlacementPolicy):
    """Nodes in turn, whatever they have and do."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(self, nodes: Sequence[Node], prefix_tokens: Mapping[str, int] = NOTHING_KNOWN) -> Node:
        return nodes[next(self._turn) % len(nodes)]


class LeastLoaded(PlacementPolicy):
    """The node with the fewest open requests of this proxy; among equals, in turn."""

    name = "least_loaded"

    def __init__(self) -> None:
        self._ties = RoundRobin()

    def choose(self, nodes: Sequence[Node], prefix_tokens: Mapping[str, int] = NOTHING_KNOWN) -> Node:
        least = min(num_open(node) for node in nodes)
        return self._ties.choose([node for node in nodes if num_open(node) == least])


class PowerOfTwo(PlacementPolicy):
    """The less loaded of two nodes drawn at random: nearly as even as the least loaded, and several proxies that see
    the same loads do not all choose the same node."""

    name = "power_of_two"

    def __init__(self, draw: random.Random | None = None) -> None:
        self._draw = draw or random.Random()

    def choose(self, nodes: Sequence[Node], prefix_tokens: Mapping[str, int] = NOTHING_KNOWN) -> Node:
        # sample() draws in random order, so equals are a coin's toss.
        return min(self._draw.sample(nodes, min(2, len(nodes))), key=num_open)


class PrefixAware(PlacementPolicy):
    """The node that has most of the prompt, unless it is far busier than another; the least loaded when nobody has any.
    No speeds and no bytes: for nodes that report none."""

    name = "prefix_aware"

    def __init__(self) -> None:
        self._equals = LeastLoaded()
        self._otherwise = LeastLoaded()

    def choose(self, nodes: Sequence[Node], prefix_tokens: Mapping[str, int] = NOTHING_KNOWN) -> Node:
        most = max(prefix_tokens.get(node.url, 0) for node in nodes)
        if most == 0:
            return self._otherwise.choose(nodes)
        best = self._equals.choose([node for node in nodes if prefix_tokens.get(node.url, 0) == most])
        least = min(num_open(node) for node in nodes)
        if num_open(best) > least + MAX_AHEAD and num_open(best) > MAX_RATIO * least:
            return self._otherwise.choose(nodes)
        return best


class Cost(LeastLoaded):
    """The policy of a role whose nodes ``CostChooser`` compares; where there is no request to weigh, the least loaded
    one."""

    name = "cost"


def create_policy(name: str, option: str = "--policy") -> PlacementPolicy:
    """Raises ConfigError when there is no such policy."""
    for policy in (Cost, PrefixAware, LeastLoaded, PowerOfTwo, RoundRobin):
        if policy.name == name:
            return policy()
    raise ConfigError(f"{option} {name} is not a placement policy", param=option)


def num_open(node: Node) -> int:
    """Requests of this proxy on the node. One counts from its placement on; its leg, which is opened a moment later, is
    the same request."""
    return max(node.num_in_flight, node.load.num_charges)


def pick(
    policy: PlacementPolicy,
    nodes: Sequence[Node],
    *,
    tried: Collection[Node] = (),
    prefix_tokens: Mapping[str, int] = NOTHING_KNOWN,
) -> Node | None:
    """A node that was not tried yet, or None.

    A second try goes to the least busy of the rest and takes nobody's turn: with two nodes, one of them broken, turns
    taken by second tries would send every first try to the broken one.
    """
    left = [node for node in nodes if node not in tried]
    if tried:
        return min(left, key=num_open, default=None)
    return policy.choose(left, prefix_tokens) if left else None
