"""Which streams leave the prefill node that generates them: *guests*, of elastic roles.

A guest stays while a decode node would be no better off with it. When prompts come to the prefill node, or streams end
on the decode nodes, it goes on there through the ordinary pull, as a stream whose node broke does: the prefill node
keeps its state as a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.nodes.load import Charge
from proxy.nodes.node import Node
from proxy.placement.estimate import CROSS_S, Estimator, Prompt

LOOK_S = 0.25
"""Between two looks at one guest, and between two guests that leave: loads are told of the first one by then."""
MIN_LEFT_TOKENS = 16
"""Of an answer; with fewer to come nobody leaves."""


class Guests:
    """Remembers when the last one left. Event loop only."""

    def __init__(self) -> None:
        self._left_s = float("-inf")

    def may_leave(self, now: float) -> bool:
        return now - self._left_s >= LOOK_S

    def leaves(
        self,
        node: Node,
        own: tuple[Charge, float],
        num_tokens: int,
        decode: Sequence[Node],
        estimator: Estimator,
        now: float,
    ) -> bool:
        """Whether a stream of ``num_tokens`` so far leaves ``node``, to which it came as ``own``, for one of the
        ``decode`` nodes (not empty): what it costs from here on, its way included, is less there. ``estimator``: with
        what is left of its answer."""
        prompt = Prompt(num_tokens, {})

        def there_s(other: Node) -> float:
            pause_s = estimator.full_step_s(node) + sum(estimator.handoff_s(other, prompt)) + other.load.room_s()
            return estimator.stream_cost_s(other) + estimator.pause_price_s(pause_s)

        if estimator.stream_cost_s(node, own) - min(map(there_s, decode)) <= CROSS_S:
            return False
        self._left_s = now
        return True
