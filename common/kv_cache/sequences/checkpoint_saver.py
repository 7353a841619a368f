"""States kept on the way: planned before a step, written by it, published after it; and the last one, donated.

1 plan: a slot per position that the policy wants of this step; 2 the step's one forward writes them; 3 publish, with
the exact position each state stands for. A prompt's end is planned here too, but kept by ``PromptEnds``. No save ever
fails a request: without a slot, or a block for an open tail, it is skipped and counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from common.kv_cache.sequences.allocation import Allocation
from common.kv_cache.sequences.sequence_table import SequenceTable


class CheckpointSaver:
    def __init__(self, sequences: SequenceTable) -> None:
        self._sequences = sequences
        self._coordinator = sequences.coordinator
        self._config = sequences.config
        self._skipped = sequences.counters.checkpoints_skipped

    def plan(
        self, allocation: Allocation, start: int, end: int, wanted: Mapping[int, str] | Collection[int]
    ) -> tuple[tuple[int, int], ...]:
        """(position, slot), ascending, for what the step (start, end] is to keep."""
        if not self._config.has_state:
            return ()
        saves: list[tuple[int, int]] = []
        positions = self._sequences.save_policy.step_positions(allocation.num_prompt_tokens, start, end, wanted)
        for position, origin in positions.items():
            if position not in allocation.saves:
                if self._exists(allocation, position):
                    self._skipped["exists"] += 1
                    continue
                if not self._coordinator.can_allocate_slot():
                    self._skipped["no_slot"] += 1
                    continue
                self._sequences.plan_save(allocation, position, origin)
            saves.append((position, allocation.saves[position].slot_id))
        return tuple(reversed(saves))

    def _exists(self, allocation: Allocation, position: int) -> bool:
        """Whether the state is cached. Of drafted tokens nobody knows: they have no keys before they are right."""
        if not self._coordinator.caches_states or position > allocation.keys.num_tokens:
            return False
        return self._coordinator.state.get(allocation.keys.key_at(position)) is not None

    def publish(self, allocation: Allocation) -> None:
        """The step has completed: what it wrote can be found."""
        due = [position for position in allocation.saves if position <= allocation.num_computed_tokens]
        for position in sorted(due):
            # The prompt's end waits for ``finish_prompt``; a sequence that goes on without was finished before it was
            # preempted, and has computed its prompt again.
            if position != allocation.num_prompt_tokens or allocation.num_computed_tokens > position:
                self._publish(allocation, position)
                self._sequences.drop_save(allocation, position)

    def _publish(self, allocation: Allocation, position: int) -> None:
        coordinator, sequences, save = self._coordinator, self._sequences, allocation.saves[position]
        if not coordinator.caches_states:
            return
        copies = sequences.copies_needed(allocation, position)
        if any(copies) and not coordinator.can_allocate(copies, 0):
            self._skipped["no_block"] += 1
            return
        tails = sequences.tail_blocks(allocation, position)
        checkpoint = sequences.make_checkpoint(allocation, position, save.slot_id, tails, save.origin)
        sequences.publish_windows(allocation, position)
        if coordinator.publish_checkpoint(checkpoint) and any(copies):
            sequences.continue_in_copies(allocation, position, copies)

    def donate(self, allocation: Allocation) -> None:
        """The running slot and the open blocks become a checkpoint of what was computed, without a copy."""
        position, coordinator = allocation.num_computed_tokens, self._coordinator
        if not coordinator.caches_states or allocation.is_sealed or not allocation.owns_state or position == 0:
            return
        if allocation.keys.num_tokens < position:
            self._skipped["no_keys"] += 1
            return
        tails = self._sequences.tail_blocks(allocation, position)
        if not self._config.has_state and not tails:
            return  # a boundary of a dense model is found through its block alone
        self._sequences.publish_blocks(allocation, again=True)
        self._sequences.publish_windows(allocation, position)
        coordinator.publish_checkpoint(
            self._sequences.make_checkpoint(allocation, position, allocation.dst_slot, tails, "donated")
        )
