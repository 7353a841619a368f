"""Prefixes between nodes: null entries, destinations, leases, quarantine."""

from __future__ import annotations

import threading

from tests.unit.kv_cache.world import World, make_config

A = list(range(1000, 1700))


def test_remote_prefix_when_400_tokens_in_blocks_of_128_then_real_hits_count_and_nulls_are_registered() -> None:
    world = World(make_config(block_size=128, num_blocks=20))
    plan = world.pull("first", A[:400])
    assert plan is not None
    assert plan.num_local_tokens == 0  # [null, null, null, slot]: padding is not a hit
    assert [index for index, _ in plan.pairs[0]] == [0, 1, 2, 3]
    stats = world.manager.stats()
    assert (stats.hit_tokens["attention"], stats.num_cached_prefix_blocks, stats.num_marked_blocks) == (0, 3, 3)

    other = world.keys(A[:384] + [1] * 100)
    hit = world.lookup_remote(other, 484)
    assert (hit.num_attention_tokens, hit.has_state, hit.num_marked_tokens) == (384, False, 384)
    local = world.manager.lookup(other, 484)
    assert (local.num_tokens, local.num_attention_tokens, local.num_state_tokens) == (0, 384, 0)

    second = world.pull("second", A[:384] + [1] * 100)
    assert second is not None
    assert (second.num_local_tokens, [index for index, _ in second.pairs[0]]) == (384, [3])
    assert second.slot_id != 0
    again = world.lookup_remote(world.keys(A[:400]), 400)
    assert (again.num_attention_tokens, again.has_state) == (400, True)
    world.check()


def test_null_entry_when_a_real_state_comes_for_its_key_then_replaced() -> None:
    world = World(make_config(block_size=4))
    world.pull("a", A[:10])
    assert world.manager.stats().num_marked_blocks == 2
    world.prefill("b", A[:8])
    assert world.manager.stats().num_marked_blocks == 1
    assert world.manager.lookup(world.keys(A[:9]), 9).num_tokens == 8
    world.check()


def test_null_entries_when_many_distinct_prompts_pass_then_bounded_by_the_pool() -> None:
    world = World(make_config(num_blocks=12, num_slots=4))
    for turn in range(200):
        assert world.pull("a", [turn] * 10) is not None
        world.manager.free("a", donate=False)
        assert world.manager.stats().num_marked_blocks <= 12
    world.check()


def test_exact_repeat_when_checkpoint_is_here_then_nothing_is_pulled_and_it_runs() -> None:
    world = World(make_config())
    world.pull("a", A[:10])
    plan = world.pull("b", A[:10])
    assert plan is not None
    assert plan.is_empty
    world.decode("a", [1, 2])
    world.decode("b", [3, 4])
    world.check()


def test_commit_when_no_running_slot_is_left_then_runs_in_the_pulled_slot_and_counts_it() -> None:
    world = World(make_config(num_slots=1))
    assert world.pull("a", A[:10]) is not None
    view = world.manager.sequence("a")
    assert view.src_slot == view.dst_slot == 1
    assert world.manager.stats().checkpoints_skipped == {"no_slot": 1}
    world.decode("a", [1, 2])
    world.check()


def test_accept_when_it_does_not_fit_then_none_and_nothing_changed() -> None:
    world = World(make_config(num_blocks=2))
    before = world.manager.stats()
    assert world.manager.accept_remote("a", world.keys(A[:10]), 10) is None
    assert world.manager.stats() == before


def test_destinations_when_not_committed_then_nobody_finds_them() -> None:
    world = World(make_config())
    assert world.manager.accept_remote("a", world.keys(A[:10]), 10) is not None
    assert world.manager.lookup(world.keys(A[:10]), 10).num_attention_tokens == 0
    world.manager.abandon_remote("a", quarantine=False)
    assert world.manager.stats().blocks["free"] == 64
    world.check()


def test_quarantine_when_read_is_not_terminal_then_units_wait_for_release() -> None:
    world = World(make_config(num_blocks=4, num_slots=2))
    world.pull("warm", A[:4])
    world.manager.free("warm", donate=False)
    plan = world.manager.accept_remote("a", world.keys(A[:10]), 10)
    assert plan is not None
    assert plan.num_local_tokens == 4
    world.manager.abandon_remote("a", quarantine=True)
    stats = world.manager.stats()
    assert (stats.blocks["quarantined"], stats.slots["quarantined"]) == (2, 1)
    assert not world.admit("b", [7] * 12)
    world.check()
    assert world.manager.release_quarantine("a")
    assert not world.manager.release_quarantine("a")
    assert world.admit("b", [7] * 12)
    world.check()


def test_lease_when_holder_forgets_the_sequence_then_bytes_and_generations_stay() -> None:
    for caching in (True, False):
        world = World(make_config(num_blocks=5, num_slots=2, caching=caching))
        world.prefill("a", A[:10], seal=True)
        lease = world.manager.lease("a", "lease", 5.0)
        world.manager.free("a", donate=True)
        assert (lease.num_tokens, len(lease.tables[0]), lease.output_row) == (10, 3, world.row(A[:10]))
        assert not world.admit("b", [7] * 12)
        assert world.admit("c", [7] * 8)
        assert world.slots[lease.slot_id] == tuple(A[:10])
        assert lease.slot_generation == world.manager.generations.generation("slots", lease.slot_id)
        assert world.manager.stats().blocks["leased"] == 3
        assert world.manager.release_lease("lease")
        assert not world.manager.release_lease("lease")
        world.check()


def test_lease_when_prompt_end_was_not_kept_then_sequence_is_sealed() -> None:
    world = World(make_config(num_slots=1, caching=False))
    world.prefill("a", A[:10])
    lease = world.manager.lease("a", "lease", 5.0)
    assert lease.slot_id == 1
    world.manager.free("a", donate=False)
    assert world.manager.stats().slots["leased"] == 1
    world.check()


def test_lease_when_renewed_from_another_thread_then_expires_later_and_only_between_steps() -> None:
    world = World(make_config())
    world.prefill("a", A[:10], seal=True)
    world.manager.lease("a", "lease", 5.0)
    world.manager.free("a", donate=False)
    renewed: list[bool] = []
    thread = threading.Thread(target=lambda: renewed.append(world.manager.leases.renew("lease", 9.0)))
    thread.start()
    thread.join()
    assert renewed == [True]
    assert world.manager.leases.renew("lease", 7.0)
    assert world.manager.next_lease_deadline() == 9.0
    world.clock.now_s = 8.9
    assert world.manager.expire_leases() == []
    world.clock.now_s = 9.0
    assert world.manager.stats().leases_active == 1
    assert world.manager.expire_leases() == ["lease"]
    assert not world.manager.leases.renew("lease", 20.0)
    assert (world.manager.stats().leases_active, world.manager.stats().leases_expired) == (0, 1)
    assert world.manager.next_lease_deadline() is None
    world.check()


def test_handed_over_prompt_when_decode_continues_it_then_next_turn_is_local() -> None:
    world = World(make_config())
    world.pull("a", A[:10])
    world.decode("a", [1, 2, 3, 4])
    world.manager.free("a", donate=True)
    assert world.manager.lookup(world.keys([*A[:10], 1, 2, 3, 4, 5]), 15).num_tokens == 14
    world.check()
