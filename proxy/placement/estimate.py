"""How long nodes would take for a prompt: what nobody has is computed, what another node has is pulled; and what one
more stream would cost on a node: itself, those that run there, and the prompts that wait there.

A node goes on from a *state*, so of n tokens it computes n - state_tokens, whatever attention blocks it has beyond. A
pull moves the blocks that its reader lacks and one state, so blocks without a state still save their bytes. With both
legs at once blocks travel while later chunks are computed: only what is left at the end is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from common.engine.pacing.shares import (
    PACING_RESERVE,
    PROMPT_SHARE,
    SLOWEST_SHARE,
    TARGET_SHARE,
    USUAL_ANSWER_TOKENS,
)
from common.wire.pull_sources import MAX_SOURCES as MAX_SOURCES
from proxy.nodes.load import Charge
from proxy.nodes.node import Node, NodeRole
from proxy.nodes.rates import Rates
from proxy.placement.in_progress import NOTHING_EXPECTED
from proxy.prefix_index.coverage import NO_COVERAGE, Coverage

MIN_GAIN_TOKENS = 32
"""Tokens that a pull must save to be worth its lease: two blocks of the usual 16 tokens. Nodes, which know their block
size, do not pull below two of theirs (``common.node.pull.sources``)."""
FIND_S = 0.003
"""Seconds that it takes a node to find a prefix at another node and to get a lease on it."""
HANDOFF_S = 0.005
"""Seconds that a second leg adds: its HTTP, the rendezvous, and the wait for the decode node's running step."""
OVERLAP = 0.8
"""Share of the time of computing a prompt in which its finished blocks already travel to the decode node."""
WASTE_PRICE = 2.0
"""Price of computing what another node has already computed, in multiples of the time it takes and beside that time:
whoever comes next waits for the node meanwhile."""
COPY_PRICE = 0.25
"""Price of a copy, as a share of the time of computing what is copied: a copy takes memory from other blocks."""
IN_TARGET_PRICE = 0.25
"""Price of a second that is within a target, for the first token or between tokens, as a share of the usual price."""
LATE_PRICE = 4.0
"""Price of a second beyond a target, beside the second itself."""
SAFE_SHARE = 0.8
"""Share of a target that placement counts on: estimates miss, and other requests come."""
GUESTS_SHARE = 0.3
"""A prefill node generates too while prompts took at most this share of its time lately. Beyond that its streams make
prompts late, and prompts in a hurry take more of the streams' time than their targets leave."""
CROSS_S, CROSS_SHARE = 0.05, 0.1
"""A node takes the other role's work only if that saves so many seconds, and this share of the time of computing the
prompt beside them. So roles stay as they are where that is about as good, and each kind of work keeps its caches."""
APART_PRICE = 1.0
"""Price of computing a prompt where its blocks are not, in multiples of the time of computing those that another node
has (see ``Estimator.apart_price_s``)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as placement sees it. ``coverage`` by node URL, with what will be there when a node has done what it
    is doing; ``holders``: nodes from which a part of it can be pulled now, and how many tokens that is, the deepest
    state first. ``deepest``: tokens before the deepest state that any node has, in memory or in a tier, or will have.
    ``images_end``: tokens up to the last image, which only a prefill node computes. ``told``: the prompt without what
    is only expected to be there; None: nothing is."""

    num_tokens: int
    coverage: Mapping[str, Coverage]
    holders: Sequence[tuple[Node, int]] = ()
    deepest: int = 0
    images_end: int = 0
    told: Prompt | None = None

    @classmethod
    def of(
        cls,
        num_tokens: int,
        coverage: Mapping[str, Coverage],
        nodes: Iterable[Node],
        expected: Mapping[str, int] = NOTHING_EXPECTED,
        images_end: int = 0,
    ) -> Prompt:
        """``nodes``: all that may be pulled from. ``expected``: tokens that a node is computing now, by URL."""
        known = [
            (node, have.state_tokens)
            for node in nodes
            if (have := coverage.get(node.url)) is not None and have.state_tokens >= MIN_GAIN_TOKENS and node.info.pull
        ]
        known.sort(key=_depth, reverse=True)
        # One more than a reader is told of: it may be among them itself.
        told = cls(num_tokens, coverage, known[: MAX_SOURCES + 1], _deepest(coverage), images_end)
        if not expected:
            return told
        coverage = _with_expected(coverage, expected, num_tokens)
        return replace(told, coverage=coverage, deepest=_deepest(coverage), told=told)

    def on(self, node: Node) -> Coverage:
        return self.coverage.get(node.url, NO_COVERAGE)

    def sources(self, reader: Node) -> list[tuple[Node, int]]:
        """From whom ``reader`` would pull, best first: who has more than it has, and how much."""
        least = self.on(reader).state_tokens + MIN_GAIN_TOKENS
        return [held for held in self.holders if held[1] >= least and held[0] is not reader][:MAX_SOURCES]


def _deepest(coverage: Mapping[str, Coverage]) -> int:
    return max((max(have.state_tokens, have.tier_tokens) for have in coverage.values()), default=0)


def _with_expected(
    coverage: Mapping[str, Coverage], expected: Mapping[str, int], num_tokens: int
) -> Mapping[str, Coverage]:
    merged = dict(coverage)
    for url, num_expected in expected.items():
        have = merged.get(url, NO_COVERAGE)
        state_tokens = max(have.state_tokens, min(num_expected, num_tokens - 1))
        attention_tokens = max(have.attention_tokens, num_expected)
        merged[url] = have._replace(attention_tokens=attention_tokens, state_tokens=state_tokens)
    return merged


def _depth(held: tuple[Node, int]) -> int:
    return held[1]


class Fill(NamedTuple):
    """How a node would get a prompt computed: ``seconds`` from its turn on, ``compute_s`` of them computing
    ``num_computed`` tokens, and what ``source`` has is pulled first. ``waste_s``: the price of what somebody had
    computed before."""

    seconds: float
    compute_s: float
    num_computed: int
    source: Node | None = None
    waste_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request, and those like it, is to keep: seconds to the first token, and between two tokens."""

    ttft_s: float | None = None
    itl_s: float | None = None


NO_TARGETS = Targets()


class Estimator:
    """Estimates of one moment for one request."""

    def __init__(
        self,
        nodes: Iterable[Node],
        rates: Mapping[str, Rates],
        now: float,
        stream_delay_weight: float,
        targets: Targets = NO_TARGETS,
        max_answer_tokens: int | None = None,
        leaving: Node | None = None,
    ) -> None:
        """``rates``: by node URL. ``max_answer_tokens``: None: not said. ``leaving``: one of the streams that run there
        is the request itself, which may go elsewhere."""
        self._rates = rates
        self._queue_s = {node.url: node.load.queue_s(now) for node in nodes}
        self._weight = stream_delay_weight
        self._now = now
        self._targets = targets
        self._leaving = leaving
        self._num_answer_tokens = min(max_answer_tokens or USUAL_ANSWER_TOKENS, USUAL_ANSWER_TOKENS)

    def queue_s(self, node: Node) -> float:
        return self._queue_s[node.url]

    def fill(self, node: Node, prompt: Prompt) -> Fill:
        """The cheapest of computing all that ``node`` has no state for, reading a deeper one from its tier, and pulling
        one first."""
        rates = self._rates[node.url]
        chunk, step_s = self._chunk(node, node.load.num_rows, prompt.num_tokens - prompt.on(node).state_tokens)
        attention_tokens, state_tokens, tier_tokens, tier = prompt.coverage.get(node.url, NO_COVERAGE)
        num_tokens, holders = prompt.num_tokens, prompt.holders
        num_left = num_tokens - state_tokens
        compute_s = -(-num_left // chunk) * step_s + num_left * rates.token_s
        again_s = rates.token_s + step_s / chunk  # a token that is computed, or copied, once more than needed
        waste_s = WASTE_PRICE * max(0, prompt.deepest - state_tokens) * again_s
        best = Fill(compute_s, compute_s, num_left, None, waste_s)
        least = state_tokens + MIN_GAIN_TOKENS
        if tier_tokens > state_tokens and tier in rates.tiers:
            kv_s, state_s = rates.tiers[tier]
            num_left, num_read = num_tokens - tier_tokens, max(0, tier_tokens - attention_tokens)
            compute_s = -(-num_left // chunk) * step_s + num_left * rates.token_s
            waste_s = (WASTE_PRICE * max(0, prompt.deepest - tier_tokens) + COPY_PRICE * num_read) * again_s
            read = Fill(state_s + num_read * kv_s + compute_s, compute_s, num_left, None, waste_s)
            best = min(best, read, key=lambda fill: fill.seconds + fill.waste_s)
        if not holders or holders[0][1] < least or not node.info.pull:
            return best
        for source, depth in holders:
            if depth < least or source is node:
                continue
            num_left = num_tokens - depth
            num_pulled = max(0, depth - attention_tokens)
            compute_s = -(-num_left // chunk) * step_s + num_left * rates.token_s
            seconds = FIND_S + rates.state_s + num_pulled * rates.kv_s + compute_s
            waste_s = (WASTE_PRICE * max(0, prompt.deepest - depth) + COPY_PRICE * num_pulled) * again_s
            if seconds + waste_s < best.seconds + best.waste_s:
                best = Fill(seconds, compute_s, num_left, source, waste_s)
            # Pulling a token costs the same at every depth: a shallower source is only better where pulling takes
            # longer than computing.
            if rates.kv_s <= rates.token_s:
                break
        return best

    def own_tokens(self, node: Node, prompt: Prompt) -> int:
        """Of the prompt, what ``node`` has a state of: in memory, or in a tier from which reading it is best."""
        have = prompt.on(node)
        if have.tier_tokens <= have.state_tokens:
            return have.state_tokens
        fill = self.fill(node, prompt)
        return have.state_tokens if fill.source is not None else prompt.num_tokens - fill.num_computed

    def apart_price_s(self, node: Node, num_tokens: int) -> float:
        """The price of computing a prompt on ``node`` when another node has ``num_tokens`` more of its blocks, and
        nobody a state there. On that other node the prompt would leave a state at the place where it parts from the
        known blocks, from which the next prompt of the kind could go on."""
        return APART_PRICE * num_tokens * self._rates[node.url].token_s if num_tokens >= MIN_GAIN_TOKENS else 0.0

    def handoff_s(self, decode: Node, prompt: Prompt) -> tuple[float, float]:
        """Of a prompt that a prefill node computed: what can overlap its computing (blocks), and what cannot."""
        rates = self._rates[decode.url]
        blocks_s = max(0, prompt.num_tokens - prompt.on(decode).attention_tokens) * rates.kv_s
        rest_s = HANDOFF_S + rates.state_s + rates.decode_step_s
        return (blocks_s, rest_s) if decode.info.pull else (0.0, rest_s + blocks_s)

    def stream_price_s(self, decode: Node) -> float:
        """Of one more stream: each of those that run makes its steps longer, and it theirs."""
        return self._weight * self._rates[decode.url].decode_step_s * decode.load.num_running

    def delay_price_s(self, decode: Node, num_computed: int, wait_s: float) -> float:
        """Of prompt tokens between a decode node's steps, after ``wait_s``: each running stream waits for them, and so
        would the next one to come. Streams with a target wait for less, as long as what they have left of it is enough
        or the prompt can wait for their ends."""
        added_s, num_running = num_computed * self._rates[decode.url].token_s, decode.load.num_running
        delay_s = self._weight * added_s * (num_running + 1)
        if self._targets.itl_s is None:
            return delay_s
        over_s = max(0.0, added_s - SAFE_SHARE * self._slack_s(decode)) if num_running else 0.0
        if over_s and self._can_wait_for_streams(decode, added_s + wait_s):
            over_s = 0.0
        return IN_TARGET_PRICE * delay_s + LATE_PRICE * over_s * num_running

    def _slack_s(self, node: Node) -> float:
        """What a stream on ``node`` can lose from its first token to its last and keep the target, beside the prompts
        that wait there or have come lately."""
        assert self._targets.itl_s is not None
        rates, num_rows, num_tokens = self._rates[node.url], node.load.num_running, self._num_answer_tokens
        share = node.load.prompt_share(self._now, num_tokens * rates.decode_s(num_rows))
        return num_tokens * max(0.0, self._targets.itl_s - self._pace(node, num_rows, share)[0])

    def _can_wait_for_streams(self, node: Node, ttft_s: float) -> bool:
        """Whether a prompt that would be computed within ``ttft_s`` is in time although the streams on ``node`` end
        before it goes on, one after the other."""
        if self._targets.ttft_s is None:
            return True
        streams_s = node.load.num_running * self._num_answer_tokens * self._rates[node.url].decode_s(1)
        return ttft_s + streams_s <= SAFE_SHARE * self._targets.ttft_s

    def ttft_price_s(self, ttft_s: float) -> float:
        """Of a first token that comes after so long: within its target less than the time, beyond it more."""
        target_s = self._targets.ttft_s
        if target_s is None:
            return ttft_s
        late_s = max(0.0, ttft_s - SAFE_SHARE * target_s)
        return IN_TARGET_PRICE * (ttft_s - late_s) + (1.0 + LATE_PRICE) * late_s

    def stream_cost_s(self, node: Node, own: tuple[Charge, float] | None = None) -> float:
        """Of one more stream from its first token to its last: its own time, by which it makes others longer, those on
        other nodes of the machine too, and by which prompts that wait there, or will come, take longer beside it.
        ``own``: it is one of those that run there, and so much work was placed for it, at that time."""
        rates, num_tokens = self._rates[node.url], self._num_answer_tokens
        num_rows = self._num_rows(node)
        share = node.load.prompt_share(self._now, num_tokens * rates.decode_s(num_rows + 1), own)
        before_s, before_rate = self._pace(node, num_rows, share)
        after_s, after_rate = self._pace(node, num_rows + 1, share)
        paces = [(num_rows, before_s, after_s)]  # of the others, without and with this one
        longer_share = 1.0 - _generating_share(node, num_rows)
        for other in self._generating_beside(node) if longer_share else ():
            num_others = self._num_rows(other)
            pace_s = self._decode_s(other, num_others)
            paces.append((num_others, pace_s, pace_s + longer_share * other.contention.beside_s))
        lasts_s = num_tokens * after_s
        others_s = num_tokens * sum(rows * max(0.0, after - before) for rows, before, after in paces)
        prompts_s = share * lasts_s * max(0.0, 1.0 - after_rate / before_rate) if before_rate > 0 else 0.0
        cost_s, target_s = self._weight * (lasts_s + others_s + prompts_s), self._targets.itl_s
        if target_s is None:
            return cost_s
        # Of the others, only what this stream adds: some may be late without it.
        late_s = max(0.0, after_s - target_s) + sum(
            rows * max(0.0, after - max(before, target_s)) for rows, before, after in paces
        )
        return IN_TARGET_PRICE * cost_s + LATE_PRICE * num_tokens * late_s

    def has_time_to_generate(self, node: Node, decode: Iterable[Node]) -> bool:
        """Whether prompts leave the prefill node ``node`` time for streams, or ``decode`` has no room for one more."""
        share = node.load.prompt_share(self._now, math.inf)
        return share <= GUESTS_SHARE or all(other.load.room_s() > 0.0 for other in decode)

    def full_step_s(self, node: Node) -> float:
        """Of a whole chunk of prompts: what is asked of ``node`` waits for so long at most."""
        rates = self._rates[node.url]
        return rates.step_s + node.load.report.chunk * rates.token_s

    def pause_price_s(self, pause_s: float) -> float:
        """Of a pause between two tokens of a stream."""
        return pause_s if self._targets.itl_s is None else (IN_TARGET_PRICE + LATE_PRICE) * pause_s

    def cross_price_s(self, fill: Fill) -> float:
        """What it must save to take the other role's work."""
        return CROSS_S + CROSS_SHARE * fill.compute_s

    def _chunk(self, node: Node, num_rows: int, num_tokens: int = 0) -> tuple[int, float]:
        """Of ``num_tokens`` of a prompt, those of one step beside ``num_rows``, and the seconds of that step without
        them: as nodes' schedulers have it."""
        rates, chunk = self._rates[node.url], node.load.report.chunk
        if num_rows == 0:
            return chunk, rates.step_s
        step_s, token_s = rates.step_s + rates.row_s * num_rows, rates.token_s
        itl_s, ttft_s = self._targets.itl_s, self._targets.ttft_s
        share = max(1, chunk // PROMPT_SHARE)
        if itl_s is None:
            return share, step_s
        if token_s <= 0:
            return chunk, step_s
        rate = SLOWEST_SHARE * chunk / (rates.step_s + chunk * token_s)
        fits = max((TARGET_SHARE * itl_s - step_s) / token_s, rate * step_s / (1.0 - rate * token_s), 1.0)
        if ttft_s is not None and fits * ttft_s < PACING_RESERVE * num_tokens * (step_s + fits * token_s):
            fits = max(fits, share)
        return int(min(chunk, fits)), step_s

    def _pace(self, node: Node, num_rows: int, share: float) -> tuple[float, float]:
        """Seconds between two tokens of ``num_rows`` streams while prompts take ``share`` of the time, and how many
        tokens of those are computed a second then."""
        rates = self._rates[node.url]
        chunk, step_s = self._chunk(node, num_rows)
        with_prompts_s = step_s + chunk * rates.token_s
        alone_s = self._decode_s(node, num_rows) if num_rows else 0.0
        rate = chunk / with_prompts_s if with_prompts_s > 0 else 0.0
        return (1.0 - share) * alone_s + share * with_prompts_s, rate

    def _decode_s(self, node: Node, num_rows: int) -> float:
        """Of a step that only generates, beside the nodes of its machine that do the same now, as long as they do."""
        seconds = self._rates[node.url].decode_s(num_rows)
        if node.contention.beside_s == 0.0:
            return seconds
        shares = (_generating_share(other, self._num_rows(other)) for other in self._generating_beside(node))
        return max(0.0, seconds + node.contention.more_s(max(shares, default=0.0)))

    def _generating_beside(self, node: Node) -> list[Node]:
        return [other for other in node.neighbours if self._num_rows(other) > 0 and other.url in self._rates]

    def _num_rows(self, node: Node) -> int:
        """Without the request itself."""
        return node.load.num_rows if node is not self._leaving else max(0, node.load.num_rows - 1)


def _generating_share(node: Node, num_rows: int) -> float:
    """Of the time that a stream takes, that in which ``node`` generates without it. On decode nodes one stream follows
    another; of the ``num_rows`` guests of a prefill node, which are half over on average, the last one ends then."""
    if num_rows == 0:
        return 0.0
    return 1.0 if node.role is NodeRole.DECODE else num_rows / (num_rows + 1)
