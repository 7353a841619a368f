"""The node that has most of the prompt, unless it is far busier than another; the least loaded when nobody has any.

No speeds and no bytes: for nodes that report none. ``cost`` weighs what this one compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.nodes.node import Node
from proxy.placement.least_loaded import LeastLoaded
from proxy.placement.policy import NOTHING_KNOWN, PlacementPolicy, num_open

# The thresholds of SGLang's cache-aware gateway, the absolute one for nodes of 64 sequences instead of 256.
MAX_AHEAD = 16
MAX_RATIO = 1.5


class PrefixAware(PlacementPolicy):
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
