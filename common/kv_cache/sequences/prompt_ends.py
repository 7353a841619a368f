"""The exact end of a prompt: kept for the next turn, for forks, and for remote readers.

Three ways to keep it: in the slot that a step's save filled; by *rotation* (the running slot becomes the end, the
sequence continues in a fresh slot whose first step reads it: no copy); by *sealing* (the sequence stops here, its
running memory is the end). A published tail block is immutable, so whoever goes on gets a copy of it.
"""

from __future__ import annotations

from typing import Any

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.results import PromptEnd
from common.kv_cache.sequences.allocation import Sequence
from common.kv_cache.sequences.sequence_table import SequenceTable


class PromptEnds:
    def __init__(self, sequences: SequenceTable) -> None:
        self._sequences = sequences
        self._coordinator = sequences.coordinator
        self._config = sequences.config

    def finish(self, seq: Sequence, output_row: Any | None, *, seal: bool, origin: str = "prompt_end") -> PromptEnd:
        num_tokens = seq.num_prompt_tokens
        assert seq.pull is None, "the prefix is not here"
        assert seq.num_computed_tokens == num_tokens, f"{seq.num_computed_tokens} of {num_tokens} tokens computed"
        if seq.prompt_end is None and not self._adopt_existing(seq, output_row):
            if seal:
                self._seal(seq, output_row, origin)
            else:
                self._keep(seq, output_row, origin)
        elif seq.prompt_end is not None and seq.prompt_end.output_row is None:
            self._coordinator.state.give_row(seq.prompt_end, output_row)
        self._sequences.drop_save(seq, num_tokens)
        seq.is_sealed = seq.is_sealed or seal
        end = seq.prompt_end
        if end is None:
            return PromptEnd(num_tokens, seq.keys.key_at(num_tokens), 0, (), False)
        return PromptEnd(num_tokens, end.key, end.slot_id, end.tail_block_ids, end.is_published)

    def _adopt_existing(self, seq: Sequence, output_row: Any | None) -> bool:
        """Use the checkpoint that the hit was exact at, or that another sequence published first."""
        existing = seq.src_checkpoint
        if existing is None or existing.position != seq.num_prompt_tokens:
            if not self._coordinator.caches_states:
                return False
            self._sequences.publish_blocks(seq, again=True)
            existing = self._coordinator.state.get(seq.keys.key_at(seq.num_prompt_tokens))
        if existing is None:
            return False
        if existing.output_row is None:
            self._coordinator.state.give_row(existing, output_row)
        self._pin_end(seq, existing)
        self._coordinator.state.touch(existing)
        return True

    def _pin_end(self, seq: Sequence, checkpoint: Checkpoint) -> None:
        self._coordinator.pin(checkpoint)
        seq.prompt_end = checkpoint

    def _seal(self, seq: Sequence, output_row: Any | None, origin: str) -> None:
        assert seq.owns_state
        position = seq.num_prompt_tokens
        tails = self._sequences.tail_blocks(seq, position)
        end = self._sequences.make_checkpoint(seq, position, seq.dst_slot, tails, origin, output_row)
        self._pin_end(seq, end)
        if self._coordinator.caches_states:
            self._publish(seq, end)

    def _publish(self, seq: Sequence, end: Checkpoint) -> None:
        self._sequences.publish_windows(seq, end.position)
        self._coordinator.publish_checkpoint(end)

    def _keep(self, seq: Sequence, output_row: Any | None, origin: str) -> None:
        """Best effort: without memory the end is skipped and counted, the sequence goes on."""
        coordinator, sequences, position = self._coordinator, self._sequences, seq.num_prompt_tokens
        planned = seq.saves.get(position)
        publishes = coordinator.caches_states
        if planned is None and not publishes:
            return
        if planned is None and origin == "prompt_end" and not sequences.save_policy.keeps_end(position):
            return
        tails = sequences.tail_blocks(seq, position)
        if not self._config.has_state and not tails and output_row is None:
            return  # a boundary of a dense model is found through its block alone
        copies = sequences.copies_needed(seq, position) if publishes else [0] * len(seq.tables)
        needs_slot = self._config.has_state and planned is None
        if not coordinator.can_allocate(copies, int(needs_slot)):
            has_blocks = coordinator.can_allocate(copies, 0)
            sequences.counters.checkpoints_skipped["no_slot" if has_blocks else "no_block"] += 1
            return
        slot_id = planned.slot_id if planned is not None else seq.dst_slot
        end = sequences.make_checkpoint(seq, position, slot_id, tails, origin, output_row)
        self._pin_end(seq, end)
        if publishes:
            self._publish(seq, end)
        if needs_slot:
            sequences.rotate_slot(seq, end)
        sequences.continue_in_copies(seq, position, copies)

    def fork(self, seq: Sequence, child_id: str) -> bool:
        """A child at the prompt's end, sharing the full blocks."""
        position = seq.num_prompt_tokens
        assert seq.pull is None, "the prefix is not here"
        assert seq.num_computed_tokens == position, "forks are made at the prompt's end"
        coordinator, sequences = self._coordinator, self._sequences
        num_full, num_tail = divmod(position, self._config.block_size)
        num_copies = [int(num_tail > 0)] * len(seq.tables)
        has_state = self._config.has_state
        rotates = seq.prompt_end is None and has_state
        if not coordinator.can_allocate(num_copies, int(has_state) + int(rotates)):
            return False
        if seq.prompt_end is None:
            tails = sequences.tail_blocks(seq, position)
            slot_id = seq.dst_slot if has_state else 0
            end = sequences.make_checkpoint(seq, position, slot_id, tails, "prompt_end")
            self._pin_end(seq, end)
            if rotates:
                sequences.rotate_slot(seq, end)
        source = seq.prompt_end
        assert source is not None
        child = sequences.create(child_id, seq.keys.fork(), position)
        child.num_computed_tokens = position
        for group, table, shared in zip(coordinator.groups, child.tables, seq.tables, strict=True):
            table.block_ids = shared.block_ids[:num_full]
            table.first_block = shared.first_block
            table.num_published = num_full
            table.write_from = position
            group.pool.hold(table.block_ids[table.first_block :])
        coordinator.pin(source)
        child.src_checkpoint = source
        if num_tail:
            for group, table in zip(coordinator.groups, child.tables, strict=True):
                table.block_ids += coordinator.allocate_blocks(group, 1)
            sequences.copy_tail(child, source)
        if has_state:
            child.src_slot = source.slot_id
            child.dst_slot = coordinator.allocate_slot()
        return True
