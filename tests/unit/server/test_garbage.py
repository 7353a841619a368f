"""When reference cycles are collected: in a node not while anybody waits for an answer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from common.server import garbage


class _Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_cycles_when_a_node_is_idle_then_old_ones_are_freed_at_once_and_young_ones_soon() -> None:
    garbage.keep_collections_short()
    gc.collect()
    cycle = _Cycle()
    gc.collect(1)  # as old as one of a request that took long
    found = weakref.ref(cycle)
    del cycle
    garbage.collect_when_idle()
    assert found() is not None, "looked at everything though nothing has come since"
    for _ in range(2):
        gc.collect(1)
    assert found() is not None
    garbage.collect_when_idle()
    assert found() is None


def test_full_collections_when_requests_are_under_way_then_take_millions_of_objects() -> None:
    garbage.keep_collections_short()
    full: list[str] = []

    def told(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(phase)

    gc.callbacks.append(told)
    try:
        kept = [[] for _ in range(400_000)]  # type: ignore[var-annotated]
    finally:
        gc.callbacks.remove(told)
    assert len(kept) == 400_000
    assert not full
