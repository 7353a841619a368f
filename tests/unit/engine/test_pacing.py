"""Prompts beside streams, and streams beside streams: what targets leave to each of them. Over a real cache manager,
without torch."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from common.engine.pacing.step_model import StepShape
from tests.unit.engine.scheduling import Rig, names, planned, words


def _learn(rig: Rig) -> None:
    """A step takes 4 ms and 1 ms a row, and with prompts 1 ms more of each of their tokens."""
    draw = random.Random(1)
    for _ in range(200):
        rows, tokens = draw.randrange(5), draw.randrange(1, 64)
        shape = StepShape(rows, 0, tokens, 0)
        rig.scheduler.step_model.observe(shape, 0.004 + 0.001 * (rows + tokens))


@pytest.mark.parametrize(
    ("target_s", "is_known", "num_tokens"),
    [(0.030, True, 22), (0.050, True, 40), (0.001, True, 2), (10.0, True, 63), (0.030, False, 16), (None, True, 16)],
)
def test_budget_when_a_stream_has_a_target_then_prompts_get_what_fits_into_it(
    target_s: float | None, is_known: bool, num_tokens: int
) -> None:
    rig = Rig()
    if is_known:
        _learn(rig)
    rig.add("stream", words(1, 4), itl_target_s=target_s)
    rig.step()
    rig.add("prompt", words(2, 200), max_tokens=1)
    (row, prompt) = planned(rig.step())
    assert row == ("stream", 4, 1)
    assert prompt[2] == pytest.approx(num_tokens, abs=1)


def test_budget_when_another_stream_has_no_target_then_its_gap_is_no_longer_than_before() -> None:
    rig = Rig()
    _learn(rig)
    rig.add("slow", words(1, 4), itl_target_s=10.0)
    rig.add("usual", words(3, 4))
    rig.step()
    rig.add("prompt", words(2, 200), max_tokens=1)
    assert planned(rig.step())[2] == ("prompt", 0, 16)


@pytest.mark.parametrize(
    ("ttft_target_s", "max_tokens", "num_tokens"),
    [(None, 100, 4), (10.0, 100, 4), (0.5, 100, 16), (0.5, 20, 4), (0.2, 100, 16), (-1.0, 100, 4)],
    ids=["none", "far", "soon", "soon, behind a short answer", "too soon", "missed"],
)
def test_budget_when_a_prompt_would_be_late_beside_streams_then_it_gets_more_than_they_leave(
    ttft_target_s: float | None, max_tokens: int, num_tokens: int
) -> None:
    """200 tokens take 0.2 s by themselves, and half a second in steps of 10 ms with 4 each."""
    rig = Rig()
    _learn(rig)
    rig.add("stream", words(1, 4), itl_target_s=0.010, max_tokens=max_tokens)
    rig.step()
    rig.add("prompt", words(2, 200), max_tokens=1, arrival_s=0.0, ttft_target_s=ttft_target_s)
    assert planned(rig.step())[1][2] == pytest.approx(num_tokens, abs=1)


def _learn_roofline(rig: Rig) -> None:
    """As ``_learn``, but a step with prompt tokens takes 20 ms at least."""
    draw = random.Random(1)
    for _ in range(400):
        rows, tokens = draw.randrange(1, 5), draw.choice((0, draw.randrange(1, 8), draw.randrange(8, 64), 64))
        seconds = 0.004 + 0.001 * (rows + tokens)
        rig.scheduler.step_model.observe(StepShape(rows, 0, tokens, 0), max(seconds, 0.020) if tokens else seconds)


@pytest.mark.parametrize(
    ("ttft_target_s", "max_tokens", "num_tokens"),
    [(5.0, 100, 0), (None, 100, 3), (-1.0, 100, 3), (0.6, 100, 16), (0.6, 20, 0)],
    ids=["can wait", "has no target", "missed", "cannot wait", "can wait for a short answer"],
)
def test_budget_when_few_tokens_would_cost_as_much_as_many_then_a_prompt_waits_if_it_can(
    ttft_target_s: float | None, max_tokens: int, num_tokens: int
) -> None:
    rig = Rig()
    _learn_roofline(rig)
    rig.add("stream", words(1, 4), itl_target_s=0.010, max_tokens=max_tokens)
    rig.step()
    rig.add("prompt", words(2, 200), max_tokens=1, arrival_s=0.0, ttft_target_s=ttft_target_s)
    found = [count for name, _, count in planned(rig.step()) if name == "prompt"]
    assert sum(found) == pytest.approx(num_tokens, abs=1 if num_tokens else 0)


@pytest.mark.parametrize(("target_s", "num_tokens"), [(0.004, 16), (0.006, 3)])
def test_budget_when_a_stream_alone_would_miss_its_target_then_prompts_get_what_they_do_without(
    target_s: float, num_tokens: int
) -> None:
    rig = Rig()
    _learn_roofline(rig)
    rig.add("stream", words(1, 4), itl_target_s=target_s)
    rig.step()
    rig.add("prompt", words(2, 200), max_tokens=1)
    assert planned(rig.step())[1][2] == pytest.approx(num_tokens, abs=1)


def test_budget_when_a_pull_waits_behind_a_prompt_that_could_wait_then_the_prompt_begins() -> None:
    rig = Rig()
    _learn_roofline(rig)
    rig.add("stream", words(1, 4), itl_target_s=0.010, max_tokens=20)
    rig.step()
    rig.add("prompt", words(2, 200), max_tokens=1, arrival_s=0.0, ttft_target_s=5.0)
    rig.add("pulled", words(3, 40), remote=SimpleNamespace(num_tokens=40), ttft_target_s=5.0)
    assert "prompt" in [name for name, _, _ in planned(rig.step())]


def test_budget_when_a_prompt_behind_another_would_be_late_then_both_get_more() -> None:
    rig = Rig()
    _learn(rig)
    rig.add("stream", words(1, 4), itl_target_s=0.010, max_tokens=100)
    rig.step()
    rig.add("first", words(2, 200), max_tokens=1, arrival_s=0.0)
    rig.add("second", words(3, 100), max_tokens=1, arrival_s=0.0, ttft_target_s=0.6)
    assert planned(rig.step()) == [("stream", 4, 1), ("first", 0, 15)]


def test_budget_when_what_waits_behind_a_prompt_is_computed_elsewhere_then_the_prompt_does_not_hurry() -> None:
    rig = Rig()
    _learn(rig)
    rig.add("stream", words(1, 4), itl_target_s=0.010, max_tokens=100)
    rig.step()
    rig.add("first", words(2, 200), max_tokens=1, arrival_s=0.0)
    rig.add("second", words(3, 100), arrival_s=0.0, ttft_target_s=0.6, remote=SimpleNamespace(num_tokens=100))
    [_, (name, _, num_tokens)] = planned(rig.step())
    assert name == "first"
    assert num_tokens < 15


def test_budget_when_many_targets_are_asked_for_then_steps_come_in_few_sizes_and_lose_little() -> None:
    """Each of which the backend may have recorded."""
    sizes, rig = set(), Rig(max_num_batched_tokens=256, caching=False)
    _learn(rig)
    for itl_ms in range(20, 250):
        stream = rig.add("stream", words(1, 4), itl_target_s=itl_ms / 1e3, max_tokens=100)
        rig.step()
        prompt = rig.add("prompt", words(2, 200), max_tokens=1)
        size = sum(num_tokens for _, _, num_tokens in planned(rig.step()))
        fits = rig.scheduler.step_model.max_prompt_tokens(StepShape(1, 5), 0, 256, itl_ms / 1e3)
        assert fits is not None
        assert size > 0.85 * min(200, fits)
        sizes.add(size)
        rig.end(stream)
        rig.end(prompt)
    assert len(sizes) < 40


@pytest.mark.parametrize(("num_tokens", "chunks"), [(15, [15]), (16, [16]), (17, [15, 2]), (31, [15, 16])])
def test_prompt_when_a_chunk_would_leave_little_of_it_then_that_is_computed_with_it(
    num_tokens: int, chunks: list[int]
) -> None:
    rig = Rig()
    rig.add("stream", words(1, 4), max_tokens=20)
    rig.step()
    rig.add("prompt", words(2, num_tokens), max_tokens=1)
    steps = [rig.step() for _ in range(len(chunks) + 1)]
    assert [step[2] for plan in map(planned, steps) for step in plan if step[0] == "prompt"] == chunks


def test_prompt_when_its_end_does_not_fit_into_a_step_then_the_step_keeps_its_bound() -> None:
    rig = Rig()
    rig.add("prompt", words(2, 66), max_tokens=1)
    assert planned(rig.step()) == [("prompt", 0, 64)]
    assert planned(rig.step()) == [("prompt", 64, 2)]


def test_budget_when_nobody_generates_then_a_prompt_gets_all_of_it() -> None:
    rig = Rig()
    _learn(rig)
    rig.add("prompt", words(2, 200), max_tokens=8, itl_target_s=0.001)
    assert planned(rig.step()) == [("prompt", 0, 64)]


def _three_streams(rig: Rig) -> None:
    """Each of 20 tokens, of a prompt that is cached then; a step of three takes 7 ms, one of four 8."""
    _learn_roofline(rig)
    for seed in (1, 2, 3):
        rig.add(f"stream{seed}", words(seed, 8), itl_target_s=1.0, max_tokens=20, arrival_s=0.0)
    rig.step()


@pytest.mark.parametrize(
    ("ttft_target_s", "itl_target_s", "num_resumed_tokens", "begins"),
    [
        (5.0, 0.0081, 0, False),
        (5.0, 0.0090, 0, True),
        (5.0, 0.0040, 0, True),
        (5.0, None, 0, True),
        (None, 0.0081, 0, True),
        (0.008, 0.0081, 0, True),
        (0.017, 0.0081, 0, True),
        (0.019, 0.0081, 0, False),
        (5.0, 0.0081, 2, True),
    ],
    ids=[
        "too slow",
        "fast enough",
        "never fast enough",
        "no target",
        "first token has none",
        "first token is due",
        "first token is due in two steps",
        "first token is due in two steps and a tenth",
        "began elsewhere",
    ],
)
def test_stream_when_a_row_more_would_be_too_slow_then_it_begins_later_if_its_first_token_has_time(
    ttft_target_s: float | None, itl_target_s: float | None, num_resumed_tokens: int, begins: bool
) -> None:
    rig = Rig()
    _three_streams(rig)
    fourth = rig.add(
        "fourth",
        words(1, 8),
        arrival_s=0.0,
        ttft_target_s=ttft_target_s,
        itl_target_s=itl_target_s,
        num_resumed_tokens=num_resumed_tokens,
    )
    assert names(rig.step().row_only) == ["fourth"] * begins
    rig.run()
    assert fourth.num_output_tokens == 8  # it was only put off


def test_stream_when_its_target_is_long_but_that_of_another_is_not_then_it_begins_later_too() -> None:
    rig = Rig()
    _three_streams(rig)
    rig.add("fast", words(1, 8), arrival_s=0.0, itl_target_s=0.0081, max_tokens=30)
    rig.step()
    rig.add("other", words(2, 8), arrival_s=0.0, ttft_target_s=5.0, itl_target_s=1.0)
    assert names(rig.step().row_only) == []


def test_streams_when_one_ends_then_one_of_those_that_were_put_off_begins() -> None:
    rig = Rig()
    _three_streams(rig)
    for name in ("fourth", "fifth"):
        rig.add(name, words(1, 8), arrival_s=0.0, ttft_target_s=5.0, itl_target_s=0.0079)
    rig.step()
    rig.end(next(each for each in rig.scheduler.running if each.request.request_id == "stream1"))
    begun = [names(rig.step().row_only) for _ in range(3)]
    assert begun == [["fifth"], [], []]  # the fourth waits on


def test_first_token_when_nobody_generates_then_it_does_not_wait_for_a_chunk_of_a_prompt() -> None:
    rig = Rig()
    _three_streams(rig)
    rig.add("fourth", words(1, 8), arrival_s=0.0, ttft_target_s=5.0, itl_target_s=0.0081)
    rig.step()
    rig.add("prompt", words(9, 200), arrival_s=-1.0)
    for sequence in list(rig.scheduler.running):
        if sequence.request.request_id != "fourth":
            rig.end(sequence)
    first, second = rig.step(), rig.step()
    assert (names(first.row_only), planned(first)) == (["fourth"], [])
    assert [name for name, _, _ in planned(second)] == ["fourth", "prompt"]


def test_prompt_when_only_it_is_wanted_then_it_does_not_wait_for_streams() -> None:
    rig = Rig()
    _three_streams(rig)
    rig.add("prompt", words(1, 8), arrival_s=0.0, sampled=False, ttft_target_s=5.0, itl_target_s=0.0081)
    assert names(rig.schedule().row_only) == ["prompt"]
