"""How long nodes would take for a prompt: what nobody has is computed, what another has is pulled, and both wait.

A node goes on from a *state*, so of n tokens it computes n - state_tokens, whatever attention blocks it has beyond. A
pull moves the blocks that its reader lacks and one state, so blocks without a state still save their bytes. With both
legs at once blocks travel while later chunks are computed: only what is left at the end is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from proxy.node import Node
from proxy.node_rates import Rates
from proxy.prefix_index import Coverage

NOTHING = Coverage(0, 0)
MIN_GAIN_TOKENS = 32
"""Nodes do not ask each other for less than two blocks (``common.node.sources``)."""
ASK_S = 0.003
"""A node's question to another one, and the lease it gets with the answer."""
HANDOFF_S = 0.005
"""A second leg: its HTTP, the rendezvous, and the wait for the decode node's running step."""
OVERLAP = 0.8
"""Part of the prompt's computing during which its blocks already travel."""
MAX_SOURCES = 2
WASTE_PRICE = 2.0
"""What was computed once is computed again only if that saves its time as often as this, and once more: whoever comes
next waits for the node meanwhile."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as placement sees it. ``coverage`` by node URL; ``holders``: nodes that can be asked for a part of
    it, and how many tokens that is, the deepest state first. ``deepest``: state that anybody has."""

    num_tokens: int
    coverage: Mapping[str, Coverage]
    holders: Sequence[tuple[Node, int]] = ()
    deepest: int = 0

    @classmethod
    def of(cls, num_tokens: int, coverage: Mapping[str, Coverage], nodes: Iterable[Node]) -> Prompt:
        """``nodes``: all that can be asked."""
        known = [
            (node, have.state_tokens)
            for node in nodes
            if (have := coverage.get(node.url)) is not None and have.state_tokens >= MIN_GAIN_TOKENS and node.info.pull
        ]
        known.sort(key=_depth, reverse=True)
        # Three: the reader itself may be among them.
        deepest = max((have.state_tokens for have in coverage.values()), default=0)
        return cls(num_tokens, coverage, known[: MAX_SOURCES + 1], deepest)

    def on(self, node: Node) -> Coverage:
        return self.coverage.get(node.url, NOTHING)

    def sources(self, reader: Node) -> list[tuple[Node, int]]:
        """Whom ``reader`` would ask, best first: who has more than it has, and how much."""
        least = self.on(reader).state_tokens + MIN_GAIN_TOKENS
        return [held for held in self.holders if held[1] >= least and held[0] is not reader][:MAX_SOURCES]


def _depth(held: tuple[Node, int]) -> int:
    return held[1]


@dataclass(frozen=True, slots=True)
class Fill:
    """How a node would get a prompt computed: ``seconds`` from its turn on, ``compute_s`` of them computing
    ``num_computed`` tokens, and what ``source`` has is pulled first. ``waste_s``: the price of what somebody had
    computed before."""

    seconds: float
    compute_s: float
    num_computed: int
    source: Node | None = None
    waste_s: float = 0.0


class Estimator:
    """Estimates of one moment for one request."""

    def __init__(
        self, nodes: Iterable[Node], rates: Mapping[str, Rates], now: float, stream_delay_weight: float
    ) -> None:
        """``rates``: by node URL."""
        self._rates = rates
        self._queue_s = {node.url: node.load.queue_s(now) for node in nodes}
        self._weight = stream_delay_weight

    def queue_s(self, node: Node) -> float:
        return self._queue_s[node.url]

    def compute_s(self, node: Node, num_tokens: int) -> float:
        rates = self._rates[node.url]
        num_steps = -(-num_tokens // node.load.report.chunk)
        return num_steps * rates.step_s + num_tokens * rates.token_s

    def fill(self, node: Node, prompt: Prompt) -> Fill:
        """The cheaper of computing all that ``node`` has no state for, and pulling a deeper state first."""
        have = prompt.coverage.get(node.url, NOTHING)
        num_left = prompt.num_tokens - have.state_tokens
        compute_s = self.compute_s(node, num_left)
        wasted = prompt.deepest - have.state_tokens
        waste_s = WASTE_PRICE * wasted * self._rates[node.url].token_s if wasted > 0 else 0.0
        best = Fill(compute_s, compute_s, num_left, None, waste_s)
        if not node.info.pull or not prompt.holders:
            return best
        for source, depth in prompt.sources(node):
            compute_s = self.compute_s(node, prompt.num_tokens - depth)
            seconds = ASK_S + self.pull_s(node, depth - have.attention_tokens, 1) + compute_s
            waste_s = WASTE_PRICE * (prompt.deepest - depth) * self._rates[node.url].token_s
            if seconds + waste_s < best.seconds + best.waste_s:
                best = Fill(seconds, compute_s, prompt.num_tokens - depth, source, waste_s)
        return best

    def pull_s(self, reader: Node, num_tokens: int, num_states: int) -> float:
        rates, report = self._rates[reader.url], reader.load.report
        num_bytes = max(0, num_tokens) * report.kv_bytes_per_token + num_states * report.state_bytes
        return rates.pull_s + num_bytes * rates.byte_s

    def handoff_s(self, decode: Node, prompt: Prompt) -> tuple[float, float]:
        """Of a prompt that a prefill node computed: what can overlap its computing (blocks), and what cannot."""
        rates, report = self._rates[decode.url], decode.load.report
        missing = max(0, prompt.num_tokens - prompt.on(decode).attention_tokens)
        blocks_s = missing * report.kv_bytes_per_token * rates.byte_s
        rest_s = HANDOFF_S + rates.pull_s + report.state_bytes * rates.byte_s + rates.decode_step_s
        return (blocks_s, rest_s) if decode.info.pull else (0.0, rest_s + blocks_s)

    def stream_price_s(self, decode: Node) -> float:
        """Of one more stream: each of those that run makes its steps longer, and it theirs."""
        return self._weight * self._rates[decode.url].decode_step_s * decode.load.num_running

    def delay_price_s(self, decode: Node, num_computed: int) -> float:
        """Of prompt tokens between a decode node's steps: each running stream waits for them, and so would the next one
        to come."""
        added_s = num_computed * self._rates[decode.url].token_s
        return self._weight * added_s * (decode.load.num_running + 1)
