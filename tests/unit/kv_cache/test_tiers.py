"""What tiers decide: which prefixes go next, what a tier takes in and lets go, what it may write, when reading pays."""

from __future__ import annotations

import random
from collections import Counter
from unittest.mock import patch

import pytest

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.eviction.base import EVICTION_POLICIES, Outlook
from common.kv_cache.eviction.reuse import NUM_BINS, ReuseStatistics, within_horizon
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.tiers.break_even import BreakEven
from common.kv_cache.tiers.index import TierIndex
from common.kv_cache.tiers.stack import TierStack
from common.kv_cache.tiers.stored_prefix import Extent, StoredPrefix, extents_of
from common.kv_cache.tiers.tier import Tier, TierSettings
from common.kv_cache.tiers.write_budget import BURST_S, WriteBudget
from tests.unit.kv_cache.turns import run_turn
from tests.unit.kv_cache.world import make_config

FREE_READS = BreakEven(0.0, 0.0, 1.0)


def make_prefix(line: int, num_extents: int, own_bytes: int = 50, extent_bytes: int = 10) -> StoredPrefix:
    """The first ``num_extents`` extents of a line of prefixes."""
    extents = tuple(Extent(0, index, 1, b"%d/%d" % (line, index)) for index in range(num_extents))
    key = b"%d:%d" % (line, num_extents)
    checkpoint = Checkpoint(key, num_extents * 256, extents[-1].key, (), 0, (), "semantic")
    return StoredPrefix(checkpoint, False, extents, (extent_bytes,) * num_extents, own_bytes)


@pytest.mark.parametrize(
    ("block_size", "first", "num_blocks", "expected"),
    [
        (16, 0, 40, [(0, 16), (16, 16), (32, 8)]),
        (16, 10, 8, [(10, 6), (16, 2)]),
        (128, 0, 5, [(0, 2), (2, 2), (4, 1)]),
        (1024, 3, 2, [(3, 1), (4, 1)]),
        (16, 4, 0, []),
    ],
)
def test_extents_when_cut_then_they_are_aligned_and_the_last_is_shorter(
    block_size: int, first: int, num_blocks: int, expected: list[tuple[int, int]]
) -> None:
    keys = [b"%d" % number for number in range(first, first + num_blocks)]
    extents = extents_of(0, first, keys, block_size)
    assert [(extent.start, extent.num_blocks) for extent in extents] == expected
    assert all(extent.key == b"%d" % (extent.start + extent.num_blocks - 1) for extent in extents)


@pytest.mark.parametrize("seed", range(3))
def test_index_when_prefixes_come_and_go_then_bytes_are_those_of_what_is_needed(seed: int) -> None:
    rng = random.Random(seed)
    worth = {b"%d:%d" % (line, depth): rng.random() for line in range(8) for depth in range(1, 9)}
    index = TierIndex(600, worth.get if seed else lambda key: None)
    for _ in range(400):
        prefix = make_prefix(rng.randrange(8), rng.randrange(1, 9))
        if prefix.key in index:
            index.touch(prefix)
        elif (dropped := index.make_room(prefix)) is not None:
            assert all(other.key not in index for other in dropped)
            index.add(prefix)
        elif rng.random() < 0.2 and len(index):
            index.drop(next(iter(index)))
        needed = {extent for stored in index for extent in stored.extents}
        assert index.used_bytes == sum(stored.own_bytes for stored in index) + 10 * len(needed) <= index.size_bytes
        assert all(index.has_extent(extent) for extent in needed)
    assert len(index) > 3


def test_index_when_many_prefixes_differ_behind_one_boundary_then_looks_once_per_position_at_most() -> None:
    index, common = TierIndex(1 << 20, lambda key: None), list(range(32))

    def keys_of(number: int) -> PrefixKeys:
        return PrefixKeys(b"root", 4, [*common, number, 7, 7])

    def stored(number: int, position: int) -> StoredPrefix:
        keys = keys_of(number)
        checkpoint = Checkpoint(
            keys.key_at(position), position, keys.boundary_key(8), keys.tail_tokens(position), 0, (), "end"
        )
        return StoredPrefix(checkpoint, False, (), (), 50)

    prefixes = [stored(number, 33 + number % 2) for number in range(100, 3100)]
    for prefix in prefixes:
        index.add(prefix)
    deeper = stored(107, 35)
    index.add(deeper)
    with (
        patch.object(PrefixKeys, "_key", autospec=True, side_effect=PrefixKeys._key) as hashed,
        patch.object(PrefixKeys, "content", autospec=True, side_effect=PrefixKeys.content) as compared,
    ):
        assert list(index.matching(keys_of(107), 35, above=32)) == [deeper, prefixes[7]]
    assert hashed.call_count + compared.call_count <= 5
    index.drop(deeper)
    assert list(index.matching(keys_of(107), 35, above=32)) == [prefixes[7]]
    assert list(index.matching(keys_of(107), 33, above=32)) == []


def test_index_when_full_then_what_is_worth_far_less_stays_out() -> None:
    worth = {b"1:1": 10.0, b"2:1": 10.0, b"3:1": 0.1, b"4:1": 9.0}
    index = TierIndex(120, worth.get)
    for line in (1, 2):
        assert index.make_room(make_prefix(line, 1)) == []
        index.add(make_prefix(line, 1))
    assert index.make_room(make_prefix(3, 1)) is None
    assert len(index) == 2
    dropped = index.make_room(make_prefix(4, 1))
    assert dropped is not None
    assert len(dropped) == 1
    assert TierIndex(40, worth.get).make_room(make_prefix(1, 1)) is None  # larger than the tier


def test_tier_when_a_return_is_unlikely_then_nothing_is_written_and_why_is_counted() -> None:
    outlooks = {b"1:1": Outlook(0.05, 1.0), b"2:1": Outlook(0.2, 1.0)}
    tier = Tier(TierSettings("disk", 1000, FREE_READS, min_return=0.1), outlooks.get, lambda: 0.0)
    assert tier.take(make_prefix(1, 1)) is None
    assert tier.take(make_prefix(2, 1)) == (60, [])
    assert tier.take(make_prefix(2, 1)) is None  # it is here
    assert tier.take(make_prefix(3, 1)) == (60, [])  # nothing is known of it: kept
    for line in range(1, 5):
        tier.evicted(b"%d:1" % line)
    assert tier.skipped == {"value": 1, "late": 1}


def test_tier_when_a_longer_prefix_follows_then_only_what_is_new_is_written() -> None:
    tier = Tier(TierSettings("disk", 1000, FREE_READS), lambda key: None, lambda: 0.0)
    first = make_prefix(1, 3)
    assert tier.take(first) == (80, [])
    assert tier.take(make_prefix(1, 5)) == (70, [])
    assert tier.index.drop(first) == []
    assert tier.index.used_bytes == 100  # the longer one needs all extents


def test_budget_when_demand_is_larger_then_the_rate_holds_and_the_likelier_are_written() -> None:
    rng, now = random.Random(5), [0.0]
    budget = WriteBudget(1000.0, lambda: now[0])
    spent: Counter[bool] = Counter()
    wanted: Counter[bool] = Counter()
    for _ in range(20_000):
        now[0] += 0.1
        probability, num_bytes = rng.random(), rng.randrange(100, 900)  # 5 times the rate
        budget.want(probability, num_bytes)
        wanted[probability > 0.85] += num_bytes
        if budget.may_spend(probability):
            budget.spend(num_bytes)
            spent[probability > 0.85] += num_bytes
        assert sum(spent.values()) <= 1000.0 * now[0] + 900
    assert sum(spent.values()) > 0.8 * 1000.0 * (now[0] - BURST_S)
    assert spent[True] > 0.9 * wanted[True]
    assert spent[False] < 0.2 * wanted[False]


def test_budget_when_there_is_none_then_everything_is_written() -> None:
    budget = WriteBudget(None, lambda: 0.0)
    assert budget.may_spend(0.0)
    budget.spend(1 << 50)
    assert budget.may_spend(0.0)


def test_return_probability_when_rates_are_even_then_it_falls_with_the_bins_that_are_left() -> None:
    probabilities = within_horizon([0.5] * NUM_BINS)
    assert probabilities[NUM_BINS - 1] == pytest.approx(0.5)
    assert probabilities[NUM_BINS] == 0.0
    assert probabilities == sorted(probabilities, reverse=True)
    assert within_horizon([0.0] * NUM_BINS) == [0.0] * (NUM_BINS + 1)


def test_late_probability_when_a_class_never_returned_then_ages_that_nobody_has_seen_change_nothing() -> None:
    """Two classes of which nobody is old yet: one returns soon in half of the cases, the other never."""
    statistics = ReuseStatistics()
    for name in ("comes", "never"):
        reached = statistics.reached((name, 1, 2))
        for age in range(10):
            reached[age] += 400
    for age in range(10):
        for _ in range(30):
            statistics.count_return(("comes", 1, 2), age)
    statistics.refresh()
    comes, never = (statistics.late_probabilities((name, 1, 2)) for name in ("comes", "never"))
    assert never[0] < 0.01
    assert max(never[10:NUM_BINS]) < 0.05
    assert comes[0] > 0.5
    assert comes[12] > 0.2
    # What leaves the pools is given the benefit of the doubt: so such ages are learnt of.
    assert statistics.return_probabilities(("never", 1, 2))[12] > 0.05
    assert statistics.index(("never", 1, 2))[12] == pytest.approx(statistics.index(("comes", 1, 2))[12])


def test_stack_when_a_prefix_is_larger_than_the_first_tier_then_the_next_one_is_offered_it() -> None:
    tiers = [
        Tier(TierSettings(kind, size, FREE_READS, 0.0), lambda key: Outlook(0.5, 1.0), lambda: 0.0)
        for kind, size in (("host", 100), ("disk", 1000))
    ]
    stack = TierStack(tiers, lambda prefix, num_local: 0)
    large, small, other = make_prefix(1, 8), make_prefix(2, 2), make_prefix(3, 3)
    assert [(write.tier, write.prefix) for write in stack.offer(large)] == [(tiers[1], large)]
    assert [(write.tier, write.prefix) for write in stack.offer(small)] == [(tiers[0], small)]
    # What the first lets go is offered to the second, and taken from there.
    assert [(write.tier, write.prefix) for write in stack.offer(other)] == [(tiers[0], other), (tiers[1], small)]
    assert [(write.tier, write.prefix) for write in stack.sink()] == [(tiers[1], other)]
    assert list(stack.sink()) == stack.offer(large) == []
    assert (stack.above(tiers[1]), stack.above(tiers[0])) == (tiers[0], None)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_next_prefixes_when_memory_is_wanted_then_they_are_those_that_are_evicted(policy: str) -> None:
    rng = random.Random(11)
    manager = KVCacheManager(make_config(num_blocks=120, num_slots=24, policy=policy))
    evicted: set[bytes] = set()
    leaving = manager.leaving_prefixes(lambda checkpoint: evicted.add(checkpoint.key))
    num_evicted = num_foreseen = 0
    for turn in range(300):
        start = rng.randrange(12) * 1000
        prompt = [*range(start, start + rng.randrange(16, 48)), 50_000 + turn]
        foreseen = {prefix.key: prefix for prefix in leaving.next(8, len(prompt) // manager.config.block_size + 8)}
        evicted.clear()
        run_turn(manager, prompt, boundaries=(len(prompt) - 1,), donate=True)
        num_evicted += len(evicted)
        num_foreseen += len(evicted & foreseen.keys())
        for prefix in foreseen.values():
            keys = [extent.key for extent in prefix.extents]
            assert not prefix.extents or keys[-1] == prefix.checkpoint.boundary_key
            assert sum(extent.num_blocks for extent in prefix.extents) == prefix.position // manager.config.block_size
    assert num_evicted > 300
    assert num_foreseen > 0.9 * num_evicted
    assert manager.check() == []


def test_prompt_when_part_of_it_is_pulled_first_then_it_is_counted_once() -> None:
    counts = []
    for pulls in (False, True):
        manager = KVCacheManager(make_config(num_blocks=60, num_slots=8, policy="value"))
        keys = manager.prefix_keys(range(40))
        if pulls:
            assert manager.accept_remote("pull", keys, 16) is not None
            manager.commit_remote("pull", None, seal=True)
            manager.free("pull", donate=True)
        assert manager.admit("request", keys, manager.lookup(keys, 40), 40)
        counts.append(manager._coordinator.policy._now)  # type: ignore[attr-defined]
    assert counts == [1, 1]


def test_break_even_when_the_state_is_large_then_short_prefixes_are_computed() -> None:
    rates = BreakEven(0.005, 1 / 3e9, 1 / 15_000)
    state, per_token = 64_389_120, 20_480
    assert rates.saved_s(300, state + 300 * per_token) < 0 < rates.saved_s(500, state + 500 * per_token)


def test_index_when_one_of_several_that_must_go_is_worth_more_then_all_stay() -> None:
    worth = {b"1:1": 0.1, b"2:1": 50.0, b"3:5": 5.0}
    index = TierIndex(120, worth.get)
    for line in (1, 2):
        index.add(make_prefix(line, 1))
    before = [prefix.key for prefix in index]
    assert index.make_room(make_prefix(3, 5)) is None
    assert [prefix.key for prefix in index] == before
    assert index.used_bytes == 120
