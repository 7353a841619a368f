"""Steps that are planned before the one in flight was completed: two slots that take turns, the state at the end kept
as it was, blocks of windows not named once they are to be given back."""

from __future__ import annotations

from typing import Any

from common.kv_cache.manager import KVCacheManager
from tests.unit.kv_cache.test_rollback import running
from tests.unit.kv_cache.world import make_config


def ahead(manager: KVCacheManager, num_tokens: int, src_slot: int) -> int:
    """The slot that a step ahead writes which runs the last of ``num_tokens`` tokens."""
    view = manager.extend_ahead("s", num_tokens, src_slot)
    assert view is not None
    assert view.src_slot == src_slot
    assert view.dst_slot not in (0, src_slot)
    assert manager.check() == []
    return view.dst_slot


def test_slots_when_steps_are_ahead_then_take_turns_and_the_end_is_in_the_one_before_the_last_row() -> None:
    manager = running(11, 12)
    manager.take_block_copies()
    keys = manager.sequence("s").keys
    first = manager.sequence("s").dst_slot
    second = ahead(manager, 13, first)
    manager.complete_step("s", 12)
    assert manager.sequence("s").dst_slot == first
    keys.extend([13])
    assert ahead(manager, 14, second) == first
    manager.complete_step("s", 13, is_ahead=True)
    view = manager.sequence("s")
    assert (view.src_slot, view.dst_slot) == (second, second)
    assert manager.check() == []
    keys.extend([14])  # the end; its row is not run, and what the step ahead made of it is dropped
    manager.free("s", donate=True)
    assert manager.check() == []
    hit = manager.lookup(manager.prefix_keys(list(range(1, 20))), 19)
    assert hit.checkpoint is not None
    assert (hit.num_tokens, hit.checkpoint.slot_id) == (13, second)
    assert manager.stats().slots["held"] == 0


def test_step_ahead_when_no_slot_or_block_can_be_had_then_is_none_and_nothing_changed() -> None:
    cases: list[dict[str, Any]] = [{"num_slots": 2}, {"num_blocks": 6}]
    for sizes in cases:
        manager = running(11, 12, **sizes)
        manager.take_block_copies()
        before = manager.stats()
        assert manager.extend_ahead("s", 29, manager.sequence("s").dst_slot) is None
        assert (manager.stats().slots, manager.stats().blocks) == (before.slots, before.blocks)
        assert manager.check() == []


def test_step_ahead_when_the_one_in_flight_gives_its_open_block_away_then_is_none() -> None:
    manager = running(11, 13)
    manager.take_block_copies()
    slot = manager.sequence("s").dst_slot
    assert manager.plan_saves("s", 11, 13, {13: "grid"})
    assert manager.extend_ahead("s", 14, slot) is None
    manager.complete_step("s", 13)
    assert manager.extend_ahead("s", 14, slot) is None
    assert sum(map(len, manager.take_block_copies().values())) == 1
    assert manager.extend_ahead("s", 14, slot) is not None


def test_window_when_a_step_is_ahead_then_what_it_leaves_is_not_named_and_given_back_with_the_step_before() -> None:
    manager = KVCacheManager(make_config(windows=(5,), state=False, caching=False), clock=lambda: 0.0)
    keys = manager.prefix_keys(list(range(1, 8)))
    assert manager.admit("s", keys, None, 7)
    manager.complete_step("s", 7)
    keys.extend([8])
    assert manager.extend("s", 8)
    (table,) = manager.sequence("s").tables[-1:]
    before = list(table.block_ids)
    assert before[0]
    view = manager.extend_ahead("s", 9, 0)
    assert view is not None
    after = list(table.block_ids)
    assert after[: len(before)] == before
    assert list(view.tables[-1].block_ids) == [0, *after[1:]]
    manager.complete_step("s", 8)
    assert table.block_ids == [0, *after[1:]]
    assert manager.check() == []
