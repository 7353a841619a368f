"""The node with the fewest open requests of this proxy; among equals, in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.nodes.node import Node
from proxy.placement.policy import NOTHING_KNOWN, PlacementPolicy, least_loaded
from proxy.placement.round_robin import RoundRobin


class LeastLoaded(PlacementPolicy):
    name = "least_loaded"

    def __init__(self) -> None:
        self._ties = RoundRobin()

    def choose(self, nodes: Sequence[Node], prefix_tokens: Mapping[str, int] = NOTHING_KNOWN) -> Node:
        return self._ties.choose(least_loaded(nodes))
