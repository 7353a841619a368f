"""How much longer the steps of a node are while another node of its machine generates as well.

Nodes of one machine read their weights over the same memory bus: on two cores of a CPU one more of them can cost each
stream more than one more row of a batch does. What it costs is learned from what they report, from differences between
reports of nearly the same time: a machine that is shared with others is slower by half for tens of seconds, and whether
a neighbour happened to generate more of them than others says nothing about the neighbour.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from common.engine.pacing.regression import FadingRegression

MIN_STEPS = 8
"""Between two reports; fewer say little about a step."""
IDLE_SHARE, BUSY_SHARE = 0.2, 0.6
"""Of the time between two reports: up to the first a node counts as one that does not generate, from the second on as
one that does."""
HALF_LIFE, HALF_LIFE_S = 60.0, 1800.0
"""Reports, and seconds, after which an older one counts half: nodes are seldom placed anew."""
_HOLDS = (0.02, 0.05)
"""How strongly each coefficient is held (``FadingRegression``)."""
PAIR_S = 6.0
"""Seconds: a report with and one without a neighbour that generated are compared when they are no further apart."""
NUM_DIFFERENCES, NUM_HELD = 32, 4
"""The middle of so many differences counts, of which at first so many are what was known before, or nothing: one that
was slow by chance would keep neighbours from generating, and nothing would speak against it."""


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
        self.beside_s = beside_s
        self._differences = deque([beside_s] * NUM_HELD, NUM_DIFFERENCES)
        self._seen: dict[bool, tuple[float, float, float]] = {}
        self._last: tuple[DecodeTotals, float] | None = None
        self._steps = DecodeTotals()
        self._beside_share = 0.0
        self.shares = (0.0, 0.0)

    @property
    def line(self) -> tuple[float, float]:
        """Of a step while no other node generates: seconds, and those of each row."""
        fixed_s, row_s = self._regression.coefficients
        return fixed_s, row_s

    def more_s(self, *, is_beside: bool) -> float:
        """What a step is longer than the node's own measurements of late, of which some may be of steps beside
        another node that generated; below 0: shorter."""
        return self.beside_s * (is_beside - self._beside_share)

    def update(self, totals: DecodeTotals | None, now: float, neighbours: Iterable[Contention]) -> None:
        """A report came; ``totals`` is None where it does not say. ``neighbours``: of the other nodes of the machine.
        They report as often, so their last two reports are of all the time between this node's last two."""
        others = [each.shares for each in neighbours]
        self._learn(self._steps, max(map(min, others), default=0.0), max(map(max, others), default=0.0), now)
        if self._steps.num_steps >= MIN_STEPS:
            self._beside_share = min(1.0, max(map(sum, others), default=0.0) / 2)
        last, self._last = self._last, None if totals is None else (totals, now)
        steps, share = DecodeTotals(), 0.0
        if totals is not None and last is not None and now > last[1]:
            steps = totals.since(last[0])
            if min(steps) < 0:  # of a node that has started again
                steps = DecodeTotals()
            share = steps.seconds / (now - last[1])
        self._steps, self.shares = steps, (share, self.shares[0])

    def _learn(self, steps: DecodeTotals, least: float, most: float, now: float) -> None:
        """``least``, ``most``: shares of the neighbour that generated most of the time of ``steps``."""
        num_steps, num_rows, seconds = steps
        is_beside = least >= BUSY_SHARE
        if num_steps < MIN_STEPS or (most > IDLE_SHARE and not is_beside):
            return
        step_s, step_rows = seconds / num_steps, num_rows / num_steps
        _, row_s = self.line
        then_s, then_step_s, then_rows = self._seen.get(not is_beside, (-math.inf, 0.0, 0.0))
        if now - then_s <= PAIR_S:
            more_s = step_s - then_step_s - row_s * (step_rows - then_rows)
            self._differences.append(more_s if is_beside else -more_s)
            self.beside_s = max(0.0, statistics.median(self._differences))
        self._seen[is_beside] = now, step_s, step_rows
        self._regression.observe((1.0, step_rows), step_s - self.beside_s * is_beside, now=now)
