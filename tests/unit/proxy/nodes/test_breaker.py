"""Breakers and the retry budget by themselves, on a clock of the test's."""

from __future__ import annotations

import pytest

from proxy.legs.retry_budget import FLOOR, WINDOW_S, RetryBudget
from proxy.nodes.breaker import PROBE_S, Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(failures=3, open_s=30, clock=clock)


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        with breaker.leg() as leg:
            leg.fail("status 500")


def test_breaker_when_legs_fail_in_a_row_then_opens_and_says_why(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 2)
    assert (breaker.state, breaker.is_admitting, breaker.reason) == (BreakerState.CLOSED, True, "")
    fail(breaker)
    assert (breaker.state, breaker.is_admitting, breaker.num_opened) == (BreakerState.OPEN, False, 1)
    assert breaker.reason == "circuit breaker open for 30 s, 3 legs failed in a row, last: status 500"
    clock.now_s += 29.9
    assert not breaker.is_admitting


def test_breaker_when_a_leg_succeeds_in_between_then_counts_anew(breaker: Breaker) -> None:
    fail(breaker, 2)
    with breaker.leg() as leg:
        leg.succeed()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_half_open_when_one_leg_probes_then_no_other_may_and_its_success_closes(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 30
    assert (breaker.state, breaker.is_admitting) == (BreakerState.HALF_OPEN, True)
    with breaker.leg() as leg:
        assert not breaker.is_admitting
        assert "being probed" in breaker.reason
        leg.succeed()
        assert (breaker.state, breaker.is_admitting) == (BreakerState.CLOSED, True)
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_half_open_when_the_probe_fails_then_opens_again(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 30
    fail(breaker)
    assert (breaker.state, breaker.num_opened) == (BreakerState.OPEN, 2)


def test_half_open_when_the_probe_ends_without_verdict_then_the_next_may_probe(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 30
    with breaker.leg():
        assert not breaker.is_admitting
    assert (breaker.state, breaker.is_admitting) == (BreakerState.HALF_OPEN, True)


def test_half_open_when_the_probe_says_nothing_for_long_then_the_next_may_probe(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 30
    with breaker.leg():  # an answer that is no stream
        clock.now_s += PROBE_S - 1
        assert not breaker.is_admitting
        clock.now_s += 1
        assert breaker.is_admitting
        with breaker.leg():
            assert not breaker.is_admitting
    assert (breaker.state, breaker.is_admitting) == (BreakerState.HALF_OPEN, True)


def test_half_open_when_the_probe_begins_to_answer_then_closes_for_one_failure(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now_s += 30
    with breaker.leg() as leg:
        leg.begin_answer()
        assert (breaker.state, breaker.is_admitting) == (BreakerState.CLOSED, True)
        leg.fail("broke")
    assert breaker.state is BreakerState.OPEN


def test_breaker_when_legs_from_before_fail_while_open_then_does_not_stay_open_longer(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now_s += 20
    fail(breaker)
    clock.now_s += 10
    assert (breaker.state, breaker.num_opened) == (BreakerState.HALF_OPEN, 1)


def test_breaker_when_the_node_is_a_new_process_then_is_closed(breaker: Breaker) -> None:
    fail(breaker, 3)
    breaker.reset()
    assert breaker.is_admitting
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_budget_when_only_retries_come_then_gives_the_floor_per_window(clock: Clock) -> None:
    budget = RetryBudget(0.2, clock=clock)
    assert [budget.try_take() for _ in range(FLOOR + 5)] == [True] * FLOOR + [False] * 5
    clock.now_s += WINDOW_S
    assert budget.try_take()


def test_budget_when_requests_come_then_gives_their_share_on_top(clock: Clock) -> None:
    budget = RetryBudget(0.2, clock=clock)
    for _ in range(100):
        budget.add_request()
        clock.now_s += 0.05
    assert sum(budget.try_take() for _ in range(100)) == FLOOR + 20
    clock.now_s += WINDOW_S - 2.5  # half of the requests are too old by now, the retries are not
    assert not budget.try_take()


def test_budget_when_its_share_is_0_then_there_are_no_retries(clock: Clock) -> None:
    assert not RetryBudget(0.0, clock=clock).try_take()
