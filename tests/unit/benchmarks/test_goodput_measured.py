"""How fast nodes were in one run, from what they report and what they did in it."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.goodput.measured import MIN_STEPS, PromptTotals, Work, as_in_run, speeds_by_second
from proxy.nodes.contention import DecodeTotals
from tests.support.simulated import SPEEDS

NOTHING = Work()


def test_node_when_its_steps_took_longer_than_it_reports_then_its_lines_are_as_many_times_as_slow() -> None:
    """10 steps of 300 tokens: 3.1 s as reported; 100 steps of 2 rows: 2.2 s."""
    found = as_in_run(SPEEDS, Work(PromptTotals(10, 3000, 0, 4.65), DecodeTotals(100, 200, 2.42)), [NOTHING])
    assert (found.prefill.fixed_s, found.prefill.unit_s) == pytest.approx((0.015, 0.0015))
    assert (found.decode.fixed_s, found.decode.unit_s) == pytest.approx((0.022, 0.0011))
    assert dataclasses.replace(found, prefill=SPEEDS.prefill, decode=SPEEDS.decode) == SPEEDS


def test_node_when_others_generated_beside_it_then_what_that_costs_is_not_its_own() -> None:
    """For half of its time: 100 steps, of which 50 took 8 ms more."""
    speeds = dataclasses.replace(SPEEDS, beside_s=0.008)
    decode = DecodeTotals(100, 200, 2.2 + 50 * 0.008)
    other = Work(decode=DecodeTotals(60, 60, decode.seconds / 2))
    found = as_in_run(speeds, Work(decode=decode), [other])
    assert (found.decode.fixed_s, found.decode.unit_s) == pytest.approx((0.02, 0.001))
    twice = as_in_run(speeds, Work(decode=decode), [other, other])
    thrice = as_in_run(speeds, Work(decode=decode), [other, other, other])
    assert twice.decode == thrice.decode  # beside two of them it was no more than always beside one
    assert twice.decode.fixed_s < found.decode.fixed_s


@pytest.mark.parametrize(
    "work",
    [
        NOTHING,
        Work(PromptTotals(MIN_STEPS - 1, 1000, 0, 9.0), DecodeTotals(MIN_STEPS - 1, 6, 9.0)),
        Work(PromptTotals(100, 0, 0, 0.0), DecodeTotals(100, 100, 0.0)),  # a clock that stood still
    ],
)
def test_node_when_its_run_says_nothing_then_as_it_reports(work: Work) -> None:
    found = as_in_run(SPEEDS, work, [NOTHING])
    assert (found.prefill, found.decode) == (SPEEDS.prefill, SPEEDS.decode)


def test_node_when_rows_ran_beside_its_prompts_then_their_time_is_not_the_prompts() -> None:
    speeds = dataclasses.replace(SPEEDS, row_s=0.01)
    found = as_in_run(speeds, Work(PromptTotals(10, 3000, 30, 3.1 + 30 * 0.01)), [NOTHING])
    assert (found.prefill.fixed_s, found.prefill.unit_s) == pytest.approx((0.01, 0.001))


def test_run_when_it_was_watched_then_nodes_are_as_fast_as_in_each_second_or_as_in_the_last_that_says() -> None:
    """Steps of one row take 21 ms as reported; the second node's take twice that in the last second."""
    first, second = (Work(decode=DecodeTotals(10, 10, seconds)) for seconds in (0.21, 0.42))
    twice = Work(decode=DecodeTotals(20, 20, 0.21 + 0.42))
    seen = [(0.0, [NOTHING, NOTHING]), (1.0, [NOTHING, first]), (2.0, [NOTHING, twice]), (3.0, [second, twice])]
    found = speeds_by_second([SPEEDS, SPEEDS], seen)
    assert [at_s for at_s, _ in found] == [0.0, 1.0, 2.0]
    one_row_s = [[each.decode.fixed_s + each.decode.unit_s for each in nodes] for _, nodes in found]
    assert one_row_s == [pytest.approx(each) for each in ([0.021, 0.021], [0.021, 0.042], [0.042, 0.042])]
    assert speeds_by_second([SPEEDS], seen[:1]) == []


def test_work_when_a_node_reports_it_then_is_read_by_its_names() -> None:
    prompt = {"steps": 1, "tokens": 100, "rows": 2, "seconds": 0.5}
    decode = {"steps": 10, "rows": 30, "seconds": 0.2}
    found = Work.of({"running": 3, "prompt_totals": prompt, "decode_totals": decode})
    assert found == Work(PromptTotals(1, 100, 2, 0.5), DecodeTotals(10, 30, 0.2))


def test_work_since_a_time_is_what_came_after() -> None:
    last = Work(PromptTotals(1, 100, 2, 0.5), DecodeTotals(1, 2, 3))
    now = Work(PromptTotals(3, 700, 4, 1.5), DecodeTotals(11, 32, 4))
    assert now.since(last) == Work(PromptTotals(2, 600, 2, 1.0), DecodeTotals(10, 30, 1))
