"""Nodes in turn, whatever they have and do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from proxy.nodes.node import Node
from proxy.placement.policy import NOTHING_KNOWN, PlacementPolicy


class RoundRobin(PlacementPolicy):
    name = "round_robin"

    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(self, nodes: Sequence[Node], prefix_tokens: Mapping[str, int] = NOTHING_KNOWN) -> Node:
        return nodes[next(self._turn) % len(nodes)]
