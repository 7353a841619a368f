"""How fast the nodes of a service were in one run: the lines that they report, of steps of many minutes, made as many
times as slow as the steps of the run were. What shares the machine changes its speed within a minute."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from proxy.nodes.contention import DecodeTotals
from proxy.nodes.load import LoadReport, Measured
from proxy.nodes.node import NodeRole
from proxy.simulation.speeds import Speeds, with_rows_alike
from tests.support.client import info, metric
from tests.support.service import Node, Service

MIN_STEPS = 4
"""Of a run; fewer say nothing of how fast a node was."""


@dataclass(frozen=True)
class Work:
    """What a node has computed: ``prompt_s`` in ``num_prompt_steps`` steps with ``num_prompt_tokens``, and the steps
    that only generated."""

    num_prompt_steps: float
    num_prompt_tokens: float
    prompt_s: float
    decode: DecodeTotals

    def since(self, last: Work) -> Work:
        return Work(
            self.num_prompt_steps - last.num_prompt_steps,
            self.num_prompt_tokens - last.num_prompt_tokens,
            self.prompt_s - last.prompt_s,
            self.decode.since(last.decode),
        )


def work_by(service: Service) -> dict[str, Work]:
    """Of each node since its start, by its URL."""
    return {node.url: _work(node) for node in _nodes(service)}


def measured_speeds(
    service: Service, others: Collection[Service], before: Mapping[str, Work] | None = None
) -> dict[NodeRole, Speeds]:
    """Of a role without nodes, those of the other one; of what its nodes have not done, those of ``others``' nodes. Of
    what nodes of one machine make of each other's steps, the most that any of the proxies has learned. ``before``: when
    the run began of which they are."""
    learned = {node["url"]: node["contention"] for each in (service, *others) for node in _status(each)["nodes"]}
    beside_s = max(float(each["contention_seconds"]) for each in learned.values())
    usual = [_report(node) for other in others for node in _nodes(other)]
    done = {url: work.since(before[url]) for url, work in work_by(service).items()} if before is not None else {}
    found: dict[NodeRole, Speeds] = {}
    for node in _nodes(service):
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


def as_in_run(speeds: Speeds, work: Work, others: Collection[Work]) -> Speeds:
    """``speeds`` of a node that did ``work`` while ``others`` of its machine did theirs."""
    decode = work.decode
    others_s = sum(other.decode.seconds for other in others)
    beside_share = min(1.0, others_s / decode.seconds) if decode.seconds > 0.0 else 0.0
    alone_s = decode.seconds - beside_share * speeds.beside_s * decode.num_steps
    return dataclasses.replace(
        speeds,
        prefill=_scaled(speeds.prefill, work.num_prompt_steps, work.num_prompt_tokens, work.prompt_s),
        decode=_scaled(speeds.decode, decode.num_steps, decode.num_rows, alone_s),
    )


def _scaled(line: Measured, num_steps: float, num_units: float, seconds: float) -> Measured:
    said_s = line.fixed_s * num_steps + line.unit_s * num_units
    if num_steps < MIN_STEPS or said_s <= 0.0 or seconds <= 0.0:
        return line
    factor = seconds / said_s
    return Measured(factor * line.fixed_s, factor * line.unit_s)


def _nodes(service: Service) -> list[Node]:
    return [*service.prefill, *service.decode]


def _work(node: Node) -> Work:
    return Work(
        metric(node, "step_time_error_ratio_count", kind="prompt"),
        metric(node, "prompt_tokens_total", source="computed"),
        metric(node, "step_seconds_total", kind="prompt"),
        _report(node).decode_totals or DecodeTotals(),
    )


def _status(service: Service) -> dict[str, Any]:
    status: dict[str, Any] = httpx.get(service.url + "/status.json", timeout=10).raise_for_status().json()
    return status


def _report(node: Node) -> LoadReport:
    return LoadReport.from_json(info(node)["load"]) or LoadReport()
