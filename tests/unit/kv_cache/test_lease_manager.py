"""What remote readers are shown: leased prefixes, finished blocks, and the tags by which they know the content."""

from __future__ import annotations

import ctypes
import struct

import pytest

from common.kv_cache.eviction.base import LruOrder
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.pools.generations import ENTRY_BYTES, GenerationTables, content_tag
from common.kv_cache.pools.unit_pool import UnitPool
from common.kv_cache.sharing.leases import LeasedPrefix
from tests.unit.kv_cache.world import World, make_config

A = list(range(1000, 1100))


def assert_tagged(world: World, lease: LeasedPrefix, tokens: list[int]) -> None:
    """The reader's side of the check: tags computed from its own tokens."""
    keys, size = world.keys(tokens), world.config.block_size
    tables = world.manager.generations
    for group, table in zip(world.groups, lease.tables, strict=True):
        for index, block_id in enumerate(table):
            key = keys.key_at(min((index + 1) * size, lease.num_tokens))
            assert not block_id or tables.tag(group.pool_name, block_id) == content_tag(key)
    assert not lease.slot_id or tables.tag("slots", lease.slot_id) == content_tag(keys.key_at(lease.num_tokens))


def test_table_when_read_as_memory_then_16_bytes_per_unit_generation_and_tag() -> None:
    tables = GenerationTables({"blocks": 5}, epoch=77)
    key = bytes(range(32))
    tables.bump("blocks", [3])
    tables.set_tags("blocks", [3, 1], [key, bytes(32)])
    assert (ENTRY_BYTES, tables.num_bytes("blocks")) == (16, 80)
    entries = list(struct.iter_unpack("<QQ", ctypes.string_at(tables.address("blocks"), 80)))
    assert entries[0] == (77, 0)
    assert entries[3] == (tables.generation("blocks", 3), content_tag(key))
    assert entries[3][1] == int.from_bytes(key[:8], "little")
    assert [tag for _, tag in entries[1:3]] == [0, 0]
    tables.bump("blocks", [3])
    assert tables.tag("blocks", 3) == content_tag(key)  # stale: the generation says so
    with pytest.raises(AssertionError, match="null entry"):
        tables.set_tags("blocks", [0], [key])


def test_bump_when_it_returns_then_the_new_generation_is_before_a_fence_and_what_is_written_behind_it() -> None:
    seen: list[int] = []
    tables = GenerationTables({"blocks": 5}, epoch=77, fence=lambda: seen.append(tables.generation("blocks", 3)))
    old = tables.generation("blocks", 3)
    tables.bump("blocks", [1, 3])
    assert seen == [old + 1]


def test_generations_when_a_pool_allocates_then_fenced_before_anybody_knows_what_to_write() -> None:
    fences: list[tuple[int, ...]] = []
    units = range(1, 9)

    def note() -> None:
        fences.append(tuple(tables.generation("blocks", unit) for unit in units))

    tables = GenerationTables({"blocks": 9}, epoch=77, fence=note)
    old = [tables.generation("blocks", unit) for unit in units]
    pool = UnitPool("blocks", 9, tables, LruOrder())
    allocated = pool.allocate(3)
    assert fences == [tuple(value + (unit in allocated) for unit, value in zip(units, old, strict=True))]


@pytest.mark.parametrize("caching", [True, False])
def test_tags_when_a_prompt_is_computed_in_chunks_then_each_complete_block_has_its_key(caching: bool) -> None:
    world = World(make_config(caching=caching))
    assert world.admit("a", A[:14])
    table = world.manager.sequence("a").tables[0].block_ids
    keys = world.keys(A[:14])
    for end in (3, 9, 14):
        world.step("a", end)
        tags = [world.manager.generations.tag("blocks", block_id) for block_id in table]
        assert tags[: end // 4] == [content_tag(keys.boundary_key(index + 1)) for index in range(end // 4)]
        progress = world.manager.progress("a")
        assert (progress.num_tokens, progress.tables[0]) == (end // 4 * 4, tuple(table[: end // 4]))
    world.check()


def test_tags_when_another_sequence_published_first_then_the_private_blocks_have_them_too() -> None:
    world = World(make_config())
    for seq_id in ("a", "b"):
        assert world.manager.admit(seq_id, world.keys(A[:8]), None, 8)
        world.tokens[seq_id] = A[:8]
    world.step("a", 8)
    world.step("b", 8)
    assert world.manager.sequence("a").tables[0].block_ids != world.manager.sequence("b").tables[0].block_ids
    world.manager.finish_prompt("b", world.row(A[:8]), seal=True)
    assert_tagged(world, world.manager.lease("b", "lease", 5.0), A[:8])
    world.check()


def lease_prefix(world: World, tokens: list[int], deeper_than: int = 0) -> LeasedPrefix | None:
    keys = world.keys(tokens)
    lease = world.manager.lease_prefix(keys, len(tokens), "lease", 5.0, deeper_than=deeper_than)
    world.run_copies()
    world.check()
    return lease


def test_lease_prefix_when_a_generation_was_donated_then_its_end_is_leased_until_the_deadline() -> None:
    world = World(make_config())
    world.prefill("a", A[:10])
    world.decode("a", A[10:13])
    world.manager.free("a", donate=True)
    assert lease_prefix(world, A[:30], deeper_than=13) is None
    lease = lease_prefix(world, A[:30], deeper_than=10)
    assert lease is not None
    assert (lease.num_tokens, lease.output_row, len(lease.tables[0])) == (13, None, 4)
    assert lease.key == world.keys(A[:13]).key_at(13)
    assert_tagged(world, lease, A[:30])
    assert world.manager.stats().blocks["leased"] == 4
    assert world.slots[lease.slot_id] == tuple(A[:13])
    world.clock.now_s = 5.0
    assert world.manager.expire_leases() == ["lease"]
    assert world.manager.stats().blocks["leased"] == 0
    world.check()


def test_lease_prefix_when_it_is_a_whole_prompt_then_with_its_row() -> None:
    world = World(make_config())
    world.prefill("a", A[:12])
    world.manager.free("a", donate=True)
    lease = lease_prefix(world, A[:12])
    assert lease is not None
    assert (lease.num_tokens, lease.output_row) == (12, world.row(A[:12]))


def test_lease_when_its_name_is_taken_then_nothing_is_pinned_for_it() -> None:
    world = World(make_config())
    world.prefill("a", A[:12])
    world.manager.free("a", donate=True)
    assert lease_prefix(world, A[:12]) is not None
    with pytest.raises(AssertionError, match="lease lease exists"):
        world.manager.lease_closure(world.keys(A[:12]).key_at(12), "lease", 5.0)
    world.check()
    assert world.manager.release_lease("lease")
    assert world.manager.stats().blocks["leased"] == 0


def test_lease_prefix_when_the_model_is_dense_then_the_deepest_boundary_or_tail() -> None:
    world = World(make_config(state=False))
    world.prefill("a", A[:10], plan_end=False)
    world.decode("a", A[10:15])
    world.manager.free("a", donate=False)
    lease = lease_prefix(world, [*A[:9], 1, 2, 3])
    assert lease is not None
    assert (lease.num_tokens, lease.slot_id) == (8, 0)
    assert world.manager.release_lease("lease")
    lease = lease_prefix(world, [*A[:10], 1, 2])
    assert lease is not None
    assert (lease.num_tokens, len(lease.tables[0])) == (10, 3)
    assert_tagged(world, lease, A[:10])
    assert world.manager.release_lease("lease")
    # All of it, but no row: the reader computes the last token itself.
    lease = lease_prefix(world, A[:12])
    assert lease is not None
    assert (lease.num_tokens, lease.output_row) == (12, None)
    assert world.manager.release_lease("lease")
    world.check()


def test_lease_prefix_when_its_tail_is_in_a_complete_block_then_a_copy_until_the_lease_ends() -> None:
    world = World(make_config())
    world.prefill("a", A[:12], boundaries=(6,))
    world.manager.free("a", donate=True)
    table_before = world.manager.stats()
    lease = lease_prefix(world, [*A[:6], 1, 2, 3])
    assert lease is not None
    assert lease.num_tokens == 6
    assert_tagged(world, lease, A[:6])
    assert world.rows[lease.tables[0][1]][:2] == [tuple(A[:5]), tuple(A[:6])]
    assert world.manager.stats().blocks["leased"] == 3  # a full block, the checkpoint's own tail, its copy
    assert world.manager.release_lease("lease")
    assert world.manager.stats() == table_before
    world.check()


def test_lease_prefix_when_there_is_no_memory_for_a_copied_tail_then_none_and_nothing_changed() -> None:
    world = World(make_config(num_blocks=4))
    world.prefill("a", A[:12], boundaries=(6,))
    assert world.manager.extend("a", 16)
    before = world.manager.stats()
    assert lease_prefix(world, [*A[:6], 1, 2, 3]) is None
    assert world.manager.stats() == before


def test_lease_prefix_when_it_ends_before_its_copy_ran_then_the_copy_is_forgotten() -> None:
    world = World(make_config())
    world.prefill("a", A[:12], boundaries=(6,))
    world.manager.free("a", donate=True)
    keys = world.keys([*A[:6], 1])
    assert world.manager.lease_prefix(keys, 7, "lease", 5.0, deeper_than=0) is not None
    world.check()
    assert world.manager.release_lease("lease")
    assert world.manager.take_block_copies() == {}
    world.check()


def test_tag_when_its_tail_is_leased_then_a_later_end_in_the_same_block_leaves_it() -> None:
    world = World(make_config(block_size=16))
    assert world.admit("a", A[:40])
    world.step("a", 28, {20})
    early = world.manager.lease_prefix(world.keys([*A[:20], 1]), 21, "early", 5.0, deeper_than=0)
    assert early is not None
    world.manager.free("a", donate=True)  # its end is in the block that is leased: the sequence's copy never ran
    assert_tagged(world, early, A[:20])
    world.check()
    lease = lease_prefix(world, A[:40])
    assert lease is not None
    assert (lease.num_tokens, lease.tables[0][1] != early.tables[0][1]) == (28, True)
    assert_tagged(world, lease, A[:28])


def test_lease_when_an_earlier_boundary_left_its_tail_in_the_last_block_then_the_prompts_own_tag() -> None:
    world = World(make_config(block_size=16, num_blocks=8))
    world.prefill("a", A[:28], seal=True, boundaries=(20, 24))
    lease = world.manager.lease("a", "lease", 5.0)
    world.run_copies()
    assert_tagged(world, lease, A[:28])
    assert world.rows[lease.tables[0][1]][:12] == [tuple(A[: 17 + row]) for row in range(12)]
    world.check()


@pytest.mark.parametrize("state", [True, False])
def test_part_of_a_prompt_when_committed_and_freed_then_the_rest_resumes_from_it(state: bool) -> None:
    world = World(make_config(state=state, num_slots=2))
    for num_tokens in (10, 12):
        tokens = [num_tokens, *A[:20]]
        plan = world.manager.accept_remote("a", world.keys(tokens), num_tokens)
        assert plan is not None
        world.receive(plan, tokens[:num_tokens])
        world.manager.commit_remote("a", None, seal=True)
        world.manager.free("a", donate=True)
        world.check()
        world.check_published()
        assert world.manager.lookup(world.keys(tokens), 21).num_tokens == num_tokens
        assert world.admit("a", tokens)
        world.step("a", 21)
        world.manager.free("a", donate=False)


def test_keys_when_a_prefix_is_shared_then_so_are_its_tags_and_no_others() -> None:
    tags: set[int] = set()
    for tail in ([1], [2], [1, 2]):
        keys = PrefixKeys(b"root", 4, [*A[:8], *tail])
        tags |= {content_tag(keys.key_at(position)) for position in (4, 8, 8 + len(tail))}
    assert len(tags) == 2 + 3
