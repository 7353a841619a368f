"""The highest rate at which enough requests keep their targets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

SHARE = 0.9
"""Of the requests, which must keep both targets."""
_STEP = 2.0
_MAX_STEPS = 8


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
