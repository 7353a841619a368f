"""What a sequence may count on: where it resumes, what it shares, what it leaves behind."""

from __future__ import annotations

import pytest

from common.kv_cache.keys import PrefixKeys
from common.kv_cache.prefix.admitted_prefixes import AdmittedPrefixes
from tests.unit.kv_cache.world import World, make_config

A = list(range(100, 140))


def test_repeat_when_prompt_was_finished_then_hit_is_exact_with_its_row() -> None:
    world = World(make_config())
    world.prefill("a", A[:10])
    world.manager.free("a", donate=False)
    hit = world.manager.lookup(world.keys(A[:10]), 10)
    assert (hit.num_tokens, hit.output_row) == (10, world.row(A[:10]))
    assert world.admit("b", A[:10])
    end = world.manager.finish_prompt("b", None)
    assert end.is_published
    assert world.manager.sequence("b").src_slot == end.slot_id
    world.decode("b", [1, 2, 3])
    world.check()


def test_longer_prompt_when_earlier_end_is_inside_a_block_then_resumes_there_in_a_tail_copy() -> None:
    world = World(make_config())
    end = world.prefill("a", A[:10])
    world.manager.free("a", donate=False)
    assert world.admit("b", A[:17])
    view = world.manager.sequence("b")
    assert view.num_computed_tokens == view.tables[0].write_from == 10
    assert view.tables[0].block_ids[2] != end.tail_block_ids[0]
    assert world.manager.take_block_copies() == {0: [(end.tail_block_ids[0], view.tables[0].block_ids[2])]}
    assert view.src_slot == end.slot_id
    world.check()


def test_shared_prefix_when_no_state_is_there_then_junction_is_saved_and_used_next_time() -> None:
    world = World(make_config())
    world.prefill("a", A[:20])
    keys = world.keys([*A[:13], 1, 2, 3])
    hit = world.manager.lookup(keys, 16)
    assert (hit.num_tokens, hit.num_attention_tokens, hit.junction, hit.num_written) == (0, 12, 12, (12,))
    assert world.manager.save_positions(16, hit) == {12: "junction", 16: "prompt_end"}
    world.prefill("b", [*A[:13], 1, 2, 3])
    assert world.manager.sequence("b").tables[0].block_ids[:3] == world.manager.sequence("a").tables[0].block_ids[:3]
    third = world.manager.lookup(world.keys([*A[:13], 5, 6, 7]), 16)
    assert (third.num_tokens, third.junction) == (12, None)
    stats = world.manager.stats()
    assert stats.lost_tokens == {"no_state": 12}
    assert (stats.hit_tokens["attention"], stats.hit_tokens["state"]) == (12, 0)
    world.check()


@pytest.mark.parametrize("windows", [(), (6,)])
def test_shared_prefix_when_no_group_keeps_every_position_then_junction_is_saved_and_used_next_time(
    windows: tuple[int, ...],
) -> None:
    world = World(make_config(attention=False, windows=windows))
    world.prefill("a", A[:20])
    hit = world.manager.lookup(world.keys([*A[:13], 1, 2, 3]), 16)
    assert (hit.num_tokens, hit.num_attention_tokens, hit.junction) == (0, 0, 12)
    world.prefill("b", [*A[:13], 1, 2, 3])
    third = world.manager.lookup(world.keys([*A[:13], 5, 6, 7]), 16)
    assert (third.num_tokens, third.junction) == (12, None)
    assert world.manager.lookup(world.keys(A[:20]), 20).junction is None
    other = world.manager.lookup(world.keys([99, *A[:13]]), 14)
    assert (other.num_tokens, other.junction) == (0, None)
    world.check()


def test_seen_prefixes_when_too_many_then_the_longest_unseen_go_deep_end_first() -> None:
    seen = AdmittedPrefixes(max_keys=6)
    prompts = [PrefixKeys(b"root", 4, [number] * 16) for number in range(3)]
    for prompt in prompts[:2]:
        seen.add(prompt, 16)
    assert [seen.depth(prompt, 16) for prompt in prompts] == [8, 16, 0]
    seen.add(prompts[0], 11)  # its first two blocks again
    seen.add(prompts[2], 15)
    assert [seen.depth(prompt, 16) for prompt in prompts] == [8, 4, 12]
    assert seen.depth(prompts[2], 10) == 8
    seen.add(PrefixKeys(b"root", 4, range(100)), 100)
    assert len(seen) == 6


def test_lookup_when_prefix_start_was_evicted_then_deeper_checkpoint_is_not_used() -> None:
    world = World(make_config(num_blocks=7))
    assert world.admit("loser", A[:12])
    assert world.admit("winner", A[:4])
    world.step("winner", 4)
    world.step("loser", 8, {8})
    world.manager.free("winner", donate=False)
    assert world.admit("pressure", [7] * 16)  # evicts the winner's first block; the loser's copy of it is private
    hit = world.manager.lookup(world.keys(A[:12]), 12)
    assert (hit.num_tokens, hit.num_attention_tokens, hit.num_state_tokens) == (0, 0, 8)
    world.check()


def test_checkpoint_when_its_attention_went_while_leased_then_it_goes_with_the_lease() -> None:
    world = World(make_config(num_blocks=6))
    assert world.admit("winner", A[:4])
    assert world.admit("loser", A[:6])
    world.step("winner", 4)
    world.step("loser", 6)
    world.manager.finish_prompt("loser", None, seal=True)
    world.manager.lease("loser", "lease", 10.0)
    world.manager.free("loser", donate=False)
    world.manager.free("winner", donate=False)
    assert world.admit("pressure", [7] * 16)
    assert world.manager.stats().num_checkpoints == 1
    assert world.manager.release_lease("lease")
    assert world.manager.stats().num_checkpoints == 0
    assert world.manager.stats().checkpoints_evicted == {"attention": 1}
    world.check()


@pytest.mark.parametrize("state", [True, False])
def test_admit_when_hit_went_stale_then_refused_and_nothing_changed(state: bool) -> None:
    world = World(make_config(num_blocks=4, state=state))
    world.prefill("a", A[:12])
    world.manager.free("a", donate=False)
    keys = world.keys(A[:13])
    hit = world.manager.lookup(keys, 13)
    assert world.admit("b", [7] * 16)
    world.manager.free("b", donate=False)
    before = world.manager.stats()
    assert not world.manager.admit("c", keys, hit, 13)
    assert world.manager.stats() == before
    world.check()


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(2, 4), (8, 1)])
def test_admit_when_it_does_not_fit_then_false_and_nothing_changed(num_blocks: int, num_slots: int) -> None:
    world = World(make_config(num_blocks=num_blocks, num_slots=num_slots))
    assert world.admit("a", A[:4])
    before = world.manager.stats()
    assert not world.admit("b", [1] * 8)
    assert world.manager.stats() == before
    assert not world.manager.extend("a", 4 * num_blocks + 1)
    assert world.manager.stats() == before
    world.check()


def test_two_sequences_when_same_prefix_in_one_step_then_first_publisher_wins() -> None:
    world = World(make_config())
    assert world.admit("a", A[:8])
    assert world.admit("b", A[:8])
    world.step("b", 8)
    world.step("a", 8)
    assert list(world.manager.lookup(world.keys(A[:9]), 9).tables[0]) == world.manager.sequence("b").tables[0].block_ids
    world.manager.free("a", donate=False)
    assert world.manager.stats().blocks["cached"] == 0
    world.manager.free("b", donate=False)
    assert world.manager.stats().blocks["cached"] == 2
    world.check()


def test_publication_when_step_has_not_completed_then_nothing_is_found() -> None:
    world = World(make_config())
    assert world.admit("a", A[:8])
    assert world.manager.lookup(world.keys(A[:8]), 8).num_attention_tokens == 0


def test_prompt_end_when_no_slot_is_left_then_skipped_counted_and_generation_goes_on() -> None:
    world = World(make_config(num_slots=1))
    end = world.prefill("a", A[:10])
    assert (end.slot_id, end.is_published) == (0, False)
    assert world.manager.stats().checkpoints_skipped["no_slot"] == 2  # the planned save, then the rotation
    world.decode("a", [1, 2])
    world.check()


def test_prompt_end_when_no_block_is_left_then_skipped_and_counted() -> None:
    world = World(make_config(num_blocks=3))
    assert not world.prefill("a", A[:10]).is_published
    assert world.manager.stats().checkpoints_skipped == {"no_block": 1}
    world.decode("a", [1, 2])
    world.check()


def test_prompt_end_when_one_spare_block_and_slot_then_kept_and_sequence_goes_on_in_copies() -> None:
    world = World(make_config(num_blocks=4, num_slots=2))
    end = world.prefill("a", A[:10], plan_end=False)
    assert end.is_published
    view = world.manager.sequence("a")
    assert view.tables[0].block_ids[2] != end.tail_block_ids[0]
    assert view.src_slot == end.slot_id
    assert view.dst_slot != end.slot_id
    world.decode("a", [1, 2])
    assert world.manager.lookup(world.keys(A[:10]), 10).num_tokens == 10
    world.check()


def test_abort_when_a_save_was_planned_then_its_slot_is_free_again() -> None:
    world = World(make_config(num_slots=3))
    assert world.admit("a", A[:10])
    assert len(world.manager.plan_saves("a", 0, 10, {4, 10})) == 2
    assert world.manager.plan_saves("a", 0, 10, {4, 10}) == world.manager.plan_saves("a", 0, 10, {4, 10})
    world.manager.free("a", donate=True)
    assert world.manager.stats().slots["free"] == 3
    world.check()


def test_plan_saves_when_checkpoints_fill_the_slots_then_least_recently_used_goes() -> None:
    world = World(make_config(num_slots=3))
    for name, first in (("a", 1), ("b", 2)):
        world.prefill(name, [first] * 6, seal=True)
        world.manager.free(name, donate=False)
    assert world.manager.lookup(world.keys([1] * 6), 6).num_tokens == 6
    world.prefill("c", [3] * 6)
    assert world.manager.lookup(world.keys([1] * 6), 6).num_tokens == 0
    assert world.manager.lookup(world.keys([2] * 6), 6).num_tokens == 6
    world.check()


def test_donated_state_when_generation_ended_then_next_turn_resumes_after_it() -> None:
    world = World(make_config())
    world.prefill("a", A[:10])
    world.decode("a", [1, 2, 3])
    world.manager.free("a", donate=True)
    hit = world.manager.lookup(world.keys([*A[:10], 1, 2, 3, 4, 5]), 15)
    assert hit.num_tokens == 13
    assert world.manager.stats().checkpoints_saved["donated"] == 1
    world.check()


def test_donation_when_the_first_publishers_block_was_evicted_then_the_losers_copy_takes_its_place() -> None:
    world = World(make_config(num_blocks=7))
    assert world.admit("loser", A[:12])
    assert world.admit("winner", A[:4])
    world.step("winner", 4)
    world.step("loser", 8)
    world.manager.free("winner", donate=False)
    assert world.admit("pressure", [7] * 16)  # evicts the winner's block
    assert world.manager.lookup(world.keys(A[:12]), 12).num_attention_tokens == 0
    world.manager.free("loser", donate=True)
    assert world.manager.lookup(world.keys(A[:12]), 12).num_tokens == 8
    world.check()
    world.check_published()


def test_donation_when_running_slot_was_never_written_then_nothing_is_published() -> None:
    world = World(make_config(max_checkpoints=1))
    world.prefill("a", A[:6], plan_end=False)
    world.prefill("b", [7] * 6, plan_end=False)  # over the limit: private end, rotated, nothing run since
    world.manager.free("a", donate=False)
    world.manager.free("b", donate=True)
    assert world.manager.lookup(world.keys([7] * 7), 7).num_tokens == 0
    world.check()


def test_eviction_when_boundary_block_goes_then_linked_checkpoint_goes_too() -> None:
    world = World(make_config(num_blocks=4))
    world.prefill("a", A[:10], seal=True)
    world.manager.free("a", donate=False)
    assert world.admit("b", [7] * 16)
    stats = world.manager.stats()
    assert (stats.num_checkpoints, stats.num_cached_prefix_blocks, stats.slots["cached"]) == (0, 0, 0)
    world.check()


def test_admit_when_pool_is_full_then_its_own_hit_is_never_evicted_for_it() -> None:
    world = World(make_config(num_blocks=5, num_slots=2))
    end = world.prefill("a", A[:10], seal=True)
    world.manager.free("a", donate=False)
    assert world.admit("b", A[:14])
    assert world.manager.sequence("b").src_slot == end.slot_id
    world.step("b", 14)
    world.check()


def test_resumed_checkpoint_when_first_step_completed_then_evictable_again() -> None:
    world = World(make_config(num_slots=2))
    world.prefill("a", A[:10], seal=True)
    world.manager.free("a", donate=False)
    assert world.admit("b", A[:14])
    assert not world.admit("c", [7] * 4)
    world.step("b", 14)
    assert world.admit("c", [7] * 4)
    world.check()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("state", [True, False])
def test_fork_when_prompt_ends_inside_a_block_then_each_goes_its_own_way(caching: bool, state: bool) -> None:
    world = World(make_config(caching=caching, state=state))
    world.prefill("a", A[:10])
    assert world.fork("a", "b")
    assert world.fork("a", "c")
    tables = [world.manager.sequence(name).tables[0].block_ids for name in "abc"]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    world.decode("a", [1, 2, 3])
    world.decode("c", [7, 8])
    world.decode("b", [4, 5, 6])
    for name in "abc":
        world.manager.free(name, donate=True)
    world.check()


def test_fork_when_memory_is_short_then_false_and_nothing_changed() -> None:
    world = World(make_config(num_blocks=4, num_slots=2))
    world.prefill("a", A[:10], plan_end=False)
    before = world.manager.stats()
    assert not world.fork("a", "b")
    assert world.manager.stats() == before


def test_dense_model_when_prompt_repeats_without_row_then_last_token_alone_is_computed_and_not_written() -> None:
    world = World(make_config(state=False))
    world.prefill("a", A[:12])
    world.manager.free("a", donate=False)
    hit = world.manager.lookup(world.keys(A[:8]), 8)
    assert (hit.num_tokens, hit.num_written, hit.output_row) == (7, (8,), None)
    exact = world.manager.lookup(world.keys(A[:12]), 12)
    assert (exact.num_tokens, exact.output_row) == (12, world.row(A[:12]))
    world.prefill("b", A[:8])
    world.check()


def test_dense_model_when_tail_was_donated_then_next_turn_continues_in_a_copy() -> None:
    world = World(make_config(state=False))
    world.prefill("a", A[:9])
    world.decode("a", [1])
    world.manager.free("a", donate=True)
    hit = world.manager.lookup(world.keys([*A[:9], 1, 2]), 11)
    assert (hit.num_tokens, hit.num_written) == (10, (10,))
    world.prefill("b", [*A[:9], 1, 2])
    world.check()


def test_cache_salt_when_it_differs_then_nothing_is_shared() -> None:
    world = World(make_config())
    world.prefill("a", A[:10])
    assert world.manager.lookup(world.keys(A[:10], salt="tenant"), 10).num_attention_tokens == 0


def test_caching_disabled_when_a_sequence_runs_then_it_holds_one_slot_and_leaves_nothing() -> None:
    world = World(make_config(caching=False))
    world.prefill("a", A[:10])
    assert world.manager.stats().slots["held"] == 1
    world.decode("a", [1, 2])
    world.manager.free("a", donate=True)
    stats = world.manager.stats()
    assert (stats.slots["free"], stats.blocks["free"]) == (16, 64)
    world.check()


def test_bucket_when_ninth_tail_follows_one_boundary_then_least_recently_used_is_replaced() -> None:
    world = World(make_config(num_slots=16))
    for last in range(9):
        world.prefill("a", [*A[:4], last], seal=True)
        world.manager.free("a", donate=False)
    assert world.manager.stats().checkpoints_evicted == {"limit": 2}  # nine tails and the junction, eight may stay
    assert world.manager.lookup(world.keys([*A[:4], 0]), 5).num_tokens == 4
    assert world.manager.lookup(world.keys([*A[:4], 8]), 5).num_tokens == 5
    world.check()


def test_generation_when_unit_is_allocated_then_bumped_and_owner_appends_leave_it() -> None:
    world = World(make_config(num_blocks=3, num_slots=1))
    generations = world.manager.generations
    start = [generations.generation("blocks", block_id) for block_id in range(4)]
    start_slot = generations.generation("slots", 1)
    assert len(set(start)) == 4  # random: no two units share one by chance
    assert world.admit("a", A[:5])
    table = list(world.manager.sequence("a").tables[0].block_ids)
    before = [generations.generation("blocks", block_id) for block_id in table]
    assert before == [start[block_id] + 1 for block_id in table]
    world.step("a", 5)
    world.decode("a", [1, 2])
    assert [generations.generation("blocks", block_id) for block_id in table] == before
    world.manager.free("a", donate=False)
    assert [generations.generation("blocks", block_id) for block_id in table] == before
    assert world.admit("b", [7] * 12)
    assert [generations.generation("blocks", block_id) for block_id in table] == [each + 1 for each in before]
    assert generations.generation("slots", 1) == start_slot + 2
    assert generations.generation("blocks", 0) == generations.generation("slots", 0) == generations.epoch
