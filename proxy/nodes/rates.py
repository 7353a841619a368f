"""Each node's speeds as placement uses them: what the node measured, as far as that can be trusted, mixed with the mean
of its role, which is mixed with the mean of all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.nodes.load import DEFAULT_KV_BYTES, LoadReport, Measured
from proxy.nodes.node import Node, NodeRole

MAX_AGE_S = 0.5
"""Seconds after which rates are computed anew: reports come no more often."""
# Weight of the mean over all nodes in the mean of a role, and of the defaults in the mean over all nodes, where one
# fully trusted measurement weighs 1.
ROLE_PRIOR, DEFAULT_PRIOR = 0.05, 0.01


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of a node's work: ``step_s`` + ``token_s`` a prompt token for a step that computes prompts, ``pull_s`` +
    ``byte_s`` a byte for a pull, ``decode_step_s`` + ``decode_row_s`` a row for a step that only decodes; ``row_s``:
    what such a row adds to a step that computes prompts. The defaults are of a small model on a small machine, until a
    node has measured something.

    What follows from them and the node's sizes: ``kv_s`` of pulling a token's blocks, ``state_s`` of a pull with one
    state.
    """

    step_s: float = 0.005
    token_s: float = 0.0002
    decode_step_s: float = 0.01
    decode_row_s: float = 0.0
    row_s: float = 0.0
    pull_s: float = 0.003
    byte_s: float = 1e-9
    kv_s: float = DEFAULT_KV_BYTES * 1e-9
    state_s: float = 0.003
    tiers: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By kind of tier, of reading: ``kv_s`` and ``state_s`` there."""

    def decode_s(self, num_rows: int) -> float:
        """Of a step that only decodes."""
        return self.decode_step_s + self.decode_row_s * num_rows


class RateTable:
    """Rates by node URL, computed again when they are older than ``MAX_AGE_S``."""

    def __init__(self) -> None:
        self._rates: dict[str, Rates] = {}
        self._made_s = float("-inf")

    def rates(self, nodes: Sequence[Node], now: float) -> Mapping[str, Rates]:
        if now - self._made_s > MAX_AGE_S or any(node.url not in self._rates for node in nodes):
            everywhere = _mixed(Rates(), (node.load.report for node in nodes), DEFAULT_PRIOR)
            by_role = {
                role: _mixed(everywhere, (node.load.report for node in nodes if node.role is role), ROLE_PRIOR)
                for role in NodeRole
            }
            self._rates = {node.url: _own(node, by_role) for node in nodes}
            self._made_s = now
        return self._rates


def _own(node: Node, by_role: Mapping[NodeRole, Rates]) -> Rates:
    report, others = node.load.report, by_role[node.role]
    step_s, token_s = _trusted(others.step_s, others.token_s, report.prefill)
    pull_s, byte_s = _trusted(others.pull_s, others.byte_s, report.pull)
    # Not mixed by age: a node that has generated nothing for a while is as fast as it was.
    decode = report.decode or Measured(others.decode_step_s, others.decode_row_s)
    row_s = report.row_s or others.row_s
    if node.role is NodeRole.PREFILL:
        # It has seen a row or two at a time, so what one more adds is little more than noise in its own lines.
        decode = at_one_row(decode, by_role[NodeRole.DECODE].decode_row_s)
        row_s = by_role[NodeRole.DECODE].row_s
    kv_s, state_s = report.kv_bytes_per_token * byte_s, pull_s + report.state_bytes * byte_s
    tiers = {
        kind: (report.kv_bytes_per_token * s_per_byte, fixed_s + report.state_bytes * s_per_byte)
        for kind, (fixed_s, s_per_byte) in report.tiers.items()
    }
    return Rates(step_s, token_s, decode.fixed_s, decode.unit_s, row_s, pull_s, byte_s, kv_s, state_s, tiers)


def at_one_row(line: Measured, row_s: float) -> Measured:
    """The line of another slope that has the same value at one row."""
    row_s = min(row_s, line.fixed_s + line.unit_s)
    return Measured(max(0.0, line.fixed_s + (line.unit_s - row_s)), row_s)


def _trusted(fixed_s: float, unit_s: float, own: Measured | None) -> tuple[float, float]:
    if own is None:
        return fixed_s, unit_s
    return fixed_s + own.trust * (own.fixed_s - fixed_s), unit_s + own.trust * (own.unit_s - unit_s)


def _mixed(prior: Rates, reports: Iterable[LoadReport], weight: float) -> Rates:
    """The mean of what was measured, each by its trust, and of ``prior`` with ``weight``."""
    reports = list(reports)
    step_s, token_s = _mean(prior.step_s, prior.token_s, [each.prefill for each in reports], weight)
    pull_s, byte_s = _mean(prior.pull_s, prior.byte_s, [each.pull for each in reports], weight)
    decode = [Measured(each.decode.fixed_s, each.decode.unit_s) for each in reports if each.decode is not None]
    decode_step_s, decode_row_s = _mean(prior.decode_step_s, prior.decode_row_s, decode, weight)
    rows = [each.row_s for each in reports if each.row_s]
    row_s = (prior.row_s * weight + sum(rows)) / (weight + len(rows))
    return Rates(step_s, token_s, decode_step_s, decode_row_s, row_s, pull_s, byte_s)


def _mean(fixed_s: float, unit_s: float, measured: Iterable[Measured | None], weight: float) -> tuple[float, float]:
    known = [each for each in measured if each is not None]
    total = weight + sum(each.trust for each in known)
    fixed_s = fixed_s * weight + sum(each.trust * each.fixed_s for each in known)
    unit_s = unit_s * weight + sum(each.trust * each.unit_s for each in known)
    return fixed_s / total, unit_s / total
