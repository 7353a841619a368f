"""What a scheduler does round images: those that no step may cut, and those that are not processed yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.engine.sequence import Sequence
from common.errors import ImageRefusedError
from common.images.span import ImageSpan
from tests.unit.engine.scheduling import Rig, planned, words

IMAGES = (ImageSpan(3, 1, 6, bytes(32)), ImageSpan(12, 1, 9, bytes([1, *[0] * 31])))


class Input:
    """Of an image: processed when the test says so."""

    def __init__(self, *, is_there: bool = True) -> None:
        self.is_there = is_there
        self.error: Exception | None = None
        self.num_asked = 0

    def is_ready(self) -> bool:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return self.is_there


def rig(budget: int, *, is_whole: bool = False) -> Rig:
    return Rig(max_num_batched_tokens=budget, images_are_whole=is_whole)


def pictured(made: Rig, name: str, inputs: list[Input]) -> Sequence:
    sequence = made.add(name, words(1, 24))
    sequence.request = replace(sequence.request, images=IMAGES, image_inputs=inputs)
    sequence.keys.images = IMAGES
    return sequence


def chunks(made: Rig, name: str) -> list[tuple[int, int]]:
    """(start, end) of a prompt's steps."""
    found = [entry for schedule in made.run() for entry in planned(schedule) if entry[0] == name]
    return [(start, start + count) for _, start, count in found if start < 24]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (64, [(0, 24)]),
        (10, [(0, 10), (10, 12), (12, 22), (22, 24)]),
        (5, [(0, 3), (3, 9), (9, 12), (12, 21), (21, 24)]),
    ],
)
def test_chunks_when_images_are_whole_then_none_ends_inside_one_whatever_the_budget(
    budget: int, expected: list[tuple[int, int]]
) -> None:
    made = rig(budget, is_whole=True)
    pictured(made, "a", [Input(), Input()])
    found = chunks(made, "a")
    assert found == expected
    assert not any(image.start < end < image.end for image in IMAGES for _, end in found)
    for schedule in [made.schedule()]:
        assert schedule.is_empty


def test_segments_when_images_are_whole_then_say_which_positions_see_each_other() -> None:
    made = rig(10, is_whole=True)
    pictured(made, "a", [Input(), Input()])
    whole = [segment.whole for schedule in made.run() for segment in schedule.plan.segments]
    assert whole[:4] == [((3, 9),), (), ((12, 21),), ()]
    plain = rig(10)
    pictured(plain, "a", [Input(), Input()])
    assert not any(segment.whole for schedule in plain.run() for segment in schedule.plan.segments)


def test_prompt_when_an_image_is_not_processed_then_it_waits_before_it_and_others_go_on() -> None:
    made = rig(64)
    inputs = [Input(), Input(is_there=False)]
    pictured(made, "a", inputs)
    made.add("b", words(2, 8), max_tokens=2)
    assert planned(made.step()) == [("a", 0, 12), ("b", 0, 8)]
    assert planned(made.step()) == [("b", 8, 1)]
    assert made.schedule().is_empty
    inputs[1].is_there = True
    assert planned(made.step()) == [("a", 12, 12)]


def test_prompt_when_its_first_image_is_not_processed_then_it_takes_no_memory_before_and_others_pass() -> None:
    made = rig(64)
    inputs = [Input(is_there=False), Input(is_there=False)]
    sequence = made.add("a", words(1, 24))
    sequence.request = replace(sequence.request, images=(ImageSpan(0, 1, 6, bytes(32)), IMAGES[1]), image_inputs=inputs)
    made.add("b", words(2, 8), max_tokens=1)
    assert planned(made.step()) == [("b", 0, 8)]
    assert sequence in made.scheduler.waiting
    assert [each.num_asked for each in inputs] == [1, 1]  # both are being processed from now on
    inputs[0].error = ImageRefusedError("no image", reason="content")
    [(failed, error)] = made.schedule().failed
    assert (failed, error) == (sequence, inputs[0].error)
