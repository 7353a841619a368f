"""How fast nodes were in one run, from what they report and what they did in it."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.goodput.measured import MIN_STEPS, Work, as_in_run
from proxy.nodes.contention import DecodeTotals
from tests.support.simulated import SPEEDS

NOTHING = Work(0, 0, 0.0, DecodeTotals())


def test_node_when_its_steps_took_longer_than_it_reports_then_its_lines_are_as_many_times_as_slow() -> None:
    """10 steps of 300 tokens: 3.1 s as reported; 100 steps of 2 rows: 2.2 s."""
    found = as_in_run(SPEEDS, Work(10, 3000, 4.65, DecodeTotals(100, 200, 2.42)), [NOTHING])
    assert (found.prefill.fixed_s, found.prefill.unit_s) == pytest.approx((0.015, 0.0015))
    assert (found.decode.fixed_s, found.decode.unit_s) == pytest.approx((0.022, 0.0011))
    assert dataclasses.replace(found, prefill=SPEEDS.prefill, decode=SPEEDS.decode) == SPEEDS


def test_node_when_others_generated_beside_it_then_what_that_costs_is_not_its_own() -> None:
    """For half of its time: 100 steps, of which 50 took 8 ms more."""
    speeds = dataclasses.replace(SPEEDS, beside_s=0.008)
    decode = DecodeTotals(100, 200, 2.2 + 50 * 0.008)
    other = dataclasses.replace(NOTHING, decode=DecodeTotals(60, 60, decode.seconds / 2))
    found = as_in_run(speeds, dataclasses.replace(NOTHING, decode=decode), [other])
    assert (found.decode.fixed_s, found.decode.unit_s) == pytest.approx((0.02, 0.001))
    twice = as_in_run(speeds, dataclasses.replace(NOTHING, decode=decode), [other, other])
    thrice = as_in_run(speeds, dataclasses.replace(NOTHING, decode=decode), [other, other, other])
    assert twice.decode == thrice.decode  # beside two of them it was no more than always beside one
    assert twice.decode.fixed_s < found.decode.fixed_s


@pytest.mark.parametrize(
    "work",
    [
        NOTHING,
        Work(MIN_STEPS - 1, 1000, 9.0, DecodeTotals(MIN_STEPS - 1, 6, 9.0)),
        Work(100, 0, 0.0, DecodeTotals(100, 100, 0.0)),  # a clock that stood still
    ],
)
def test_node_when_its_run_says_nothing_then_as_it_reports(work: Work) -> None:
    found = as_in_run(SPEEDS, work, [NOTHING])
    assert (found.prefill, found.decode) == (SPEEDS.prefill, SPEEDS.decode)


def test_work_since_a_time_is_what_came_after() -> None:
    last, now = Work(1, 100, 0.5, DecodeTotals(1, 2, 3)), Work(3, 700, 1.5, DecodeTotals(11, 32, 4))
    assert now.since(last) == Work(2, 600, 1.0, DecodeTotals(10, 30, 1))
