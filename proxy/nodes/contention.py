"""How much longer the steps of a node are while another node of its machine generates as well.

Nodes of one machine read their weights over the same memory bus: on two cores of a CPU one more of them can cost each
stream more than one more row of a batch does. What it costs is learned from what they report. It changes: where others
share the machine, two nodes were seen to cost each other nothing, and 3.5 ms of 9 a step, for minutes each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from common.engine.pacing.regression import FadingRegression

MIN_STEPS = 8
"""Between two reports; fewer say little about a step."""
IDLE_SHARE, BUSY_SHARE = 0.2, 0.6
"""Of the time between two reports: up to the first a node counts as one that does not generate, from the second on as
one that does."""
HALF_LIFE, HALF_LIFE_S = 60.0, 1800.0
"""Reports, and seconds, after which an older one counts half for what a step takes beside nobody."""
_HOLDS = (0.02, 0.05)
"""How strongly each coefficient of that is held (``FadingRegression``)."""
MIN_ALONE = 4.0
"""Reports of steps beside nobody, from which on others are held against them."""
NEW_SHARE = 0.5
"""Of what is learned, what the last report of steps beside others makes: one that was slow by chance is not all."""
FORGET_S = 300.0
"""Seconds in which half of it is forgotten while the nodes do not generate beside each other: where much was learned
none will, and nothing else would tell that it is less by now. Each such trial is paid for by the streams that run."""


class DecodeTotals(NamedTuple):
    """Of the steps of a node that only generated, since its start: how many, their rows, and seconds."""

    num_steps: float = 0.0
    num_rows: float = 0.0
    seconds: float = 0.0

    def since(self, last: DecodeTotals) -> DecodeTotals:
        return DecodeTotals(*(now - before for now, before in zip(self, last, strict=True)))


class Contention:
    """Of one node. ``beside_s``: what a step is longer while another node generates; 0 until that was seen. ``shares``:
    of the time before its last report, and of that before the one before, the part in which it generated."""

    def __init__(self, line: tuple[float, float] = (0.0, 0.0), beside_s: float = 0.0) -> None:
        """``line``, ``beside_s``: what is known of it already."""
        self._regression = FadingRegression(_HOLDS, HALF_LIFE, HALF_LIFE_S)
        self._regression.coefficients = line
        self._is_line_known = any(line)
        self.beside_s = beside_s
        self._last: tuple[DecodeTotals, float] | None = None
        self._steps = DecodeTotals()
        self._beside_share = 0.0
        self.shares = (0.0, 0.0)

    @property
    def line(self) -> tuple[float, float]:
        """Of a step while no other node generates: seconds, and those of each row."""
        fixed_s, row_s = self._regression.coefficients
        return fixed_s, row_s

    def more_s(self, share: float) -> float:
        """What a step is longer than the node's own measurements of late, of which some may be of steps beside
        another node that generated, if one does for ``share`` of the time; below 0: shorter."""
        return self.beside_s * (share - self._beside_share)

    def update(self, totals: DecodeTotals | None, now: float, neighbours: Iterable[Contention]) -> None:
        """A report came; ``totals`` is None where it does not say. ``neighbours``: of the other nodes of the machine.
        They report as often, so their last two reports are of all the time between this node's last two."""
        others = [each.shares for each in neighbours]
        last, self._last = self._last, None if totals is None else (totals, now)
        passed_s = now - last[1] if last is not None else 0.0
        self._learn(self._steps, max(map(min, others), default=0.0), max(map(max, others), default=0.0), passed_s, now)
        if self._steps.num_steps >= MIN_STEPS:
            self._beside_share = min(1.0, max(map(sum, others), default=0.0) / 2)
        steps, share = DecodeTotals(), 0.0
        if totals is not None and last is not None and passed_s > 0:
            steps = totals.since(last[0])
            if min(steps) < 0:  # of a node that has started again
                steps = DecodeTotals()
            share = steps.seconds / passed_s
        self._steps, self.shares = steps, (share, self.shares[0])

    def _learn(self, steps: DecodeTotals, least: float, most: float, passed_s: float, now: float) -> None:
        """``least``, ``most``: shares of the neighbour that generated most of the time of ``steps``; ``passed_s``:
        since the report before."""
        num_steps, num_rows, seconds = steps
        is_beside = least >= BUSY_SHARE
        if not is_beside or num_steps < MIN_STEPS:
            self.beside_s *= 0.5 ** (passed_s / FORGET_S)
        if num_steps < MIN_STEPS or (most > IDLE_SHARE and not is_beside):
            return
        step_s, step_rows = seconds / num_steps, num_rows / num_steps
        if not is_beside:
            self._regression.observe((1.0, step_rows), step_s, now=now)
        elif self._is_line_known or self._regression.weight >= MIN_ALONE:
            fixed_s, row_s = self.line
            more_s = step_s - fixed_s - row_s * step_rows
            self.beside_s = max(0.0, self.beside_s + NEW_SHARE * (more_s - self.beside_s))
