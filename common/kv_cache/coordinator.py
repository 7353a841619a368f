"""What concerns more than one group: joint lookups, allocation with linked eviction, pins, publication of checkpoints.

Links kept here: a checkpoint hangs on the attention block that ends at its boundary and on its tail block; when either
is evicted an unpinned checkpoint goes with it, and a pinned one when its last pin goes. Memory is checked before it is
taken, so a caller that asked ``can_allocate`` after pinning its hits never fails half way.
"""

from __future__ import annotations

from common.kv_cache.checkpoint import Checkpoint
from common.kv_cache.full_attention import FullAttentionManager
from common.kv_cache.generations import GenerationTables
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.results import PrefixHit, RemoteHit
from common.kv_cache.spec import KVCacheConfig
from common.kv_cache.state import StateManager
from common.kv_cache.stats import CacheCounters
from common.kv_cache.unit_pool import UnitPool


class Coordinator:
    def __init__(self, config: KVCacheConfig, generations: GenerationTables, counters: CacheCounters) -> None:
        self.config = config
        self.blocks = UnitPool("blocks", config.num_blocks, generations)
        self.slots = UnitPool("slots", config.num_slots, generations)
        self.attention = FullAttentionManager(self.blocks, config.block_size)
        self.state = StateManager(self.slots, config.max_checkpoints)
        self._counters = counters
        self.caches_states = config.enable_prefix_caching and not (
            config.has_state and config.mamba_cache_mode == "none"
        )

    # -- lookups ------------------------------------------------------------------------------------------------------

    def lookup_local(self, keys: PrefixKeys, num_tokens: int) -> PrefixHit:
        """Deepest checkpoint that attention covers too. Dense: attention alone, or a deeper tail."""
        if not self.config.enable_prefix_caching or num_tokens == 0:
            return PrefixHit()
        run = tuple(self.attention.left_run(keys, num_tokens)) if self.config.has_attention else ()
        num_attention = len(run) * keys.block_size
        num_state, found = 0, None
        for checkpoint in self.state.matching(keys, num_tokens):
            is_whole = checkpoint.position == num_tokens
            if is_whole and checkpoint.output_row is None and self.config.has_state:
                continue  # the last token must be computed for its row, and its state cannot be undone
            num_state = max(num_state, checkpoint.position)
            if self._is_covered(checkpoint, num_attention):
                found = checkpoint
                break
        if found is not None and found.position == num_tokens and found.output_row is not None:
            return PrefixHit(
                num_tokens, num_tokens, run, num_attention, num_state, None, found, output_row=found.output_row
            )
        if self.config.has_state:
            resume = found.position if found is not None else 0
            written = max(resume, num_attention)
            junction = num_attention if num_attention > resume else None
            return PrefixHit(resume, written, run, num_attention, num_state, junction, found)
        if found is not None and found.position <= num_attention:
            found = None
        written = found.position if found is not None else num_attention
        return PrefixHit(min(written, num_tokens - 1), written, run, num_attention, num_state, None, found)

    def lookup_remote(self, keys: PrefixKeys, num_tokens: int) -> RemoteHit:
        """Each group by itself: the full-attention run sets what is reused; null entries never count."""
        if not self.config.enable_prefix_caching:
            return RemoteHit(0, 0, (), not self.config.has_state, None, 0)
        run = tuple(self.attention.left_run(keys, num_tokens)) if self.config.has_attention else ()
        num_blocks, num_tail = divmod(num_tokens, keys.block_size)
        checkpoint = self.state.get(keys.key_at(num_tokens))
        num_attention = len(run) * keys.block_size
        if num_tail and checkpoint is not None and checkpoint.tail_block_id and len(run) == num_blocks:
            num_attention = num_tokens
        marked = 0
        for index in range(len(run), 0, -1):
            if self.attention.is_marked(run[index - 1]):
                marked = index * keys.block_size
                break
        has_state = not self.config.has_state or checkpoint is not None
        return RemoteHit(num_attention, len(run) * keys.block_size, run, has_state, checkpoint, marked)

    def is_current(self, hit: PrefixHit, keys: PrefixKeys) -> bool:
        """Whether everything a lookup found is still where it was."""
        if hit.checkpoint is not None and not hit.checkpoint.is_published:
            return False
        return all(
            self.attention.get(keys.boundary_key(index + 1)) == block_id for index, block_id in enumerate(hit.block_ids)
        )

    def _is_covered(self, checkpoint: Checkpoint, num_attention_tokens: int) -> bool:
        covered_from = checkpoint.position - len(checkpoint.tail_tokens)
        return not self.config.has_attention or covered_from <= num_attention_tokens

    # -- memory -------------------------------------------------------------------------------------------------------

    def can_allocate(self, num_blocks: int, num_slots: int) -> bool:
        return num_blocks <= self.blocks.num_available and num_slots <= self.slots.num_available

    def allocate_block(self) -> int:
        if self.blocks.num_free == 0:
            self._evict_block(self.blocks.least_recent())
        return self.blocks.allocate()

    def allocate_slot(self) -> int:
        if self.slots.num_free == 0:
            self._evict_checkpoint(self.state.of_slot(self.slots.least_recent()), "capacity")
        return self.slots.allocate()

    def _evict_block(self, block_id: int) -> None:
        self._counters.evictions["attention"] += 1
        for checkpoint in self.state.with_tail(block_id):
            self._evict_checkpoint(checkpoint, "tail")
        key = self.attention.key_of(block_id)
        if key is not None:
            for checkpoint in self.state.at_boundary(key):
                if not checkpoint.is_pinned:
                    self._evict_checkpoint(checkpoint, "attention")
            self.attention.forget(block_id)

    def _evict_checkpoint(self, checkpoint: Checkpoint, reason: str) -> None:
        assert not checkpoint.is_pinned
        self._counters.checkpoints_evicted[reason] += 1
        if checkpoint.slot_id:
            self._counters.evictions["state"] += 1
        self.state.remove(checkpoint)
        if checkpoint.tail_block_id:
            self.blocks.remove_content(checkpoint.tail_block_id)

    # -- pins ---------------------------------------------------------------------------------------------------------

    def pin(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_pins += 1
        if checkpoint.slot_id:
            self.slots.hold(checkpoint.slot_id)
        if checkpoint.tail_block_id:
            self.blocks.hold(checkpoint.tail_block_id)

    def unpin(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_pins -= 1
        assert checkpoint.num_pins >= 0
        if checkpoint.slot_id:
            self.slots.drop(checkpoint.slot_id)
        if checkpoint.tail_block_id:
            self.blocks.drop(checkpoint.tail_block_id)
        self._evict_if_orphan(checkpoint)

    def lease(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_leases += 1
        if checkpoint.slot_id:
            self.slots.lease(checkpoint.slot_id)
        if checkpoint.tail_block_id:
            self.blocks.lease(checkpoint.tail_block_id)

    def end_lease(self, checkpoint: Checkpoint) -> None:
        checkpoint.num_leases -= 1
        assert checkpoint.num_leases >= 0
        if checkpoint.slot_id:
            self.slots.end_lease(checkpoint.slot_id)
        if checkpoint.tail_block_id:
            self.blocks.end_lease(checkpoint.tail_block_id)
        self._evict_if_orphan(checkpoint)

    def _evict_if_orphan(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.is_published or checkpoint.is_pinned or self.hangs_on_cache(checkpoint):
            return
        self._evict_checkpoint(checkpoint, "attention")

    def hangs_on_cache(self, checkpoint: Checkpoint) -> bool:
        """Whether the full block that ends at the checkpoint's boundary is still published."""
        if not self.config.has_attention or checkpoint.position == len(checkpoint.tail_tokens):
            return True
        return self.attention.get(checkpoint.boundary_key) != 0

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def make_checkpoint(
        self, keys: PrefixKeys, position: int, slot_id: int, tail_block_id: int, output_row: object | None = None
    ) -> Checkpoint:
        """A private checkpoint; the caller pins it or publishes it while it still holds slot and tail."""
        assert position > 0
        return Checkpoint(
            key=keys.key_at(position),
            position=position,
            boundary_key=keys.boundary_key(position // keys.block_size),
            tail_tokens=keys.tail_tokens(position),
            slot_id=slot_id,
            tail_block_id=tail_block_id,
            output_row=output_row,
        )

    def publish_checkpoint(self, checkpoint: Checkpoint, event: str) -> bool:
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
        self.state.add(checkpoint)
        if checkpoint.tail_block_id:
            self.blocks.add_content(checkpoint.tail_block_id)
        if not checkpoint.tail_tokens:
            self.attention.unmark(checkpoint.key)
        self._counters.checkpoints_saved[event] += 1
        return True
