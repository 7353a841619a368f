"""The search for a goodput, over services of which the rate is known."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping

import pytest

from benchmarks.goodput.clients import Targets
from benchmarks.goodput.search import SHARE, Attainment, Estimate, Goodput, estimates, find_goodputs

NUM_REQUESTS = 400


def _share(at: float, rate: float, width: float = 0.33) -> float:
    """A logistic function of the rate's logarithm that is SHARE at ``rate``."""
    return 1.0 / (1.0 + (at / rate) ** (1.0 / width) * (1.0 / SHARE - 1.0))


def _find(
    highest: Mapping[str, Mapping[str, float]], start: float, num_rounds: int
) -> tuple[dict[str, Goodput], list[float]]:
    """``highest``: by way and mix, the rate at which SHARE keep their targets. Also returns what was measured."""
    measured: list[float] = []

    async def measure(rate: float) -> dict[str, Attainment]:
        measured.append(rate)
        return {
            way: Attainment(
                {mix: round(NUM_REQUESTS * _share(rate, most)) for mix, most in mixes.items()},
                dict.fromkeys(mixes, NUM_REQUESTS),
            )
            for way, mixes in highest.items()
        }

    return asyncio.run(find_goodputs(measure, start, num_rounds)), measured


def estimate(runs: Iterable[tuple[float, int, int]]) -> Estimate:
    return estimates({"only": list(runs)})["only"]


@pytest.mark.parametrize("width", [0.15, 0.33, 0.6])
def test_estimate_when_many_requests_came_at_two_rates_then_where_the_share_is_crossed(width: float) -> None:
    found = estimate((at, round(1000 * _share(at, 3.0, width)), 1000) for at in (2.5, 4.0))
    assert found.rate == pytest.approx(3.0, rel=0.1)
    assert found.least < found.rate < found.most


def test_estimate_when_all_are_kept_or_none_then_beyond_what_was_run() -> None:
    assert 1.0 < estimate([(1.0, 30, 30)]).rate < 2.0
    assert 0.5 < estimate([(1.0, 0, 30)]).rate < 1.0
    assert 0.5 < estimate([(1.0, 0, 0)]).rate < 2.0


def test_estimate_when_a_few_miss_far_below_then_hardly_moves() -> None:
    clean = [(1.0, 50, 50), (4.0, 45, 50), (6.0, 30, 50)]
    assert estimate([(1.0, 48, 50), *clean[1:]]).rate == pytest.approx(estimate(clean).rate, rel=0.1)


def test_estimate_when_drawn_again_and_again_then_the_rate_is_within_the_bounds_about_as_often_as_they_say() -> None:
    draw, hits = random.Random(1), 0
    for _ in range(100):
        runs = [(at, sum(draw.random() < _share(at, 3.0) for _ in range(40)), 40) for at in (2.4, 3.0, 3.6)]
        found = estimate(runs)
        hits += found.least <= 3.0 <= found.most
    assert 65 <= hits <= 95  # 80 expected, with a standard deviation of 4


def test_estimates_when_one_way_kept_more_in_every_round_then_it_is_better_however_rounds_went() -> None:
    rates = (0.71, 0.82, 0.85, 0.70)  # the machine was slow in the last two: the share fell, and at the lowest rate
    better = [(rate, kept, 100) for rate, kept in zip(rates, (98, 97, 66, 63), strict=True)]
    worse = [(rate, kept, 100) for rate, kept in zip(rates, (62, 59, 27, 59), strict=True)]
    assert estimate(better).rate < estimate(worse).rate  # each by itself: the second hardly falls with the rate at all
    found = estimates({"better": better, "worse": worse})
    assert found["better"].rate > 1.2 * found["worse"].rate


def test_estimates_when_ways_kept_as_many_then_they_are_alike_and_another_one_moves_them_together() -> None:
    same = [(2.0, 45, 50), (3.0, 30, 50)]
    found = estimates({"one": same, "two": same, "steep": [(2.0, 49, 50), (3.0, 5, 50)]})
    assert found["one"] == found["two"]


def test_rounds_when_ways_differ_then_all_at_one_rate_near_the_best_two() -> None:
    found, measured = _find({"best": {"mix": 4.0}, "next": {"mix": 3.5}, "last": {"mix": 1.0}}, 1.5, num_rounds=5)
    assert measured[0] == 1.5
    assert len(measured) == 5
    assert measured[-1] == pytest.approx((4.0 * 3.5) ** 0.5, rel=0.1)
    assert found["best"].of_all.rate / found["next"].of_all.rate == pytest.approx(4.0 / 3.5, rel=0.05)
    assert found["last"].of_all.rate < 2.0


def test_goodput_when_mixes_differ_then_of_every_one_is_that_of_the_worst() -> None:
    found, _ = _find({"only": {"easy": 5.0, "hard": 2.0}}, 3.0, num_rounds=4)
    assert found["only"].of_every.rate == pytest.approx(2.0, rel=0.1)
    assert 2.0 < found["only"].of_all.rate < 5.0


def test_goodput_when_a_mix_did_not_come_in_one_round_then_it_is_judged_by_the_others() -> None:
    rounds = iter([Attainment({"a": 9, "b": 0}, {"a": 10, "b": 10}), Attainment({"a": 9}, {"a": 10})])

    async def measure(rate: float) -> dict[str, Attainment]:
        return {"only": next(rounds)}

    found = asyncio.run(find_goodputs(measure, 1.0, num_rounds=2))["only"]
    assert found.of_every.rate < found.of_all.rate


@pytest.mark.parametrize(
    ("ttft_s", "itl_s", "is_steady"), [(1.2, 0.0085, True), (1.3, 0.01, False), (1.0, 0.007, False)]
)
def test_targets_when_one_is_much_longer_or_shorter_then_not_within(
    ttft_s: float, itl_s: float, is_steady: bool
) -> None:
    assert Targets(ttft_s, itl_s).are_within(1.25, Targets(1.0, 0.01)) is is_steady
