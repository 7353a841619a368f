"""Which state a sequence goes on from when drafts behind its last token were wrong, and that every slot is accounted
for."""

from __future__ import annotations

from typing import Any

import pytest

from common.kv_cache.manager import KVCacheManager
from tests.unit.kv_cache.world import make_config

BLOCK = 4


def running(num_tokens: int, num_known: int, **cache: Any) -> KVCacheManager:
    """One sequence whose first ``num_tokens`` are computed, of ``num_known`` that are known."""
    manager = KVCacheManager(make_config(block_size=BLOCK, **cache), clock=lambda: 0.0)
    keys = manager.prefix_keys(list(range(1, num_tokens + 1)))
    assert manager.admit("s", keys, None, num_tokens)
    manager.complete_step("s", num_tokens)
    manager.finish_prompt("s", "row")
    keys.extend(range(num_tokens + 1, num_known + 1))
    assert manager.extend("s", num_known + 8)
    return manager


@pytest.mark.parametrize(
    ("last", "num_right", "position"),
    [
        (12, 12, 12),  # none: the one saved behind the known tokens
        (12, 14, 12),  # two: they run again
        (14, 14, 14),  # each has its own
        (14, 13, 13),
        (13, 15, 13),  # the last ones had no slot
        (12, 16, 16),  # all: the running slot itself
    ],
)
def test_state_when_drafts_were_run_then_is_the_last_one_that_saw_right_tokens_only(
    last: int, num_right: int, position: int
) -> None:
    manager = running(11, 12)
    end = 16
    before = manager.stats().slots["held"]
    planned = manager.plan_rollback("s", 12, last)
    assert planned is not None
    slots = dict(planned)
    assert list(slots) == list(range(12, last + 1))
    assert manager.check() == []
    running_slot = manager.sequence("s").dst_slot
    manager.sequence("s").keys.extend(range(13, num_right + 2))
    assert manager.complete_drafts("s", end, num_right) == position
    view = manager.sequence("s")
    assert (view.src_slot, view.dst_slot) == ((slots[position],) * 2 if position < end else (running_slot,) * 2)
    assert view.num_computed_tokens == position
    assert manager.check() == []
    assert manager.stats().slots["held"] <= before


def test_drafts_when_no_slot_can_be_had_then_are_not_run() -> None:
    manager = running(11, 12, num_slots=2)  # of the prompt's end, which the next step reads, and the running one
    assert manager.plan_rollback("s", 12, 14) is None
    manager.free("s", donate=False)
    assert manager.check() == []


def test_sequence_when_it_ends_between_plan_and_step_then_gives_its_slots_back() -> None:
    manager = running(11, 12)
    assert manager.plan_rollback("s", 12, 15)
    manager.free("s", donate=False)
    assert manager.check() == []
    assert manager.stats().slots["held"] == 0


def test_blocks_when_drafts_were_wrong_then_only_right_tokens_are_published() -> None:
    manager = running(11, 12)
    manager.plan_rollback("s", 12, 12)
    manager.sequence("s").keys.extend([13, 14, 15])  # two right ones, and what came in place of the third
    assert manager.complete_drafts("s", 18, 14) == 12
    assert manager.stats().num_cached_prefix_blocks == 3
    manager.free("s", donate=True)
    assert manager.lookup(manager.prefix_keys(list(range(1, 30))), 29).num_tokens == 12
    assert manager.check() == []


def test_drafts_when_the_mode_is_align_then_end_at_a_boundary() -> None:
    aligned = running(11, 12, mode="align")
    assert [aligned.max_drafts(known, 7) for known in (11, 12, 13, 14)] == [1, 0, 3, 2]
    assert running(11, 12).max_drafts(12, 7) == 7
