"""The detector tested: a prefix is moved into another storage, one bit is flipped there, and it has to be named."""

from __future__ import annotations

import pytest
import torch

from common.kv_cache.pools.storage import KVStorage
from common.node.digests import PrefixDigests, find_mismatch, make_digests
from common.transfer.reads import Read, ReadStatus
from common.transfer.regions import Region
from common.transfer.testing.faulty import Fault, FaultyBackend
from common.transfer.testing.inprocess import InProcessBackend, InProcessHub
from tests.unit.kv_cache.world import make_config

BLOCK_SIZE = 4
# Two groups: full attention, and a window of which the first block is not kept any more.
TABLES = ((5, 2, 7), (0, 3, 1))
NUM_TOKENS = 10
SLOT = 2
# Where the reader puts them: block i of group g, and the state.
PAIRS = (((0, 1), (1, 2), (2, 3)), ((1, 4), (2, 5)))
LOCAL_SLOT = 1


def make_storage(seed: int) -> KVStorage:
    storage = KVStorage(make_config(num_blocks=8, num_slots=3, windows=(8,)), torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for arena in (*storage.block_arenas, storage.slot_arena):
        arena[1:] = torch.randint(256, arena[1:].shape, dtype=torch.uint8, generator=generator)
    return storage


@pytest.fixture
def holder() -> KVStorage:
    return make_storage(1)


@pytest.fixture
def reader(holder: KVStorage) -> KVStorage:
    """Has read the prefix; what lies behind the valid rows of the tails is its own."""
    reader = make_storage(2)
    for table, pairs, source, destination in zip(TABLES, PAIRS, holder.block_arenas, reader.block_arenas, strict=True):
        for index, local in pairs:
            destination[local] = source[table[index]]
    reader.slot_arena[LOCAL_SLOT] = holder.slot_arena[SLOT]
    return reader


def flip(arena: torch.Tensor, unit: int, offset: int) -> None:
    arena[unit, offset] ^= 1


def test_compare_when_nothing_changed_then_no_mismatch(holder: KVStorage, reader: KVStorage) -> None:
    for verify in ("all", "sample"):
        digests = make_digests(holder, TABLES, NUM_TOKENS, SLOT, verify)
        assert find_mismatch(reader, digests, PAIRS, NUM_TOKENS, LOCAL_SLOT) is None


def test_compare_when_one_bit_flips_then_it_is_named(holder: KVStorage, reader: KVStorage) -> None:
    digests = make_digests(holder, TABLES, NUM_TOKENS, SLOT, "all")
    assert digests.blocks[1][0] is None
    row_bytes = 4 * 4
    for group_id, layer_idx in ((0, 1), (1, 3)):
        for place in reader.layout.attention[layer_idx]:  # K, then V
            for index, local in PAIRS[group_id]:
                num_valid = min(BLOCK_SIZE, NUM_TOKENS - index * BLOCK_SIZE)
                last_valid = place.offset_bytes + num_valid * row_bytes - 1
                for offset in (place.offset_bytes, last_valid):
                    flip(reader.block_arenas[group_id], local, offset)
                    message = find_mismatch(reader, digests, PAIRS, NUM_TOKENS, LOCAL_SLOT)
                    assert message is not None
                    assert f"block {index} of group {group_id} has digest" in message
                    flip(reader.block_arenas[group_id], local, offset)
                if num_valid < BLOCK_SIZE:
                    flip(reader.block_arenas[group_id], local, last_valid + 1)
                    assert find_mismatch(reader, digests, PAIRS, NUM_TOKENS, LOCAL_SLOT) is None
                    flip(reader.block_arenas[group_id], local, last_valid + 1)
    flip(reader.slot_arena, LOCAL_SLOT, 0)
    assert "the state has digest" in (find_mismatch(reader, digests, PAIRS, NUM_TOKENS, LOCAL_SLOT) or "")
    # A block or state that was not read is not looked at.
    assert find_mismatch(reader, digests, PAIRS, NUM_TOKENS, 0) is None


def test_compare_when_two_blocks_changed_places_then_it_is_found(holder: KVStorage, reader: KVStorage) -> None:
    digests = make_digests(holder, TABLES, NUM_TOKENS, SLOT, "all")
    swapped = (((0, 2), (1, 1), (2, 3)), PAIRS[1])
    assert find_mismatch(reader, digests, swapped, NUM_TOKENS, LOCAL_SLOT) is not None


def test_make_when_off_then_nothing_and_nothing_is_compared(holder: KVStorage, reader: KVStorage) -> None:
    digests = make_digests(holder, TABLES, NUM_TOKENS, SLOT, "off")
    assert digests == PrefixDigests()
    flip(reader.block_arenas[0], 1, 0)
    assert find_mismatch(reader, digests, PAIRS, NUM_TOKENS, LOCAL_SLOT) is None


def test_make_when_sampled_then_one_block_in_sixteen_the_state_always_and_every_block_some_time(
    holder: KVStorage,
) -> None:
    table = [1 + index % 7 for index in range(40)]
    seen: set[int] = set()
    for _ in range(300):
        digests = make_digests(holder, (table,), len(table) * BLOCK_SIZE, SLOT, "sample")
        chosen = [index for index, digest in enumerate(digests.blocks[0]) if digest is not None]
        assert len(chosen) in (2, 3)
        assert digests.slot == holder.digest_slot(SLOT)
        seen.update(chosen)
    assert seen == set(range(40))


def test_make_when_there_is_no_state_or_no_block_then_nothing_is_made_up(holder: KVStorage) -> None:
    assert make_digests(holder, ((), ()), 0, 0, "all") == PrefixDigests(((), ()), None)
    assert make_digests(holder, ((), ()), 0, 0, "sample") == PrefixDigests(((), ()), None)


def test_compare_when_the_transport_delivers_other_bytes_then_it_is_found(holder: KVStorage, reader: KVStorage) -> None:
    """Generations cannot see this: the read reports DONE, the holder's memory never changed."""
    hub = InProcessHub()

    def backend_of(storage: KVStorage, name: str) -> InProcessBackend:
        backend = InProcessBackend(hub, engine_id=name, epoch=1)
        arena = storage.block_arenas[0]
        backend.register([Region("blocks", arena.data_ptr(), *arena.shape, null_unit=True, owner=arena)])
        return backend

    faulty, other = FaultyBackend(backend_of(reader, "reader")), backend_of(holder, "holder")
    peer = faulty.add_peer(other.metadata())
    digests = make_digests(holder, TABLES, NUM_TOKENS, SLOT, "all")
    for fault in (Fault("stale"), None):
        if fault is not None:
            faulty.inject(fault)
        handle = faulty.post_read(peer, [Read("blocks", "blocks", [(2, TABLES[0][1])])])
        assert faulty.poll(handle) is ReadStatus.DONE
        message = find_mismatch(reader, digests, PAIRS, NUM_TOKENS, LOCAL_SLOT)
        assert (message is not None) == (fault is not None)
    other.close()
