"""Attention groups side by side: sliding windows, MLA latents, full attention, states."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from common.kv_cache.layout import make_layout
from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.spec import GroupKind, StateLayerSpec, StateTensorSpec
from tests.unit.kv_cache.world import World, make_config, make_geometry

A = list(range(1000, 1200))


def cached_positions(world: World, group_id: int) -> list[int]:
    entries = world.manager._coordinator.groups[group_id].entries()
    return sorted(entries.positions[block_id] for block_id in entries.block_of.values())


def test_groups_when_a_model_has_several_then_one_per_kind_and_window() -> None:
    groups = make_geometry(mla=True, windows=(6, 9, 6)).attention_groups
    assert [(group.label, group.pool_name, len(group.layers)) for group in groups] == [
        ("attention", "blocks", 1),
        ("mla", "blocks_1", 1),
        ("window_9", "blocks_2", 1),
        ("window_6", "blocks_3", 2),
    ]
    assert [group.kind for group in groups[2:]] == [GroupKind.SLIDING_WINDOW] * 2


def test_layout_when_groups_differ_then_each_has_blocks_of_its_own_size() -> None:
    layout = make_layout(make_geometry(mla=True, windows=(6, 6)), 4)
    # full: K and V of 4 x 4 floats; MLA: one latent of 4 x 6 floats, padded to 64; two window layers
    assert layout.group_block_bytes == (2 * 64, 128, 2 * 2 * 64)
    latent, nothing = layout.attention[2]
    assert (latent.shape, nothing.shape) == ((1, 4, 6), (1, 4, 0))


def test_layout_when_recurrent_layers_have_different_mixers_then_one_slot_holds_all_their_states() -> None:
    conv = StateTensorSpec("conv", (8, 3), "bfloat16")
    layers = (
        StateLayerSpec(0, "short_conv", (conv,)),
        StateLayerSpec(1, "mamba2", (conv, StateTensorSpec("recurrent", (2, 4, 8), "float32"))),
        StateLayerSpec(2, "gated_delta", (conv, StateTensorSpec("recurrent", (4, 8, 8), "float32"))),
    )
    layout = make_layout(dataclasses.replace(make_geometry(), state_layers=layers), 4)
    assert layout.slot_bytes == 64 + (64 + 256) + (64 + 1024)  # 48 bytes of conv padded to 64
    assert [layout.state[index]["conv"].offset_bytes for index in range(3)] == [0, 64, 384]


def test_storage_when_groups_differ_then_layers_see_their_own_pool() -> None:
    config = make_config(num_blocks=5, mla=True, windows=(6,))
    storage = KVStorage(config, torch.device("cpu"))
    key, value = storage.attention_layer(2)
    assert (tuple(key.shape), tuple(value.shape)) == ((6, 4, 1, 6), (6, 4, 1, 0))
    for layer_idx in (1, 2, 3):
        storage.attention_layer(layer_idx)[0][3] = float(layer_idx)
    for layer_idx in (1, 2, 3):
        assert (storage.attention_layer(layer_idx)[0][3] == layer_idx).all()
        assert (storage.attention_layer(layer_idx)[0][4] == 0).all()
    storage.copy_blocks([(3, 4)], group_id=2)
    assert (storage.attention_layer(3)[0][4] == 3).all()
    assert (storage.attention_layer(1)[0][4] == 0).all()


def test_window_when_a_sequence_goes_on_then_blocks_behind_it_are_given_back() -> None:
    world = World(make_config(num_blocks=12, state=False, attention=False, windows=(6,), caching=False))
    assert world.admit("a", A[:10])
    assert world.manager.stats().blocks["held"] == 3
    world.step("a", 10)
    world.manager.finish_prompt("a", None)
    assert world.manager.sequence("a").tables[0].block_ids[0] == 0  # going on reads 5 .. 9
    assert world.manager.stats().blocks["held"] == 2
    world.decode("a", A[10:100])
    assert world.manager.stats().blocks["held"] == 2
    assert world.manager.stats().blocks["free"] == 10
    world.manager.free("a", donate=True)
    world.check()


def test_window_when_its_blocks_left_a_sequence_then_they_stay_cached_for_others() -> None:
    world = World(make_config(state=False, attention=False, windows=(6,)))
    world.prefill("a", A[:40])
    assert cached_positions(world, 0) == list(range(4, 41, 4))
    hit = world.manager.lookup(world.keys([*A[:21], 1]), 22)
    assert (hit.num_tokens, [bool(block_id) for block_id in hit.tables[0]]) == (20, [False] * 3 + [True] * 2)
    world.prefill("b", [*A[:21], 1])
    world.check()
    world.check_published()


@pytest.mark.parametrize(("window", "needed"), [(2, [5]), (5, [5]), (6, [4, 5]), (9, [4, 5]), (10, [3, 4, 5])])
def test_window_when_looked_up_from_the_right_then_enough_blocks_fill_it(window: int, needed: list[int]) -> None:
    world = World(make_config(state=False, windows=(window,)))
    world.prefill("a", A[:26])
    hit = world.manager.lookup(world.keys([*A[:24], 1, 2, 3]), 27)
    assert hit.num_tokens == 24
    full, windowed = hit.tables
    assert all(full)
    assert [index for index, block_id in enumerate(windowed) if block_id] == needed
    world.prefill("b", [*A[:24], 1, 2, 3])
    world.check()


def test_window_when_a_needed_block_is_gone_then_the_next_shorter_resume_is_taken() -> None:
    world = World(make_config(state=False, windows=(6,)))
    world.prefill("a", A[:26])
    world.manager.free("a", donate=False)
    coordinator = world.manager._coordinator
    window = coordinator.groups[1]
    coordinator._evict_blocks(window, (window.get(world.keys(A).boundary_key(5)),))
    hit = world.manager.lookup(world.keys([*A[:24], 1, 2, 3]), 27)
    assert (hit.num_tokens, hit.num_attention_tokens) == (16, 24)  # blocks 3 and 4 fill the window before 16
    assert hit.num_written == (24, 16)  # full attention is shared beyond the resume, not stored twice
    assert hit.num_windowless_tokens == 24
    world.prefill("b", [*A[:24], 1, 2, 3])
    assert world.manager.sequence("b").tables[0].block_ids[:6] == list(hit.tables[0])
    stats = world.manager.stats()
    assert stats.lost_tokens == {"no_window": 8}
    assert stats.hit_tokens == {"attention": 24, "window_6": 8, "joint": 16}  # 8: two real blocks, two null ones
    world.check()
    world.check_published()


def test_window_when_the_whole_prompt_is_here_without_a_row_then_one_token_further_back_is_needed() -> None:
    world = World(make_config(state=False, attention=False, windows=(5,)))
    world.prefill("a", A[:13])
    world.manager.free("a", donate=False)
    hit = world.manager.lookup(world.keys(A[:12]), 12)
    # the last token, 11, is computed again and reads 7 .. 10: two blocks, although going on after 12 reads 8 .. 11
    assert (hit.num_tokens, [bool(block_id) for block_id in hit.tables[0]]) == (11, [False, True, True])
    coordinator = world.manager._coordinator
    window = coordinator.groups[0]
    coordinator._evict_blocks(window, (window.get(world.keys(A).boundary_key(2)),))
    assert world.manager.lookup(world.keys([*A[:12], 1]), 13).num_tokens == 12
    assert world.manager.lookup(world.keys(A[:12]), 12).num_tokens == 4
    world.prefill("b", A[:12])
    world.check()
    world.check_published()


def test_window_when_its_far_end_is_gone_then_a_state_is_no_use_and_the_one_below_is_taken() -> None:
    world = World(make_config(windows=(6,)))
    world.prefill("a", A[:30], boundaries=[10, 24])
    world.manager.free("a", donate=False)
    coordinator = world.manager._coordinator
    window = coordinator.groups[1]
    coordinator._evict_blocks(window, (window.get(world.keys(A).boundary_key(5)),))  # 19 .. 23 are read at 24
    assert world.admit("b", [*A[:24], 1, 2])
    assert world.manager.sequence("b").num_computed_tokens == 10
    assert world.manager.stats().lost_tokens == {"no_window": 14}
    world.step("b", 26)
    world.check()
    world.check_published()


def test_checkpoint_when_its_windows_block_went_while_leased_then_it_goes_with_the_lease() -> None:
    world = World(make_config(num_blocks=6, attention=False, windows=(6,)))
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
    world.check()


def test_window_when_retention_is_set_then_only_blocks_that_resumable_positions_read_are_published() -> None:
    world = World(make_config(state=False, windows=(6,), interval=16, num_blocks=100))
    world.prefill("a", A[:75], chunk=20)
    assert cached_positions(world, 0) == list(range(4, 73, 4))
    # before 16, 32, 48, 64, before the replay boundary 72 and the kept end 75
    assert cached_positions(world, 1) == [12, 16, 28, 32, 44, 48, 60, 64, 68, 72]
    assert world.manager.lookup(world.keys([*A[:60], 1]), 61).num_tokens == 48
    world.check()
    world.check_published()


def test_window_when_retention_declines_then_a_checkpoint_still_has_its_window() -> None:
    world = World(make_config(windows=(6,), interval=64, num_blocks=100))
    world.prefill("a", A[:75], chunk=20, boundaries=[30])
    assert cached_positions(world, 1) == [28, 60, 64, 68, 72]
    assert world.manager.lookup(world.keys([*A[:60], 1]), 61).num_tokens == 30
    world.prefill("b", [*A[:60], 1])
    world.check()


@pytest.mark.parametrize("seal", [True, False])
def test_window_when_retention_declines_then_the_end_of_a_prompt_still_has_its_window(seal: bool) -> None:
    world = World(make_config(windows=(6,), interval=64, num_blocks=100))
    world.prefill("a", A[:76], seal=seal)
    world.manager.free("a", donate=False)
    # 64, the replay boundary 72, and 76, where nothing but the end itself reads
    assert cached_positions(world, 1) == [60, 64, 68, 72, 76]
    assert world.manager.lookup(world.keys(A[:76]), 76).output_row is not None
    world.check()


def test_hits_when_every_pool_is_full_then_all_groups_are_touched_before_anything_is_allocated() -> None:
    # the pools hold exactly what was found and what is new: allocating in one group before touching another one's hit
    # would evict it
    world = World(make_config(num_blocks=9, num_slots=3, windows=(6,)))
    world.prefill("a", A[:16], seal=True)
    world.manager.free("a", donate=False)
    world.prefill("b", [7] * 16, seal=True)
    world.manager.free("b", donate=False)
    tokens = [*A[:16], *range(19)]
    hit = world.manager.lookup(world.keys(tokens), len(tokens))
    assert hit.num_tokens == 16
    assert world.admit("c", tokens)  # asserts that what was found is still what it was
    world.step("c", len(tokens))
    world.check()
    world.check_published()


def test_admission_when_one_group_has_no_room_then_refused_and_nothing_changed() -> None:
    world = World(make_config(num_blocks=9, windows=(6,)))
    assert world.admit("a", A[:20])
    before = world.manager.stats()
    assert not world.admit("b", [7] * 20)
    assert world.manager.stats() == before
    world.step("a", 20)  # its window moves on: the window pool has room again, full attention has not
    before = world.manager.stats()
    assert not world.admit("b", [7] * 20)
    assert world.manager.stats() == before
    world.check()


def test_fork_and_lease_when_there_are_three_groups_then_each_group_is_shared_and_pinned() -> None:
    world = World(make_config(windows=(6,)))
    world.prefill("a", A[:30])
    assert world.fork("a", "b")
    lease = world.manager.lease("a", "lease", 10.0)
    assert [len(table) for table in lease.tables] == [8, 8]
    assert [bool(block_id) for block_id in lease.tables[1]] == [False] * 6 + [True] * 2
    assert [bool(count) for count in lease.generations[1]] == [False] * 6 + [True] * 2
    world.decode("a", [1, 2, 3, 4, 5, 6, 7])
    world.decode("b", [4, 5, 6])
    world.manager.free("a", donate=True)
    world.manager.free("b", donate=True)
    assert world.manager.release_lease("lease")
    world.check()
    world.check_published()
