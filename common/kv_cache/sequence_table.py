"""All running sequences and the primitive moves on one of them: what the facade, prompt ends and remote intake share.

No move here checks for memory: callers ask ``Coordinator.can_allocate`` first, so that every public operation is all or
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.kv_cache.checkpoint import Checkpoint
from common.kv_cache.coordinator import Coordinator
from common.kv_cache.copies import CopyQueue
from common.kv_cache.sequence import Sequence
from common.kv_cache.spec import KVCacheConfig
from common.kv_cache.stats import CacheCounters


class SequenceTable:
    def __init__(self, config: KVCacheConfig, coordinator: Coordinator, counters: CacheCounters) -> None:
        self.config = config
        self.coordinator = coordinator
        self.counters = counters
        self.copies = CopyQueue(coordinator.blocks)
        self._by_id: dict[str, Sequence] = {}

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __getitem__(self, seq_id: str) -> Sequence:
        return self._by_id[seq_id]

    def add(self, seq: Sequence) -> None:
        assert seq.seq_id not in self._by_id, f"sequence {seq.seq_id} exists"
        self._by_id[seq.seq_id] = seq

    # -- blocks -------------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size) if self.config.has_attention else 0

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Append fresh blocks until ``num_tokens`` positions are covered."""
        for _ in range(self.blocks_for(num_tokens) - len(seq.block_ids)):
            seq.block_ids.append(self.coordinator.allocate_block())

    def publish_blocks(self, seq: Sequence, start: int) -> None:
        """Name the complete blocks from table index ``start`` on, as far as keys are known; first publisher wins."""
        if not (self.config.enable_prefix_caching and self.config.has_attention):
            return
        attention, keys = self.coordinator.attention, seq.keys
        end = min(seq.num_computed_tokens, keys.num_tokens) // self.config.block_size
        for index in range(start, end):
            attention.publish(keys.boundary_key(index + 1), seq.block_ids[index])
        seq.num_published_blocks = max(seq.num_published_blocks, end)

    def tail_block(self, seq: Sequence, position: int) -> int:
        """Block whose first rows are the tail below ``position``; 0 on a boundary. Bytes are there now, not pending."""
        if position % self.config.block_size == 0 or not self.config.has_attention:
            return 0
        return self.copies.origin(seq.block_ids[position // self.config.block_size])

    def needs_copy(self, seq: Sequence, position: int) -> bool:
        """Whether publishing the tail at ``position`` takes the sequence's open block away from it."""
        index, num_tail = divmod(position, self.config.block_size)
        if num_tail == 0 or not self.config.has_attention:
            return False
        is_complete = (index + 1) * self.config.block_size <= max(seq.num_computed_tokens, seq.write_from)
        return not is_complete and seq.block_ids[index] not in self.copies

    def continue_in_copy(self, seq: Sequence, position: int) -> None:
        """Leave the open block at ``position`` to a checkpoint; the sequence goes on in a copy of it."""
        index = position // self.config.block_size
        source = seq.block_ids[index]
        seq.block_ids[index] = self.coordinator.allocate_block()
        self.copies.push(source, seq.block_ids[index])
        self.coordinator.blocks.drop(source)

    # -- slots --------------------------------------------------------------------------------------------------------

    def rotate_slot(self, seq: Sequence, checkpoint: Checkpoint) -> None:
        """The running slot now belongs to ``checkpoint``; the next step reads it and writes a fresh slot."""
        assert seq.owns_state
        assert seq.src_checkpoint is None
        assert checkpoint.slot_id == seq.dst_slot
        self.coordinator.pin(checkpoint)
        seq.src_checkpoint = checkpoint
        self.coordinator.slots.drop(seq.dst_slot)
        seq.dst_slot = self.coordinator.allocate_slot()

    def drop_save(self, seq: Sequence, position: int) -> None:
        slot_id = seq.saves.pop(position, 0)
        if slot_id:
            self.coordinator.slots.drop(slot_id)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def remove(self, seq: Sequence) -> None:
        """Give everything back, blocks tail first so that the deep end of a prefix is evicted before its start."""
        coordinator = self.coordinator
        del self._by_id[seq.seq_id]
        self.copies.cancel(seq.block_ids)
        for position in list(seq.saves):
            self.drop_save(seq, position)
        for checkpoint in (seq.src_checkpoint, seq.prompt_end):
            if checkpoint is not None:
                coordinator.unpin(checkpoint)
        if seq.dst_slot:
            coordinator.slots.drop(seq.dst_slot)
        for block_id in reversed(seq.block_ids):
            coordinator.blocks.drop(block_id)
