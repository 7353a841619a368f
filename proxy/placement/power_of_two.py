"""The less loaded of two nodes drawn at random: nearly as even as the least loaded, and several proxies that see the
same loads do not all choose the same node.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from proxy.nodes.node import Node
from proxy.placement.policy import NOTHING_KNOWN, PlacementPolicy, num_open


class PowerOfTwo(PlacementPolicy):
    name = "power_of_two"

    def __init__(self, draw: random.Random | None = None) -> None:
        self._draw = draw or random.Random()

    def choose(self, nodes: Sequence[Node], prefix_tokens: Mapping[str, int] = NOTHING_KNOWN) -> Node:
        # sample() draws in random order, so equals are a coin's toss.
        return min(self._draw.sample(nodes, min(2, len(nodes))), key=num_open)
