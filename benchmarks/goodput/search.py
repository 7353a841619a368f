"""The highest rate at which enough requests keep their targets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
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


async def find_both(attainment: Callable[[float], Awaitable[Attainment]], start: float, num_halvings: int) -> Goodput:
    """As ``find_goodput``, each rate measured once."""
    known: dict[float, Attainment] = {}

    async def measured(rate: float) -> Attainment:
        if rate not in known:
            known[rate] = await attainment(rate)
        return known[rate]

    async def of_all(rate: float) -> float:
        return (await measured(rate)).of_all

    async def of_worst(rate: float) -> float:
        return (await measured(rate)).of_worst

    found = await find_goodput(of_all, start, num_halvings)
    return Goodput(found, await find_goodput(of_worst, start, num_halvings))


async def find_goodput(attainment: Callable[[float], Awaitable[float]], start: float, num_halvings: int) -> float:
    """Requests a second, between the best rate that keeps :data:`SHARE` and the least that does not, straight between
    their attainments. ``attainment`` of a rate is measured, each rate once; ``start``: the first. 0: no rate kept."""
    low, low_share = 0.0, 1.0
    high, high_share = 0.0, 0.0
    rate = start
    for _ in range(_MAX_STEPS):
        share = await attainment(rate)
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
        share = await attainment(rate)
        if share >= SHARE:
            low, low_share = rate, share
        else:
            high, high_share = rate, share
    return low + (high - low) * (low_share - SHARE) / max(low_share - high_share, 1e-9)
