"""When a reader counts as standing still, on a loop and a transport of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from common.server.stall import STALL_S, StallTimer


class Scene:
    """``unread``: what the transport's buffer holds."""

    def __init__(self) -> None:
        self.unread = 100
        self.is_answering = True
        self.stalls: list[int] = []
        self.due: list[Callable[[], None]] = []
        this: Any = self
        self.timer = StallTimer(this, this, is_answering=lambda: self.is_answering, on_stall=self.stalls.append)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Scene:
        assert delay_s == STALL_S
        self.due = [call]
        return self

    def cancel(self) -> None:
        self.due = []

    def wait(self) -> None:
        """Until STALL_S have passed."""
        for call in self.due[:]:
            self.due.remove(call)
            call()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_reader_when_an_answer_waits_for_it_then_has_to_take_what_is_there(scene: Scene) -> None:
    scene.timer.pause()
    scene.unread = 50  # a little is not enough: the answer cannot go on
    scene.wait()
    assert scene.stalls == [50]


def test_reader_when_it_took_enough_then_has_the_whole_time_for_the_next(scene: Scene) -> None:
    for _ in range(3):
        scene.timer.pause()
        scene.timer.resume()
    scene.wait()
    assert scene.stalls == []
    scene.timer.pause()
    scene.wait()
    assert scene.stalls == [100]


def test_reader_of_a_whole_answer_when_it_goes_on_reading_then_may_take_long(scene: Scene) -> None:
    scene.timer.pause()
    scene.is_answering = False
    scene.timer.end_answer()
    for scene.unread in (90, 80, 1):
        scene.wait()
    assert scene.stalls == []
    scene.wait()
    assert scene.stalls == [1]


def test_reader_of_a_short_answer_when_it_never_reads_it_then_its_connection_ends(scene: Scene) -> None:
    scene.is_answering = False
    scene.timer.end_answer()
    scene.wait()
    assert scene.stalls == [100]


def test_answer_when_it_is_read_at_once_then_nothing_is_waited_for(scene: Scene) -> None:
    scene.unread, scene.is_answering = 0, False
    scene.timer.end_answer()
    assert scene.due == []


def test_connection_when_it_is_lost_then_nothing_is_waited_for(scene: Scene) -> None:
    scene.timer.pause()
    scene.timer.close()
    scene.wait()
    assert scene.stalls == []
