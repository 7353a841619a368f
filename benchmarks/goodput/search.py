"""The rate at which enough requests keep their targets, estimated from runs at several rates."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SHARE = 0.9
"""Of the requests, which must keep both targets."""
CREDIBLE = 0.8
"""Probability that a rate is within its estimate's bounds, if requests miss their targets independently."""
_LAPSES = 0.02
"""Of the requests, which may miss their targets at any rate: a machine stands still now and then."""
_WIDTHS = (0.1, 0.15, 0.22, 0.33, 0.5, 0.75)
"""How gently the share may fall with the rate's logarithm."""
_REACH = 2.0
"""Times the highest and the lowest rate that were run, up to which rates are thought possible."""
_NUM_RATES = 200


@dataclass(frozen=True)
class Attainment:
    """Of one run: the requests of each mix that came, and those that kept both targets."""

    kept: Mapping[Any, int]
    came: Mapping[Any, int]

    @property
    def of_all(self) -> float:
        return sum(self.kept.values()) / max(1, sum(self.came.values()))

    @property
    def of_worst(self) -> float:
        return min((self.kept.get(mix, 0) / number for mix, number in self.came.items()), default=0.0)


class Estimate(NamedTuple):
    """The rate at which :data:`SHARE` keep their targets, and between which it is with probability
    :data:`CREDIBLE`."""

    rate: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.rate:.3f} ({self.least:.3f}-{self.most:.3f})"


@dataclass(frozen=True)
class Goodput:
    """At which :data:`SHARE` of all requests, and of those of every mix, keep both targets."""

    of_all: Estimate
    of_every: Estimate


Measure = Callable[[float], Awaitable[Mapping[str, Attainment]]]
"""Of every way at one rate, one after the other."""


async def find_goodputs(measure: Measure, start: float, num_rounds: int) -> dict[str, Goodput]:
    """By way. In each round all are measured at one rate, ``start`` at first: what comes, and what the machine does
    meanwhile, is alike for them, so that they are told apart sooner. It is the rate between the best two's estimates so
    far, of all requests and of every mix: what the others can is known less well."""
    runs: dict[str, list[tuple[float, Attainment]]] = {}
    rate = start
    for _ in range(num_rounds):
        for way, attainment in (await measure(rate)).items():
            runs.setdefault(way, []).append((rate, attainment))
        found = [goodput_of(each) for each in runs.values()]
        best = sorted(math.sqrt(each.of_all.rate * each.of_every.rate) for each in found)[-2:]
        rate = math.sqrt(best[0] * best[-1])
    return {way: goodput_of(each) for way, each in runs.items()}


def goodput_of(runs: Sequence[tuple[float, Attainment]]) -> Goodput:
    of_all = estimate((rate, sum(run.kept.values()), sum(run.came.values())) for rate, run in runs)
    mixes = {mix for _, run in runs for mix in run.came}
    of_each = [estimate((rate, run.kept.get(mix, 0), run.came.get(mix, 0)) for rate, run in runs) for mix in mixes]
    return Goodput(of_all, min(of_each, default=of_all))


def estimate(runs: Iterable[tuple[float, int, int]]) -> Estimate:
    """``runs``: rates above 0, and of how many requests how many kept their targets there. The share is taken to fall
    with the rate as a logistic function of its logarithm; all heights and widths of it are weighed by how likely they
    make what was seen (as QUEST does for thresholds in psychophysics, Watson and Pelli 1983)."""
    runs = list(runs)
    lowest = min(rate for rate, _, _ in runs) / _REACH
    step = (max(rate for rate, _, _ in runs) * _REACH / lowest) ** (1 / (_NUM_RATES - 1))
    rates = [lowest * step**number for number in range(_NUM_RATES)]
    logs = [[_log_likelihood(rate, width, runs) for width in _WIDTHS] for rate in rates]
    most = max(map(max, logs))
    summed = list(itertools.accumulate(sum(math.exp(log - most) for log in each) for each in logs))
    bounds = (0.5, (1.0 - CREDIBLE) / 2, (1.0 + CREDIBLE) / 2)
    return Estimate(*(rates[bisect_left(summed, part * summed[-1])] for part in bounds))


def _log_likelihood(rate: float, width: float, runs: Sequence[tuple[float, int, int]]) -> float:
    """Of ``runs``, if :data:`SHARE` keep their targets at ``rate``."""
    top = 1.0 - _LAPSES
    odds = SHARE / (top - SHARE)  # of the logistic function there
    log = 0.0
    for at, kept, came in runs:
        share = top / (1.0 + (at / rate) ** (1.0 / width) / odds)
        log += kept * math.log(share) + (came - kept) * math.log(1.0 - share)
    return log
