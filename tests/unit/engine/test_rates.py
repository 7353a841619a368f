"""What a node learns about its own speed."""

from __future__ import annotations

import random

import pytest

from common.engine.rates import HALF_LIFE, LinearCost


def test_line_when_nothing_was_observed_then_none() -> None:
    assert LinearCost().line is None


def test_line_when_observations_lie_on_one_then_it_is_found() -> None:
    cost = LinearCost()
    draw = random.Random(1)
    for _ in range(50):
        units = draw.randrange(1, 2000)
        cost.observe(units, 0.01 + units * 0.0003)
    line = cost.line
    assert line is not None
    assert line.fixed_s == pytest.approx(0.01, rel=1e-3)
    assert line.unit_s == pytest.approx(0.0003, rel=1e-3)
    assert 40 < line.weight <= 50


def test_line_when_all_observations_are_of_one_size_then_it_is_their_mean_per_unit() -> None:
    cost = LinearCost()
    for seconds in (0.1, 0.2, 0.3):
        cost.observe(100, seconds)
    line = cost.line
    assert line is not None
    assert (line.fixed_s, line.unit_s) == (0.0, pytest.approx(0.002, rel=0.02))


def test_line_when_noise_would_make_a_part_negative_then_none_is() -> None:
    cost = LinearCost()
    for units, seconds in ((10, 0.5), (500, 0.1), (1000, 0.05)):
        cost.observe(units, seconds)
    line = cost.line
    assert line is not None
    assert line.fixed_s >= 0
    assert line.unit_s > 0


def test_line_when_the_machine_became_slower_then_it_follows() -> None:
    cost = LinearCost()
    for speed in (0.001, 0.004):
        for index in range(10 * HALF_LIFE):
            units = 100 + index % 7 * 100
            cost.observe(units, units * speed)
    line = cost.line
    assert line is not None
    assert line.unit_s == pytest.approx(0.004, rel=0.02)
