"""How fast the nodes of a simulated cluster are: what real ones say of themselves (``GET /internal/v1/load``), from a
JSON file. One such object, or one for each role: ``{"prefill": {...}, "decode": {...}}`` below ``"roles"``. With
``contention_seconds`` in it (as the proxy's ``/status.json`` has it) all nodes share one machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.engine.pacing.step_model import StepShape
from common.errors import ConfigError
from proxy.nodes.load import LoadReport, Measured
from proxy.nodes.node import NodeRole
from proxy.nodes.rates import at_one_row

_NEEDED = {
    "prefill": ("seconds_per_step", "seconds_per_token"),
    "decode": ("seconds_per_step", "seconds_per_row"),
    "pull": ("seconds_per_pull", "seconds_per_byte"),
}


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds of one node's work: of steps that compute prompts, of steps that only generate, of pulls; and what it
    runs at a time. ``beside_s``: what a step that only generates is longer while another node does the same."""

    prefill: Measured
    decode: Measured
    pull: Measured
    row_s: float
    chunk: int
    max_num_seqs: int
    beside_s: float = 0.0

    @classmethod
    def of(cls, report: LoadReport) -> Speeds | None:
        """None: something was not measured."""
        if report.prefill is None or report.decode is None or report.pull is None:
            return None
        prefill, decode, pull = (
            Measured(each.fixed_s, each.unit_s) for each in (report.prefill, report.decode, report.pull)
        )
        return cls(prefill, decode, pull, report.row_s, report.chunk, report.max_num_seqs)

    def step_s(self, shape: StepShape) -> float:
        if shape.num_prompt_tokens:
            line = self.prefill
            return line.fixed_s + line.unit_s * shape.num_prompt_tokens + self.row_s * shape.num_rows
        return self.decode.fixed_s + self.decode.unit_s * shape.num_rows

    def pull_s(self, num_bytes: float) -> float:
        return self.pull.fixed_s + self.pull.unit_s * num_bytes


def read_speeds(path: Path) -> dict[NodeRole, Speeds]:
    """Raises ConfigError naming what is missing."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"--rates {path}: {why}", param="--rates") from exc
    roles = body.get("roles") if isinstance(body, Mapping) else None
    if roles is not None and not isinstance(roles, Mapping):
        raise ConfigError(f"--rates {path}: roles must be an object with prefill and decode", param="--rates")
    found = {}
    for role in NodeRole:
        where = f"--rates {path}: " + (f"roles.{role.value}" if roles is not None else "the object")
        found[role] = _speeds(where, roles.get(role.value) if roles is not None else body)
    return with_rows_alike(found)


def with_rows_alike(speeds: Mapping[NodeRole, Speeds]) -> dict[NodeRole, Speeds]:
    """A prefill node has seen few rows: what one more adds is as on decode nodes, as placement has it."""
    prefill, decode = speeds[NodeRole.PREFILL], speeds[NodeRole.DECODE]
    line = at_one_row(prefill.decode, decode.decode.unit_s)
    prefill = replace(prefill, decode=line, row_s=decode.row_s or prefill.row_s)
    return {NodeRole.PREFILL: prefill, NodeRole.DECODE: decode}


def _speeds(where: str, body: Any) -> Speeds:
    if not isinstance(body, Mapping):
        raise ConfigError(f"{where} must be an object as GET /internal/v1/load answers it", param="--rates")
    report = LoadReport.from_json(body)
    beside_s = body.get("contention_seconds", 0.0)
    if isinstance(beside_s, bool) or not isinstance(beside_s, int | float) or not 0.0 <= beside_s < math.inf:
        raise ConfigError(f"{where}.contention_seconds {beside_s!r} must be a number from 0 on", param="--rates")
    speeds = Speeds.of(report) if report is not None else None
    if speeds is None:
        for name, (fixed, unit) in _NEEDED.items():
            line = body.get(name)
            if not isinstance(line, Mapping) or fixed not in line or unit not in line:
                raise ConfigError(f"{where} has no {name}.{fixed} and {name}.{unit}, in seconds", param="--rates")
        raise ConfigError(f"{where}: the seconds of prefill, decode and pull must be numbers above 0", param="--rates")
    return replace(speeds, beside_s=beside_s)
