"""Which node gets the next leg: pure choice among usable nodes, no waiting, no I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from proxy.nodes.node import Node

NOTHING_KNOWN: Mapping[str, int] = {}


class PlacementPolicy(ABC):
    """Chooses one of ``nodes`` (never empty). One instance per role; called from the event loop only."""

    name: str

    @abstractmethod
    def choose(self, nodes: Sequence[Node], prefix_tokens: Mapping[str, int] = NOTHING_KNOWN) -> Node:
        """``prefix_tokens``: by node URL, how much of the prompt a node has that is of use to it in its role."""


def least_loaded(nodes: Sequence[Node]) -> list[Node]:
    """Those of ``nodes`` (never empty) with the fewest requests of this proxy: placed on them, or open legs."""
    least = min(num_open(node) for node in nodes)
    return [node for node in nodes if num_open(node) == least]


def num_open(node: Node) -> int:
    """A request counts from its placement on; its leg, which is opened a moment later, is the same one."""
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
