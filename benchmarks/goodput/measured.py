"""How fast the nodes of a service were in one run: the lines that they report, of steps of many minutes, made as many
times as slow as the steps of the run were, and those of each second of it. What shares the machine changes its speed
within a minute."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from common.wire.routes import LOAD_ROUTE
from proxy.nodes.contention import DecodeTotals
from proxy.nodes.load import LoadReport, Measured
from proxy.nodes.node import NodeRole
from proxy.simulation.speeds import Speeds, with_rows_alike
from tests.support.service import Node, Service

MIN_STEPS = 4
"""Of a run; fewer say nothing of how fast a node was."""
LOOK_S = 1.0
"""Between two looks at what nodes have done in a run."""


class PromptTotals(NamedTuple):
    """Of the steps of a node with prompt tokens: how many, those tokens, the rows that generated in them, seconds."""

    num_steps: float = 0.0
    num_tokens: float = 0.0
    num_rows: float = 0.0
    seconds: float = 0.0

    def since(self, last: PromptTotals) -> PromptTotals:
        return PromptTotals(*(now - before for now, before in zip(self, last, strict=True)))


class Work(NamedTuple):
    """What a node has computed."""

    prompt: PromptTotals = PromptTotals()
    decode: DecodeTotals = DecodeTotals()

    @classmethod
    def of(cls, load: Mapping[str, Any]) -> Work:
        prompt, decode = load["prompt_totals"], load["decode_totals"]
        return cls(
            PromptTotals(prompt["steps"], prompt["tokens"], prompt["rows"], prompt["seconds"]),
            DecodeTotals(decode["steps"], decode["rows"], decode["seconds"]),
        )

    def since(self, last: Work) -> Work:
        return Work(self.prompt.since(last.prompt), self.decode.since(last.decode))


WorkBy = Mapping[str, Work]
"""Of each node since its start, by its URL."""
SpeedsBy = Mapping[NodeRole, Speeds]


def work_by(service: Service) -> WorkBy:
    return {node.url: Work.of(_load(node)) for node in nodes_of(service)}


@contextlib.asynccontextmanager
async def watched(service: Service) -> AsyncIterator[list[tuple[float, list[Work]]]]:
    """A list that grows meanwhile: seconds since the first look, and what each node has done since its start."""
    seen: list[tuple[float, list[Work]]] = []
    watching = asyncio.create_task(_watch(service, seen))
    try:
        yield seen
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def _watch(service: Service, seen: list[tuple[float, list[Work]]]) -> None:
    urls = [node.url for node in nodes_of(service)]
    async with httpx.AsyncClient(timeout=10) as client:
        began_s = time.perf_counter()
        while True:
            at_s = time.perf_counter() - began_s
            loads = [(await client.get(url + LOAD_ROUTE)).raise_for_status().json() for url in urls]
            seen.append((at_s, list(map(Work.of, loads))))
            await asyncio.sleep(LOOK_S)


def measured_speeds(service: Service, others: Collection[Service], before: WorkBy | None = None) -> SpeedsBy:
    """Of a role without nodes, those of the other one; of what its nodes have not done, those of ``others``' nodes. Of
    what nodes of one machine make of each other's steps, the most that any of the proxies has learned. ``before``: when
    the run began of which they are."""
    learned = {node["url"]: node["contention"] for each in (service, *others) for node in _status(each)["nodes"]}
    beside_s = max(float(each["contention_seconds"]) for each in learned.values())
    usual = [_report(node) for other in others for node in nodes_of(other)]
    done = {url: work.since(before[url]) for url, work in work_by(service).items()} if before is not None else {}
    found: dict[NodeRole, Speeds] = {}
    for node in nodes_of(service):
        report = _report(node)
        for like in usual:
            report = dataclasses.replace(
                report,
                prefill=report.prefill or like.prefill,
                decode=report.decode or like.decode,
                pull=report.pull or like.pull,
                row_s=report.row_s or like.row_s,
            )
        speeds = Speeds.of(report)
        if speeds is not None:
            speeds = dataclasses.replace(speeds, beside_s=beside_s)
            alone = learned[node.url]
            if alone["contention_seconds"] > 0.0:  # else its own line may be of steps beside others
                line = Measured(alone["seconds_per_step"], alone["seconds_per_row"])
                speeds = dataclasses.replace(speeds, decode=line)
            if node.url in done:
                speeds = as_in_run(speeds, done[node.url], [work for url, work in done.items() if url != node.url])
            found[NodeRole(node.role)] = speeds
    if not found:
        raise SystemExit("no node has computed, generated and pulled enough to say how fast it is")
    known = next(iter(found.values()))
    return with_rows_alike({role: found.get(role, known) for role in NodeRole})


def known_contention(service: Service) -> list[float]:
    """Of each node, what its proxy takes a step to be longer beside another node that generates, in seconds."""
    known = {node["url"]: node["contention"]["contention_seconds"] for node in _status(service)["nodes"]}
    return [known[node.url] for node in nodes_of(service)]


def speeds_by_second(
    usual: Sequence[Speeds], seen: Sequence[tuple[float, Sequence[Work]]]
) -> list[tuple[float, list[Speeds]]]:
    """Of each node, whose speeds are as ``usual``, in each second of a run that was watched, and when that began. A
    node that did nothing in one is as fast as it was before."""
    found: list[tuple[float, list[Speeds]]] = []
    last = list(usual)
    for (at_s, before), (_, after) in itertools.pairwise(seen):
        done = [work.since(earlier) for work, earlier in zip(after, before, strict=True)]
        for number, work in enumerate(done):
            now = as_in_run(usual[number], work, [*done[:number], *done[number + 1 :]], min_steps=1)
            prefill = now.prefill if work.prompt.num_steps else last[number].prefill
            decode = now.decode if work.decode.num_steps else last[number].decode
            last[number] = dataclasses.replace(now, prefill=prefill, decode=decode)
        found.append((at_s, list(last)))
    return found


def as_in_run(speeds: Speeds, work: Work, others: Collection[Work], *, min_steps: int = MIN_STEPS) -> Speeds:
    """``speeds`` of a node that did ``work`` while ``others`` of its machine did theirs."""
    prompt, decode = work.prompt, work.decode
    others_s = sum(other.decode.seconds for other in others)
    beside_share = min(1.0, others_s / decode.seconds) if decode.seconds > 0.0 else 0.0
    alone_s = decode.seconds - beside_share * speeds.beside_s * decode.num_steps
    rows_s = speeds.row_s * prompt.num_rows
    if prompt.num_steps >= min_steps:
        speeds = dataclasses.replace(
            speeds, prefill=_scaled(speeds.prefill, prompt.num_steps, prompt.num_tokens, prompt.seconds - rows_s)
        )
    if decode.num_steps >= min_steps:
        speeds = dataclasses.replace(speeds, decode=_scaled(speeds.decode, decode.num_steps, decode.num_rows, alone_s))
    return speeds


def _scaled(line: Measured, num_steps: float, num_units: float, seconds: float) -> Measured:
    said_s = line.fixed_s * num_steps + line.unit_s * num_units
    if said_s <= 0.0 or seconds <= 0.0:
        return line
    factor = seconds / said_s
    return Measured(factor * line.fixed_s, factor * line.unit_s)


def nodes_of(service: Service) -> list[Node]:
    """As a simulated cluster has them."""
    return [*service.prefill, *service.decode]


def _status(service: Service) -> dict[str, Any]:
    status: dict[str, Any] = httpx.get(service.url + "/status.json", timeout=10).raise_for_status().json()
    return status


def _report(node: Node) -> LoadReport:
    return LoadReport.from_json(_load(node)) or LoadReport()


def _load(node: Node) -> dict[str, Any]:
    load: dict[str, Any] = httpx.get(node.url + LOAD_ROUTE, timeout=10).raise_for_status().json()
    return load
