"""States to go back to when a step runs drafted tokens that may turn out wrong.

1 plan: a slot for the state at the end of the known tokens, and where states are small for each place at which the
drafts may part from the answer; 2 the step's one forward writes them and, to the running slot, the state after all
drafts; 3 settle: the running slot is the last of them that has seen right tokens only, and the others are given back.
K/V needs none of this: rows of wrong tokens are written again before anything reads them.
"""

from __future__ import annotations

from common.kv_cache.sequences.allocation import Allocation
from common.kv_cache.sequences.sequence_table import SequenceTable


class Rollback:
    def __init__(self, sequences: SequenceTable) -> None:
        self._sequences = sequences
        self._coordinator = sequences.coordinator
        self._has_state = sequences.config.has_state

    def plan(self, allocation: Allocation, first: int, last: int) -> tuple[tuple[int, int], ...] | None:
        """(position, slot), ascending, for the states at ``first`` .. ``last``, fewer when slots are short. None: there
        is no slot for the first one either. () for dense models."""
        if not self._has_state:
            return ()
        assert not allocation.rollback, f"sequence {allocation.seq_id}: a step with drafts was not settled"
        for position in range(first, last + 1):
            if not self._coordinator.can_allocate_slot():
                break
            allocation.rollback[position] = self._coordinator.allocate_slot()
        return tuple(allocation.rollback.items()) or None

    def settle(self, allocation: Allocation, end: int, num_right: int) -> int:
        """The step ran the tokens before ``end``, and the first ``num_right`` are the sequence's own. Returns how many
        of them the running slot has seen from now on; the sequence goes on from there."""
        if not self._has_state or num_right == end:
            position = num_right
        else:
            position = max(each for each in allocation.rollback if each <= num_right)
            # Whatever is dropped below is what the drafts made of the state.
            allocation.rollback[position], allocation.dst_slot = allocation.dst_slot, allocation.rollback[position]
        self._coordinator.slots.drop(allocation.rollback.values())
        allocation.rollback.clear()
        return position
