"""Taking a prefix in from a peer: destinations first, publication only after validation.

1 accept: pin what is here, allocate destinations (held, unpublished); 2 the read and its validation happen elsewhere;
3 commit: publish full blocks, null entries and the checkpoint; the sequence is runnable at N. Or abandon:
destinations freed, or quarantined while the read may still write them.
"""

from __future__ import annotations

from typing import Any

from common.kv_cache.keys import PrefixKeys
from common.kv_cache.prompt_ends import PromptEnds
from common.kv_cache.results import PullPlan
from common.kv_cache.sequence import Pull, Sequence
from common.kv_cache.sequence_table import SequenceTable


class RemoteIntake:
    def __init__(self, sequences: SequenceTable, prompt_ends: PromptEnds) -> None:
        self._sequences = sequences
        self._coordinator = sequences.coordinator
        self._config = sequences.config
        self._prompt_ends = prompt_ends
        self.quarantined: dict[str, tuple[list[int], list[int]]] = {}  # sequence -> blocks, slots

    def accept(self, seq_id: str, keys: PrefixKeys, num_tokens: int) -> PullPlan | None:
        coordinator, sequences = self._coordinator, self._sequences
        hit = coordinator.lookup_remote(keys, num_tokens)
        num_blocks = sequences.blocks_for(num_tokens)
        num_found = len(hit.block_ids)
        uses_tail = hit.num_attention_tokens > hit.num_block_tokens
        # First touch the hits of all groups, then allocate: allocation may evict what was just found.
        seq = Sequence(seq_id, keys, num_tokens, write_from=num_tokens, num_published_blocks=num_found)
        sequences.add(seq)
        for block_id in hit.block_ids:
            coordinator.blocks.hold(block_id)
            seq.block_ids.append(block_id)
        if hit.checkpoint is not None and (self._config.has_state or uses_tail):
            coordinator.pin(hit.checkpoint)
            coordinator.state.touch(hit.checkpoint)
            seq.src_checkpoint = hit.checkpoint
        if not coordinator.can_allocate(num_blocks - num_found, int(self._config.has_state)):
            sequences.remove(seq)
            return None
        sequences.grow(seq, num_tokens)
        slot_id = 0
        if self._config.has_state:
            seq.src_slot = seq.dst_slot = coordinator.allocate_slot()
            if seq.src_checkpoint is not None:
                seq.src_slot = seq.src_checkpoint.slot_id
            else:
                slot_id = seq.dst_slot
        indices = tuple(range(num_found, num_blocks - int(uses_tail)))
        seq.pull = Pull(indices, slot_id)
        state = (num_tokens if hit.checkpoint is not None else 0) if self._config.has_state else None
        sequences.counters.count_query(
            num_tokens, attention=hit.num_attention_tokens, state=state, joint=hit.num_attention_tokens
        )
        return PullPlan(num_tokens, tuple((index, seq.block_ids[index]) for index in indices), slot_id, num_found)

    def commit(self, seq: Sequence, output_row: Any | None) -> None:
        assert seq.pull is not None, "nothing was accepted"
        start, num_tokens, pull = seq.num_published_blocks, seq.num_prompt_tokens, seq.pull
        seq.pull = None
        seq.num_computed_tokens = num_tokens
        # Only real blocks were counted as cached, so everything pulled is published here.
        self._sequences.publish_blocks(seq, start)
        self._mark_null_entries(seq)
        source = seq.src_checkpoint
        last = len(seq.block_ids) - 1
        if source is not None and source.tail_block_id and last not in pull.indices:
            self._sequences.copies.push(source.tail_block_id, seq.block_ids[last])
        self._prompt_ends.finish(seq, output_row, seal=False, event="pulled")

    def _mark_null_entries(self, seq: Sequence) -> None:
        """The state row of this prefix is [null, .., null, slot]: register the nulls on the attention entries."""
        if not (self._config.enable_prefix_caching and self._config.has_state and self._config.has_attention):
            return
        attention, state = self._coordinator.attention, self._coordinator.state
        for num_blocks in range(1, -(-seq.num_prompt_tokens // self._config.block_size)):
            key = seq.keys.boundary_key(num_blocks)
            if state.get(key) is None:
                attention.mark_remote(key)

    def abandon(self, seq: Sequence, *, quarantine: bool) -> None:
        assert seq.pull is not None, "nothing was accepted"
        pull = seq.pull
        if quarantine and (pull.indices or pull.slot_id):
            blocks, slots = self.quarantined.setdefault(seq.seq_id, ([], []))
            for index in reversed(pull.indices):
                block_id = seq.block_ids.pop(index)
                self._coordinator.blocks.quarantine(block_id)
                blocks.append(block_id)
            if pull.slot_id:
                self._coordinator.slots.quarantine(pull.slot_id)
                slots.append(pull.slot_id)
                seq.src_slot = seq.dst_slot = 0
        self._sequences.remove(seq)

    def release(self, seq_id: str) -> bool:
        units = self.quarantined.pop(seq_id, None)
        if units is None:
            return False
        for block_id in units[0]:
            self._coordinator.blocks.release_quarantined(block_id)
        for slot_id in units[1]:
            self._coordinator.slots.release_quarantined(slot_id)
        return True
