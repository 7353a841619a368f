"""How many requests a second two nodes serve within their targets: ``python -m benchmarks.goodput``.

Two nodes of one model (random weights), each on a core of its own, in three ways: *elastic* roles, *static* ones (one
prefill and one decode node), and two nodes that are *alike* and compute prompts themselves. Requests come as a Poisson
process, in ``--rounds``: in each, all ways are measured one after the other, at the same rate and with the same
arrivals. Targets are multiples of what the pair with static roles takes for one request alone, of each mix, measured
before each round; requests carry them as headers, except in ways that are ``--untold``: there neither nodes nor proxy
know of targets. The goodput of a mix is the rate at which 90 % of its requests keep both targets (the first token's
time, and the mean time between tokens), estimated from all rounds, each near the best estimate so far. *shifting*
changes between the mixes every 30 s; each comes at a multiple of the best goodput that was found for it, and two such
multiples are looked for: 90 % of all requests keep their targets, and 90 % of those of every mix. *closed*: 16 requests
of 512/128 at any time, first with static roles and no target, then the others with a target between tokens of 1.4 times
the p99 gap of that. *predicted*: what ``tandem simulate --cluster`` makes of the same rounds, arrival for arrival.
Prints the configuration, every run, and tables.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
import uvloop

from benchmarks.engine.models import FAMILIES, SIZES, make_checkpoint
from benchmarks.goodput.clients import Clients, Outcome, Targets, percentile
from benchmarks.goodput.measured import (
    SpeedsBy,
    WorkBy,
    known_contention,
    measured_speeds,
    nodes_of,
    speeds_by_second,
    watched,
    work_by,
)
from benchmarks.goodput.predicted import Round, Simulated, cache_of, predict_goodput, predict_rounds
from benchmarks.goodput.search import CREDIBLE, SHARE, Attainment, Estimate, Goodput, find_goodputs
from benchmarks.goodput.services import ELASTIC, STATIC, WAYS, start
from benchmarks.goodput.traffic import MIXES, SHIFT_S, SHIFTING, Mix, draw_arrivals
from common.models.synthetic import build_tokenizer
from proxy.nodes.node import NodeRole
from tests.support.service import Service

MAX_MODEL_LEN = 4096
CACHE_BYTES = 1 << 30
CLOSED = "closed"
CLOSED_ITL = 1.4
"""Target of the closed loop, in times of the p99 gap of static roles."""
CLOSED_MIX = "512/128"
GUESSED = 3
"""Times as long as measured is simulated for a first guess."""
MORE_ROUNDS = 3
"""Of that: it begins far from the rate that is looked for."""
SETTLE_S = 2.0
"""Between two runs: loads and cache events arrive."""
NUM_UNLOADED = 3
STEADY = 1.25
"""Times as slow or as fast, up to which the machine is taken to have kept its speed in a round."""
NUM_WARM, WARM_CONCURRENCY, WARM_SEED = 16, 8, 1_000_000
"""Requests, or chats, of each mix that every way answers first, and the seed of their tokens, which come only there."""
WARM_STREAMS, WARM_S = 2.0, 60.0
"""Streams of the longest answers that run at a time on average, and seconds of them, with which every way begins: what
nodes of one machine cost each other is only learned where both generate now and then."""
NUM_WARM_CLOSED, WARM_ITL = 48, 2.0
"""Requests that every way answers before the closed loop, and their target between tokens, in times of the value
without load: steps of so many rows come in no mix, and each size is slow until it was seen some times."""
ERRORS = "tandem_step_time_error_ratio"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="granitemoehybrid")
    parser.add_argument("--size", choices=tuple(SIZES), default="M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--untold",
        nargs="+",
        choices=WAYS,
        default=(),
        help="ways whose requests do not carry their targets",
    )
    parser.add_argument("--mixes", nargs="*", choices=(*MIXES, SHIFTING), default=(*MIXES, SHIFTING))
    parser.add_argument(
        "--closed",
        type=int,
        default=160,
        help="requests of the closed loop, many, since at its ends fewer are under way; 0: leave it out",
    )
    parser.add_argument("--concurrency", type=int, default=16, help="of the closed loop")
    parser.add_argument("--seconds", type=float, default=120.0, help="that requests come, in each run")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each way and mix")
    parser.add_argument("--ttft", type=float, default=2.0, help="target, in times of the value without load")
    parser.add_argument("--itl", type=float, default=1.5, help="target, in times of the value without load")
    parser.add_argument("--chunk", type=int, default=512, help="--max-num-batched-tokens of the nodes")
    args = parser.parse_args()
    if args.seconds <= 0 or args.rounds < 1 or args.closed < 0 or args.concurrency < 1:
        parser.error("--seconds, --rounds and --concurrency must be above 0, --closed not below")
    if others := [way for way in args.untold if way not in args.ways]:
        parser.error(f"--untold {' '.join(others)}: not among --ways {' '.join(args.ways)}")
    print(json.dumps({**vars(args), "cores": os.cpu_count(), "cpu": platform.processor() or platform.machine()}))
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder, services(args, Path(folder)) as running:
        uvloop.run(measure(args, running, Path(folder)))


@contextlib.contextmanager
def services(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Service]]:
    """All ways at once, so that they are measured in turn; those that wait cost next to nothing."""
    path = make_checkpoint(args.family, args.size, getattr(torch, args.dtype), folder)
    config = path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": MAX_MODEL_LEN}))
    build_tokenizer(SIZES[args.size]["vocab"], MAX_MODEL_LEN).save_pretrained(path)
    flags = ["--dtype", args.dtype, "--max-num-batched-tokens", str(args.chunk), "--kv-cache-memory", str(CACHE_BYTES)]
    flags += ["--max-model-len", str(MAX_MODEL_LEN), "--num-threads", "1", "--log-level", "warning"]
    with contextlib.ExitStack() as stack:
        yield {way: stack.enter_context(start(way, path, flags)) for way in dict.fromkeys((STATIC, *args.ways))}


@dataclass
class Runs:
    """Everything that was measured; ``draw`` numbers the arrivals, so that no prompt comes twice; ``num_rounds``: those
    that were begun; ``rounds``: those that count; ``alone_speeds``: of the nodes when targets were measured last."""

    args: argparse.Namespace
    running: Mapping[str, Service]
    targets: dict[Mix, Targets] = field(default_factory=dict)
    draw: int = 0
    num_rounds: int = 0
    rounds: list[Round] = field(default_factory=list)
    alone_speeds: SpeedsBy | None = None

    async def attainments(self, rates: Mapping[Mix, float], factor: float) -> dict[str, Attainment]:
        """Of each way at ``factor`` times ``rates``; targets are those of now, since what shares the machine changes
        its speed."""
        await self._set_targets(rates)
        found = await self._round(rates, factor)
        if not await self._set_targets(rates):
            print("the machine changed its speed: once more", flush=True)
            self.rounds.pop()
            found = await self._round(rates, factor)
        return found

    async def _set_targets(self, mixes: Iterable[Mix]) -> bool:
        """Whether they were about the same before."""
        before, begun = dict(self.targets), work_by(self.running[STATIC])
        self.targets |= {mix: await self.unloaded(mix) for mix in mixes}
        self.alone_speeds = self._speeds(STATIC, begun)
        return all(self.targets[mix].are_within(STEADY, before[mix]) for mix in mixes)

    async def _round(self, rates: Mapping[Mix, float], factor: float) -> dict[str, Attainment]:
        scaled = {mix: factor * rate for mix, rate in rates.items()}
        seconds = max(self.args.seconds, SHIFT_S * len(scaled)) if len(scaled) > 1 else self.args.seconds
        first = self.num_rounds % len(self.args.ways)  # none is always the first one after a pause
        self.num_rounds += 1
        alone = {mix: self._alone(self.targets[mix]) for mix in scaled}
        this = Round(factor, scaled, seconds, self.num_rounds, dict(self.targets), alone, self.alone_speeds)
        self.rounds.append(this)
        return {way: await self._attainment(way, this) for way in (*self.args.ways[first:], *self.args.ways[:first])}

    async def _attainment(self, way: str, this: Round) -> Attainment:
        self.draw += 1
        scaled, arrivals = this.rates, this.arrivals(self.vocab, self.draw)
        service = self.running[way]
        begun = work_by(service)
        this.known_contention[way] = known_contention(service)
        async with watched(service) as seen:
            outcome = await self._clients(way, self.targets).open_loop(arrivals)
        speeds = this.speeds[way] = self._speeds(way, begun)
        this.by_second[way] = speeds_by_second([speeds[NodeRole(node.role)] for node in nodes_of(service)], seen)
        share = outcome.attainment(self.targets)
        rate = sum(scaled.values()) / len(scaled)
        worst = f" ({100 * share.of_worst:.1f} of the worst mix)" if len(scaled) > 1 else ""
        late, slow = outcome.missed(self.targets)
        show(
            way,
            f"{rate:6.3f} requests/s, {100 * share.of_all:5.1f} % in time{worst}, {late} late, {slow} slow",
            outcome,
        )
        await asyncio.sleep(SETTLE_S)
        return share

    async def warm_open(self) -> None:
        mix = max(self.targets, key=lambda mix: mix.num_answer_tokens)
        rate = WARM_STREAMS * self.args.itl / (mix.num_answer_tokens * self.targets[mix].itl_s)
        for way in self.running:
            self.draw += 1
            await self._clients(way, self.targets).open_loop(draw_arrivals({mix: rate}, WARM_S, self.vocab, self.draw))

    async def warm_closed(self) -> None:
        itl_s = WARM_ITL / self.args.itl * self.targets[MIXES[CLOSED_MIX]].itl_s
        for way in self.running:
            await self._closed_loop(way, NUM_WARM_CLOSED, itl_s)

    async def closed(self, way: str, itl_s: float) -> Outcome:
        outcome = await self._closed_loop(way, self.args.closed, itl_s)
        show(way, f"{self.args.concurrency} at a time", outcome)
        await asyncio.sleep(SETTLE_S)
        return outcome

    async def _closed_loop(self, way: str, num_requests: int, itl_s: float) -> Outcome:
        self.draw += 1
        mix = MIXES[CLOSED_MIX]
        arrivals = draw_arrivals({mix: float(num_requests)}, 10.0, self.vocab, self.draw)[:num_requests]
        clients = self._clients(way, {mix: Targets(math.inf, itl_s)})
        return await clients.closed_loop(arrivals, self.args.concurrency)

    async def unloaded(self, mix: Mix) -> Targets:
        """One request at a time, with static roles."""
        self.draw += 1
        single = Mix(mix.num_prompt_tokens, mix.num_answer_tokens)
        arrivals = draw_arrivals({single: NUM_UNLOADED + 1.0}, 10.0, self.vocab, self.draw)[: NUM_UNLOADED + 1]
        answers = (await self._clients(STATIC, {}).closed_loop(arrivals, 1)).answers[1:]
        ttft_s = percentile([answer.ttft_s for answer in answers], 0.5)
        itl_s = percentile([answer.itl_s for answer in answers], 0.5)
        print(f"{mix}: alone {1e3 * ttft_s:.0f} ms to the first token, {1e3 * itl_s:.1f} ms between tokens", flush=True)
        return Targets(self.args.ttft * ttft_s, self.args.itl * itl_s)

    def rate_of_half(self, mix: Mix) -> float:
        """At which one node is busy half the time with prompts, of which nothing is cached."""
        return float(self.args.ttft) / self.targets[mix].ttft_s / 2

    @property
    def vocab(self) -> int:
        return SIZES[self.args.size]["vocab"]

    def _speeds(self, way: str, begun: WorkBy) -> SpeedsBy:
        """Since ``begun``."""
        return measured_speeds(self.running[way], self.running.values(), begun)

    def _alone(self, targets: Targets) -> Targets:
        return Targets(targets.ttft_s / self.args.ttft, targets.itl_s / self.args.itl)

    def _clients(self, way: str, targets: Mapping[Mix, Targets]) -> Clients:
        return Clients(self.running[way].url, {} if way in self.args.untold else targets)


async def measure(args: argparse.Namespace, running: Mapping[str, Service], model: Path) -> None:
    runs = Runs(args, running)
    for way in running:  # every kind of step was seen, and most sizes recorded, before anything counts
        for number, mix in enumerate(MIXES.values()):
            warm = draw_arrivals({mix: NUM_WARM * mix.num_turns / 10.0}, 10.0, runs.vocab, WARM_SEED + number)
            await Clients(running[way].url, {}).closed_loop(warm, WARM_CONCURRENCY)
    for mix in MIXES.values():
        runs.targets[mix] = await runs.unloaded(mix)
    await runs.warm_open()
    tables: dict[str, Table] = {}
    best = {mix: runs.rate_of_half(mix) for mix in MIXES.values()}
    for name, mix in MIXES.items():
        if SHIFTING in args.mixes and name not in args.mixes:  # not measured: what is predicted
            guesses = [await guess(runs, way, {mix: best[mix]}, model) for way in args.ways]
            best[mix] *= max(goodput.of_all.rate for goodput in guesses)
            print(f"{name} in {SHIFTING}: {best[mix]:.3f} requests/s", flush=True)
    names = [*(each for each in args.mixes if each != SHIFTING), *([SHIFTING] if SHIFTING in args.mixes else [])]
    for name in names:
        print(f"\n{name}", flush=True)
        rates = best if name == SHIFTING else {MIXES[name]: best[MIXES[name]]}
        table = tables[name] = Table(dict(rates), {})
        guessed = sorted([(await guess(runs, way, table.rates, model)).of_all.rate for way in args.ways])
        measured = functools.partial(runs.attainments, table.rates)
        num_before = len(runs.rounds)
        table.found = await find_goodputs(measured, guessed[len(guessed) // 2], args.rounds)
        table.rounds = runs.rounds[num_before:]
        if name != SHIFTING:
            best[MIXES[name]] *= max(goodput.of_all.rate for goodput in table.found.values())
    print(
        f"\ngoodput, requests/s of which {100 * SHARE:.0f} % are in time, and its bounds with a probability of "
        f"{100 * CREDIBLE:.0f} %, if requests are late independently; shifting: in times of the mixes' best"
    )
    print("  mix             " + "".join(f"{way:>22}" for way in args.ways) + "   elastic / better of the others")
    for name, table in tables.items():
        for label, found in table.rows(name):
            others = max((each.rate for way, each in found.items() if way != ELASTIC), default=0.0)
            ratio = f"{found[ELASTIC].rate / others:10.2f}" if ELASTIC in found and others else ""
            print(f"  {label:<16}" + "".join(f"{found[way]!s:>22}" for way in args.ways) + ratio)
    await predict(runs, tables, model)
    if args.closed:
        print(f"\n{CLOSED}, {CLOSED_MIX}", flush=True)
        await runs.warm_closed()
        static = await runs.closed(STATIC, math.inf)
        itl_s = CLOSED_ITL * static.gap_s(0.99)
        print(f"  target between tokens of the others: {1e3 * itl_s:.1f} ms")
        closed = {way: await runs.closed(way, itl_s) for way in args.ways if way != STATIC}
        if ELASTIC in closed:
            elastic = closed[ELASTIC]
            print(
                f"elastic / static: tokens/s {elastic.tokens_per_s / static.tokens_per_s:.2f}, mean time to the first "
                f"token {_mean_ttft_s(elastic) / _mean_ttft_s(static):.2f}, "
                f"p99 gap {elastic.gap_s(0.99) / static.gap_s(0.99):.2f}"
            )
    print("\nprediction error of a step's time: at most, of half and of nine tenths of the steps")
    for way, service in running.items():
        for node in (*service.prefill, *service.decode):
            metrics = httpx.get(node.url + "/metrics", timeout=10).text  # noqa: ASYNC210 nothing else runs here now
            print(f"  {way:<8} {node.role:<8}{prediction_errors(metrics)}")


@dataclass
class Table:
    """``found``: by way, in multiples of ``rates``, from ``rounds``."""

    rates: dict[Mix, float]
    found: dict[str, Goodput]
    rounds: list[Round] = field(default_factory=list)

    def rows(self, name: str) -> list[tuple[str, dict[str, Estimate]]]:
        """What is printed of it: requests a second of a mix, multiples of several."""
        if name != SHIFTING:
            [rate] = self.rates.values()
            scaled = {way: Estimate(*(rate * each for each in found.of_all)) for way, found in self.found.items()}
            return [(name, scaled)]
        return [
            (f"{name}, all", {way: goodput.of_all for way, goodput in self.found.items()}),
            (f"{name}, every", {way: goodput.of_every for way, goodput in self.found.items()}),
        ]


async def guess(runs: Runs, way: str, rates: Mapping[Mix, float], model: Path) -> Goodput:
    """What ``tandem simulate --cluster`` makes of ``rates``, with the speeds that the nodes report now."""
    args = runs.args
    return await predict_goodput(
        rates,
        runs.targets,
        simulated(runs, way, model),
        seconds=GUESSED * args.seconds,
        vocab=runs.vocab,
        num_rounds=args.rounds + MORE_ROUNDS,
    )


def simulated(runs: Runs, way: str, model: Path) -> Simulated:
    args, speeds = runs.args, measured_speeds(runs.running[way], runs.running.values())
    max_num_seqs = max(each.max_num_seqs for each in speeds.values())
    cache = cache_of(model, args.dtype, CACHE_BYTES, max_num_seqs)
    return Simulated(way, way not in args.untold, cache, speeds)


async def predict(runs: Runs, tables: Mapping[str, Table], model: Path) -> None:
    """The same tables from the nodes' own figures, and how far they are off."""
    args = runs.args
    print(
        "\npredicted (tandem simulate --cluster, with the speeds that nodes had each second; below, those that they "
        "report now), and as a share of the measured"
    )
    services = {way: simulated(runs, way, model) for way in args.ways}
    for way, service in services.items():
        for role, speeds_of_role in service.speeds.items():
            print(f"  {way} {role.value}: {speeds_of_role}")
    print("  mix             " + "".join(f"{way:>16}" for way in args.ways))
    for name, table in tables.items():
        predicted = predict_rounds(table.rounds, services.values(), runs.vocab)
        guesses = Table(table.rates, predicted)
        for (label, guessed), (_, found) in zip(guesses.rows(name), table.rows(name), strict=True):
            cells = [f"{guessed[way].rate:9.3f} ({guessed[way].rate / found[way].rate:.2f})" for way in args.ways]
            print(f"  {label:<16}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


def _mean_ttft_s(outcome: Outcome) -> float:
    return sum(answer.ttft_s for answer in outcome.answers) / max(1, len(outcome.answers))


def show(way: str, what: str, outcome: Outcome) -> None:
    failed = f", {outcome.refused.total()} failed" if outcome.refused else ""
    print(
        f"  {way:<8} {what}; {outcome.tokens_per_s:6.1f} tokens/s; "
        f"first token median {1e3 * outcome.ttft_s(0.5):6.0f}, p90 {1e3 * outcome.ttft_s(0.9):6.0f} ms; "
        f"gaps median {1e3 * outcome.gap_s(0.5):5.1f}, p99 {1e3 * outcome.gap_s(0.99):6.1f} ms; "
        f"{len(outcome.answers)} answers {outcome.placements}{failed}",
        flush=True,
    )


def prediction_errors(metrics: str) -> str:
    """Upper bounds of the buckets in which the median and the ninth decile lie, of each kind of step."""
    buckets: dict[str, list[tuple[float, float]]] = {}
    for line in metrics.splitlines():
        if line.startswith(f"{ERRORS}_bucket"):
            labels, value = line.rsplit(" ", 1)
            kind = labels.partition('kind="')[2].partition('"')[0]
            bound = labels.partition('le="')[2].partition('"')[0]
            buckets.setdefault(kind, []).append((float(bound), float(value)))
    parts = []
    for kind, each in buckets.items():
        each.sort()
        total = each[-1][1]
        if total:
            median, late = (next(bound for bound, count in each if count >= part * total) for part in (0.5, 0.9))
            parts.append(f"  {kind} {median:g}, {late:g} ({int(total)} steps)")
    return "".join(parts) or "  no steps"


if __name__ == "__main__":
    main()
