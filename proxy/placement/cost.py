"""The default policy: the decode node, the way (remote prefill or its own) and the prefill nodes with the shortest
estimated time to the first token, and what that does to streams that already run.

1 for each node that may compute: its queue, and the ``Fill`` it would need, 2 for each decode node: its own prefill
against the best prefill node for it, 3 the cheapest; among those that are about as cheap and compute least, the least
loaded, in turn. Decode node and way are chosen together because what the decode node has decides what must move.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from proxy.nodes.load import Charge
from proxy.nodes.node import Node
from proxy.placement.estimate import MAX_SOURCES, MIN_GAIN_TOKENS, OVERLAP, Estimator, Fill, Prompt

# Seconds, and share of the best estimate, within which two placements count as equal: estimates are no more exact.
NEAR_S = 0.002
NEAR_SHARE = 0.2
MAX_WEIGHED_PROMPTS = 16
"""Prompts of one request that are weighed; the rest of a longer list is taken to be like them."""
MAX_REMEMBERED_NODES = 1024
"""Nodes whose last turns are remembered; where more have come and gone, all turns are forgotten."""


@dataclass(frozen=True, slots=True)
class Options:
    """What may be chosen. ``prefill`` is empty or has the candidates of each prompt, one at least. ``is_elastic``: a
    decode node may compute prompts that are new to it; ``generators``: prefill nodes that may compute the prompts and
    generate too."""

    decode: Sequence[Node]
    prefill: Sequence[Sequence[Node]]
    may_be_local: bool = True
    is_elastic: bool = False
    generators: Sequence[Node] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """``prefill`` is empty for a local placement. ``sources``: from whom those who compute may pull. ``ttft_s``: the
    estimate, ``wait_s`` of them behind others' work. ``charges``: the work that it means, by node. ``known_tokens``: of
    each prompt that was weighed, those that whoever computes it has, will have or is told to pull. ``crosses``: a node
    takes the other role's work."""

    decode: Node
    prefill: Sequence[Node]
    sources: Sequence[Node]
    ttft_s: float
    charges: Sequence[tuple[Node, Charge]]
    known_tokens: Sequence[int] = ()
    crosses: bool = False
    wait_s: float = 0.0


class _Bid(NamedTuple):
    """What one prompt would cost on one prefill node: it is computed after ``ready_s`` seconds, in which up to
    ``hidden_s`` seconds of moving its blocks pass too."""

    node: Node
    fill: Fill
    ready_s: float
    hidden_s: float


def _fills(nodes: Sequence[Node], prompt: Prompt, estimator: Estimator) -> list[Fill]:
    """What each of ``nodes`` would need, and the price of doing it away from the prompt's blocks."""
    fills = [estimator.fill(node, prompt) for node in nodes]
    num_blocks = [prompt.on(node).attention_tokens for node in nodes]
    most = max(num_blocks)
    if most <= prompt.deepest:
        return fills
    for index, (node, fill) in enumerate(zip(nodes, fills, strict=True)):
        apart_s = estimator.apart_price_s(node, most - max(num_blocks[index], prompt.deepest))
        if apart_s > 0:
            fills[index] = fill._replace(waste_s=fill.waste_s + apart_s)
    return fills


def _price_s(bid: _Bid) -> float:
    return bid.ready_s + bid.fill.waste_s


@dataclass(slots=True)
class _Way:
    """One way to do it on one decode node. ``cost_s`` is ``ttft_s`` with what others suffer. ``bids`` is empty when the
    decode node computes the prompts, as ``fills``. ``crosses``, ``wait_s``: as of ``Choice``."""

    decode: Node
    ttft_s: float
    cost_s: float
    num_computed: int
    fills: Sequence[Fill] = ()
    bids: Sequence[_Bid] = ()
    crosses: bool = False
    wait_s: float = 0.0


class CostChooser:
    """Remembers only who was chosen last, to take turns."""

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._last_turn: dict[str, int] = {}

    def choose(
        self,
        weighed: Sequence[Prompt],
        num_prompts: int,
        options: Options,
        estimator: Estimator,
        *,
        bonus_s: Mapping[str, float],
    ) -> Choice:
        """``weighed``: the first of the request's ``num_prompts``, ``MAX_WEIGHED_PROMPTS`` at most. ``bonus_s``: by
        decode node's URL, what a preference for it is worth."""
        scale = num_prompts / len(weighed)
        bids = self._bids(weighed, options, estimator)
        ways: list[_Way] = []
        for decode in options.decode:
            base_s = estimator.stream_price_s(decode) - bonus_s.get(decode.url, 0.0)
            if not bids or (options.may_be_local and _goes_on(decode, weighed, estimator)):
                ways.append(_local(decode, weighed, scale, estimator, base_s))
            elif options.is_elastic and options.may_be_local and not _needs_a_tower(decode, weighed):
                ways.append(_crossing(decode, weighed, scale, estimator, base_s))
            if bids:
                ways.append(_remote(decode, weighed, scale, bids, estimator, base_s))
        generators = [node for node in options.generators if estimator.has_time_to_generate(node, options.decode)]
        if generators and options.may_be_local:
            # As a stream on the decode node that has most room for it, and what it costs more, or less, here.
            least_s = min(map(estimator.stream_cost_s, options.decode))
            for node in generators:
                base_s = estimator.stream_cost_s(node) - least_s
                ways.append(_crossing(node, weighed, scale, estimator, base_s))
        way = self._in_turn(ways)
        if not way.bids:
            compute_s = scale * sum(fill.compute_s for fill in way.fills)
            charge = Charge(way.num_computed, compute_s, is_stream=True)
            sources = _sources([way.decode], weighed, way.fills, estimator)
            known = _known(weighed, way.fills)
            charges = [(way.decode, charge)]
            return Choice(way.decode, (), sources, way.ttft_s, charges, known, way.crosses, way.wait_s)
        chosen = way.bids if num_prompts > 1 else [self._bid_in_turn(way.bids[0], bids[0])]
        # What was not weighed is spread like what was.
        chosen = [chosen[index % len(chosen)] for index in range(num_prompts)]
        charges = [(bid.node, Charge(bid.fill.num_computed, bid.fill.compute_s)) for bid in chosen]
        charges.append((way.decode, Charge(0, 0.0, is_stream=True)))
        prefill, fills = [bid.node for bid in chosen], [bid.fill for bid in chosen]
        sources, known = _sources(prefill, weighed, fills, estimator), _known(weighed, fills)
        return Choice(way.decode, prefill, sources, way.ttft_s, charges, known, wait_s=way.wait_s)

    @staticmethod
    def _bids(prompts: Sequence[Prompt], options: Options, estimator: Estimator) -> list[list[_Bid]]:
        """By prompt, the cheapest first; empty when the prompts cannot go to prefill nodes."""
        if not options.prefill:
            return []
        bids = []
        for prompt, nodes in zip(prompts, options.prefill, strict=False):
            offered = [
                _Bid(node, fill, estimator.queue_s(node) + fill.seconds, OVERLAP * fill.compute_s)
                for node, fill in zip(nodes, _fills(nodes, prompt, estimator), strict=True)
            ]
            offered.sort(key=_price_s)
            bids.append(offered)
        return bids

    # --- ties

    def _in_turn(self, ways: Sequence[_Way]) -> _Way:
        """Among the ways that are about as good as the best one, and compute least, that on the least loaded decode
        node."""
        best = min(ways, key=lambda way: way.cost_s)
        if best.crosses:
            self._take_turn(best.decode)
            return best
        ways = [way for way in ways if not way.crosses]
        limit_s = best.cost_s + NEAR_S + NEAR_SHARE * max(0.0, best.cost_s)
        most = min(way.num_computed for way in ways if way.cost_s <= limit_s) + MIN_GAIN_TOKENS
        near: dict[str, _Way] = {}
        for way in ways:
            other = near.get(way.decode.url)
            is_near = way.cost_s <= limit_s and way.num_computed < most
            if is_near and (other is None or way.cost_s < other.cost_s):
                near[way.decode.url] = way
        way = min(near.values(), key=lambda way: (way.decode.load.num_running, self._last(way.decode)))
        self._take_turn(way.decode)
        return way

    def _bid_in_turn(self, best: _Bid, bids: Sequence[_Bid]) -> _Bid:
        limit_s = _price_s(best) + best.ready_s * NEAR_SHARE + NEAR_S
        most = best.fill.num_computed + MIN_GAIN_TOKENS
        near = [bid for bid in bids if _price_s(bid) <= limit_s and bid.fill.num_computed < most]
        bid = min(near, key=lambda bid: (bid.node.load.num_placed, self._last(bid.node)))
        self._take_turn(bid.node)
        return bid

    def _last(self, node: Node) -> int:
        return self._last_turn.get(node.url, 0)

    def _take_turn(self, node: Node) -> None:
        self._last_turn[node.url] = next(self._turns)
        if len(self._last_turn) > MAX_REMEMBERED_NODES:
            self._last_turn.clear()


def _goes_on(decode: Node, prompts: Sequence[Prompt], estimator: Estimator) -> bool:
    """Whether the decode node has a state of every prompt to go on from, in memory or in a tier, behind all its images.
    A prompt that is new to it is for the prefill nodes, where they are not far slower (``_crossing``): keeping such
    work from the streams is what they are for."""
    for prompt in prompts:
        have = prompt.coverage.get(decode.url)
        if have is None or estimator.own_tokens(decode, prompt) < max(1, prompt.images_end):
            return False
    return True


def _needs_a_tower(decode: Node, prompts: Sequence[Prompt]) -> bool:
    """Whether an image would have to be computed, which only prefill nodes can."""
    return any(prompt.images_end > prompt.on(decode).state_tokens for prompt in prompts)


def _crossing(node: Node, prompts: Sequence[Prompt], scale: float, estimator: Estimator, base_s: float) -> _Way:
    """One node does what two roles would."""
    way = _local(node, prompts, scale, estimator, base_s)
    way.cost_s += scale * sum(map(estimator.cross_price_s, way.fills))
    way.crosses = True
    return way


def _local(decode: Node, prompts: Sequence[Prompt], scale: float, estimator: Estimator, base_s: float) -> _Way:
    """The decode node computes all prompts, one after the other."""
    fills: list[Fill] = []
    num_computed, seconds, waste_s = 0, 0.0, 0.0
    for prompt in prompts:
        fill = estimator.fill(decode, prompt)
        fills.append(fill)
        num_computed += fill.num_computed
        seconds += fill.seconds
        waste_s += fill.waste_s
    num_computed = int(scale * num_computed)
    wait_s = estimator.queue_s(decode) + decode.load.room_s()
    ttft_s = wait_s + scale * seconds
    cost_s = estimator.ttft_price_s(ttft_s) + base_s + scale * waste_s
    cost_s += estimator.delay_price_s(decode, num_computed, wait_s)
    return _Way(decode, ttft_s, cost_s, num_computed, fills, wait_s=wait_s)


def _remote(
    decode: Node,
    prompts: Sequence[Prompt],
    scale: float,
    bids: Sequence[Sequence[_Bid]],
    estimator: Estimator,
    base_s: float,
) -> _Way:
    """Each prompt goes to the prefill node that is done with it first, after those before it."""
    last_s, waste_s, num_computed = 0.0, 0.0, 0
    taken_s: dict[str, float] = {}
    chosen: list[_Bid] = []
    for prompt, offered in zip(prompts, bids, strict=True):
        blocks_s, rest_s = estimator.handoff_s(decode, prompt)
        best_s, best = math.inf, offered[0]
        for bid in offered:
            seconds = _price_s(bid)
            if seconds >= best_s:
                break  # so are those after it; what is added here is never below 0
            if taken_s:
                seconds += taken_s.get(bid.node.url, 0.0)
            if blocks_s > bid.hidden_s:
                seconds += blocks_s - bid.hidden_s
            if seconds < best_s:
                best_s, best = seconds, bid
        taken_s[best.node.url] = taken_s.get(best.node.url, 0.0) + best.fill.compute_s
        last_s = max(last_s, best_s - best.fill.waste_s + rest_s)
        waste_s += best.fill.waste_s
        num_computed += best.fill.num_computed
        chosen.append(best)
    ttft_s = decode.load.room_s() + scale * last_s
    cost_s = estimator.ttft_price_s(ttft_s) + base_s + scale * waste_s
    wait_s = decode.load.room_s() + max(estimator.queue_s(bid.node) for bid in chosen)
    return _Way(decode, ttft_s, cost_s, int(scale * num_computed), bids=chosen, wait_s=wait_s)


def _known(prompts: Sequence[Prompt], fills: Sequence[Fill]) -> list[int]:
    return [prompt.num_tokens - fill.num_computed for prompt, fill in zip(prompts, fills, strict=False)]


def _sources(
    readers: Sequence[Node], prompts: Sequence[Prompt], fills: Sequence[Fill], estimator: Estimator
) -> list[Node]:
    """Of the first prompt that would be pulled in part: its source, and the next best one. One reader reads all. What
    a reader is only expected to have may be on its way there: then it is told from where, as it was of the request that
    brings it, and waits for that one's pull."""
    for index, (prompt, fill) in enumerate(zip(prompts, fills, strict=False)):
        reader = readers[min(index, len(readers) - 1)]
        told = prompt.told
        if told is not None and told.on(reader) != prompt.on(reader):
            prompt, fill = told, estimator.fill(reader, told)
        if fill.source is not None:
            others = prompt.sources(reader)
            return [fill.source, *(node for node, _ in others if node is not fill.source)][:MAX_SOURCES]
    return []
