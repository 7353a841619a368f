"""What goes first when memory is short: learnt returns, branches, thrash, and that nothing grows without bound."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest

from common.errors import ConfigError
from common.kv_cache.eviction.base import EVICTION_POLICIES
from common.kv_cache.eviction.block_tree import BlockTree, Record
from common.kv_cache.eviction.create import create_policy
from common.kv_cache.eviction.reuse import EDGES, NUM_BINS, ReuseStatistics, age_bin, gittins
from common.kv_cache.eviction.value_policy import GHOSTS_PER_SLOT, MIN_GHOSTS, ValuePolicy
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from tests.unit.kv_cache.world import make_config


def make_record(position: int = 4) -> Record:
    return Record(b"key", b"boundary", position, "semantic", 0, position)


def best_ratio(rates: list[float], age: int) -> float:
    """The definition, tried for every stopping bin."""
    returns, waiting, left, best = 0.0, 0.0, 1.0, 0.0
    for later in range(age, NUM_BINS):
        returns += left * rates[later]
        waiting += left * (EDGES[later + 1] - EDGES[later]) * (1 - rates[later] / 2)
        left *= 1 - rates[later]
        best = max(best, returns / waiting)
    return best


@pytest.mark.parametrize("seed", range(5))
def test_index_when_computed_then_it_is_the_best_ratio_over_all_stopping_ages(seed: int) -> None:
    rng = random.Random(seed)
    rates = [rng.choice([0.0, 0.01, rng.random()]) for _ in range(NUM_BINS)]
    index = gittins(rates)
    assert index[:NUM_BINS] == pytest.approx([best_ratio(rates, age) for age in range(NUM_BINS)])
    assert index[NUM_BINS] == 0.0


def test_index_when_nothing_is_known_then_recency_decides() -> None:
    index = ReuseStatistics().index(("semantic", 0, 0, 0))
    assert index == sorted(index, reverse=True)
    assert index[0] > index[10] > 0


def test_index_when_returns_come_after_a_wait_then_it_rises_until_then_and_falls_after() -> None:
    statistics, usual = ReuseStatistics(), age_bin(100)
    reached = statistics.reached(("semantic", 0))
    for count in range(200):
        for age in range(usual + 1):
            reached[age] += 1
        if count % 2:
            statistics.count_return(("semantic", 0), usual)
        else:
            for age in range(usual + 1, NUM_BINS):
                reached[age] += 1
    statistics.refresh()
    index = statistics.index(("semantic", 0))
    assert index[0] < index[usual - 3] < index[usual]
    assert index[usual + 1] < index[0]
    # What is known of the kind holds for a class of it that is new.
    assert statistics.index(("semantic", 7))[usual] == pytest.approx(index[usual], rel=0.1)


def test_age_bins_when_listed_then_each_age_is_between_its_edges() -> None:
    for age in (0, 7, 8, 9, 100, 5000, 40_000):
        place = age_bin(age)
        assert EDGES[place] <= age < EDGES[place + 1]
    assert age_bin(10**9) == NUM_BINS


def test_tree_when_checkpoints_hang_then_it_knows_the_blocks_that_lead_there() -> None:
    tree = BlockTree(20)
    tree.store(0, [1, 2, 3, 4])
    tree.store(2, [5, 6])  # a fork after block 2
    deep, fork = make_record(), make_record()
    assert tree.hang(4, deep) == ([4, 3, 2, 1], 0)
    assert tree.hang(6, fork) == ([6, 5], 2)
    assert (tree.own_stretch(4), tree.own_stretch(6)) == ((4, 0), (2, 2))
    assert tree.unhang(4, deep) == ([4, 3], 2)
    assert [block for block in range(1, 7) if tree.leads_to_checkpoint(block)] == [1, 2, 5, 6]
    assert tree.unhang(6, fork) == ([6, 5, 2, 1], 0)


def test_tree_when_a_block_is_evicted_and_used_again_then_old_links_lead_nowhere() -> None:
    tree = BlockTree(20)
    tree.store(0, [1, 2, 3])
    assert tree.remove([2]) == []
    tree.store(0, [2])
    assert tree.hang(3, make_record()) == ([3], 0)
    assert not tree.leads_to_checkpoint(2)
    assert tree.remove([3]) == [3]
    assert tree.remove_leading(3) == ([], 0)


def test_stretch_when_the_block_before_it_is_evicted_and_used_again_then_nothing_is_before_it() -> None:
    tree = BlockTree(10)
    tree.store(0, [1, 2])
    tree.hang(1, make_record())
    tree.hang(2, make_record())
    assert tree.own_stretch(2) == (1, 1)
    tree.remove([1])
    tree.remove_leading(1)
    tree.store(2, [1])
    tree.hang(1, make_record())
    assert tree.own_stretch(1) == (1, 2)
    assert tree.own_stretch(2) == (1, 0)  # not a circle


def serve(manager: KVCacheManager, prompt: list[int], boundary: int) -> int:
    keys = manager.prefix_keys(prompt)
    hit = manager.lookup(keys, len(prompt))
    assert manager.admit("request", keys, hit, len(prompt))
    if hit.num_tokens < len(prompt):
        wanted = manager.save_positions(len(prompt), hit, (boundary,))
        manager.plan_saves("request", hit.num_tokens, len(prompt), wanted)
        manager.take_block_copies()
        manager.complete_step("request", len(prompt))
    manager.finish_prompt("request", "row")
    manager.free("request", donate=True)
    return hit.num_tokens


def make_manager(policy: str, num_blocks: int, num_slots: int) -> KVCacheManager:
    return KVCacheManager(make_config(num_blocks=num_blocks, num_slots=num_slots, policy=policy))


def hits_of_cycle(policy: str, num_sessions: int) -> int:
    """Sessions that return one after the other, each with a question of its own, in a pool for half of them."""
    manager = make_manager(policy, num_blocks=num_sessions * 2, num_slots=num_sessions)
    hits = 0
    for turn in range(40):
        for session in range(num_sessions):
            prompt = [*range(session * 100, session * 100 + 16), 10_000 + turn * 100 + session, 7]
            hits += serve(manager, prompt, boundary=16)
        assert manager.check() == []
    return hits


def test_reuse_distance_when_beyond_the_pool_then_value_keeps_some_where_lru_keeps_none() -> None:
    assert hits_of_cycle("lru", 24) == 0
    assert hits_of_cycle("value", 24) > 40 * 24 * 16 // 8


def test_kinds_of_states_when_one_never_returns_then_it_goes_first() -> None:
    manager = make_manager("value", num_blocks=400, num_slots=16)
    for turn in range(30):
        for session in range(6):
            prompt = [*range(session * 100, session * 100 + 16), 10_000 + turn * 100 + session, 7]
            hit = serve(manager, prompt, boundary=16)
            # Each request leaves a state at its end too, which nobody asks for: 12 slots of 16 would be theirs.
            assert hit == (16 if turn else 0) or turn < 15
    assert manager.check() == []


def test_blocks_when_short_then_those_that_lead_nowhere_go_first() -> None:
    manager = make_manager("value", num_blocks=24, num_slots=16)
    keep, dead_end = list(range(100, 132)), list(range(200, 232))
    serve(manager, keep, boundary=16)
    keys = manager.prefix_keys(dead_end)
    assert manager.admit("dead end", keys, None, len(dead_end))
    manager.complete_step("dead end", len(dead_end))
    manager.free("dead end", donate=False)  # published blocks, no state: newer than those of ``keep``, but worthless
    serve(manager, list(range(300, 356)), boundary=16)
    assert manager.lookup(manager.prefix_keys(keep), len(keep)).num_tokens == len(keep)
    assert manager.lookup(manager.prefix_keys(dead_end), len(dead_end)).num_attention_tokens < len(dead_end)
    assert manager.check() == []


def test_blocks_when_two_prompts_computed_them_at_once_then_the_named_ones_lead_to_the_later_ones_state() -> None:
    manager = make_manager("value", num_blocks=24, num_slots=16)
    common, dead_end = list(range(100, 116)), list(range(200, 216))
    later = [*common, *range(300, 316)]
    for name, prompt in (("earlier", common), ("later", later)):
        assert manager.admit(name, manager.prefix_keys(prompt), None, len(prompt))
    for name, prompt in (("earlier", common), ("later", later)):
        manager.complete_step(name, len(prompt))
    manager.free("earlier", donate=False)  # the state of the later one is found through its blocks
    manager.free("later", donate=True)
    assert manager.admit("dead end", manager.prefix_keys(dead_end), None, len(dead_end))
    manager.complete_step("dead end", len(dead_end))
    manager.free("dead end", donate=False)  # newer than ``common``, but worthless
    serve(manager, list(range(400, 464)), boundary=16)
    assert manager.lookup(manager.prefix_keys([*later, 7]), len(later) + 1).num_tokens == len(later)
    assert manager.lookup(manager.prefix_keys(dead_end), len(dead_end)).num_attention_tokens < len(dead_end)
    assert manager.check() == []


def test_same_requests_when_served_twice_then_same_evictions() -> None:
    def run() -> list[int]:
        rng, manager = random.Random(3), make_manager("value", num_blocks=60, num_slots=10)
        starts = [rng.randrange(20) * 100 for _ in range(300)]
        prompts = [[*range(start, start + 20), rng.randrange(5)] for start in starts]
        return [serve(manager, prompt, boundary=16) for prompt in prompts]

    first = run()
    assert first == run()
    assert sum(first) > 0


def test_admission_when_many_prompts_differ_behind_one_boundary_then_hashes_once_per_position_at_most() -> None:
    manager = make_manager("value", num_blocks=64, num_slots=16)
    common, size = list(range(32)), manager.config.block_size
    for number in range(3000):
        serve(manager, [*common, 100 + number % 60, number // 60, 7][: 34 + number % 2], boundary=32)
    policy = manager._coordinator.policy
    assert isinstance(policy, ValuePolicy)
    assert policy.num_ghosts > 2000
    with patch.object(PrefixKeys, "_key", autospec=True, side_effect=PrefixKeys._key) as hashed:
        keys = manager.prefix_keys([*common, 7, 7, 7])
        policy.admitted(keys, 35)
    assert hashed.call_count <= size + 1
    assert keys.history[0] == 32


@pytest.mark.full
def test_records_when_prompts_never_repeat_then_ghosts_stay_bounded() -> None:
    manager = make_manager("value", num_blocks=16, num_slots=4)
    policy = manager._coordinator.policy
    assert isinstance(policy, ValuePolicy)
    limit = MIN_GHOSTS + GHOSTS_PER_SLOT * manager.config.num_slots
    for number in range(limit // 2 + 500):  # two records each
        serve(manager, [number, number >> 8, 1, 2, 3, 4], boundary=4)
    assert limit - manager.config.num_slots < policy.num_ghosts <= limit
    assert manager.check() == []


def test_policy_when_unknown_then_config_error_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--eviction-policy"):
        create_policy(make_config(policy="no such policy"))
    for name in EVICTION_POLICIES:
        assert create_policy(make_config(policy=name)) is not None


def test_dense_model_when_value_is_asked_then_blocks_are_least_recently_used() -> None:
    assert not isinstance(create_policy(make_config(state=False, policy="value")), ValuePolicy)
