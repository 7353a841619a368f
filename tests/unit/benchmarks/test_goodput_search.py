"""The search for a goodput, over services of which the highest rate is known."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from benchmarks.goodput.search import SHARE, Attainment, Goodput, find_goodputs


def _find(
    highest: Mapping[str, tuple[float, float]], start: float, num_halvings: int
) -> tuple[dict[str, Goodput], list[tuple[float, list[str]]]]:
    """``highest``: by way, up to which rate 0.9 of all keep their targets, and of the worst mix; shares fall evenly.
    Also returns what was measured."""
    measured: list[tuple[float, list[str]]] = []

    async def measure(rate: float, ways: Sequence[str]) -> dict[str, Attainment]:
        measured.append((rate, list(ways)))
        return {
            way: Attainment(*(max(0.0, 1.0 - (1.0 - SHARE) * rate / most) for most in highest[way])) for way in ways
        }

    return asyncio.run(find_goodputs(measure, list(highest), start, num_halvings)), measured


@pytest.mark.parametrize("start", [0.2, 1.0, 2.9, 20.0])
def test_goodput_when_the_share_falls_evenly_then_it_is_found_exactly(start: float) -> None:
    found, _ = _find({"only": (3.0, 2.0)}, start, num_halvings=0)
    assert found["only"].of_all == pytest.approx(3.0)
    assert found["only"].of_every == pytest.approx(2.0)


def test_goodput_when_no_rate_keeps_the_targets_then_it_is_nothing() -> None:
    found, _ = _find({"only": (1e-6, 1e-7)}, 1.0, num_halvings=2)
    assert found["only"] == Goodput(0.0, 0.0)


def test_ways_when_they_need_the_same_rates_then_are_measured_together_and_each_rate_once() -> None:
    _, measured = _find({"fast": (4.0, 4.0), "slow": (0.9, 0.9), "like": (3.5, 3.5)}, 1.0, num_halvings=0)
    assert measured[0] == (1.0, ["fast", "slow", "like"])
    assert sorted(measured[1:]) == [
        (pytest.approx(1 / 1.5), ["slow"]),
        (1.5, ["fast", "like"]),
        (2.25, ["fast", "like"]),
        (3.375, ["fast", "like"]),
        (pytest.approx(5.0625), ["fast", "like"]),
    ]
