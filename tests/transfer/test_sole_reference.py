"""What proves that a thing has ended, and what does not."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from common.transfer.sole_reference import SoleReference


class Thing:
    pass


@pytest.fixture(autouse=True)
def no_chance_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_drop_when_nobody_else_holds_it_then_it_has_ended() -> None:
    sole = SoleReference(Thing())
    assert not sole.is_shared()
    assert sole.drop()
    assert sole.drop()
    assert not sole.is_shared()


def test_drop_when_a_kept_error_has_its_frame_then_it_lives_on_and_is_named_until_the_error_goes() -> None:
    sole = SoleReference(Thing())

    def use(thing: Thing) -> None:
        raise ValueError(thing)

    kept: list[Exception] = []
    try:
        use(sole.value)
    except ValueError as exc:
        kept.append(exc)
    assert sole.is_shared()
    assert any(each.startswith("frame of") and "use" in each for each in sole.holders())
    assert not sole.drop()
    assert isinstance(sole.value, Thing)
    kept.clear()
    assert not sole.is_shared()
    assert sole.drop()


def test_is_shared_when_only_garbage_holds_it_then_it_is_collected() -> None:
    sole = SoleReference(Thing())
    circle: list[object] = [sole.value]
    circle.append(circle)
    del circle
    assert not sole.is_shared()
    assert sole.drop()
