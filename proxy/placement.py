"""Which node gets the next leg: pure choice among usable nodes, no waiting, no I/O."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from common.errors import ConfigError
from proxy.nodes import Node


class PlacementPolicy(ABC):
    """Chooses one of ``nodes`` (never empty). One instance per role; called from the event loop only."""

    name: str

    @abstractmethod
    def choose(self, nodes: Sequence[Node]) -> Node: ...


class RoundRobin(PlacementPolicy):
    name = "round_robin"

    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(self, nodes: Sequence[Node]) -> Node:
        return nodes[next(self._turn) % len(nodes)]


class LeastLoaded(PlacementPolicy):
    """The node with the fewest open legs of this proxy; among equals, in turn."""

    name = "least_loaded"

    def __init__(self) -> None:
        self._ties = RoundRobin()

    def choose(self, nodes: Sequence[Node]) -> Node:
        least = min(node.num_in_flight for node in nodes)
        return self._ties.choose([node for node in nodes if node.num_in_flight == least])


def create_policy(name: str) -> PlacementPolicy:
    for policy in (RoundRobin, LeastLoaded):
        if policy.name == name:
            return policy()
    raise ConfigError(f"--policy {name} is not a placement policy", param="--policy")


def pick(policy: PlacementPolicy, nodes: Sequence[Node], *, tried: Collection[Node] = ()) -> Node | None:
    """A node that was not tried yet, or None.

    A second try goes to the least busy of the rest and takes nobody's turn: with two nodes, one of them broken, turns
    taken by second tries would send every first try to the broken one.
    """
    left = [node for node in nodes if node not in tried]
    if tried:
        return min(left, key=lambda node: node.num_in_flight, default=None)
    return policy.choose(left) if left else None
