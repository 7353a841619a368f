"""The highest rate at which enough requests keep their targets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHARE = 0.9
"""Of the requests, which must keep both targets."""
_STEP = 1.5
_MAX_STEPS = 8


@dataclass(frozen=True)
class Attainment:
    """Of requests that keep both targets, the part: of all, and of the mix with the fewest."""

    of_all: float
    of_worst: float

    @classmethod
    def of(cls, kept: Mapping[Any, int], came: Mapping[Any, int]) -> Attainment:
        if not came:
            return cls(0.0, 0.0)
        worst = min(kept.get(mix, 0) / number for mix, number in came.items())
        return cls(sum(kept.values()) / sum(came.values()), worst)


@dataclass(frozen=True)
class Goodput:
    """The highest rates at which :data:`SHARE` of all requests, and of those of every mix, keep both targets."""

    of_all: float
    of_every: float


Measure = Callable[[float, Sequence[str]], Awaitable[Mapping[str, Attainment]]]
"""Of the named ways at a rate, one after the other."""


async def find_goodputs(measure: Measure, ways: Sequence[str], start: float, num_halvings: int) -> dict[str, Goodput]:
    """By way. Those that are to be measured at the same rate are measured together, so that what the machine does
    meanwhile is alike for all. ``start``: the first rate."""
    known: dict[str, dict[float, Attainment]] = {way: {} for way in ways}
    while wanted := _wanted(known, start, num_halvings):
        rate = min(wanted.values())
        measured = await measure(rate, [way for way in ways if wanted.get(way) == rate])
        for way, attainment in measured.items():
            known[way][rate] = attainment
    return {
        way: Goodput(*(_run(search(start, num_halvings), shares)[1] for shares in _shares(known[way]))) for way in ways
    }


def _wanted(known: Mapping[str, Mapping[float, Attainment]], start: float, num_halvings: int) -> dict[str, float]:
    """The next rate of each way that is not done."""
    wanted: dict[str, float] = {}
    for way, measured in known.items():
        for shares in _shares(measured):
            rate, _ = _run(search(start, num_halvings), shares)
            if rate is not None:
                wanted[way] = rate
                break
    return wanted


def _shares(measured: Mapping[float, Attainment]) -> tuple[dict[float, float], dict[float, float]]:
    of_all = {rate: attainment.of_all for rate, attainment in measured.items()}
    return of_all, {rate: attainment.of_worst for rate, attainment in measured.items()}


def _run(searching: Generator[float, float, float], known: Mapping[float, float]) -> tuple[float | None, float]:
    """Up to the first rate that is not known; None: it ended, and found the other value."""
    try:
        rate = next(searching)
        while rate in known:
            rate = searching.send(known[rate])
    except StopIteration as end:
        return None, end.value
    return rate, 0.0


def search(start: float, num_halvings: int) -> Generator[float, float, float]:
    """Yields rates, takes their attainments, and returns requests a second, between the best rate that keeps
    :data:`SHARE` and the least that does not, straight between their attainments. 0: no rate kept."""
    low, low_share = 0.0, 1.0
    high, high_share = 0.0, 0.0
    rate = start
    for _ in range(_MAX_STEPS):
        share = yield rate
        if share >= SHARE:
            low, low_share = rate, share
            if high:
                break
            rate *= _STEP
        else:
            high, high_share = rate, share
            if low:
                break
            rate /= _STEP
    if not low:
        return 0.0
    if not high:
        return low
    for _ in range(num_halvings):
        rate = (low + high) / 2
        share = yield rate
        if share >= SHARE:
            low, low_share = rate, share
        else:
            high, high_share = rate, share
    return low + (high - low) * (low_share - SHARE) / max(low_share - high_share, 1e-9)
