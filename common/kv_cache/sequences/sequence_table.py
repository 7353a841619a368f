"""The allocations of all running sequences, and the elementary moves on one of them.

The manager, the checkpoint saver, prompt ends and remote prefixes build their operations from these moves.

No move here checks for memory: callers ask ``Coordinator.can_allocate`` first, so that every public operation is all or
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.checkpoints.save_policy import SavePolicy
from common.kv_cache.coordinator import Coordinator
from common.kv_cache.groups.single_type import SingleTypeManager
from common.kv_cache.groups.sliding_window import SlidingWindowManager
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.observe.stats import CacheCounters
from common.kv_cache.pools.copy_queue import CopyQueue
from common.kv_cache.sequences.allocation import Allocation, BlockTable, Save
from common.kv_cache.spec import KVCacheConfig


class SequenceTable:
    def __init__(
        self, config: KVCacheConfig, coordinator: Coordinator, save_policy: SavePolicy, counters: CacheCounters
    ) -> None:
        self.config = config
        self.coordinator = coordinator
        self.save_policy = save_policy
        self.counters = counters
        self.copies = tuple(CopyQueue(group.pool) for group in coordinator.groups)
        self._by_id: dict[str, Allocation] = {}

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Allocation]:
        return iter(self._by_id.values())

    def __getitem__(self, seq_id: str) -> Allocation:
        return self._by_id[seq_id]

    def create(self, seq_id: str, keys: PrefixKeys, num_prompt_tokens: int) -> Allocation:
        assert seq_id not in self._by_id, f"sequence {seq_id} exists"
        tables = tuple(BlockTable() for _ in self.coordinator.groups)
        allocation = self._by_id[seq_id] = Allocation(seq_id, keys, num_prompt_tokens, tables)
        return allocation

    def rows(self, allocation: Allocation) -> Iterator[tuple[SingleTypeManager, BlockTable, CopyQueue]]:
        """Per attention group: its manager, the sequence's table, the copies to run."""
        return zip(self.coordinator.groups, allocation.tables, self.copies, strict=True)

    # -- blocks -------------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Entries of a table that covers ``num_tokens`` positions."""
        return -(-num_tokens // self.config.block_size)

    def missing_blocks(self, allocation: Allocation, num_tokens: int) -> list[int]:
        """Per attention group, how many blocks ``grow`` would allocate."""
        num_blocks = self.blocks_for(num_tokens)
        return [max(0, num_blocks - len(table.block_ids)) for table in allocation.tables]

    def grow(self, allocation: Allocation, num_tokens: int) -> None:
        """Append fresh blocks until ``num_tokens`` positions are covered."""
        for group, table, num_fresh in zip(
            self.coordinator.groups, allocation.tables, self.missing_blocks(allocation, num_tokens), strict=True
        ):
            if num_fresh:
                table.block_ids += self.coordinator.allocate_blocks(group, num_fresh)

    def publish_blocks(self, allocation: Allocation, *, again: bool = False) -> None:
        """Tag the complete blocks, as far as keys are known, and name them; first publisher wins. ``again``: name from
        the start, since what was found or lost before may have been evicted meanwhile."""
        end = min(allocation.num_computed_tokens, allocation.keys.num_tokens) // self.config.block_size
        for group, table in zip(self.coordinator.groups, allocation.tables, strict=True):
            fresh = max(table.num_published, table.first_block)
            if end > fresh:
                keys = allocation.keys.boundary_keys(end)[fresh + 1 : end + 1]
                group.pool.set_tags(table.block_ids[fresh:end], keys)
            if self.config.enable_prefix_caching:
                self._name_blocks(allocation, group, table, table.first_block if again else table.num_published, end)
            table.num_published = max(table.num_published, end)

    def _name_blocks(
        self, allocation: Allocation, group: SingleTypeManager, table: BlockTable, start: int, end: int
    ) -> None:
        size, positions = self.config.block_size, None
        if isinstance(group, SlidingWindowManager):
            positions = self.save_policy.window_positions(start * size, end * size, allocation.num_prompt_tokens)
        if positions is None:
            group.publish_run(allocation.keys, table.block_ids, start, end)
        else:
            for position in positions:
                self._publish_window(allocation, group, table, position)

    def publish_windows(self, allocation: Allocation, position: int) -> None:
        """Name what going on at ``position`` reads of sliding windows, whatever the retention interval declined."""
        for group, table in zip(self.coordinator.groups, allocation.tables, strict=True):
            if isinstance(group, SlidingWindowManager):
                self._publish_window(allocation, group, table, position)

    def _publish_window(
        self, allocation: Allocation, group: SingleTypeManager, table: BlockTable, position: int
    ) -> None:
        start = max(group.first_needed(position), table.first_block)
        group.publish_run(allocation.keys, table.block_ids, start, position // self.config.block_size)

    def release_passed(self, allocation: Allocation) -> None:
        """Give back the blocks that the windows have left: null entries from now on."""
        for group, table in zip(self.coordinator.groups, allocation.tables, strict=True):
            first = group.first_needed(allocation.num_computed_tokens)
            if first > table.first_block:
                passed = [block_id for block_id in table.block_ids[table.first_block : first] if block_id]
                table.block_ids[table.first_block : first] = [0] * (first - table.first_block)
                table.first_block = first
                group.pool.drop(passed)

    def tables_ahead(self, allocation: Allocation, position: int) -> tuple[BlockTable, ...]:
        """What the token at ``position`` needs, while the step before it still has what the windows leave then."""
        tables = []
        for group, table in zip(self.coordinator.groups, allocation.tables, strict=True):
            first = group.first_needed(position)
            if first > table.first_block:
                block_ids = [0] * first + table.block_ids[first:]
                table = BlockTable(block_ids, table.write_from, table.num_published, first)
            tables.append(table)
        return tuple(tables)

    def tail_blocks(self, allocation: Allocation, position: int) -> tuple[int, ...]:
        """Per attention group, the block whose first rows are the tail below ``position``; () on a boundary. Bytes are
        there now, not pending."""
        index, num_tail = divmod(position, self.config.block_size)
        if num_tail == 0:
            return ()
        return tuple(copies.origin(table.block_ids[index]) for _, table, copies in self.rows(allocation))

    def make_checkpoint(
        self,
        allocation: Allocation,
        position: int,
        slot_id: int,
        tail_block_ids: tuple[int, ...],
        origin: str,
        output_row: object | None = None,
    ) -> Checkpoint:
        """A private checkpoint of what the sequence computed, its slot and tail blocks tagged with its key.

        A unit has one tag. A complete block keeps its own, and so does what somebody reads now, or what the sequence
        only continues from; of several tails that one step leaves in a block the last one counts.
        """
        checkpoint = self.coordinator.make_checkpoint(
            allocation.keys, position, slot_id, tail_block_ids, origin, output_row
        )
        if slot_id:
            self.coordinator.slots.set_tags((slot_id,), (checkpoint.key,))
        index = position // self.config.block_size
        sources = allocation.src_checkpoint.tail_block_ids if allocation.src_checkpoint is not None else ()
        for group, table, block_id in zip(self.coordinator.groups, allocation.tables, tail_block_ids, strict=False):
            if index >= table.num_published and block_id not in sources and not group.pool.leased[block_id]:
                group.pool.set_tags((block_id,), (checkpoint.key,))
        return checkpoint

    def copies_needed(self, allocation: Allocation, position: int) -> list[int]:
        """Per attention group, 1 when publishing the tail at ``position`` takes the sequence's open block away."""
        index, num_tail = divmod(position, self.config.block_size)
        needed = []
        for _, table, copies in self.rows(allocation):
            is_complete = (index + 1) * self.config.block_size <= max(allocation.num_computed_tokens, table.write_from)
            needed.append(int(num_tail > 0 and not is_complete and table.block_ids[index] not in copies))
        return needed

    def continue_in_copies(self, allocation: Allocation, position: int, needed: list[int]) -> None:
        """Leave the open blocks at ``position`` to a checkpoint; the sequence goes on in copies of them."""
        index = position // self.config.block_size
        for is_needed, (group, table, copies) in zip(needed, self.rows(allocation), strict=True):
            if is_needed:
                source = table.block_ids[index]
                table.block_ids[index] = self.coordinator.allocate_blocks(group, 1)[0]
                copies.push(source, table.block_ids[index])
                group.pool.drop((source,))

    def copy_tail(self, allocation: Allocation, checkpoint: Checkpoint, skipped: tuple[bool, ...] = ()) -> None:
        """The tail of a checkpoint, copied into the sequence's own blocks; ``skipped``: groups that have the rows."""
        index = checkpoint.position // self.config.block_size
        for group_id, source in enumerate(checkpoint.tail_block_ids):
            if not (skipped and skipped[group_id]):
                self.copies[group_id].push(source, allocation.tables[group_id].block_ids[index])

    # -- slots --------------------------------------------------------------------------------------------------------

    def rotate_slot(self, allocation: Allocation, checkpoint: Checkpoint) -> None:
        """The running slot now belongs to ``checkpoint``; the next step reads it and writes a fresh slot."""
        assert allocation.owns_state
        assert allocation.src_checkpoint is None
        assert checkpoint.slot_id == allocation.dst_slot
        self.coordinator.pin(checkpoint)
        allocation.src_checkpoint = checkpoint
        self.coordinator.slots.drop((allocation.dst_slot,))
        allocation.dst_slot = self.coordinator.allocate_slot()

    def plan_save(self, allocation: Allocation, position: int, origin: str) -> None:
        allocation.saves[position] = Save(self.coordinator.allocate_slot(), origin)

    def drop_save(self, allocation: Allocation, position: int) -> None:
        save = allocation.saves.pop(position, None)
        if save is not None:
            self.coordinator.slots.drop((save.slot_id,))

    # -- leaving ------------------------------------------------------------------------------------------------------

    def remove(self, allocation: Allocation) -> None:
        """Give everything back, blocks tail first so that the deep end of a prefix is evicted before its start."""
        coordinator = self.coordinator
        del self._by_id[allocation.seq_id]
        for position in list(allocation.saves):
            self.drop_save(allocation, position)
        coordinator.slots.drop(allocation.rollback.values())
        for checkpoint in (allocation.src_checkpoint, allocation.prompt_end):
            if checkpoint is not None:
                coordinator.unpin(checkpoint)
        coordinator.slots.drop(slot_id for slot_id in (allocation.dst_slot, allocation.other_slot) if slot_id)
        for group, table, copies in self.rows(allocation):
            copies.cancel(table.block_ids)
            group.pool.drop(filter(None, reversed(table.block_ids)))
