"""Positions of tokens around images."""

from __future__ import annotations

from common.images.span import ImageSpan, rope_axes, rope_position

IMAGES = (ImageSpan(2, 2, 3, bytes(32)), ImageSpan(9, 4, 1, bytes(32)))


def test_axes_when_cut_anywhere_then_pieces_are_those_of_the_whole() -> None:
    time, height, width = rope_axes(IMAGES, 0, 16)
    assert time == [0, 1, *[2] * 6, 5, *[6] * 4, 10, 11, 12]
    assert height == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert width == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 6, 10, 11, 12]
    for cut in range(17):
        parts = zip(rope_axes(IMAGES, 0, cut), rope_axes(IMAGES, cut, 16), strict=True)
        assert [[*left, *right] for left, right in parts] == [time, height, width]


def test_position_of_text_when_images_lie_before_it_then_moved_by_each() -> None:
    assert [rope_position(IMAGES, position) for position in (0, 1, 8, 13, 100)] == [0, 1, 5, 10, 97]
