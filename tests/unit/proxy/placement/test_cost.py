"""The choice among bids, against all of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from proxy.nodes.load import Charge
from proxy.nodes.node import Node, NodeRole
from proxy.nodes.rates import Rates
from proxy.placement import cost
from proxy.placement.cost import CostChooser, Options
from proxy.placement.estimate import Estimator, Prompt
from proxy.prefix_index.coverage import Coverage
from tests.unit.proxy.placement.world import make_pool


class Offered(list[cost._Bid]):
    """``num_seen``: how many bids were looked at."""

    num_seen = 0

    def __iter__(self) -> Iterator[cost._Bid]:
        for bid in super().__iter__():
            self.num_seen += 1
            yield bid


def cheapest_of_all(
    decode: Node, prompts: Sequence[Prompt], bids: Sequence[Sequence[cost._Bid]], estimator: Estimator
) -> list[cost._Bid]:
    taken_s: Counter[str] = Counter()
    chosen = []
    for prompt, offered in zip(prompts, bids, strict=True):
        blocks_s, _ = estimator.handoff_s(decode, prompt)
        seconds = [
            bid.ready_s + bid.fill.waste_s + taken_s[bid.node.url] + max(0.0, blocks_s - bid.hidden_s)
            for bid in offered
        ]
        chosen.append(offered[seconds.index(min(seconds))])
        taken_s[chosen[-1].node.url] += chosen[-1].fill.compute_s
    return chosen


@pytest.mark.parametrize("num_prompts", [1, 2, 16])
def test_bids_when_not_all_are_looked_at_then_the_cheapest_of_all_are_taken(num_prompts: int) -> None:
    draw = random.Random(num_prompts)
    num_seen = num_offered = num_not_first = 0
    for _ in range(100):
        nodes = make_pool(8, 1).nodes
        # Few values, so that some bids cost the same.
        rates = {
            node.url: Rates(
                step_s=draw.choice([0.0, 0.01]), token_s=draw.choice([1e-5, 1e-4, 3e-4]), kv_s=draw.choice([0.0, 1e-4])
            )
            for node in nodes
        }
        for node in nodes:
            if draw.random() < 0.5:
                node.load.charge(Charge(100, draw.choice([0.05, draw.random()])), 0.0)
        prompts = []
        for _ in range(num_prompts):
            num_tokens = draw.choice([100, draw.randrange(1, 4000)])
            held = [draw.randrange(num_tokens) if draw.random() < 0.4 else 0 for _ in nodes]
            coverage = {node.url: Coverage(depth, depth) for node, depth in zip(nodes, held, strict=True)}
            prompts.append(Prompt.of(num_tokens, coverage, nodes))
        [decode] = [node for node in nodes if node.role is NodeRole.DECODE]
        prefill = [node for node in nodes if node is not decode]
        estimator = Estimator(nodes, rates, 0.0, 1.0)
        bids = [
            Offered(each) for each in CostChooser._bids(prompts, Options([decode], [prefill] * num_prompts), estimator)
        ]
        way = cost._remote(decode, prompts, 1.0, bids, estimator, 0.0)
        num_seen += sum(offered.num_seen for offered in bids)
        assert list(way.bids) == cheapest_of_all(decode, prompts, bids, estimator)
        num_offered += sum(map(len, bids))
        num_not_first += sum(bid is not offered[0] for bid, offered in zip(way.bids, bids, strict=True))
    assert num_not_first > 0
    assert num_seen < 0.8 * num_offered
