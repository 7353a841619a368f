"""Views into the arenas: one block or slot is one contiguous byte range across its layers."""

from __future__ import annotations

import dataclasses
import mmap
import os

import torch

from common.kv_cache.pools.storage import KVStorage
from common.kv_cache.spec import AttentionLayerSpec
from tests.unit.kv_cache.world import make_config


def make_storage(**options: bool) -> KVStorage:
    return KVStorage(make_config(num_blocks=5, num_slots=3, **options), torch.device("cpu"))  # type: ignore[arg-type]


def make_two_heads() -> KVStorage:
    """Of one layer, with two heads of 4 floats, in blocks of 4 tokens."""
    layer = AttentionLayerSpec(1, 2, 4, 4, "float32")
    config = make_config(num_blocks=5, num_slots=3)
    geometry = dataclasses.replace(config.geometry, attention_layers=(layer,))
    return KVStorage(dataclasses.replace(config, geometry=geometry), torch.device("cpu"))


def test_arenas_when_created_then_zero_and_page_aligned() -> None:
    storage = make_storage()
    for arena, num_units in ((storage.block_arenas[0], 6), (storage.slot_arena, 4)):
        assert arena.shape[0] == num_units
        assert arena.data_ptr() % mmap.PAGESIZE == 0
        assert not arena.any()


def test_storages_when_over_one_memory_then_what_one_writes_the_other_has_and_arenas_lie_apart() -> None:
    memory_fd = os.memfd_create("test")
    config = make_config(num_blocks=5, num_slots=3, windows=(8,))
    one, other = (KVStorage(config, torch.device("cpu"), memory_fd) for _ in range(2))
    os.close(memory_fd)
    arenas, others = ((*each.block_arenas, each.slot_arena) for each in (one, other))
    for number, arena in enumerate(arenas, 1):
        assert not arena.any()
        assert arena.data_ptr() % mmap.PAGESIZE == 0
        arena.fill_(number)
    for number, (arena, seen) in enumerate(zip(arenas, others, strict=True), 1):
        assert seen.shape == arena.shape
        assert (seen == number).all()
    other.zero_slot(2)
    assert not one.slot_arena[2].any()


def test_views_when_written_then_only_that_unit_changes() -> None:
    storage = make_storage()
    key, value = storage.attention_layer(1)
    assert key.shape == value.shape == (6, 4, 1, 4)
    key[2], value[2] = 1.0, 2.0
    touched = storage.block_arenas[0].any(dim=1)
    assert touched.tolist() == [False, False, True, False, False, False]
    assert (storage.block_arenas[0][2].view(torch.float32)[:16] == 1.0).all()
    assert (storage.block_arenas[0][2].view(torch.float32)[16:] == 2.0).all()
    state = storage.state_layer(0)
    assert {name: tuple(view.shape) for name, view in state.items()} == {"conv": (4, 4, 3), "recurrent": (4, 2, 2, 2)}
    state["conv"][1] = 3.0
    assert not state["recurrent"].any()
    assert storage.slot_arena.any(dim=1).tolist() == [False, True, False, False]


def test_copies_when_pairs_swap_then_all_sources_are_read_first() -> None:
    storage = make_storage()
    key, _ = storage.attention_layer(1)
    key[1], key[2] = 1.0, 2.0
    storage.copy_blocks([(1, 2), (2, 3)])
    assert [float(key[block_id].mean()) for block_id in (1, 2, 3)] == [1.0, 1.0, 2.0]
    storage.copy_blocks([])
    storage.zero_block(3)
    storage.state_layer(0)["conv"][1] = 1.0
    storage.zero_slot(1)
    assert not key[3].any()
    assert not storage.slot_arena.any()


def test_block_when_it_has_several_heads_then_the_rows_of_each_lie_side_by_side() -> None:
    storage = make_two_heads()
    key, value = storage.attention_layer(1)
    row = torch.arange(4.0) + 1
    key[2, 3, 1], value[2, 0, 0] = row, -row
    written = storage.block_arenas[0][2].view(torch.float32).view(2, 2, 4, 4)  # K and V, head, token, column
    assert torch.equal(written[0, 1, 3], row)
    assert torch.equal(written[1, 0, 0], -row)
    assert int(written.count_nonzero()) == 8


def test_digest_and_copy_when_one_byte_of_the_valid_rows_flips_then_they_differ_and_behind_them_they_do_not() -> None:
    """The detector's own test: each place of a block and of a slot, one bit at a time."""
    storage = make_two_heads()
    num_bytes = storage.block_arenas[0].shape[1]
    storage.block_arenas[0][2] = torch.arange(num_bytes) % 251
    block = storage.block_arenas[0][2]
    row_bytes, head_bytes = 16, 64
    for num_valid in (1, 3, 4):
        sound, copy = storage.digest_block(2, num_valid), storage.copy_rows(2, num_valid)
        assert len(sound) == 16
        assert sound == storage.digest_block(2, num_valid) != storage.digest_block(3, num_valid)
        for offset in range(num_bytes):
            is_valid = offset % head_bytes < num_valid * row_bytes
            assert copy[offset] == (block[offset] if is_valid else 0)
            block[offset] ^= 1
            assert (storage.digest_block(2, num_valid) != sound) == is_valid, (num_valid, offset)
            block[offset] ^= 1

    storage.slot_arena[1] = torch.arange(storage.slot_arena.shape[1]) % 251
    sound = storage.digest_slot(1)
    for offset in range(storage.slot_arena.shape[1]):
        storage.slot_arena[1, offset] ^= 1
        assert storage.digest_slot(1) != sound
        storage.slot_arena[1, offset] ^= 1
    assert storage.digest_slot(1) == sound != storage.digest_slot(2)


def test_digest_when_the_same_rows_lie_in_another_block_or_storage_then_it_is_the_same() -> None:
    here, there = make_storage(), make_storage()
    here.block_arenas[0][2], there.block_arenas[0][4] = 7, 7
    here.slot_arena[1], there.slot_arena[2] = 9, 9
    assert here.digest_block(2, 4) == there.digest_block(4, 4) != here.digest_block(2, 3)
    assert here.digest_slot(1) == there.digest_slot(2)


def test_storage_when_a_kind_is_absent_then_its_arena_is_empty() -> None:
    assert make_storage(state=False).slot_arena.numel() == 0
    assert make_storage(attention=False).block_arenas == ()
