"""Bytes that a tier may write per second, spent on what is most likely to be asked for again.

Demand is counted by likelihood and fades; the budget pays from the top down to where it ends, and a token bucket holds
the bound: never more than the rate times the time since the start, plus the last write.
"""

from __future__ import annotations

import math
from collections.abc import Callable

NUM_STEPS = 50
"""Of likelihood, in which demand is counted."""
MEMORY_S = 300.0
"""Seconds after which demand counts 1/e: a busy node sees some hundred prefixes in that time."""
BURST_S = 60.0
"""Seconds of the rate that may be saved up."""


class WriteBudget:
    """``rate``: bytes per second, None without a bound. ``clock`` in seconds."""

    def __init__(self, rate: float | None, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._clock = clock
        self._demand = [0.0] * (NUM_STEPS + 1)
        self._saved = 0.0
        self._seconds = 0.0
        self._last_s = clock()

    def want(self, probability: float, num_bytes: int) -> None:
        """Something of that size may have to be written. Say it once of each."""
        self._pass_time()
        self._demand[_step(probability)] += num_bytes

    def may_spend(self, probability: float) -> bool:
        """Whether something that likely may be written now."""
        if self._rate is None:
            return True
        self._pass_time()
        if self._saved <= 0:
            return False
        if self._saved >= self._rate * BURST_S:
            return True  # nothing likelier came for a minute
        likelier = sum(self._demand[_step(probability) + 1 :])
        return likelier <= self._rate * self._seconds

    def spend(self, num_bytes: int) -> None:
        self._saved -= num_bytes

    def _pass_time(self) -> None:
        if self._rate is None:
            return
        now = self._clock()
        passed, self._last_s = max(0.0, now - self._last_s), now
        fading = math.exp(-passed / MEMORY_S)
        self._demand = [num_bytes * fading for num_bytes in self._demand]
        # Weighed like the demand of that time, so that both are comparable.
        self._seconds = self._seconds * fading + MEMORY_S * (1 - fading)
        self._saved = min(self._saved + passed * self._rate, self._rate * BURST_S)


def _step(probability: float) -> int:
    return round(min(1.0, max(0.0, probability)) * NUM_STEPS)
