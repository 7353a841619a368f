"""What the engine predicts of its steps, of times that the test makes."""

from __future__ import annotations

import random
import statistics

import pytest

from common.engine.pacing.regression import FadingRegression
from common.engine.pacing.step_model import (
    MAX_OUTLIERS,
    MAX_ROW_KINDS,
    MIN_WEIGHT,
    StepModel,
    StepShape,
    chunk_attended,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def true_s(shape: StepShape, *, speed: float = 1.0) -> float:
    attended = 2e-7 * (shape.num_row_attended + shape.num_prompt_attended)
    if shape.num_prompt_tokens:
        return speed * (0.008 + 0.0005 * shape.num_rows + 0.0002 * shape.num_prompt_tokens + attended)
    return speed * (0.005 + 0.0004 * shape.num_rows + attended)


def random_shape(draw: random.Random) -> StepShape:
    rows = draw.randrange(0, 17)
    tokens = draw.choice((0, 0, draw.randrange(1, 513)))
    if not rows and not tokens:
        rows = 1
    return StepShape(rows, rows * draw.randrange(10, 2000), tokens, chunk_attended(draw.randrange(2000), tokens))


def trained(num_steps: int = 400, *, noise: float = 0.0, seed: int = 1) -> StepModel:
    model, draw = StepModel(Clock()), random.Random(seed)
    for _ in range(num_steps):
        shape = random_shape(draw)
        model.observe(shape, true_s(shape) * draw.lognormvariate(0.0, noise))
    return model


def errors(model: StepModel, seed: int = 2) -> list[float]:
    draw = random.Random(seed)
    shapes = [random_shape(draw) for _ in range(200)]
    predicted = [(model.predict(shape) or 0.0, true_s(shape)) for shape in shapes]
    return sorted(abs(value - right) / right for value, right in predicted)


def test_prediction_when_nothing_or_too_little_was_seen_then_there_is_none() -> None:
    model = StepModel(Clock())
    for num in range(int(MIN_WEIGHT)):
        assert model.predict(StepShape(1, 10)) is None
        assert model.max_prompt_tokens(StepShape(1, 10), 0, 512, 0.05) is None
        assert (model.prompt_line, model.decode_line is None) == (None, num == 0)
        model.observe(StepShape(1, 10), 0.01)
    model.observe(StepShape(1, 10), 0.01)
    assert model.predict(StepShape(1, 10)) == pytest.approx(0.01, rel=0.05)
    assert model.predict(StepShape(1, 10, 100, 5050)) is None, "of steps with prompts nothing is known yet"


def test_totals_when_steps_were_seen_then_are_by_kind_of_those_that_were_believed() -> None:
    model = StepModel(Clock())
    for _ in range(4):
        model.observe(StepShape(3, 30), 0.01)
    for _ in range(4):
        model.observe(StepShape(3, 30, 100, 5050), 0.2)
    model.observe(StepShape(3, 30), 1.0)
    model.observe(StepShape(3, 30, 100, 5050), 5.0)
    assert model.decode_totals == (4, 12, pytest.approx(0.04))
    assert model.prompt_totals == (4, 400, 12, pytest.approx(0.8))


@pytest.mark.parametrize(("noise", "median", "late"), [(0.0, 0.01, 0.03), (0.1, 0.03, 0.1)])
def test_prediction_when_steps_of_all_kinds_were_seen_then_is_right(noise: float, median: float, late: float) -> None:
    missed = errors(trained(noise=noise))
    assert statistics.median(missed) < median
    assert missed[int(0.9 * len(missed))] < late


def test_prediction_when_the_machine_becomes_slower_then_follows() -> None:
    model, draw = trained(), random.Random(3)
    for _ in range(1500):
        shape = random_shape(draw)
        model.observe(shape, true_s(shape, speed=2.0))
    draw = random.Random(4)
    for _ in range(50):
        shape = random_shape(draw)
        assert model.predict(shape) == pytest.approx(true_s(shape, speed=2.0), rel=0.1)


def test_prediction_when_a_step_takes_much_longer_then_is_not_believed_unless_that_goes_on() -> None:
    model, shape = trained(), StepShape(4, 2000)
    right = model.predict(shape)
    assert right is not None
    for _ in range(MAX_OUTLIERS):
        model.observe(shape, 100 * right)
    assert model.predict(shape) == right
    for _ in range(300):
        model.observe(shape, 4 * right)
    assert model.predict(shape) == pytest.approx(4 * right, rel=0.1)


def test_prediction_when_numbers_of_rows_are_uneven_then_each_is_remembered() -> None:
    model, draw = StepModel(Clock()), random.Random(1)

    def stairs(rows: int) -> float:
        return 0.005 * (1 + (rows - 1) // 4)

    for _ in range(600):
        rows = draw.randrange(1, 17)
        model.observe(StepShape(rows, rows * 100), stairs(rows))
    for rows in range(1, 17):
        assert model.predict(StepShape(rows, rows * 100)) == pytest.approx(stairs(rows), rel=0.1), rows


def test_prediction_when_only_one_kind_of_step_comes_for_long_then_others_are_still_known() -> None:
    model = trained()
    for _ in range(2000):
        model.observe(StepShape(8, 8000), true_s(StepShape(8, 8000)))
        model.observe(StepShape(8, 8000, 64, 64 * 500), true_s(StepShape(8, 8000, 64, 64 * 500)))
    missed = errors(model)
    assert missed[int(0.9 * len(missed))] < 0.1


def test_prediction_when_few_prompt_tokens_come_for_long_then_how_long_many_take_is_still_known() -> None:
    """Contexts grow meanwhile, which explains small steps' times as well as their tokens do."""
    model, draw = StepModel(Clock()), random.Random(5)
    for num_tokens in (512, 512, 256, 64, 512):
        shape = StepShape(1, 500, num_tokens, chunk_attended(0, num_tokens))
        model.observe(shape, roofline_s(shape))
    for step in range(3000):
        num_tokens = draw.randrange(5, 8)
        shape = StepShape(1, 500 + step, num_tokens, chunk_attended(step % 2000, num_tokens))
        model.observe(shape, roofline_s(shape) * draw.lognormvariate(0.0, 0.05))
    for num_tokens in (16, 64, 256, 512):
        shape = StepShape(1, 500, num_tokens, chunk_attended(0, num_tokens))
        assert model.predict(shape) == pytest.approx(roofline_s(shape), rel=0.35)


def test_prompt_tokens_when_a_time_is_given_then_they_fit_and_one_more_would_not() -> None:
    model, rows = trained(), StepShape(4, 4 * 500)
    for seconds in (0.015, 0.03, 0.06):
        num = model.max_prompt_tokens(rows, 1000, 512, seconds)
        assert num is not None
        for tokens, fits in ((num, True), (num + 1, False)):
            shape = rows._replace(num_prompt_tokens=tokens, num_prompt_attended=chunk_attended(1000, tokens))
            predicted = model.predict(shape)
            assert predicted is not None
            assert (predicted <= 0.9 * seconds) == fits
    assert model.max_prompt_tokens(rows, 1000, 512, 0.001) == 0
    assert model.max_prompt_tokens(rows, 1000, 512, 10.0) == 512


def test_prompt_tokens_when_gaps_are_longer_than_predicted_then_are_fewer_until_they_are_not_any_more() -> None:
    model, rows = trained(), StepShape(4, 4 * 500)

    def fits() -> int:
        num = model.max_prompt_tokens(rows, 0, 512, 0.05)
        assert num is not None
        return num

    def run(num_steps: int, times: float) -> None:
        for _ in range(num_steps):
            shape = rows._replace(num_prompt_tokens=50, num_prompt_attended=chunk_attended(0, 50))
            seconds = true_s(shape)
            model.observe(shape, seconds, times * seconds)

    before = fits()
    run(5, 3.0)
    assert fits() < before
    run(40, 3.0)
    assert fits() < 0.9 * before
    run(3000, 1.0)
    assert fits() == pytest.approx(before, rel=0.1)


def test_errors_when_steps_are_observed_then_are_told_by_kind() -> None:
    model = trained()
    told: list[tuple[str, float]] = []
    model.on_error = lambda kind, share: told.append((kind, share))
    for shape in (StepShape(4, 2000), StepShape(4, 2000, 100, 5050)):
        model.observe(shape, 2 * true_s(shape))
    assert [kind for kind, _ in told] == ["decode", "prompt"]
    assert [share for _, share in told] == pytest.approx([0.5, 0.5], abs=0.02)


def test_steps_when_they_take_no_time_or_have_nothing_in_them_then_nothing_breaks() -> None:
    model = StepModel(Clock())
    for _ in range(20):
        model.observe(StepShape(), 1.0)
        model.observe(StepShape(2, 20), 0.0)
        model.observe(StepShape(0, 0, 5, 15), 0.0)
    predicted = model.predict(StepShape(2, 20))
    assert predicted is None or predicted >= 0.0


def test_memory_when_there_are_ever_more_rows_then_is_bounded() -> None:
    model = StepModel(Clock())
    for rows in range(1, 4 * MAX_ROW_KINDS):
        model.observe(StepShape(rows, rows), 0.01 + rows * 1e-4)
    assert len(model._corrections) <= MAX_ROW_KINDS


def test_observations_when_time_passes_then_fade_but_never_to_nothing() -> None:
    clock = Clock()
    model = StepModel(clock)
    for _ in range(50):
        model.observe(StepShape(0, 0, 100, 0), 0.1)
    before = model.prompt_line
    clock.now += 1e9
    model.observe(StepShape(0, 0, 100, 0), 0.1)
    after = model.prompt_line
    assert before is not None
    assert after is not None
    assert after.weight < before.weight
    assert after.fixed_s + 100 * after.unit_s == pytest.approx(0.1, rel=0.05)
    assert model.age_s(of_prompts=True) == 0.0


def test_regression_when_a_coefficient_would_be_negative_then_is_zero_and_the_rest_fits() -> None:
    regression, draw = FadingRegression((0.01, 0.01), 100, 300.0), random.Random(1)
    for _ in range(200):
        x = draw.uniform(1.0, 10.0)
        regression.observe((1.0, x), 0.1 * x - 0.05)
    fixed, slope = regression.coefficients
    assert fixed == 0.0
    assert slope == pytest.approx(0.09, abs=0.015)


def roofline_s(shape: StepShape) -> float:
    """As of a step that reads all weights however few tokens it has."""
    return max(0.017, 0.008 + 0.00115 * shape.num_prompt_tokens) + 0.001 * shape.num_rows


def test_prediction_when_few_tokens_take_as_long_as_some_then_sizes_that_were_seen_are_right() -> None:
    model, draw = StepModel(Clock()), random.Random(4)
    for _ in range(300):
        num_tokens = draw.choice((2, 3, 4, 6, 12, 64, 512))
        shape = StepShape(2, 0, num_tokens, 0)
        model.observe(shape, roofline_s(shape))
    for num_tokens in (2, 3, 6, 12, 64, 512):
        shape = StepShape(2, 0, num_tokens, 0)
        assert model.predict(shape) == pytest.approx(roofline_s(shape), rel=0.1)
    fits = model.max_prompt_tokens(StepShape(2, 0), 0, 512, 0.0205)
    assert fits is not None
    assert roofline_s(StepShape(2, 0, fits, 0)) < 0.021


def test_line_when_all_prompts_were_as_long_then_little_of_it_is_taken_for_fixed() -> None:
    model = StepModel(Clock())
    for _ in range(20):
        model.observe(StepShape(0, 0, 512, chunk_attended(0, 512)), 0.6)
    assert model.prompt_line is not None
    assert model.prompt_line.fixed_s < 0.02
    assert model.predict(StepShape(0, 0, 512, chunk_attended(0, 512))) == pytest.approx(0.6, rel=0.01)


def test_least_tokens_when_asked_for_a_rate_then_so_many_have_it_and_fewer_do_not() -> None:
    model = trained()
    rows = StepShape(4, 400)
    for share in (0.1, 0.25, 0.5):
        full = model.prompt_rate(StepShape(), 0, 512)
        assert full is not None
        least = model.least_prompt_tokens(rows, 0, 512, share * full)
        fast, slow = model.prompt_rate(rows, 0, least), model.prompt_rate(rows, 0, least - 1)
        assert fast is not None
        assert slow is not None
        assert slow < share * full <= fast
    assert model.least_prompt_tokens(rows, 0, 512, 1e9) == 512
