"""The exact end of a prompt: kept for the next turn, for forks, and for remote readers.

Three ways to keep it: in the slot that a step's save filled; by *rotation* (the running slot becomes the end, the
sequence continues in a fresh slot whose first step reads it: no copy); by *sealing* (the sequence stops here, its
running memory is the end). A published tail block is immutable, so whoever goes on gets a copy of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.sequences.allocation import Allocation
from common.kv_cache.sequences.sequence_table import SequenceTable


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The state after a prompt's last token. ``slot_id`` 0: not kept, or dense. ``tail_block_ids``: per attention
    group, () on a block boundary. ``is_published``: can be found."""

    num_tokens: int
    key: bytes
    slot_id: int
    tail_block_ids: tuple[int, ...]
    is_published: bool


class PromptEnds:
    def __init__(self, sequences: SequenceTable) -> None:
        self._sequences = sequences
        self._coordinator = sequences.coordinator
        self._config = sequences.config

    def finish(
        self, allocation: Allocation, output_row: Any | None, *, seal: bool, origin: str = "prompt_end"
    ) -> PromptEnd:
        num_tokens = allocation.num_prompt_tokens
        assert allocation.pull is None, "the prefix is not here"
        assert allocation.num_computed_tokens == num_tokens, (
            f"{allocation.num_computed_tokens} of {num_tokens} tokens computed"
        )
        if allocation.prompt_end is None and not self._adopt_existing(allocation, output_row):
            if seal:
                self._seal(allocation, output_row, origin)
            else:
                self._keep(allocation, output_row, origin)
        elif allocation.prompt_end is not None and allocation.prompt_end.output_row is None:
            self._coordinator.state.give_row(allocation.prompt_end, output_row)
        self._sequences.drop_save(allocation, num_tokens)
        allocation.is_sealed = allocation.is_sealed or seal
        end = allocation.prompt_end
        if end is None:
            return PromptEnd(num_tokens, allocation.keys.key_at(num_tokens), 0, (), False)
        return PromptEnd(num_tokens, end.key, end.slot_id, end.tail_block_ids, end.is_published)

    def _adopt_existing(self, allocation: Allocation, output_row: Any | None) -> bool:
        """Use the checkpoint that the hit was exact at, or that another sequence published first."""
        existing = allocation.src_checkpoint
        if existing is None or existing.position != allocation.num_prompt_tokens:
            if not self._coordinator.caches_states:
                return False
            self._sequences.publish_blocks(allocation, again=True)
            existing = self._coordinator.state.get(allocation.keys.key_at(allocation.num_prompt_tokens))
        if existing is None:
            return False
        if existing.output_row is None:
            self._coordinator.state.give_row(existing, output_row)
        self._pin_end(allocation, existing)
        self._coordinator.state.touch(existing)
        return True

    def _pin_end(self, allocation: Allocation, checkpoint: Checkpoint) -> None:
        self._coordinator.pin(checkpoint)
        allocation.prompt_end = checkpoint

    def _seal(self, allocation: Allocation, output_row: Any | None, origin: str) -> None:
        assert allocation.owns_state
        position = allocation.num_prompt_tokens
        tails = self._sequences.tail_blocks(allocation, position)
        end = self._sequences.make_checkpoint(allocation, position, allocation.dst_slot, tails, origin, output_row)
        self._pin_end(allocation, end)
        if self._coordinator.caches_states:
            self._publish(allocation, end)

    def _publish(self, allocation: Allocation, end: Checkpoint) -> None:
        self._sequences.publish_windows(allocation, end.position)
        self._coordinator.publish_checkpoint(end)

    def _keep(self, allocation: Allocation, output_row: Any | None, origin: str) -> None:
        """Best effort: without memory the end is skipped and counted, the sequence goes on."""
        coordinator, sequences, position = self._coordinator, self._sequences, allocation.num_prompt_tokens
        planned = allocation.saves.get(position)
        publishes = coordinator.caches_states
        if planned is None and not publishes:
            return
        if planned is None and origin == "prompt_end" and not sequences.save_policy.keeps_end(position):
            return
        tails = sequences.tail_blocks(allocation, position)
        if not self._config.has_state and not tails and output_row is None:
            return  # a boundary of a dense model is found through its block alone
        copies = sequences.copies_needed(allocation, position) if publishes else [0] * len(allocation.tables)
        needs_slot = self._config.has_state and planned is None
        if not coordinator.can_allocate(copies, int(needs_slot)):
            has_blocks = coordinator.can_allocate(copies, 0)
            sequences.counters.checkpoints_skipped["no_slot" if has_blocks else "no_block"] += 1
            return
        slot_id = planned.slot_id if planned is not None else allocation.dst_slot
        end = sequences.make_checkpoint(allocation, position, slot_id, tails, origin, output_row)
        self._pin_end(allocation, end)
        if publishes:
            self._publish(allocation, end)
        if needs_slot:
            sequences.rotate_slot(allocation, end)
        sequences.continue_in_copies(allocation, position, copies)

    def fork(self, allocation: Allocation, child_id: str) -> bool:
        """A child at the prompt's end, sharing the full blocks."""
        position = allocation.num_prompt_tokens
        assert allocation.pull is None, "the prefix is not here"
        assert allocation.num_computed_tokens == position, "forks are made at the prompt's end"
        coordinator, sequences = self._coordinator, self._sequences
        num_full, num_tail = divmod(position, self._config.block_size)
        num_copies = [int(num_tail > 0)] * len(allocation.tables)
        has_state = self._config.has_state
        rotates = allocation.prompt_end is None and has_state
        if not coordinator.can_allocate(num_copies, int(has_state) + int(rotates)):
            return False
        if allocation.prompt_end is None:
            tails = sequences.tail_blocks(allocation, position)
            slot_id = allocation.dst_slot if has_state else 0
            end = sequences.make_checkpoint(allocation, position, slot_id, tails, "prompt_end")
            self._pin_end(allocation, end)
            if rotates:
                sequences.rotate_slot(allocation, end)
        source = allocation.prompt_end
        assert source is not None
        child = sequences.create(child_id, allocation.keys.fork(), position)
        child.num_computed_tokens = position
        for group, table, shared in zip(coordinator.groups, child.tables, allocation.tables, strict=True):
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
