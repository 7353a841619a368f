"""Taking a prefix in from a peer: destinations first, publication only after validation.

1 accept: pin what is here, allocate destinations (held, unpublished); 2 the read and its validation happen elsewhere;
3 commit: publish full blocks, null entries and the checkpoint; the sequence is runnable at N. Or abandon:
destinations freed, or quarantined while the read may still write them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.kv_cache.keys import PrefixKeys
from common.kv_cache.prefix.hits import RemoteHit
from common.kv_cache.sequences.allocation import Allocation, Pull
from common.kv_cache.sequences.prompt_ends import PromptEnds
from common.kv_cache.sequences.sequence_table import SequenceTable


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Destinations of one pull, held and unpublished until ``commit_remote`` or ``abandon_remote``.

    Attributes:
        num_tokens: length of the prefix.
        pairs: per attention group, (index in the prompt's block table, local block id) to be read, ascending.
        slot_id: slot to read the state into; 0 when no state is needed.
        num_local_tokens: of the prefix, what was found here: its K/V as far as the groups that keep everything have it
            (without attention layers: all or nothing, as its state is here or not). Null positions are never counted.
    """

    num_tokens: int
    pairs: tuple[tuple[tuple[int, int], ...], ...]
    slot_id: int
    num_local_tokens: int

    @property
    def is_empty(self) -> bool:
        return not any(self.pairs) and self.slot_id == 0


class RemotePrefixes:
    def __init__(self, sequences: SequenceTable, prompt_ends: PromptEnds) -> None:
        self._sequences = sequences
        self._coordinator = sequences.coordinator
        self._config = sequences.config
        self._prompt_ends = prompt_ends
        # sequence -> blocks per attention group, slots: destinations of reads that may still write
        self.quarantined: dict[str, tuple[tuple[list[int], ...], list[int]]] = {}

    def accept(self, seq_id: str, keys: PrefixKeys, num_tokens: int) -> PullPlan | None:
        coordinator, sequences = self._coordinator, self._sequences
        hit = coordinator.lookup.remote(keys, num_tokens)
        num_blocks = sequences.blocks_for(num_tokens)
        checkpoint = hit.checkpoint
        uses_tail = checkpoint is not None and bool(checkpoint.tail_block_ids)
        # First touch the hits of all groups, then allocate: allocation may evict what was just found.
        allocation = sequences.create(seq_id, keys, num_tokens)
        for group, table, found, first in zip(
            coordinator.groups, allocation.tables, hit.tables, hit.first_needed, strict=True
        ):
            group.pool.hold(block_id for block_id in found if block_id)
            table.block_ids = list(found)
            table.first_block = first
            table.write_from = num_tokens
        if checkpoint is not None and (self._config.has_state or uses_tail):
            coordinator.pin(checkpoint)
            coordinator.state.touch(checkpoint)
            allocation.src_checkpoint = checkpoint
        missing = [
            [i for i in range(first, num_blocks) if i >= len(found) or not found[i]]
            for found, first in zip(hit.tables, hit.first_needed, strict=True)
        ]
        if not coordinator.can_allocate([len(indices) for indices in missing], int(self._config.has_state)):
            sequences.remove(allocation)
            return None
        coordinator.policy.admitted(keys, num_tokens)
        keys.is_counted = True
        coordinator.lookup.remember(keys, num_tokens)
        for group, table, indices in zip(coordinator.groups, allocation.tables, missing, strict=True):
            table.num_published = indices[0] if indices else num_blocks
            table.block_ids += [0] * (num_blocks - len(table.block_ids))
            for index, block_id in zip(indices, coordinator.allocate_blocks(group, len(indices)), strict=True):
                table.block_ids[index] = block_id
        slot_id = 0
        if self._config.has_state:
            allocation.src_slot = allocation.dst_slot = coordinator.allocate_slot()
            if allocation.src_checkpoint is not None:
                allocation.src_slot = allocation.src_checkpoint.slot_id
            else:
                slot_id = allocation.dst_slot
        read = tuple(tuple(i for i in indices if not (uses_tail and i == num_blocks - 1)) for indices in missing)
        allocation.pull = Pull(read, slot_id)
        self._count_hit(hit, num_tokens)
        pairs = tuple(
            tuple((i, table.block_ids[i]) for i in indices)
            for table, indices in zip(allocation.tables, read, strict=True)
        )
        return PullPlan(num_tokens, pairs, slot_id, self._num_local_tokens(hit, num_tokens, read, slot_id))

    def _num_local_tokens(
        self, hit: RemoteHit, num_tokens: int, read: tuple[tuple[int, ...], ...], slot_id: int
    ) -> int:
        groups = self._coordinator.groups
        if not groups:
            return 0 if slot_id else num_tokens
        counted = self._coordinator.full_groups or groups
        return hit.num_run_tokens if any(read[group.group.group_id] for group in counted) else num_tokens

    def _count_hit(self, hit: RemoteHit, num_tokens: int) -> None:
        """Counts real blocks and tails only. ``joint`` is what the groups that keep everything have; a model without
        such groups has what its checkpoint has."""
        size, checkpoint = self._config.block_size, hit.checkpoint
        has_tail = checkpoint is not None and bool(checkpoint.tail_block_ids)
        num_tail = num_tokens % size if has_tail else 0
        num_state = num_tokens if checkpoint is not None else 0
        hits = {"joint": hit.num_attention_tokens if self._coordinator.full_groups else num_state}
        for group, table in zip(self._coordinator.groups, hit.tables, strict=True):
            hits[group.group.label] = (len(table) - table.count(0)) * size + num_tail
        if self._config.has_state:
            hits["state"] = num_state
        self._sequences.counters.count_query(num_tokens, hits)

    def commit(self, allocation: Allocation, output_row: Any | None, *, seal: bool) -> None:
        assert allocation.pull is not None, "nothing was accepted"
        allocation.pull = None
        allocation.num_computed_tokens = allocation.num_prompt_tokens
        # Only real blocks were counted as cached, so everything pulled is published here.
        self._sequences.publish_blocks(allocation)
        self._mark_null_entries(allocation)
        source = allocation.src_checkpoint
        if source is not None and source.tail_block_ids:
            self._sequences.copy_tail(allocation, source)
        if (
            not seal
            or self._config.has_state
            or output_row is not None
            or allocation.num_prompt_tokens % allocation.keys.block_size
        ):
            self._prompt_ends.finish(allocation, output_row, seal=seal, origin="pulled")

    def _mark_null_entries(self, allocation: Allocation) -> None:
        """The state row of this prefix is [null, .., null, slot]: register the nulls on the attention entries."""
        groups, state = self._coordinator.full_groups, self._coordinator.state
        if not (self._config.enable_prefix_caching and self._config.has_state and groups):
            return
        for num_blocks in range(1, -(-allocation.num_prompt_tokens // self._config.block_size)):
            key = allocation.keys.boundary_key(num_blocks)
            if state.get(key) is None:
                groups[0].mark_remote(key)

    def abandon(self, allocation: Allocation, *, quarantine: bool) -> None:
        assert allocation.pull is not None, "nothing was accepted"
        pull = allocation.pull
        if quarantine and (any(pull.indices) or pull.slot_id):
            tables, slots = self.quarantined.setdefault(allocation.seq_id, (tuple([] for _ in allocation.tables), []))
            for group, table, indices, block_ids in zip(
                self._coordinator.groups, allocation.tables, pull.indices, tables, strict=True
            ):
                for index in reversed(indices):
                    block_id = table.block_ids.pop(index)
                    group.pool.quarantine(block_id)
                    block_ids.append(block_id)
            if pull.slot_id:
                self._coordinator.slots.quarantine(pull.slot_id)
                slots.append(pull.slot_id)
                allocation.src_slot = allocation.dst_slot = 0
        self._sequences.remove(allocation)

    def release(self, seq_id: str) -> bool:
        units = self.quarantined.pop(seq_id, None)
        if units is None:
            return False
        for group, block_ids in zip(self._coordinator.groups, units[0], strict=True):
            for block_id in block_ids:
                group.pool.release_quarantined(block_id)
        for slot_id in units[1]:
            self._coordinator.slots.release_quarantined(slot_id)
        return True
