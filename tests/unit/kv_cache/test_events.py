"""Following the events gives the same picture as asking the cache."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from common.kv_cache.manager import KVCacheManager
from common.kv_cache.observe.events import MAX_REMOVED_KEYS, CacheEvent, EventKind, EventLog
from tests.unit.kv_cache.test_random_interleavings import Driver
from tests.unit.kv_cache.turns import run_turn
from tests.unit.kv_cache.world import World, make_config

A = list(range(1000, 1200))


def apply(known: dict[tuple[str, bytes], int], events: Iterable[CacheEvent], block_size: int) -> None:
    """A reader's picture: (group, key) -> position."""
    for event in events:
        for index, key in enumerate(reversed(event.keys)):
            if event.kind is EventKind.STORED:
                known[event.group, key] = event.position - index * block_size
            else:
                del known[event.group, key]


def picture(manager: KVCacheManager) -> dict[tuple[str, bytes], int]:
    known: dict[tuple[str, bytes], int] = {}
    apply(known, manager.snapshot().events, manager.config.block_size)
    return known


def test_events_when_a_prompt_is_stored_then_groups_keys_parents_and_positions_are_told() -> None:
    manager = KVCacheManager(make_config(block_size=16, windows=(20,), events=True))
    keys = manager.prefix_keys(A[:40])
    run_turn(manager, A[:40], boundaries=[30])
    assert manager.events is not None
    events = manager.events.since(0)
    assert events is not None
    assert [event.sequence_number for event in events] == [1, 2, 3, 4]
    blocks = {event.group: event for event in events if not event.is_checkpoint}
    boundaries = (keys.boundary_key(1), keys.boundary_key(2))
    for group in ("attention", "window_20"):
        event = blocks[group]
        assert (event.keys, event.parent, event.position) == (boundaries, keys.boundary_key(0), 32)
    checkpoints = [event for event in events if event.is_checkpoint]
    assert [(event.group, event.position) for event in checkpoints] == [("state", 30), ("state", 40)]
    assert checkpoints[0].keys == (keys.key_at(30),)
    assert checkpoints[0].parent == keys.boundary_key(1)


def test_events_when_followed_from_any_snapshot_then_they_give_what_is_there() -> None:
    world = World(make_config(num_blocks=20, num_slots=6, windows=(6,), events=True))
    driver = Driver(world, 3)
    manager, rng = world.manager, random.Random(4)
    assert manager.events is not None
    known: dict[tuple[str, bytes], int] = {}
    last = 0
    for _ in range(300):
        driver.play(rng.randint(1, 4))
        if rng.random() < 0.1:
            snapshot = manager.snapshot()
            known, last = {}, snapshot.sequence_number
            apply(known, snapshot.events, 4)
        events = manager.events.since(last)
        assert events is not None
        assert [event.sequence_number for event in events] == list(range(last + 1, last + 1 + len(events)))
        apply(known, events, 4)
        last += len(events)
        assert known == picture(manager)
    assert any(event.kind is EventKind.REMOVED for event in manager.events.since(0) or [])


def test_checkpoint_when_it_gets_the_row_of_a_prompt_that_ends_there_then_it_is_told_again() -> None:
    manager = KVCacheManager(make_config(block_size=16, events=True))
    assert manager.events is not None
    run_turn(manager, A[:40], boundaries=[30])
    last = manager.events.last_sequence_number
    run_turn(manager, A[:30])  # resumes nowhere near its end: the state at 30 has no row
    told = [event for event in manager.events.since(last) or [] if event.is_checkpoint]
    assert [(event.position, event.has_row) for event in told] == [(16, False), (30, True)]  # 16: the junction
    rows = {event.position: event.has_row for event in manager.snapshot().checkpoints}
    assert rows == {16: False, 30: True, 40: True}


def test_events_when_a_reader_is_too_late_then_it_is_told_to_start_again() -> None:
    log = EventLog(capacity=3)
    for position in range(5):
        log.stored("attention", b"", [bytes([position])], position)
    assert log.since(1) is None
    assert [event.sequence_number for event in log.since(2) or []] == [3, 4, 5]
    assert log.since(5) == []
    assert log.since(6) is None  # a number of another life of this node


def test_events_when_they_have_more_keys_than_are_kept_then_the_oldest_go() -> None:
    log = EventLog(max_keys=2 * MAX_REMOVED_KEYS)
    keys = [number.to_bytes(4, "big") for number in range(2 * MAX_REMOVED_KEYS)]
    log.stored("attention", b"", keys[:MAX_REMOVED_KEYS], MAX_REMOVED_KEYS)
    log.removed("attention", keys[:-1])
    assert log.since(0) is None
    assert [event.keys for event in log.since(1) or []] == [
        tuple(keys[:MAX_REMOVED_KEYS]),
        tuple(keys[MAX_REMOVED_KEYS:-1]),
    ]
    log.removed("attention", [])
    assert log.since(3) == []


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_events_when_one_prompt_takes_the_place_of_20_000_blocks_then_its_readers_can_follow(policy: str) -> None:
    manager = KVCacheManager(make_config(num_blocks=20_010, policy=policy, events=True))
    assert manager.events is not None
    run_turn(manager, range(80_000))
    known, last = picture(manager), manager.events.last_sequence_number
    run_turn(manager, range(80_000, 160_000))
    events = manager.events.since(last)
    assert events is not None
    assert sum(len(event.keys) for event in events if event.kind is EventKind.REMOVED) > 19_000
    assert max(len(event.keys) for event in events if event.kind is EventKind.REMOVED) <= MAX_REMOVED_KEYS
    apply(known, events, 4)
    assert known == picture(manager)


def test_events_when_not_asked_for_then_none_are_kept() -> None:
    assert KVCacheManager(make_config()).events is None
