"""What ``tandem simulate --cluster`` makes of the benchmark's mixes: of the rounds that were run, arrival for arrival,
with the speeds that the nodes had in each second of each run, so that what is off is neither the draw nor what the
machine did meanwhile, before or later; before them, of a search, with the speeds of then."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.goodput.clients import Targets
from benchmarks.goodput.measured import SpeedsBy
from benchmarks.goodput.search import Attainment, Goodput, find_goodputs, goodputs_of
from benchmarks.goodput.services import ALIKE, ELASTIC
from benchmarks.goodput.traffic import THINK_S, Arrival, Mix, draw_arrivals
from common.kv_cache.spec import KVCacheConfig
from common.simulate.simulate import read_plan
from proxy.nodes.contention import Contention
from proxy.placement import estimate
from proxy.simulation.cluster import Cluster
from proxy.simulation.speeds import Speeds

BLOCK_SIZE = 16
"""As nodes have it (``--block-size``)."""


def cache_of(model: Path, dtype: str, memory_bytes: int, max_num_seqs: int) -> KVCacheConfig:
    return read_plan(
        model,
        dtype,
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=memory_bytes,
        block_size=BLOCK_SIZE,
        enable_events=True,
    ).config


@dataclass(frozen=True)
class Round:
    """What came to each way: ``rates``, ``factor`` times those of its table, for ``seconds``. ``alone``: what one
    request alone took then, with static roles, whose nodes were as fast as ``alone_speeds``; ``speeds``: by way, of its
    run; ``by_second``: by way, of each node, from when on; ``known_contention``: by way, of each node, at its begin."""

    factor: float
    rates: Mapping[Mix, float]
    seconds: float
    times_seed: int
    targets: Mapping[Mix, Targets]
    alone: Mapping[Mix, Targets] = field(default_factory=dict)
    alone_speeds: SpeedsBy | None = None
    speeds: dict[str, SpeedsBy] = field(default_factory=dict)
    by_second: dict[str, Sequence[tuple[float, Sequence[Speeds]]]] = field(default_factory=dict)
    known_contention: dict[str, Sequence[float]] = field(default_factory=dict)

    def arrivals(self, vocab: int, seed: int) -> list[Arrival]:
        return draw_arrivals(self.rates, self.seconds, vocab, seed, self.times_seed)


@dataclass(frozen=True)
class Simulated:
    """The service of one way. ``is_told``: requests carry their targets; ``speeds``: where a round has none."""

    way: str
    is_told: bool
    cache: KVCacheConfig
    speeds: SpeedsBy

    def run(self, this: Round, vocab: int) -> Attainment:
        num_prefill, num_decode = (0, 2) if self.way == ALIKE else (1, 1)
        is_elastic, speeds = self.way == ELASTIC, this.speeds.get(self.way, self.speeds)
        cluster = Cluster(num_prefill, num_decode, cache=self.cache, speeds=speeds, elastic=is_elastic)
        if known := this.known_contention.get(self.way):
            for node, beside_s in zip(cluster.nodes.values(), known, strict=True):
                node.node.contention = Contention(node.node.contention.line, beside_s)
        for at_s, of_nodes in this.by_second.get(self.way, ()):
            for node, now in zip(cluster.nodes.values(), of_nodes, strict=True):
                cluster.at(at_s, functools.partial(node.change_speeds, now))
        judged_by = {mix: self._judged(mix, this, speeds) for mix in this.rates}
        kept: Counter[Mix] = Counter()
        came: Counter[Mix] = Counter()
        for arrival in this.arrivals(vocab, seed=1):
            came[arrival.mix] += len(arrival.prompts)
            targets = this.targets[arrival.mix]
            judged = judged_by[arrival.mix]
            sent = estimate.Targets(targets.ttft_s, targets.itl_s) if self.is_told else estimate.NO_TARGETS
            cluster.at(arrival.at_s, functools.partial(_turn, cluster, arrival, judged, sent, 0, [], kept))
        cluster.run()
        return Attainment(kept, came)

    def _judged(self, mix: Mix, this: Round, speeds: SpeedsBy) -> Targets:
        """The round's targets, less what one request alone took longer than it takes simulated: that is what each
        takes beside steps and pulls."""
        targets, alone = this.targets[mix], this.alone.get(mix)
        if alone is None:
            return targets
        cluster = Cluster(1, 1, cache=self.cache, speeds=this.alone_speeds or speeds, elastic=False)
        served = cluster.submit(range(mix.num_prompt_tokens), range(mix.num_answer_tokens))
        cluster.run()
        return Targets(targets.ttft_s - (alone.ttft_s - served.ttft_s), targets.itl_s - (alone.itl_s - served.itl_s))


def predict_rounds(rounds: Sequence[Round], services: Iterable[Simulated], vocab: int) -> dict[str, Goodput]:
    """By way, from what was run."""
    return goodputs_of(
        {service.way: [(this.factor, service.run(this, vocab)) for this in rounds] for service in services}
    )


async def predict_goodput(
    rates: Mapping[Mix, float],
    targets: Mapping[Mix, Targets],
    service: Simulated,
    *,
    seconds: float,
    vocab: int,
    num_rounds: int,
) -> Goodput:
    """As it is measured, before anything was."""

    numbers = itertools.count(1)

    async def measure(factor: float) -> dict[str, Attainment]:
        scaled = {mix: factor * rate for mix, rate in rates.items()}
        return {service.way: service.run(Round(factor, scaled, seconds, next(numbers), targets), vocab)}

    return (await find_goodputs(measure, 1.0, num_rounds))[service.way]


def _turn(
    cluster: Cluster,
    arrival: Arrival,
    judged: Targets,
    sent: estimate.Targets,
    turn: int,
    so_far: list[int],
    kept: Counter[Mix],
) -> None:
    prompt = [*so_far, *arrival.prompts[turn]]
    # Any tokens, as long as no other answer has them.
    answer = [(hash((arrival.at_s, turn)) + number) % 1_000_003 for number in range(arrival.mix.num_answer_tokens)]

    def go_on() -> None:
        kept[arrival.mix] += not served.is_refused and judged.are_kept(served)
        if turn + 1 < len(arrival.prompts):
            longer: list[Any] = [*prompt, *answer]
            further = functools.partial(_turn, cluster, arrival, judged, sent, turn + 1, longer, kept)
            cluster.at(cluster.now + THINK_S, further)

    served = cluster.submit(prompt, answer, targets=sent, on_end=go_on)
