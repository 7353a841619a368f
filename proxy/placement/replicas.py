"""How many nodes of each role the load asks for, for operators and autoscalers.

Prefill: the seconds of computing prompts that come in a second, with what waits, over the part of a node's time that
prompts may take. Decode: the streams that run or wait, over those that one node runs within the target for the time
between two tokens. Both fade over a minute. Where roles are elastic either kind of node does either work: then the sum
counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from common.engine.pacing.shares import TARGET_SHARE
from proxy.nodes.load import BUSY_S
from proxy.nodes.node import Node, NodeRole
from proxy.nodes.pool import NodePool
from proxy.nodes.rates import Rates, RateTable

BUSY_SHARE = 0.7
"""Of a prefill node's time, and of a decode node's room: above it queues grow faster than the load."""
FADING_S = 60.0
DRAIN_S = 30.0
"""Seconds in which what waits now is to be worked off."""


class ReplicaAdvice:
    """Event loop only."""

    def __init__(
        self, pool: NodePool, rates: RateTable, itl_target_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._rates = rates
        self._itl_target_s = itl_target_s
        self._clock = clock
        self._wanted: dict[NodeRole, float] = {}
        self._at_s = 0.0

    def nodes(self) -> Mapping[NodeRole, int]:
        """By role, at least one of each that the pool has nodes of."""
        return {role: max(1, math.ceil(wanted - 1e-9)) for role, wanted in self.wanted().items()}

    def wanted(self) -> Mapping[NodeRole, float]:
        """The same before it is rounded up. Of several proxies prefill nodes add up, for each knows the prompts that it
        placed; of decode nodes the maximum counts, for each knows all streams."""
        nodes, now = self._pool.nodes, self._clock()
        by_role = {role: [node for node in nodes if node.role is role] for role in NodeRole}
        if not by_role[NodeRole.DECODE]:
            return {}
        rates = self._rates.rates(nodes, now)
        kept = math.exp(-max(0.0, now - self._at_s) / FADING_S) if self._wanted else 0.0
        self._at_s = now
        current = {NodeRole.PREFILL: self._prompt_nodes(nodes, now), NodeRole.DECODE: self._stream_nodes(nodes, rates)}
        if not by_role[NodeRole.PREFILL]:
            current = {NodeRole.DECODE: current[NodeRole.DECODE] + current[NodeRole.PREFILL]}
        self._wanted = {
            role: kept * self._wanted.get(role, wanted) + (1.0 - kept) * wanted for role, wanted in current.items()
        }
        return self._wanted

    @staticmethod
    def _prompt_nodes(nodes: list[Node], now: float) -> float:
        coming = sum(node.load.busy_s(now) for node in nodes) / BUSY_S
        waiting = sum(node.load.queue_s(now) for node in nodes) / DRAIN_S
        return (coming + waiting) / BUSY_SHARE

    def _stream_nodes(self, nodes: list[Node], rates: Mapping[str, Rates]) -> float:
        num_streams = sum(node.load.num_running for node in nodes)
        decode = [node for node in nodes if node.role is NodeRole.DECODE]
        room = sum(self._room(node, rates[node.url]) for node in decode) / len(decode)
        return num_streams / (BUSY_SHARE * room)

    def _room(self, node: Node, rates: Rates) -> float:
        """Streams that a node runs in time; one at least."""
        most = node.load.report.max_num_seqs
        if self._itl_target_s is None or rates.decode_row_s <= 0:
            return most
        return min(most, max(1.0, (TARGET_SHARE * self._itl_target_s - rates.decode_step_s) / rates.decode_row_s))
