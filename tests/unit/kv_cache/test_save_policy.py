"""Which positions each mode keeps."""

from __future__ import annotations

import pytest

from common.kv_cache.checkpoints.save_policy import MAX_SEMANTIC_SAVES, SavePolicy
from common.kv_cache.manager import KVCacheManager
from tests.unit.kv_cache.turns import run_turn
from tests.unit.kv_cache.world import World, make_config

A = list(range(1000, 1200))


def policy(mode: str = "auto", interval: int | None = None, **options: bool) -> SavePolicy:
    return SavePolicy(make_config(block_size=16, mode=mode, interval=interval, **options))


@pytest.mark.parametrize(
    ("mode", "interval", "expected"),
    [
        ("none", None, []),
        ("auto", None, [30, 50, 96, 100]),
        ("auto", 32, [30, 32, 50, 64, 96, 100]),
        ("all", None, [16, 32, 48, 64, 80, 96]),
        ("all", 32, [32, 64, 96]),
        ("all", 64, [64, 96]),  # 96 is the replay boundary
        ("align", 64, [64, 96]),
    ],
)
def test_positions_when_prompt_is_new_then_those_of_the_mode(
    mode: str, interval: int | None, expected: list[int]
) -> None:
    assert sorted(policy(mode, interval).prompt_positions(100, 0, None, (50, 30, 96, 100, 0))) == expected


def test_positions_when_part_is_cached_then_only_what_is_still_computed() -> None:
    resume, junction = 40, 64
    assert policy().prompt_positions(100, resume, junction, (30, 40, 50)) == {
        50: "semantic",
        64: "junction",
        100: "prompt_end",
    }
    assert sorted(policy("all").prompt_positions(100, resume, junction)) == [48, 64, 80, 96]
    assert sorted(policy("all", 80).prompt_positions(100, resume, junction)) == [64, 80, 96]
    assert policy("none").prompt_positions(100, resume, junction, (50,)) == {}


def test_positions_when_there_are_too_many_boundaries_then_the_most_valuable_stay() -> None:
    boundaries = list(range(90, 0, -5))
    kept = policy().prompt_positions(100, 0, None, boundaries)
    assert sorted(kept) == sorted([*boundaries[:MAX_SEMANTIC_SAVES], 100])


def test_positions_when_model_is_dense_or_caching_is_off_then_none() -> None:
    assert policy(state=False).prompt_positions(100, 0, None, (50,)) == {}
    assert policy(caching=False).prompt_positions(100, 0, None, (50,)) == {}


def test_slots_when_short_then_the_deep_positions_get_them() -> None:
    world = World(make_config(block_size=16, num_slots=3, mode="all"))
    assert world.admit("a", A[:100])
    wanted = world.manager.save_positions(100, None)
    saves = world.manager.plan_saves("a", 0, 100, wanted)
    assert [position for position, _ in saves] == [80, 96]
    assert world.manager.stats().checkpoints_skipped == {"no_slot": 4}
    world.check()


def test_checkpoints_when_saved_then_counted_by_why() -> None:
    manager = KVCacheManager(make_config(block_size=16, interval=48))
    run_turn(manager, A[:100], A[100:110], boundaries=[20], donate=True)
    run_turn(manager, [*A[:70], *A[:30]])
    saved = manager.stats().checkpoints_saved
    assert saved == {"semantic": 1, "grid": 3, "prompt_end": 2, "donated": 1, "junction": 1}
    origins = {checkpoint.position: checkpoint.origin for checkpoint in manager._coordinator.state}
    assert (origins[20], origins[48], origins[64], origins[109]) == ("semantic", "grid", "junction", "donated")


@pytest.mark.parametrize("mode", ["all", "align"])
def test_prompt_end_when_states_are_kept_by_block_then_kept_on_a_boundary_only(mode: str) -> None:
    world = World(make_config(block_size=16, mode=mode))
    assert not world.prefill("a", A[:100]).is_published
    assert world.manager.stats().checkpoints_skipped == {}
    assert world.prefill("b", A[50:114]).is_published
    assert world.manager.lookup(world.keys(A[50:114]), 64).output_row is not None
    world.check()


@pytest.mark.parametrize("mode", ["auto", "all", "align"])
def test_preempted_sequence_when_donated_then_it_resumes_where_it_was(mode: str) -> None:
    world = World(make_config(block_size=16, mode=mode))
    world.prefill("a", A[:40])
    world.decode("a", A[40:55])
    world.manager.free("a", donate=True)
    hit = world.manager.lookup(world.keys(A[:56]), 56)
    assert hit.num_tokens == 55
    assert world.admit("a", A[:56])
    world.step("a", 56)
    world.check()
