"""Any sequence of operations keeps every unit accounted for, and nobody ever reads bytes of another prefix."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv_cache.eviction.base import EVICTION_POLICIES
from common.kv_cache.planner import MAMBA_CACHE_MODES
from common.kv_cache.pools.generations import content_tag
from common.kv_cache.sharing.leases import LeasedPrefix
from common.kv_cache.sharing.remote_prefix import PullPlan
from tests.unit.kv_cache.world import World, make_config

KINDS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "all": {"mode": "all"},
    "align": {"mode": "align"},
    "all_retained": {"mode": "all", "interval": 8},
    "grid": {"interval": 8},
    "window_state": {"attention": False, "windows": (6,)},
    "full_window": {"state": False, "windows": (7,)},
    "full_window_retained": {"state": False, "windows": (5,), "interval": 8},
    "three_groups": {"windows": (6,)},
    "three_groups_retained": {"windows": (9,), "interval": 8, "mode": "all"},
    "mla_state": {"attention": False, "mla": True},
    "five_groups": {"mla": True, "windows": (3, 9)},
    "dense": {"state": False},
    "state_only": {"attention": False},
    "no_caching": {"caching": False},
    "dense_no_caching": {"state": False, "caching": False},
    "mode_none": {"mode": "none"},
}
QUICK = ("hybrid", "align", "five_groups", "three_groups_retained", "mode_none")
"""The mixed ones below come to the others too."""


class Driver:
    """Plays random operations; prompts come from a small tree so that prefixes are shared, diverge and repeat."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random = world, random.Random(seed)
        self.running: list[str] = []
        self.finished: set[str] = set()
        self.pulling: dict[str, tuple[PullPlan, list[int], bool]] = {}  # plan, prefix, is a part of the prompt
        self.quarantined: list[str] = []
        self.leases: dict[str, tuple[LeasedPrefix, tuple[int, ...]]] = {}
        self.count = 0

    def prompt(self) -> list[int]:
        if self.world.tokens and self.random.random() < 0.5:
            base = self.random.choice(list(self.world.tokens.values()))
            cut = self.random.choice([len(base), len(base), self.random.randint(0, len(base))])
            return base[:cut] + [self.random.randrange(2) for _ in range(self.random.randint(0 if cut else 1, 9))]
        return [self.random.randrange(2) for _ in range(self.random.randint(1, 22))]

    def new_id(self) -> str:
        self.count += 1
        return f"s{self.count}"

    def admit(self) -> None:
        seq_id = self.new_id()
        prompt = self.prompt()
        if self.world.admit(seq_id, prompt):
            self.running.append(seq_id)
            view = self.world.manager.sequence(seq_id)
            assert view.num_computed_tokens <= len(prompt)

    def advance(self) -> None:
        world, manager = self.world, self.world.manager
        if not self.running:
            return
        seq_id = self.random.choice(self.running)
        view = manager.sequence(seq_id)
        tokens = world.tokens[seq_id]
        if view.num_computed_tokens < view.num_prompt_tokens:
            start = view.num_computed_tokens
            budget = min(self.random.randint(1, 12), view.num_prompt_tokens - start)
            end = start + manager.chunk_size(start, budget, view.num_prompt_tokens)
            assert start < end <= start + budget
            wanted = {p for p in range(1, view.num_prompt_tokens + 1) if self.random.random() < 0.15}
            if self.random.random() < 0.5:
                wanted.add(view.num_prompt_tokens)
            world.step(seq_id, end, wanted)
            return
        if seq_id not in self.finished:
            self.finished.add(seq_id)
            seal = self.random.random() < 0.3
            end = manager.finish_prompt(seq_id, world.row(tokens), seal=seal)
            if end.slot_id:
                assert world.slots[end.slot_id] == tuple(tokens)
            if seal:
                if self.random.random() < 0.7:
                    self.lease(seq_id)
                self.leave(seq_id)
            elif self.random.random() < 0.4:
                child = self.new_id()
                if world.fork(seq_id, child):
                    self.running.append(child)
                    self.finished.add(child)
            return
        if manager.extend(seq_id, len(tokens) + 1):
            tokens.append(self.random.randrange(2))
            view.keys.extend(tokens[-1:])
            world.step(seq_id, len(tokens))
        else:
            self.leave(seq_id)

    def lease(self, seq_id: str) -> None:
        lease_id = f"lease-{seq_id}"
        lease = self.world.manager.lease(seq_id, lease_id, self.world.clock.now_s + self.random.randint(1, 9))
        self.world.run_copies()
        self.leases[lease_id] = (lease, tuple(self.world.tokens[seq_id][: lease.num_tokens]))

    def lease_cached(self) -> None:
        world, prompt, lease_id = self.world, self.prompt(), self.new_id()
        deeper_than = self.random.choice([0, 0, len(prompt) // 2])
        deadline_s = world.clock.now_s + self.random.randint(1, 9)
        keys = world.keys(prompt)
        found = world.manager.lookup(keys, len(prompt))
        lease = world.manager.lease_prefix(keys, len(prompt), lease_id, deadline_s, deeper_than=deeper_than)
        world.run_copies()
        if lease is None:
            return
        assert deeper_than < lease.num_tokens <= len(prompt)
        assert lease.num_tokens >= found.num_tokens
        assert lease.output_row == found.output_row
        self.leases[lease_id] = (lease, tuple(prompt[: lease.num_tokens]))

    def leave(self, seq_id: str) -> None:
        self.running.remove(seq_id)
        self.world.manager.free(seq_id, donate=self.random.random() < 0.6)

    def leave_any(self) -> None:
        if self.running:
            self.leave(self.random.choice(self.running))

    def accept(self) -> None:
        """A whole prompt, or the part of it that a peer has."""
        seq_id, prompt = self.new_id(), self.prompt()
        is_part = self.random.random() < 0.4
        num_tokens = self.random.randint(1, len(prompt)) if is_part else len(prompt)
        plan = self.world.manager.accept_remote(seq_id, self.world.keys(prompt), num_tokens)
        if plan is not None:
            self.world.tokens[seq_id] = prompt[:num_tokens]
            self.pulling[seq_id] = (plan, prompt[:num_tokens], is_part)

    def settle_pull(self) -> None:
        if not self.pulling:
            return
        seq_id = self.random.choice(list(self.pulling))
        plan, prompt, is_part = self.pulling.pop(seq_id)
        succeeded = self.random.random() < 0.7
        if succeeded and is_part:
            self.world.receive(plan, prompt)
            self.world.manager.commit_remote(seq_id, None, seal=True)
            self.world.manager.free(seq_id, donate=True)
        elif succeeded:
            self.world.receive(plan, prompt)
            self.world.manager.commit_remote(seq_id, self.world.row(prompt))
            self.running.append(seq_id)
            self.finished.add(seq_id)
        else:
            quarantine = self.random.random() < 0.5
            self.world.manager.abandon_remote(seq_id, quarantine=quarantine)
            if quarantine and not plan.is_empty:
                # a late read lands in quarantined memory whenever it likes
                self.world.receive(plan, [9] * len(prompt))
                self.quarantined.append(seq_id)

    def end_quarantine(self) -> None:
        if self.quarantined:
            assert self.world.manager.release_quarantine(self.quarantined.pop())

    def pass_time(self) -> None:
        self.world.clock.now_s += self.random.randint(0, 3)
        for lease_id in self.world.manager.expire_leases():
            del self.leases[lease_id]
        if self.leases and self.random.random() < 0.5:
            lease_id = self.random.choice(list(self.leases))
            assert self.world.manager.release_lease(lease_id)
            del self.leases[lease_id]

    def check_leases(self) -> None:
        """Bytes promised to a reader stay what they are, under an unchanged generation."""
        world, size = self.world, self.world.config.block_size
        for lease, tokens in self.leases.values():
            for group, rows, table, generations in zip(
                world.groups, world.group_rows, lease.tables, lease.generations, strict=True
            ):
                first = max(0, lease.num_tokens - group.window + 1) if group.window else 0
                for position in range(first, lease.num_tokens):
                    assert rows[table[position // size]][position % size] == tokens[: position + 1]
                for block_id, generation in zip(table, generations, strict=True):
                    now = world.manager.generations.generation(group.pool_name, block_id) if block_id else 0
                    assert now == generation
            if world.config.has_state:
                assert world.slots[lease.slot_id] == tokens
                assert world.manager.generations.generation("slots", lease.slot_id) == lease.slot_generation

    def check_progress(self) -> None:
        """What may be shown of running sequences is computed, and tagged as its reader expects."""
        world, size = self.world, self.world.config.block_size
        for seq_id in self.running:
            progress = world.manager.progress(seq_id)
            keys = world.keys(world.tokens[seq_id])
            for group, rows, table in zip(world.groups, world.group_rows, progress.tables, strict=True):
                for index, block_id in enumerate(table):
                    end = (index + 1) * size
                    if block_id:
                        tag = world.manager.generations.tag(group.pool_name, block_id)
                        assert tag == content_tag(keys.boundary_key(index + 1))
                        assert rows[block_id][size - 1] == tuple(world.tokens[seq_id][:end])

    def play(self, num_operations: int) -> None:
        operations = [self.admit] * 3 + [self.advance] * 10 + [self.leave_any, self.accept, self.settle_pull] * 2
        operations += [self.end_quarantine, self.pass_time, self.lease_cached]
        for _ in range(num_operations):
            self.random.choice(operations)()
            self.world.check()
            self.world.check_published()
            self.check_leases()
            self.check_progress()

    def drain(self) -> None:
        manager = self.world.manager
        while self.pulling:
            self.settle_pull()
        while self.running:
            self.leave_any()
        while self.quarantined:
            self.end_quarantine()
        for lease_id in list(self.leases):
            manager.release_lease(lease_id)
        self.world.run_copies()
        self.world.check()
        stats = manager.stats()
        for counts in (*stats.group_blocks.values(), stats.slots):
            assert counts["held"] == counts["leased"] == counts["quarantined"] == 0


def play(seed: int, num_operations: int, **options: Any) -> None:
    driver = Driver(World(make_config(**options)), seed)
    driver.play(num_operations)
    driver.drain()


PRESSURE = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(EVICTION_POLICIES),
        "num_blocks": st.integers(7, 30),
        "num_slots": st.integers(2, 9),
        "max_checkpoints": st.sampled_from([2, 5, 100]),
    }
)
MIXES = st.fixed_dictionaries(
    {
        "attention": st.booleans(),
        "mla": st.booleans(),
        "windows": st.lists(st.integers(1, 13), max_size=2, unique=True).map(tuple),
        "state": st.booleans(),
        "mode": st.sampled_from(MAMBA_CACHE_MODES),
        "interval": st.sampled_from([None, 4, 8, 12]),
        "caching": st.sampled_from([True, True, True, False]),
    }
).filter(lambda mix: mix["attention"] or mix["mla"] or mix["windows"] or mix["state"])


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.full) for kind in sorted(KINDS)]
)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), pressure=PRESSURE)
def test_random_operations_when_memory_is_tight_then_nothing_leaks_or_is_misread(
    kind: str, seed: int, pressure: dict[str, Any]
) -> None:
    play(seed, 80, **pressure, **KINDS[kind])


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), pressure=PRESSURE, mix=MIXES)
def test_random_operations_when_groups_are_mixed_at_random_then_nothing_leaks_or_is_misread(
    seed: int, pressure: dict[str, Any], mix: dict[str, Any]
) -> None:
    play(seed, 80, **pressure, **mix)


@pytest.mark.full
@pytest.mark.timeout(3600)
@settings(max_examples=5000, derandomize=False)
@given(seed=st.integers(0, 2**32), pressure=PRESSURE, mix=MIXES)
def test_random_operations_when_played_5000_times_then_nothing_leaks_or_is_misread(
    seed: int, pressure: dict[str, Any], mix: dict[str, Any]
) -> None:
    play(seed, 100, **pressure, **mix)


def test_random_operations_when_driven_long_then_every_path_was_taken() -> None:
    driver = Driver(World(make_config(num_blocks=24, num_slots=9)), 7)
    driver.play(3000)
    stats = driver.world.manager.stats()
    assert {"save", "prompt_end", "donated", "pulled"} <= stats.checkpoints_saved.keys()
    assert {"capacity", "attention"} <= stats.checkpoints_evicted.keys()
    assert stats.hit_tokens["joint"] > 0
    assert stats.leases_expired > 0
    driver.drain()
