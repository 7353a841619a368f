"""How long this node's work takes, learned from the work that it did. The proxy's placement asks for it.

``LinearCost`` learns seconds = fixed + per_unit * units. Observations fade one by one, so that the estimate follows the
machine; what was never observed is None and not zero.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

HALF_LIFE = 100
"""Observations after which an older one counts half: many enough that a single slow step does not show, few enough to
follow a machine whose speed changes."""
_FADE = 0.5 ** (1 / HALF_LIFE)
"""What one observation's weight is multiplied with when the next one comes."""
_MIN_SPREAD = 0.1
"""Least standard deviation of the units, as a share of their mean, from which the fixed part is estimated. Below it the
observations are nearly the same point, through which any line fits."""


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = ``fixed_s`` + ``unit_s`` * units; neither is negative. ``weight``: of how many observations, the older
    ones in part."""

    fixed_s: float
    unit_s: float
    weight: float


class LinearCost:
    """Least squares over fading observations. One thread observes; any may read the line."""

    def __init__(self) -> None:
        # Weight, units, seconds, units squared, units times seconds. Replaced as a whole: a reader sees one moment.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._observed_s = 0.0

    def observe(self, units: float, seconds: float) -> None:
        """``units`` is above 0."""
        weight, x, y, xx, xy = self._sums
        self._sums = (
            weight * _FADE + 1.0,
            x * _FADE + units,
            y * _FADE + seconds,
            xx * _FADE + units * units,
            xy * _FADE + units * seconds,
        )
        self._observed_s = time.monotonic()

    @property
    def age_s(self) -> float:
        """Since the last observation."""
        return time.monotonic() - self._observed_s

    @property
    def line(self) -> Line | None:
        """None before the first observation."""
        weight, x, y, xx, xy = self._sums
        if not weight or not x:
            return None
        mean_x, mean_y = x / weight, y / weight
        variance = xx / weight - mean_x * mean_x
        if variance > (_MIN_SPREAD * mean_x) ** 2:
            unit_s = (xy / weight - mean_x * mean_y) / variance
            fixed_s = mean_y - unit_s * mean_x
            if unit_s > 0 and fixed_s >= 0:
                return Line(fixed_s, unit_s, weight)
        return Line(0.0, mean_y / mean_x, weight)
