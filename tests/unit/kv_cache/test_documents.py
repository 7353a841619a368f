"""What the source documents of hybrid prefix caching describe, with their own figures."""

from __future__ import annotations

import random

import pytest

from common.kv_cache.manager import KVCacheManager
from common.kv_cache.planner import plan_cache
from tests.unit.kv_cache.turns import run_turn
from tests.unit.kv_cache.world import World, make_config, make_geometry

A = list(range(1000, 9000))


def segments(*names: str, size: int = 917) -> list[int]:
    """A prompt of messages of ``size`` tokens each; a message's tokens depend on its name only."""
    return [ord(name) * 10_000 + offset for name in names for offset in range(size)]


# -- A: states at block-aligned chunk ends (#30877) -------------------------------------------------------------------


def running_world(**options: object) -> World:
    return World(make_config(block_size=16, num_blocks=64, mode="align", **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_tokens", "budget", "ends"),
    [
        (100, 1000, [96, 100]),  # one chunk to the longest part that can be cached, and the rest
        (96, 1000, [80, 96]),  # the prompt's own end is on a boundary: the last token is still computed after a hit
        (100, 48, [48, 96, 100]),
        (100, 50, [48, 96, 100]),  # a budget that is no multiple of the block size is floored
        (15, 1000, [15]),
        (16, 1000, [16]),
        (17, 1000, [16, 17]),
        (40, 10, [10, 16, 26, 32, 40]),  # a budget below the block size goes on all the same, and is aligned again
    ],
)
def test_align_when_prompt_is_chunked_then_all_chunks_but_the_last_end_on_blocks(
    num_tokens: int, budget: int, ends: list[int]
) -> None:
    world = running_world()
    world.prefill("a", A[:num_tokens], chunk=budget)
    assert world.chunk_ends == ends
    world.check()


def test_align_when_a_chunk_has_k_blocks_then_its_row_is_nulls_and_one_state() -> None:
    world = running_world()
    manager, tokens = world.manager, A[:100]
    assert world.admit("a", tokens)
    wanted = manager.save_positions(100, None)
    world.step("a", 48, wanted)  # 3 blocks: 2 nulls and a state
    first = world.state_row("a")
    assert [bool(slot_id) for slot_id in first] == [False, False, True]
    assert manager.stats().slots["held"] == 1  # what was kept is evictable now
    world.step("a", 96, wanted)
    second = world.state_row("a")
    assert [bool(slot_id) for slot_id in second] == [False, False, True, False, False, True]
    assert second[2] == first[2]
    world.step("a", 100, wanted)
    assert world.state_row("a") == [*second, manager.sequence("a").dst_slot]
    assert manager.lookup(world.keys(A[:200]), 200).num_tokens == 96
    assert manager.lookup(world.keys(A[:96]), 96).num_tokens == 48  # its last token has to be computed
    assert manager.lookup(world.keys([*A[:90], *range(10)]), 100).num_tokens == 48
    world.check()
    world.check_published()


def test_align_when_generation_crosses_boundaries_then_each_is_kept() -> None:
    world = running_world()
    world.prefill("a", A[:40])
    world.decode("a", A[40:100])
    row = world.state_row("a")
    assert [bool(slot_id) for slot_id in row] == [False, True, True, True, True, True, True]
    assert row[-1] == world.manager.sequence("a").dst_slot
    assert world.manager.lookup(world.keys(A[:90]), 90).num_tokens == 80
    world.check_published()


def test_align_when_a_request_runs_then_it_never_holds_more_than_two_states() -> None:
    world = running_world()
    manager = world.manager
    most = 0
    assert world.admit("a", A[:200])
    wanted = manager.save_positions(200, None)
    done = 0
    while done < 200:
        end = done + manager.chunk_size(done, min(64, 200 - done), 200)
        manager.plan_saves("a", done, end, wanted)
        most = max(most, manager.stats().slots["held"])
        world.step("a", end, wanted)
        done = end
    for position in range(200, 260):
        world.tokens["a"].append(A[position])
        manager.sequence("a").keys.extend([A[position]])
        assert manager.extend("a", position + 1)
        manager.plan_saves("a", position, position + 1, ())
        most = max(most, manager.stats().slots["held"])
        world.step("a", position + 1)
    assert most == 2


def test_align_when_chunks_are_fragments_then_no_state_gets_another_positions_key() -> None:
    # budgets [364, 2002] at block 1600 once published the state of 364 tokens as that of 1600 (#43559)
    world = World(make_config(block_size=1600, num_blocks=8, mode="align"))
    assert world.admit("a", A[:2366])
    wanted = world.manager.save_positions(2366, None)
    ends, done = [], 0
    for budget in (364, 2002, 2002):
        end = done + world.manager.chunk_size(done, min(budget, 2366 - done), 2366)
        saves = world.manager.plan_saves("a", done, end, wanted)
        assert all(position == end and position % 1600 == 0 for position, _ in saves)
        world.manager.complete_step("a", end)
        ends.append(end)
        done = end
    assert ends == [364, 1600, 2366]
    assert [checkpoint.position for checkpoint in world.manager._coordinator.state] == [1600]


def test_other_modes_when_prompt_is_chunked_then_never_cut() -> None:
    for mode in ("auto", "all", "none"):
        world = World(make_config(block_size=16, mode=mode))
        world.prefill("a", A[:100], chunk=50)
        assert world.chunk_ends == [50, 100]


# -- B: partial hits without extra rounds (#43628) --------------------------------------------------------------------

FOUR, FIVE, FIVE_ELSE = segments(*"abcd"), segments(*"abxcd")[:4584], segments(*"abycd")[:4584]
"""4,584 tokens in messages of 917; the first two are shared: 1,834 tokens, 3 whole blocks of 544."""


def document_b(mode: str) -> KVCacheManager:
    return KVCacheManager(make_config(block_size=544, num_blocks=100, num_slots=64, mode=mode))


def ends_of_messages(prompt: list[int]) -> list[int]:
    return list(range(917, len(prompt), 917))


def test_granular_when_states_are_kept_at_chunk_ends_then_a_diverging_prompt_reuses_nothing() -> None:
    manager = document_b("align")
    run_turn(manager, FOUR)
    second = run_turn(manager, FIVE)
    assert (second.num_tokens, second.num_attention_tokens) == (0, 1632)
    assert run_turn(manager, FIVE).num_tokens / len(FIVE) >= 0.949  # an exact repeat, as reported: 94.9 %


def test_granular_when_every_block_is_kept_then_the_shared_blocks_are_reused_in_one_forward() -> None:
    manager = document_b("all")
    assert run_turn(manager, FOUR).chunk_ends == [len(FOUR)]
    second = run_turn(manager, FIVE)
    assert second.num_tokens == 1632
    assert second.num_tokens / len(FIVE) >= 0.356
    assert second.chunk_ends == [len(FIVE)]


def test_granular_when_ends_of_messages_are_known_then_the_second_request_reuses_them_to_the_token() -> None:
    manager = document_b("auto")
    first = run_turn(manager, FOUR, boundaries=ends_of_messages(FOUR))
    second = run_turn(manager, FIVE, boundaries=ends_of_messages(FIVE))
    assert (first.chunk_ends, second.chunk_ends) == ([len(FOUR)], [len(FIVE)])
    assert second.num_tokens == 1834
    assert second.num_tokens / len(FIVE) >= 0.356


def test_granular_when_the_prompt_is_raw_tokens_then_the_third_request_reuses_the_junction() -> None:
    manager = document_b("auto")
    turns = [run_turn(manager, prompt) for prompt in (FOUR, FIVE, FIVE_ELSE)]
    assert [turn.num_tokens for turn in turns] == [0, 0, 1632]
    assert turns[2].num_tokens / len(FIVE) >= 0.356
    assert [len(turn.chunk_ends) for turn in turns] == [1, 1, 1]


@pytest.mark.parametrize("mode", ["auto", "all"])
def test_granular_when_the_budget_is_short_then_one_forward_per_budget(mode: str) -> None:
    manager = document_b(mode)
    turn = run_turn(manager, FOUR, boundaries=ends_of_messages(FOUR), budget=1000)
    assert turn.chunk_ends == [1000, 2000, 3000, len(FOUR)]
    assert manager.stats().checkpoints_skipped == {}


def test_granular_when_a_request_has_run_then_all_it_kept_is_evictable() -> None:
    manager = document_b("all")
    run_turn(manager, FOUR)
    slots = manager.stats().slots
    assert (slots["held"], slots["cached"]) == (0, 6)


# -- C: sizes per group, O(1) states (#37429) -------------------------------------------------------------------------


def test_none_when_200_requests_run_at_random_then_each_holds_exactly_one_slot() -> None:
    config = make_config(block_size=16, num_blocks=4000, num_slots=200, mode="none")
    manager, rng = KVCacheManager(config), random.Random(5)
    running: dict[str, int] = {}
    count = most = 0
    for _ in range(6000):
        if len(running) < 200 and rng.random() < 0.3:
            tokens = [rng.randrange(3) for _ in range(rng.randint(1, 90))]
            keys = manager.prefix_keys(tokens)
            hit = manager.lookup(keys, len(tokens))
            assert hit.num_tokens == 0
            name = f"r{count}"
            assert manager.admit(name, keys, hit, len(tokens))
            running[name], count = len(tokens), count + 1
        elif running:
            name = rng.choice(list(running))
            view = manager.sequence(name)
            start, num_prompt = view.num_computed_tokens, running[name]
            if start < num_prompt:
                end = min(start + rng.randint(1, 40), num_prompt)
                wanted = manager.save_positions(num_prompt, None, (5, 10))
                assert wanted == {}
                assert manager.plan_saves(name, start, end, wanted) == ()
                manager.complete_step(name, end)
                if end == num_prompt:
                    manager.finish_prompt(name, "row")
            elif rng.random() < 0.1:
                manager.free(name, donate=True)
                del running[name]
            elif manager.extend(name, start + 1):
                view.keys.extend([1])
                assert manager.plan_saves(name, start, start + 1, ()) == ()
                manager.complete_step(name, start + 1)
        manager.take_block_copies()
        slots = manager.stats().slots
        most = max(most, slots["held"])
        assert (slots["held"], slots["cached"]) == (len(running), 0)
    assert most == 200
    assert manager.check() == []


# -- D: the retention interval (#45845) -------------------------------------------------------------------------------

RETENTION_SLOTS = 1800
"""Dense states of 50 such prompts are 5,000 to 6,500, those of every 512 tokens 1,300 to 1,600."""


def conversations(interval: int | None) -> tuple[float, KVCacheManager]:
    """50 prompts of 12,800 tokens x 60 turns in random order, each turn 64 tokens longer; hit rate without the first
    turns, which nobody can have."""
    config = make_config(block_size=128, num_blocks=9000, num_slots=RETENTION_SLOTS, mode="all", interval=interval)
    manager, rng = KVCacheManager(config), random.Random(1)
    prompts = [[number << 20 | offset for offset in range(12_800)] for number in range(50)]
    order = [number for number in range(50) for _ in range(60)]
    rng.shuffle(order)
    num_prompt = num_hit = 0
    for turn, number in enumerate(order):
        prompt = prompts[number]
        hit = run_turn(manager, prompt).num_tokens
        if len(prompt) > 12_800:
            num_prompt += len(prompt)
            num_hit += hit
        prompt += range(1 << 30 | turn * 64, 1 << 30 | (turn + 1) * 64)
    return num_hit / num_prompt, manager


@pytest.mark.full
def test_retention_when_dense_states_overflow_the_pool_then_sparse_ones_keep_the_hits() -> None:
    dense, _ = conversations(None)
    sparse, manager = conversations(512)
    assert dense <= 0.85
    assert sparse >= 0.985
    assert manager.stats().checkpoints_skipped.get("no_slot", 0) == 0
    assert manager.check() == []


@pytest.mark.parametrize(("mode", "interval"), [("all", 64), ("align", 64)])
def test_retention_when_set_then_one_state_per_interval_and_the_replay_boundary(mode: str, interval: int) -> None:
    manager = KVCacheManager(make_config(block_size=16, num_blocks=100, num_slots=64, mode=mode, interval=interval))
    run_turn(manager, A[:250], A[250:300], budget=64)
    kept = sorted(checkpoint.position for checkpoint in manager._coordinator.state)
    assert kept == [64, 128, 192, 240, 256]  # 240 = (250 - 1) // 16 * 16; 256 while generating
    hit = manager.lookup(manager.prefix_keys(A[:190]), 190)
    assert (hit.num_tokens, hit.num_attention_tokens) == (128, 176)  # at most an interval earlier


def test_retention_when_unset_then_every_boundary_is_kept() -> None:
    manager = KVCacheManager(make_config(block_size=16, num_blocks=100, num_slots=64, mode="all"))
    run_turn(manager, A[:100], A[100:130])
    kept = sorted(checkpoint.position for checkpoint in manager._coordinator.state)
    assert kept == [16, 32, 48, 64, 80, 96, 112, 128]


# -- E: decode-side hits (#42547) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "align", "all"])
def test_remote_prefix_when_states_come_last_only_then_nulls_never_count_and_the_next_one_moves_less(mode: str) -> None:
    world = World(make_config(block_size=128, num_blocks=20, mode=mode))
    plan = world.pull("first", A[:400])
    assert plan is not None
    assert (plan.num_local_tokens, len(plan.pairs[0])) == (0, 4)
    assert [bool(slot_id) for slot_id in world.state_row("first")] == [False, False, False, True]
    world.manager.free("first", donate=False)
    repeat = world.pull("second", A[:400])
    assert repeat is not None
    assert repeat.is_empty
    longer = world.lookup_remote(world.keys(A[:600]), 600)
    assert (longer.num_attention_tokens, longer.has_state) == (384, False)
    assert world.manager.lookup(world.keys([*A[:384], *range(99)]), 483).num_tokens == 0
    world.check()
    world.check_published()


def test_three_groups_when_accepted_remotely_then_each_group_pulls_only_what_it_needs() -> None:
    world = World(make_config(block_size=128, num_blocks=20, windows=(200,)))
    plan = world.pull("first", A[:1000])
    assert plan is not None
    full, window = plan.pairs
    assert [index for index, _ in full] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [index for index, _ in window] == [6, 7]  # positions 801 .. 999
    assert plan.slot_id
    world.decode("first", A[1000:1030])
    world.manager.free("first", donate=True)
    # full attention has 8 blocks of the longer prompt, the window's last blocks and the state come from the peer
    longer = world.pull("second", A[:1400])
    assert longer is not None
    assert [[index for index, _ in pairs] for pairs in longer.pairs] == [[8, 9, 10], [9, 10]]
    assert (longer.num_local_tokens, bool(longer.slot_id)) == (1024, True)
    # the window reaches back into blocks that are here
    near = world.pull("third", [*A[:1024], *range(100)])
    assert near is not None
    assert [[index for index, _ in pairs] for pairs in near.pairs] == [[8], [8]]
    # full attention: 8 blocks twice; window: the one with 925 .. 1,023; null entries are nobody's hit
    hits = world.manager.stats().hit_tokens
    assert (hits["attention"], hits["window_200"], hits["state"]) == (2048, 128, 0)
    repeat = world.pull("fourth", A[:1000])
    assert repeat is not None
    assert repeat.is_empty
    world.check()
    world.check_published()


def test_three_groups_when_looked_up_locally_then_resume_is_where_all_of_them_agree() -> None:
    world = World(make_config(block_size=4, num_blocks=40, windows=(6,)))
    world.prefill("a", A[:30], boundaries=[10, 21])
    world.manager.free("a", donate=False)
    hit = world.manager.lookup(world.keys([*A[:25], 1, 2]), 27)
    assert (hit.num_tokens, hit.num_attention_tokens, hit.junction) == (21, 24, 24)
    full, window = hit.tables
    assert len(full) == 6
    assert [bool(block_id) for block_id in window] == [False, False, False, False, True]  # positions 16 .. 20
    assert hit.num_written == (24, 21)
    assert world.admit("b", [*A[:25], 1, 2])
    world.step("b", 27)
    world.decode("b", [5, 6, 7])
    world.check()
    world.check_published()


def test_three_groups_when_the_windows_blocks_are_gone_then_no_local_resume_from_that_state() -> None:
    # the window pool is the smaller one: blocks that other sequences need push out what the checkpoint needs
    world = World(make_config(block_size=4, num_blocks=40, windows=(6,)))
    world.prefill("a", A[:30], boundaries=[10])
    world.manager.free("a", donate=False)
    window = world.manager._coordinator.groups[1]
    for block_id in list(window.pool.cached_ids()):
        key = window.key_of(block_id)
        if key is not None and window.entries().positions[block_id] == 8:
            world.manager._coordinator._evict_blocks(window, (block_id,))
    hit = world.manager.lookup(world.keys([*A[:25], 1, 2]), 27)
    assert (hit.num_tokens, hit.num_attention_tokens, hit.num_state_tokens) == (0, 24, 0)
    assert world.manager.stats().checkpoints_evicted == {"attention": 1}
    remote = world.lookup_remote(world.keys([*A[:25], 1, 2]), 27)
    assert (remote.num_attention_tokens, remote.has_state) == (24, False)
    world.check()


def test_capacity_when_a_model_has_windows_then_refused_below_the_smallest_and_exact_at_it() -> None:
    geometry = make_geometry(windows=(6,))
    plan = plan_cache(
        geometry, kv_cache_memory_bytes=1 << 16, max_num_seqs=2, max_model_len=20, block_size=4, root_key=b""
    )
    full, window = plan.config.num_blocks
    assert full == window  # no interval: as many as the others
    assert plan.report.used_bytes <= 1 << 16
