"""What concerns more than one group: allocation with linked eviction, pins, publication of checkpoints.

Links kept here: a checkpoint hangs on the attention blocks that end at its boundary and on its tail blocks; when one of
them is evicted an unpinned checkpoint goes with it, and a pinned one when its last pin goes. Memory is checked before
it is taken, so a caller that asked ``can_allocate`` after pinning its hits never fails half way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.eviction.create import create_policy
from common.kv_cache.groups.full_attention import FullAttentionManager
from common.kv_cache.groups.recurrent_state import STATE_LABEL, RecurrentStateManager
from common.kv_cache.groups.single_type import SingleTypeManager
from common.kv_cache.groups.sliding_window import SlidingWindowManager
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.observe.events import CacheEvent, CacheSnapshot, EventKind, EventLog
from common.kv_cache.observe.stats import CacheCounters
from common.kv_cache.pools.generations import GenerationTables
from common.kv_cache.pools.unit_pool import UNIT_STATES, UnitPool
from common.kv_cache.prefix.lookup import PrefixLookup
from common.kv_cache.spec import GroupKind, KVCacheConfig

MAX_FRESH = 1024
"""Published checkpoints that wait for a tier to look at them; without one they are forgotten."""

_MANAGERS: dict[GroupKind, type[FullAttentionManager] | type[SlidingWindowManager]] = {
    GroupKind.FULL_ATTENTION: FullAttentionManager,
    GroupKind.MLA: FullAttentionManager,
    GroupKind.SLIDING_WINDOW: SlidingWindowManager,
}


class Coordinator:
    """
    Attributes:
        groups: the attention groups' managers, in group order.
        full_groups: those of them that keep every position.
        state: the checkpoints.
        lookup: joint lookups over all of them.
        fresh: checkpoints that were published since somebody emptied it, newest last.
        on_evict: told of each checkpoint that is about to be evicted.
    """

    def __init__(self, config: KVCacheConfig, generations: GenerationTables, counters: CacheCounters) -> None:
        self.config = config
        self.policy = create_policy(config)
        self.events = EventLog() if config.enable_events else None
        pools = {
            name: UnitPool(name, num_units, generations, self.policy.order(name))
            for name, num_units in config.pool_sizes.items()
        }
        self.slots = pools["slots"]
        self.groups: tuple[SingleTypeManager, ...] = tuple(
            _MANAGERS[group.kind](group, pools[group.pool_name], config.block_size, self.policy, self.events)
            for group in config.geometry.attention_groups
        )
        self.full_groups = tuple(group for group in self.groups if isinstance(group, FullAttentionManager))
        self.window_groups = tuple(group for group in self.groups if isinstance(group, SlidingWindowManager))
        self.state = RecurrentStateManager(self.slots, config.max_checkpoints, self.policy, self.events)
        self.lookup = PrefixLookup(config, self.groups, self.state)
        self._counters = counters
        self.caches_states = config.caches_states
        self.fresh: deque[Checkpoint] = deque(maxlen=MAX_FRESH)
        self.on_evict: Callable[[Checkpoint], None] | None = None

    def block_counts(self) -> dict[str, int]:
        """Blocks of all attention groups by state."""
        counts = [group.pool.counts() for group in self.groups]
        return {state: sum(each[state] for each in counts) for state in UNIT_STATES}

    # -- memory -------------------------------------------------------------------------------------------------------

    def can_allocate(self, num_blocks: Sequence[int], num_slots: int) -> bool:
        """``num_blocks`` per attention group."""
        return num_slots <= self.slots.num_available and all(
            count <= group.pool.num_available for count, group in zip(num_blocks, self.groups, strict=True)
        )

    def can_allocate_slot(self) -> bool:
        return self.slots.num_available > 0

    def allocate_blocks(self, group: SingleTypeManager, num_blocks: int) -> list[int]:
        pool = group.pool
        while (num_missing := num_blocks - pool.num_free) > 0:
            self._evict_blocks(group, pool.victims(num_missing))
        return pool.allocate(num_blocks)

    def allocate_slot(self) -> int:
        if self.slots.num_free == 0:
            self._evict_checkpoint(self.state.of_slot(self.slots.victim()), "capacity")
        return self.slots.allocate()[0]

    def _evict_blocks(self, group: SingleTypeManager, block_ids: Sequence[int]) -> None:
        group_id, state = group.group.group_id, self.state
        num_free = group.pool.num_free
        named: list[int] = []
        for block_id in block_ids:
            key = group.key_of(block_id)
            if state.depends_on(group_id, block_id, key):
                for checkpoint in state.with_tail(group_id, block_id):
                    self._evict_checkpoint(checkpoint, "tail")
                for checkpoint in state.at_boundary(key) if key is not None else ():
                    if not checkpoint.is_pinned:
                        self._evict_checkpoint(checkpoint, "attention")
            if key is not None:
                named.append(block_id)
        group.forget(named)
        self._counters.evictions[group.group.label] += group.pool.num_free - num_free

    def _evict_checkpoint(self, checkpoint: Checkpoint, reason: str) -> None:
        assert not checkpoint.is_pinned
        if self.on_evict is not None:
            self.on_evict(checkpoint)
        self._counters.checkpoints_evicted[reason] += 1
        if checkpoint.slot_id:
            self._counters.evictions["state"] += 1
        self.state.remove(checkpoint)
        for group, block_id in zip(self.groups, checkpoint.tail_block_ids, strict=False):
            group.pool.remove_content(block_id)

    # -- pins ---------------------------------------------------------------------------------------------------------

    def pin(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_pins += 1
        if checkpoint.slot_id:
            self.slots.hold((checkpoint.slot_id,))
        for group, block_id in zip(self.groups, checkpoint.tail_block_ids, strict=False):
            group.pool.hold((block_id,))

    def unpin(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_pins -= 1
        assert checkpoint.num_pins >= 0
        if checkpoint.slot_id:
            self.slots.drop((checkpoint.slot_id,))
        for group, block_id in zip(self.groups, checkpoint.tail_block_ids, strict=False):
            group.pool.drop((block_id,))
        self._evict_if_orphan(checkpoint)

    def lease(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_leases += 1
        if checkpoint.slot_id:
            self.slots.lease((checkpoint.slot_id,))
        for group, block_id in zip(self.groups, checkpoint.tail_block_ids, strict=False):
            group.pool.lease((block_id,))

    def end_lease(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_leases -= 1
        assert checkpoint.num_leases >= 0
        if checkpoint.slot_id:
            self.slots.end_lease((checkpoint.slot_id,))
        for group, block_id in zip(self.groups, checkpoint.tail_block_ids, strict=False):
            group.pool.end_lease((block_id,))
        self._evict_if_orphan(checkpoint)

    def _evict_if_orphan(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.is_published or checkpoint.is_pinned or self.hangs_on_cache(checkpoint):
            return
        self._evict_checkpoint(checkpoint, "attention")

    def hangs_on_cache(self, checkpoint: Checkpoint) -> bool:
        """Whether the full blocks that end at the checkpoint's boundary are still published, where they are read."""
        num_blocks = (checkpoint.position - len(checkpoint.tail_tokens)) // self.config.block_size
        return all(
            group.get(checkpoint.boundary_key) != 0
            for group in self.groups
            if group.first_needed(checkpoint.position) < num_blocks
        )

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def make_checkpoint(
        self,
        keys: PrefixKeys,
        position: int,
        slot_id: int,
        tail_block_ids: tuple[int, ...],
        origin: str,
        output_row: object | None = None,
    ) -> Checkpoint:
        """A private checkpoint; the caller pins it or publishes it while it still holds slot and tail."""
        assert position > 0
        return Checkpoint(
            key=keys.key_at(position),
            position=position,
            boundary_key=keys.boundary_key(position // keys.block_size),
            tail_tokens=keys.tail_tokens(position),
            slot_id=slot_id,
            tail_block_ids=tail_block_ids,
            origin=origin,
            output_row=output_row,
            history=keys.history,
        )

    def publish_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """Let others find it. False, counted: nothing to hang on, no room, or the key is taken (first one wins)."""
        reason = None
        if self.state.get(checkpoint.key) is not None:
            reason = "exists"
        elif not self.hangs_on_cache(checkpoint):
            reason = "no_attention"
        else:
            possible, victim = self.state.victim_for(checkpoint.boundary_key)
            if not possible:
                reason = "limit"
            elif victim is not None:
                self._evict_checkpoint(victim, "limit")
        if reason is not None:
            self._counters.checkpoints_skipped[reason] += 1
            return False
        hangs_on = self.groups[0].get(checkpoint.boundary_key) if self.groups else 0
        for group, block_id in zip(self.groups, checkpoint.tail_block_ids, strict=False):
            group.pool.add_content(block_id)
        self.state.add(checkpoint, hangs_on)
        self.fresh.append(checkpoint)
        if not checkpoint.tail_tokens:
            for full_group in self.full_groups:
                full_group.unmark(checkpoint.key)
        self._counters.checkpoints_saved[checkpoint.origin] += 1
        return True

    # -- views --------------------------------------------------------------------------------------------------------

    def snapshot(self, sequence_number: int) -> CacheSnapshot:
        """Everything findable."""
        checkpoints = tuple(
            CacheEvent(
                sequence_number,
                EventKind.STORED,
                STATE_LABEL,
                (checkpoint.key,),
                checkpoint.boundary_key,
                checkpoint.position,
                is_checkpoint=True,
                has_row=checkpoint.output_row is not None,
            )
            for checkpoint in self.state
        )
        return CacheSnapshot(sequence_number, tuple(group.entries() for group in self.groups), checkpoints)
