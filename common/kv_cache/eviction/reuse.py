"""How likely and how soon a kept prefix is asked for again, learnt from what happened to prefixes of its class.

Per class a histogram over age: how many reached each age, how many returned there. Ages are counted in admitted
requests, in bins that widen geometrically. Prefixes that were evicted are counted as well (their keys are remembered),
so what is learnt does not depend on what was kept. Counts are halved now and then: the last few thousand requests
decide.

The *index* of (class, age) is the Gittins index of the wait: over the best stopping age, expected returns per request
waited. It rises while a return comes nearer (so that, when memory is short, what has waited is kept and newcomers go:
no thrash) and falls after the usual time of return has passed (so that, with much memory, recency decides). J. C.
Gittins, Bandit processes and dynamic allocation indices, 1979; hit density of Beckmann et al., LHD, NSDI 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FIRST_EDGE = 8
BINS_PER_OCTAVE = 3
NUM_BINS = 1 + 13 * BINS_PER_OCTAVE
EDGES = (0.0, *(FIRST_EDGE * 2 ** (step / BINS_PER_OCTAVE) for step in range(NUM_BINS)))
"""Bin b holds ages in [EDGES[b], EDGES[b + 1]), in admitted requests; older ages belong to no bin and are worthless."""

PRIOR_WEIGHT = 3.0
PRIOR_RATES = (0.1, *([0.02] * (NUM_BINS - 1)))
"""A class without history takes its parent's rates, and the root's are these: least recently used first."""

RETURN_HORIZON = 4096
"""Admissions within which a return counts as one, for ``return_probabilities``."""

CARRY = 0.8
"""What a bin counts for the age of the next one, and so on: half an octave."""

ReuseClass = tuple[str | int, ...]
"""From general to special: each prefix of the tuple is a class that its members are counted in too."""


def age_bin(age: int) -> int:
    """Bin of an age; NUM_BINS when it is beyond the last."""
    if age < FIRST_EDGE:
        return 0
    return min(NUM_BINS, 1 + int(BINS_PER_OCTAVE * math.log2(age / FIRST_EDGE)))


@dataclass(slots=True)
class _Histogram:
    reached: list[float] = field(default_factory=lambda: [0.0] * (NUM_BINS + 1))
    returned: list[float] = field(default_factory=lambda: [0.0] * (NUM_BINS + 1))

    def add(self, other: _Histogram) -> None:
        self.reached = [mine + theirs for mine, theirs in zip(self.reached, other.reached, strict=True)]
        self.returned = [mine + theirs for mine, theirs in zip(self.returned, other.returned, strict=True)]


class ReuseStatistics:
    def __init__(self) -> None:
        self._histograms: dict[ReuseClass, _Histogram] = {}
        self._totals: dict[ReuseClass, _Histogram] = {}
        self._rates: dict[ReuseClass, list[float]] = {}
        self._indices: dict[ReuseClass, list[float]] = {}
        self._late_rates: dict[ReuseClass, list[float]] = {}
        self._probabilities: dict[ReuseClass, list[float]] = {}
        self._late_probabilities: dict[ReuseClass, list[float]] = {}

    def reached(self, reuse_class: ReuseClass) -> list[float]:
        """Live counts by bin of how many of the class came to that age: the caller adds to them."""
        histogram = self._histograms.get(reuse_class)
        if histogram is None:
            histogram = self._histograms[reuse_class] = _Histogram()
        return histogram.reached

    def count_return(self, reuse_class: ReuseClass, age_bin: int) -> None:
        self._histograms[reuse_class].returned[age_bin] += 1

    def halve(self) -> None:
        """Forget the distant past by and by."""
        for histogram in self._histograms.values():
            for counts in (histogram.reached, histogram.returned):
                counts[:] = [count / 2 for count in counts]

    def refresh(self) -> None:
        """Let what was counted since the last refresh count in ``index``."""
        self._rates.clear()
        self._indices.clear()
        self._late_rates.clear()
        self._probabilities.clear()
        self._late_probabilities.clear()
        self._totals.clear()
        for reuse_class, histogram in self._histograms.items():
            for length in range(1, len(reuse_class) + 1):
                self._totals.setdefault(reuse_class[:length], _Histogram()).add(histogram)

    def index(self, reuse_class: ReuseClass) -> list[float]:
        """By age bin, as of the last refresh: expected returns per request of waiting; 0 beyond the last bin."""
        index = self._indices.get(reuse_class)
        if index is None:
            index = self._indices[reuse_class] = gittins(self._rates_of(reuse_class))
        return index

    def return_probabilities(self, reuse_class: ReuseClass) -> list[float]:
        """By age bin, as of the last refresh: how likely one of that age returns within ``RETURN_HORIZON`` admissions;
        0 beyond the last bin."""
        probabilities = self._probabilities.get(reuse_class)
        if probabilities is None:
            probabilities = self._probabilities[reuse_class] = within_horizon(self._rates_of(reuse_class))
        return probabilities

    def late_probabilities(self, reuse_class: ReuseClass) -> list[float]:
        """As ``return_probabilities``, by what came at the ages just before rather than by the general rates."""
        probabilities = self._late_probabilities.get(reuse_class)
        if probabilities is None:
            probabilities = self._late_probabilities[reuse_class] = within_horizon(self._late_rates_of(reuse_class))
        return probabilities

    def _late_rates_of(self, reuse_class: ReuseClass) -> list[float]:
        """As ``_rates_of``, but at ages that hardly any has come to which was kept for the same reason, what stands is
        how often such returned at the ages just before. (With the general rates there, what never returns looks as if
        it might yet: a fifth of what host memory gave on to a disk was that, docs/tiers.md.)"""
        rates = self._late_rates.get(reuse_class)
        if rates is None:
            rates = self._late_rates_of(reuse_class[:-1]) if reuse_class else list(PRIOR_RATES)
            total = self._totals.get(reuse_class)
            if total is not None:
                if len(reuse_class) == 1:
                    rates = _carried_on(total, rates)
                rates = [
                    min(1.0, (returned + PRIOR_WEIGHT * rate) / (reached + PRIOR_WEIGHT))
                    for returned, reached, rate in zip(total.returned, total.reached, rates, strict=False)
                ]
            self._late_rates[reuse_class] = rates
        return rates

    def _rates_of(self, reuse_class: ReuseClass) -> list[float]:
        """By bin: the share of those who reached it that returned in it."""
        rates = self._rates.get(reuse_class)
        if rates is None:
            parent = self._rates_of(reuse_class[:-1]) if reuse_class else list(PRIOR_RATES)
            total = self._totals.get(reuse_class)
            if total is not None:
                parent = [
                    min(1.0, (returned + PRIOR_WEIGHT * rate) / (reached + PRIOR_WEIGHT))
                    for returned, reached, rate in zip(total.returned, total.reached, parent, strict=False)
                ]
            rates = self._rates[reuse_class] = parent
        return rates


def _carried_on(total: _Histogram, rates: list[float]) -> list[float]:
    """By bin: the share that returned in the bins before it, the nearest ones most; ``rates`` where none came there."""
    carried, returned, reached = [], 0.0, 0.0
    for age, rate in enumerate(rates):
        carried.append((returned + PRIOR_WEIGHT * rate) / (reached + PRIOR_WEIGHT))
        returned = CARRY * returned + total.returned[age]
        reached = CARRY * reached + total.reached[age]
    return carried


def gittins(rates: list[float]) -> list[float]:
    """Best ratio of returns to waiting over all stopping bins, from each bin on. O(bins): from the last bin back,
    neighbours merge while the later stretch is the better one."""
    stretches: list[tuple[float, float, float]] = []  # returns, waiting, share that has not returned; nearest last
    index = [0.0] * (NUM_BINS + 1)
    for age in range(NUM_BINS - 1, -1, -1):
        rate = rates[age]
        returns, waiting, left = rate, (EDGES[age + 1] - EDGES[age]) * (1 - rate / 2), 1 - rate
        while stretches and stretches[-1][0] * waiting > returns * stretches[-1][1]:
            later = stretches.pop()
            returns, waiting, left = returns + left * later[0], waiting + left * later[1], left * later[2]
        stretches.append((returns, waiting, left))
        index[age] = returns / waiting
    return index


def within_horizon(rates: list[float]) -> list[float]:
    """From each bin on, the share that returns in a bin which begins within ``RETURN_HORIZON`` of it."""
    probabilities = [0.0] * (NUM_BINS + 1)
    for age in range(NUM_BINS):
        left = 1.0
        for later in range(age, NUM_BINS):
            if EDGES[later] - EDGES[age] >= RETURN_HORIZON:
                break
            left *= 1 - rates[later]
        probabilities[age] = 1 - left
    return probabilities
