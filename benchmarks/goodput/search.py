"""The rate at which enough requests keep their targets, estimated from runs at several rates."""

from __future__ import annotations

import itertools
import math
import operator
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
        found = goodputs_of(runs).values()
        best = sorted(math.sqrt(each.of_all.rate * each.of_every.rate) for each in found)[-2:]
        rate = math.sqrt(best[0] * best[-1])
    return goodputs_of(runs)


def goodputs_of(runs: Mapping[str, Sequence[tuple[float, Attainment]]]) -> dict[str, Goodput]:
    """By way, of runs of each at the same rates."""
    mixes = {mix for of_way in runs.values() for _, run in of_way for mix in run.came}
    of_all, *of_each = (
        estimates(
            {
                way: [(rate, _sum(run.kept, some), _sum(run.came, some)) for rate, run in each]
                for way, each in runs.items()
            }
        )
        for some in (mixes, *({mix} for mix in mixes))
    )
    return {way: Goodput(of_all[way], min((each[way] for each in of_each), default=of_all[way])) for way in runs}


def _sum(numbers: Mapping[Any, int], mixes: Iterable[Any]) -> int:
    return sum(numbers.get(mix, 0) for mix in mixes)


def estimates(runs: Mapping[str, Sequence[tuple[float, int, int]]]) -> dict[str, Estimate]:
    """By way, of ``runs``: rates above 0, and of how many requests how many kept their targets there. The share is
    taken to fall with the rate as a logistic function of its logarithm; all heights and widths of it are weighed by how
    likely they make what was seen (as QUEST does for thresholds in psychophysics, Watson and Pelli 1983). The width is
    that of all ways: the same requests came to them, on the same machine, and a few runs say less of how the share
    falls for one than of which one kept more."""
    at = [rate for of_way in runs.values() for rate, _, _ in of_way]
    lowest = min(at) / _REACH
    step = (max(at) * _REACH / lowest) ** (1 / (_NUM_RATES - 1))
    rates = [lowest * step**number for number in range(_NUM_RATES)]
    logs = {
        way: [[_log_likelihood(rate, width, of_way) for rate in rates] for width in _WIDTHS]
        for way, of_way in runs.items()
    }
    of_widths = {way: list(map(_log_of_sum, of_way)) for way, of_way in logs.items()}
    of_width = list(map(sum, zip(*of_widths.values(), strict=True)))
    all_widths = _log_of_sum(of_width)
    found = {}
    for way, of_way in logs.items():
        # How likely a width is, as all ways say, and each rate then, as this one says.
        parts = [width - all_widths - own for width, own in zip(of_width, of_widths[way], strict=True)]
        likely = [sum(map(math.exp, map(operator.add, parts, at_rate))) for at_rate in zip(*of_way, strict=True)]
        summed = list(itertools.accumulate(likely))
        bounds = (0.5, (1.0 - CREDIBLE) / 2, (1.0 + CREDIBLE) / 2)
        found[way] = Estimate(*(rates[bisect_left(summed, part * summed[-1])] for part in bounds))
    return found


def _log_of_sum(logs: Sequence[float]) -> float:
    """Of what has these logarithms."""
    most = max(logs)
    return most + math.log(sum(math.exp(log - most) for log in logs))


def _log_likelihood(rate: float, width: float, runs: Sequence[tuple[float, int, int]]) -> float:
    """Of ``runs``, if :data:`SHARE` keep their targets at ``rate``."""
    top = 1.0 - _LAPSES
    odds = SHARE / (top - SHARE)  # of the logistic function there
    log = 0.0
    for at, kept, came in runs:
        share = top / (1.0 + (at / rate) ** (1.0 / width) / odds)
        log += kept * math.log(share) + (came - kept) * math.log(1.0 - share)
    return log
