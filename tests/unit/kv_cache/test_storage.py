"""Views into the arenas: one block or slot is one contiguous byte range across its layers."""

from __future__ import annotations

import mmap

import torch

from common.kv_cache.storage import KVStorage
from tests.unit.kv_cache.world import make_config


def make_storage(**options: bool) -> KVStorage:
    return KVStorage(make_config(num_blocks=5, num_slots=3, **options), torch.device("cpu"))  # type: ignore[arg-type]


def test_arenas_when_created_then_zero_and_page_aligned() -> None:
    storage = make_storage()
    for arena, num_units in ((storage.block_arena, 6), (storage.slot_arena, 4)):
        assert arena.shape[0] == num_units
        assert arena.data_ptr() % mmap.PAGESIZE == 0
        assert not arena.any()


def test_views_when_written_then_only_that_unit_changes() -> None:
    storage = make_storage()
    key, value = storage.attention_layer(1)
    assert key.shape == value.shape == (6, 4, 1, 4)
    key[2], value[2] = 1.0, 2.0
    touched = storage.block_arena.any(dim=1)
    assert touched.tolist() == [False, False, True, False, False, False]
    assert (storage.block_arena[2].view(torch.float32)[:16] == 1.0).all()
    assert (storage.block_arena[2].view(torch.float32)[16:] == 2.0).all()
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


def test_storage_when_a_kind_is_absent_then_its_arena_is_empty() -> None:
    assert make_storage(state=False).slot_arena.numel() == 0
    assert make_storage(attention=False).block_arena.numel() == 0
