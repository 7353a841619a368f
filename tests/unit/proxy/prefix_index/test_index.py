"""The index against the caches whose events it follows, and against a picture with sets."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv_cache.manager import KVCacheManager
from common.node.routes.event_route import changes_of, snapshot_changes
from common.wire.cache_events import CHECKPOINT, TIER_PREFIX, TRUNCATED_KEY_BYTES, CacheChange, CacheNews
from proxy.prefix_index.coverage import Coverage
from proxy.prefix_index.index import PrefixIndex
from proxy.prefix_index.node_cache import NodeCache
from proxy.prefix_index.prompt_keys import PromptKeys
from tests.unit.kv_cache.test_random_interleavings import Driver
from tests.unit.kv_cache.world import World, make_config

URL = "http://node"
ROOT = b"test model"
KINDS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "dense": {"state": False},
    "states_alone": {"attention": False},
    "two_full_groups": {"mla": True},
    "windows": {"windows": (6,)},
    "dense_with_windows": {"state": False, "windows": (6, 9)},
    "windows_alone": {"attention": False, "state": False, "windows": (6,)},
}


def prompt_keys(token_ids: Sequence[int], block_size: int = 4) -> PromptKeys:
    return PromptKeys.of_prompt(ROOT, block_size, token_ids)


def travelled(changes: Sequence[CacheChange]) -> tuple[CacheChange, ...]:
    """As the proxy reads them from the wire."""
    news = CacheNews("1", 0, True, 4, (), True, tuple(changes))
    return CacheNews.from_json(json.loads(json.dumps(news.to_json()))).changes


def new_cache(manager: KVCacheManager) -> NodeCache:
    config = manager.config
    return NodeCache(config.block_size, [group.label for group in config.geometry.attention_groups], config.has_state)


def expected(manager: KVCacheManager, token_ids: Sequence[int]) -> Coverage:
    """What the node itself would find."""
    keys = manager.prefix_keys(token_ids)
    hit = manager.lookup(keys, len(token_ids))
    return Coverage(hit.num_attention_tokens, hit.num_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_index_when_it_follows_events_or_begins_with_a_snapshot_then_it_finds_what_the_node_finds(kind: str) -> None:
    world = World(make_config(num_blocks=24, num_slots=8, events=True, **KINDS[kind]))
    manager, driver, rng = world.manager, Driver(world, 5), random.Random(6)
    assert manager.events is not None
    has_full = any("window" not in group.label for group in manager.config.geometry.attention_groups)
    followed = PrefixIndex(100_000)
    followed.start(URL, new_cache(manager))
    last, prompts, num_found = 0, [[0, 1]], 0
    for _ in range(60):
        driver.play(rng.randint(1, 4))
        events = manager.events.since(last)
        assert events is not None
        last += len(events)
        assert all(followed.apply(URL, change) for change in travelled(list(changes_of(events))))
        fresh = PrefixIndex(100_000)
        fresh.start(URL, new_cache(manager))
        assert all(fresh.apply(URL, change) for change in travelled(snapshot_changes(manager.snapshot())))
        assert followed.num_entries(URL) == fresh.num_entries(URL)
        prompts = [*prompts[-40:], *(list(tokens) for tokens in world.tokens.values()), driver.prompt()]
        for prompt in rng.sample(prompts, min(6, len(prompts))):
            wanted = expected(manager, prompt)
            for index in (followed, fresh):
                found = index.lookup(prompt_keys(prompt)).get(URL, Coverage(0, 0))
                assert found.state_tokens == wanted.state_tokens, prompt
                if has_full:
                    # A checkpoint's tail counts here, and whole blocks alone there.
                    assert wanted.attention_tokens <= found.attention_tokens < wanted.attention_tokens + 4
                    assert found.attention_tokens == wanted.attention_tokens or found.attention_tokens % 4
            num_found += wanted.state_tokens > 0
    assert num_found > 20


@settings(max_examples=60)
@given(st.data())
def test_index_when_blocks_come_and_go_on_several_nodes_then_it_agrees_with_sets(data: st.DataObject) -> None:
    compare_with_sets(data)


@pytest.mark.full
@settings(max_examples=4000, derandomize=False)
@given(st.data())
def test_index_when_blocks_come_and_go_4000_times_then_it_agrees_with_sets(data: st.DataObject) -> None:
    compare_with_sets(data)


def compare_with_sets(data: st.DataObject) -> None:
    """Dense nodes, no bound in reach: coverage is the run of blocks from the left."""
    index = PrefixIndex(100_000)
    urls = ["http://a", "http://b", "http://c"]
    held: dict[str, set[bytes]] = {url: set() for url in urls}
    for url in urls:
        index.start(url, NodeCache(2, ["attention"], has_state=False))
    tokens = st.lists(st.integers(0, 1), min_size=2, max_size=12)
    for _ in range(data.draw(st.integers(1, 12))):
        url, keys = data.draw(st.sampled_from(urls)), prompt_keys(data.draw(tokens), 2)
        truncated = [key[:TRUNCATED_KEY_BYTES] for key in keys.boundary_keys[1:]]
        is_stored = data.draw(st.booleans())
        first = data.draw(st.integers(0, len(truncated) - 1))
        changed = tuple(truncated[first:])
        held[url] = held[url] | set(changed) if is_stored else held[url] - set(changed)
        assert index.apply(url, CacheChange(is_stored, "attention", changed))
    keys = prompt_keys(data.draw(tokens), 2)
    wanted = {}
    for url in urls:
        run = 0
        while run < keys.num_blocks and keys.boundary_keys[run + 1][:TRUNCATED_KEY_BYTES] in held[url]:
            run += 1
        if run:
            wanted[url] = Coverage(2 * run, min(2 * run, keys.num_tokens - 1))
    assert index.lookup(keys) == wanted
    assert [index.num_entries(url) for url in urls] == [len(held[url]) for url in urls]


def stored(keys: PromptKeys) -> CacheChange:
    return CacheChange(True, "attention", tuple(key[:TRUNCATED_KEY_BYTES] for key in keys.boundary_keys[1:]))


@pytest.mark.parametrize("missing", range(8))
def test_index_when_one_block_is_missing_then_what_is_behind_it_does_not_count(missing: int) -> None:
    index, keys = PrefixIndex(1000), prompt_keys([1] * 33)
    index.start(URL, NodeCache(4, ["attention"], has_state=False))
    index.apply(URL, stored(keys))
    index.apply(URL, CacheChange(False, "attention", (keys.boundary_keys[missing + 1][:TRUNCATED_KEY_BYTES],)))
    covered = Coverage(4 * missing, 4 * missing)
    assert index.lookup(keys) == ({URL: covered} if missing else {})


def test_index_when_it_is_full_then_unused_prompts_go_and_of_the_others_the_tails_first() -> None:
    index = PrefixIndex(1000)
    index.start(URL, NodeCache(4, ["attention"], has_state=False))
    prompts = [prompt_keys([number] * 401) for number in range(40)]  # 100 blocks each
    for number, keys in enumerate(prompts):
        index.apply(URL, stored(keys))
        assert index.num_entries(URL) <= 1000
        if number >= 5:
            assert index.lookup(prompts[0])[URL].attention_tokens > 200
            index.observe(URL, prompts[0])  # used all the time
    assert index.lookup(prompts[-1]) == {URL: Coverage(400, 400)}
    assert URL not in index.lookup(prompts[20])


def test_index_when_a_prompt_is_used_at_one_node_then_it_is_forgotten_where_it_is_only_looked_up() -> None:
    index, shared = PrefixIndex(1000), prompt_keys([7] * 401)
    urls = ["http://used", "http://idle"]
    for url in urls:
        index.start(url, NodeCache(4, ["attention"], has_state=False))
        index.apply(url, stored(shared))
    for number in range(20):
        for url in urls:
            index.apply(url, stored(prompt_keys([number + 10] * 201)))
            index.lookup(shared)
        index.observe("http://used", shared)
    assert index.lookup(shared) == {"http://used": Coverage(400, 400)}
    assert index.num_entries("http://used") > 100  # the prompt, and others


def test_index_when_a_prompt_of_another_block_size_is_used_at_a_node_then_nothing_happens() -> None:
    index = PrefixIndex(100)
    index.start(URL, NodeCache(4, ["attention"], has_state=False))
    index.apply(URL, stored(prompt_keys([1] * 401)))
    index.observe(URL, prompt_keys([1] * 401, 8))
    assert index.num_entries(URL) == 100


class _Counted(dict[bytes, Any]):
    """Counts the keys that are looked for, one by one."""

    num_looks = 0

    def get(self, key: bytes, default: Any = None) -> Any:
        self.num_looks += 1
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.num_looks += 1
        return super().__contains__(key)


def checkpoint(keys: PromptKeys, position: int, group: str = CHECKPOINT, *, has_row: bool = False) -> CacheChange:
    key, boundary = keys.key_at(position), keys.truncated_keys[position // keys.block_size]
    return CacheChange(True, group, (key[:TRUNCATED_KEY_BYTES],), boundary, position, has_row)


def test_lookup_when_a_long_prompt_has_one_state_near_its_start_then_its_blocks_are_not_gone_over_for_states() -> None:
    cache, keys = NodeCache(4, ["attention"], has_state=True), prompt_keys(list(range(40_001)))
    cache.apply(stored(keys))
    for group in (CHECKPOINT, f"{TIER_PREFIX}host", f"{TIER_PREFIX}disk"):
        cache.apply(checkpoint(keys, 70, group))
    every = [cache._checkpoints, *cache._tiers.values()]
    for checkpoints in every:
        checkpoints._behind = _Counted(checkpoints._behind)
    assert cache.coverage(keys) == Coverage(40_000, 70)
    looks = [checkpoints._behind.num_looks for checkpoints in every if isinstance(checkpoints._behind, _Counted)]
    assert len(looks) == 3
    assert max(looks) <= 2


@pytest.mark.parametrize("seed", range(40))
def test_lookup_when_there_are_few_or_many_states_then_the_deepest_that_goes_on_is_found(seed: int) -> None:
    """Against all positions in turn: prompts that share beginnings, states at and between boundaries, with and without
    the last row, in memory and in tiers, fewer and more of them than the prompt has blocks."""
    draw = random.Random(seed)
    cache, num_found = NodeCache(4, ["attention"], has_state=True), 0
    shared = [draw.randrange(9) for _ in range(100)]
    prompts = []
    for _ in range(8):
        length = draw.randrange(1, 100)
        prompts.append(prompt_keys(shared[:length] + [draw.randrange(9) for _ in range(draw.randrange(1, 60))]))
    held: dict[str, dict[bytes, bool]] = {CHECKPOINT: {}, f"{TIER_PREFIX}disk": {}}
    for _ in range(draw.choice((3, 20, 200))):
        keys, group = draw.choice(prompts), draw.choice(list(held))
        position, has_row = draw.randint(1, keys.num_tokens), draw.random() < 0.5
        if draw.random() < 0.3:
            position = keys.num_tokens
        change = checkpoint(keys, position, group, has_row=has_row)
        cache.apply(change)
        held[group][change.keys[0]] = has_row
    for keys in prompts:
        run = draw.randint(0, keys.num_blocks)
        fresh = NodeCache(4, ["attention"], has_state=True)
        fresh._checkpoints, fresh._tiers = cache._checkpoints, cache._tiers
        fresh.apply(CacheChange(True, "attention", keys.truncated_keys[1 : run + 1]))
        deepest = {}
        for group, rows in held.items():
            last = min(keys.num_tokens, 4 * run + 3) if group == CHECKPOINT else keys.num_tokens
            named = [(at, keys.key_at(at)[:TRUNCATED_KEY_BYTES]) for at in range(last, 0, -1)]
            goes_on = (at for at, key in named if key in rows and (at < keys.num_tokens or rows[key]))
            deepest[group] = next(goes_on, 0)
        found = fresh.coverage(keys)
        state, tier = deepest.values()
        assert (found.state_tokens, found.tier_tokens) == (state, tier if tier > state else 0)
        num_found += bool(state) + bool(tier)
    assert num_found


def test_index_when_one_node_is_large_then_small_ones_keep_theirs() -> None:
    index = PrefixIndex(1000)
    small = prompt_keys([7] * 401)
    for url in ("http://small", URL):
        index.start(url, NodeCache(4, ["attention"], has_state=False))
    index.apply("http://small", stored(small))
    for number in range(30):
        index.apply(URL, stored(prompt_keys([number + 10] * 401)))
    assert index.lookup(small) == {"http://small": Coverage(400, 400)}


def test_index_when_a_node_is_dropped_or_begins_anew_then_nothing_of_before_is_found() -> None:
    index, keys = PrefixIndex(1000), prompt_keys([1] * 9)
    index.start(URL, NodeCache(4, ["attention"], has_state=False))
    assert index.apply(URL, stored(keys))
    index.start(URL, NodeCache(4, ["attention"], has_state=False))
    assert index.lookup(keys) == {}
    assert index.apply(URL, stored(keys))
    index.drop(URL)
    assert index.lookup(keys) == {}
    assert not index.apply(URL, stored(keys))


def test_index_when_block_sizes_differ_then_nothing_is_found() -> None:
    index = PrefixIndex(1000)
    index.start(URL, NodeCache(4, ["attention"], has_state=False))
    index.apply(URL, stored(prompt_keys([1] * 9)))
    assert index.lookup(prompt_keys([1] * 9, 8)) == {}


def test_observed_prompts_when_their_time_is_over_or_the_node_tells_then_they_are_forgotten() -> None:
    now_s = 0.0
    index = PrefixIndex(1000, lifetime_s=10.0, clock=lambda: now_s)
    keys, longer = prompt_keys([1] * 10), prompt_keys([1] * 18)
    index.observe(URL, keys)
    assert index.lookup(longer) == {URL: Coverage(8, 8)}
    now_s = 6.0
    index.observe(URL, keys)
    now_s = 15.0
    assert index.lookup(keys) == {URL: Coverage(8, 8)}
    now_s = 16.0
    assert index.lookup(keys) == {}
    index.observe(URL, longer)
    assert index.num_entries(URL) == 4
    index.start(URL, NodeCache(4, ["attention"], has_state=False))
    index.observe(URL, keys)
    assert index.lookup(keys) == {}


def test_lookup_of_a_long_prompt_takes_no_longer_for_a_node_than_a_look_at_each_of_its_blocks() -> None:
    index, keys = PrefixIndex(1_000_000), prompt_keys(list(range(4096)), 16)
    urls = [f"http://node-{number}" for number in range(8)]
    for url in urls:
        index.start(url, NodeCache(16, ["attention"], has_state=True))
        index.apply(url, stored(keys))
        index.apply(url, CacheChange(True, "state", (keys.key_at(4090)[:8],), keys.boundary_keys[255][:8], 4090, True))
    known = dict.fromkeys(key[:8] for key in keys.boundary_keys)
    best_s = min(_timed(lambda: index.lookup(keys)) for _ in range(20))
    looks_s = min(_timed(lambda: [known.get(key[:8]) for key in keys.boundary_keys]) for _ in range(20))
    assert index.lookup(keys) == dict.fromkeys(urls, Coverage(4096, 4090))
    assert best_s / len(urls) < 10 * looks_s  # 0.7 times as long


def _timed(work: Callable[[], object]) -> float:
    started_s = time.thread_time()
    work()
    return time.thread_time() - started_s
