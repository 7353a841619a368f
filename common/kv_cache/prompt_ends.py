"""The exact end of a prompt: kept for the next turn, for forks, and for remote readers.

Three ways to keep it: in the slot that a step's save filled; by *rotation* (the running slot becomes the end, the
sequence continues in a fresh slot whose first step reads it: no copy); by *sealing* (the sequence stops here, its
running memory is the end). A published tail block is immutable, so whoever goes on gets a copy of it.
"""

from __future__ import annotations

from typing import Any

from common.kv_cache.checkpoint import Checkpoint
from common.kv_cache.leases import Lease, LeaseTable
from common.kv_cache.results import LeasedPrefix, PromptEnd
from common.kv_cache.sequence import Sequence
from common.kv_cache.sequence_table import SequenceTable


class PromptEnds:
    def __init__(self, sequences: SequenceTable, leases: LeaseTable) -> None:
        self._sequences = sequences
        self._coordinator = sequences.coordinator
        self._config = sequences.config
        self._leases = leases

    def finish(self, seq: Sequence, output_row: Any | None, *, seal: bool, event: str = "prompt_end") -> PromptEnd:
        num_tokens = seq.num_prompt_tokens
        assert seq.pull is None, "the prefix is not here"
        assert seq.num_computed_tokens == num_tokens, f"{seq.num_computed_tokens} of {num_tokens} tokens computed"
        if seq.prompt_end is None and not self._adopt_existing(seq, output_row):
            if seal:
                self._seal(seq, output_row)
            else:
                self._keep(seq, output_row, event)
        elif seq.prompt_end is not None and seq.prompt_end.output_row is None:
            seq.prompt_end.output_row = output_row
        self._sequences.drop_save(seq, num_tokens)
        seq.is_sealed = seq.is_sealed or seal
        end = seq.prompt_end
        if end is None:
            return PromptEnd(num_tokens, seq.keys.key_at(num_tokens), 0, 0, False)
        return PromptEnd(num_tokens, end.key, end.slot_id, end.tail_block_id, end.is_published)

    def _adopt_existing(self, seq: Sequence, output_row: Any | None) -> bool:
        """Use the checkpoint that the hit was exact at, or that another sequence published first."""
        existing = seq.src_checkpoint
        if existing is None or existing.position != seq.num_prompt_tokens:
            if not self._coordinator.caches_states:
                return False
            self._sequences.publish_blocks(seq, 0)
            existing = self._coordinator.state.get(seq.keys.key_at(seq.num_prompt_tokens))
        if existing is None:
            return False
        if existing.output_row is None:
            existing.output_row = output_row
        self._pin_end(seq, existing)
        self._coordinator.state.touch(existing)
        return True

    def _pin_end(self, seq: Sequence, checkpoint: Checkpoint) -> None:
        self._coordinator.pin(checkpoint)
        seq.prompt_end = checkpoint

    def _seal(self, seq: Sequence, output_row: Any | None) -> None:
        assert seq.owns_state
        position = seq.num_prompt_tokens
        tail = self._sequences.tail_block(seq, position)
        end = self._coordinator.make_checkpoint(seq.keys, position, seq.dst_slot, tail, output_row)
        self._pin_end(seq, end)
        if self._coordinator.caches_states:
            self._coordinator.publish_checkpoint(end, "prompt_end")

    def _keep(self, seq: Sequence, output_row: Any | None, event: str) -> None:
        """Best effort: without memory the end is skipped and counted, the sequence goes on."""
        coordinator, position = self._coordinator, seq.num_prompt_tokens
        planned = seq.saves.get(position, 0)
        publishes = coordinator.caches_states
        if not publishes and not planned:
            return
        tail = self._sequences.tail_block(seq, position)
        if not self._config.has_state and not tail and output_row is None:
            return  # a boundary of a dense model is found through its block alone
        needs_copy = publishes and self._sequences.needs_copy(seq, position)
        needs_slot = self._config.has_state and not planned
        if not coordinator.can_allocate(int(needs_copy), int(needs_slot)):
            reason = "no_slot" if needs_slot and not coordinator.can_allocate(0, 1) else "no_block"
            self._sequences.counters.checkpoints_skipped[reason] += 1
            return
        end = coordinator.make_checkpoint(
            seq.keys, position, planned or (seq.dst_slot if self._config.has_state else 0), tail, output_row
        )
        self._pin_end(seq, end)
        if publishes:
            coordinator.publish_checkpoint(end, event)
        if needs_slot:
            self._sequences.rotate_slot(seq, end)
        if needs_copy:
            self._sequences.continue_in_copy(seq, position)

    def fork(self, seq: Sequence, child_id: str) -> bool:
        """A child at the prompt's end, sharing the full blocks."""
        position = seq.num_prompt_tokens
        assert seq.pull is None, "the prefix is not here"
        assert seq.num_computed_tokens == position, "forks are made at the prompt's end"
        coordinator, sequences = self._coordinator, self._sequences
        num_full, num_tail = divmod(position, self._config.block_size)
        num_full, num_copies = (num_full, int(num_tail > 0)) if self._config.has_attention else (0, 0)
        has_state = self._config.has_state
        rotates = seq.prompt_end is None and has_state
        if not coordinator.can_allocate(num_copies, int(has_state) + int(rotates)):
            return False
        if seq.prompt_end is None:
            tail = sequences.tail_block(seq, position)
            end = coordinator.make_checkpoint(seq.keys, position, seq.dst_slot if has_state else 0, tail)
            self._pin_end(seq, end)
            if rotates:
                sequences.rotate_slot(seq, end)
        source = seq.prompt_end
        assert source is not None
        child = Sequence(child_id, seq.keys.fork(), position, write_from=position, num_computed_tokens=position)
        sequences.add(child)
        for block_id in seq.block_ids[:num_full]:
            coordinator.blocks.hold(block_id)
            child.block_ids.append(block_id)
        child.num_published_blocks = num_full
        coordinator.pin(source)
        child.src_checkpoint = source
        if num_copies:
            child.block_ids.append(coordinator.allocate_block())
            sequences.copies.push(source.tail_block_id, child.block_ids[-1])
        if has_state:
            child.src_slot = source.slot_id
            child.dst_slot = coordinator.allocate_slot()
        return True

    def lease(self, seq: Sequence, lease_id: str, deadline_s: float) -> LeasedPrefix:
        if seq.prompt_end is None:
            self.finish(seq, None, seal=True)
        end = seq.prompt_end
        assert end is not None
        blocks, slots = self._coordinator.blocks, self._coordinator.slots
        num_full = seq.num_prompt_tokens // self._config.block_size if self._config.has_attention else 0
        full_ids = tuple(seq.block_ids[:num_full])
        for block_id in full_ids:
            blocks.lease(block_id)
        self._coordinator.lease(end)
        self._leases.add(Lease(lease_id, full_ids, end), deadline_s)
        block_ids = (*full_ids, end.tail_block_id) if end.tail_block_id else full_ids
        return LeasedPrefix(
            num_tokens=seq.num_prompt_tokens,
            block_ids=block_ids,
            block_generations=tuple(blocks.generation(block_id) for block_id in block_ids),
            slot_id=end.slot_id,
            slot_generation=slots.generation(end.slot_id) if end.slot_id else 0,
            key=end.key,
            output_row=end.output_row,
        )

    def end_lease(self, lease: Lease) -> None:
        """Give back what the lease pinned, tail first."""
        self._coordinator.end_lease(lease.prompt_end)
        for block_id in reversed(lease.block_ids):
            self._coordinator.blocks.end_lease(block_id)
