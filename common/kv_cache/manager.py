"""The cache's one face: all that the scheduler and the services see.

Life of a sequence, local: ``lookup`` -> ``admit`` -> per step (``extend``, ``plan_saves``, ``sequence``,
``take_block_copies``, forward, ``complete_step``) -> ``finish_prompt`` -> (``fork`` | ``lease``) -> ``free``.
Remote: ``accept_remote`` -> read and validate -> ``commit_remote`` | ``abandon_remote`` -> as above from the first
step.

Called by the engine thread between steps only; ``leases.renew`` alone is thread-safe. Nothing blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from common.kv_cache import invariants
from common.kv_cache.coordinator import Coordinator
from common.kv_cache.generations import GenerationTables
from common.kv_cache.keys import PrefixKeys, chain_root
from common.kv_cache.leases import LeaseTable
from common.kv_cache.prompt_ends import PromptEnds
from common.kv_cache.remote import RemoteIntake
from common.kv_cache.results import LeasedPrefix, PrefixHit, PromptEnd, PullPlan, RemoteHit, SequenceView
from common.kv_cache.sequence import Sequence as CachedSequence
from common.kv_cache.sequence_table import SequenceTable
from common.kv_cache.spec import KVCacheConfig
from common.kv_cache.stats import CacheCounters, CacheStats


class KVCacheManager:
    """
    Attributes:
        config: sizes and policy.
        generations: per-unit counters and the epoch, for registration with the transfer backend.
        leases: ``leases.renew`` may be called from any thread.
    """

    def __init__(self, config: KVCacheConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.generations = GenerationTables(config.num_blocks, config.num_slots)
        self.leases = LeaseTable()
        self._clock = clock
        self._counters = CacheCounters()
        self._coordinator = Coordinator(config, self.generations, self._counters)
        self._sequences = SequenceTable(config, self._coordinator, self._counters)
        self._prompt_ends = PromptEnds(self._sequences, self.leases)
        self._remote = RemoteIntake(self._sequences, self._prompt_ends)

    def prefix_keys(self, token_ids: Sequence[int], cache_salt: str | None = None) -> PrefixKeys:
        """Key chain of a prompt, hashed lazily; extend it with generated tokens as they come."""
        return PrefixKeys(chain_root(self.config.root_key, cache_salt), self.config.block_size, token_ids)

    def lookup(self, keys: PrefixKeys, num_tokens: int) -> PrefixHit:
        """Where a prompt of ``num_tokens`` can be resumed from local memory. No side effects."""
        return self._coordinator.lookup_local(keys, num_tokens)

    def admit(
        self,
        seq_id: str,
        keys: PrefixKeys,
        hit: PrefixHit | None,
        num_tokens: int,
        *,
        num_prompt_tokens: int | None = None,
    ) -> bool:
        """Make a sequence: pin the hit, then allocate blocks for ``num_tokens`` positions and a running slot.

        ``num_prompt_tokens`` defaults to ``keys.num_tokens``. False (nothing changed) when it does not fit or ``hit``
        went stale since the lookup: look up again. Start computing at ``sequence(seq_id).num_computed_tokens``.
        """
        hit = hit or PrefixHit()
        coordinator, sequences = self._coordinator, self._sequences
        if not coordinator.is_current(hit, keys):
            return False
        num_found = len(hit.block_ids)
        seq = CachedSequence(seq_id, keys, num_prompt_tokens or keys.num_tokens, write_from=hit.num_written_tokens)
        seq.num_computed_tokens = hit.num_tokens
        sequences.add(seq)
        # First touch the hits of all groups, then allocate: allocation may evict what was just found.
        for block_id in hit.block_ids:
            coordinator.blocks.hold(block_id)
            seq.block_ids.append(block_id)
        seq.num_published_blocks = num_found
        if hit.checkpoint is not None:
            coordinator.pin(hit.checkpoint)
            coordinator.state.touch(hit.checkpoint)
            seq.src_checkpoint = hit.checkpoint
            seq.src_slot = hit.checkpoint.slot_id
        num_covered = max(num_tokens, hit.num_written_tokens)
        num_fresh = max(0, sequences.blocks_for(num_covered) - num_found)
        if not coordinator.can_allocate(num_fresh, int(self.config.has_state)):
            sequences.remove(seq)
            return False
        sequences.grow(seq, num_covered)
        checkpoint = hit.checkpoint
        if checkpoint is not None and checkpoint.tail_block_id and checkpoint.position > hit.num_attention_tokens:
            sequences.copies.push(checkpoint.tail_block_id, seq.block_ids[num_found])
        if self.config.has_state:
            seq.dst_slot = coordinator.allocate_slot()
        self._count_hit(hit, seq.num_prompt_tokens)
        return True

    def extend(self, seq_id: str, num_tokens: int) -> bool:
        """Cover ``num_tokens`` positions with blocks. False: no memory, nothing changed."""
        seq = self._sequences[seq_id]
        num_fresh = self._sequences.blocks_for(num_tokens) - len(seq.block_ids)
        if not self._coordinator.can_allocate(max(0, num_fresh), 0):
            return False
        self._sequences.grow(seq, num_tokens)
        return True

    def sequence(self, seq_id: str) -> SequenceView:
        seq = self._sequences[seq_id]
        return SequenceView(
            block_ids=seq.block_ids,
            write_from=seq.write_from,
            src_slot=seq.src_slot,
            dst_slot=seq.dst_slot,
            num_computed_tokens=seq.num_computed_tokens,
            num_prompt_tokens=seq.num_prompt_tokens,
            keys=seq.keys,
        )

    def has_sequence(self, seq_id: str) -> bool:
        return seq_id in self._sequences

    def take_block_copies(self) -> list[tuple[int, int]]:
        """Drain the (source, destination) block copies to run before the next forward. Call it last, when the step's
        plan is complete. No destination is the source of another pair."""
        return self._sequences.copies.drain()

    def save_positions(self, num_prompt_tokens: int, hit: PrefixHit | None) -> frozenset[int]:
        """Exact positions at which the policy wants states kept for this prompt."""
        if not self.config.has_state or not self._coordinator.caches_states:
            return frozenset()
        junction = hit.junction if hit is not None else None
        return frozenset({num_prompt_tokens} if junction is None else {num_prompt_tokens, junction})

    def plan_saves(self, seq_id: str, start: int, end: int, wanted: Collection[int]) -> tuple[tuple[int, int], ...]:
        """(position, slot) for the wanted positions in (start, end]; what finds no slot is skipped and counted."""
        seq = self._sequences[seq_id]
        if not self.config.has_state:
            return ()
        saves: list[tuple[int, int]] = []
        for position in sorted(position for position in wanted if start < position <= end):
            slot_id = seq.saves.get(position, 0)
            if not slot_id:
                if self._coordinator.caches_states and self._coordinator.state.get(seq.keys.key_at(position)):
                    self._counters.checkpoints_skipped["exists"] += 1
                    continue
                if not self._coordinator.can_allocate(0, 1):
                    self._counters.checkpoints_skipped["no_slot"] += 1
                    continue
                slot_id = seq.saves[position] = self._coordinator.allocate_slot()
            saves.append((position, slot_id))
        return tuple(saves)

    def complete_step(self, seq_id: str, num_computed_tokens: int) -> None:
        """After the step: publish full blocks and the step's saves, advance src := dst, unpin the resumed checkpoint.

        Full blocks are published as far as ``keys`` reach: extend the keys first.
        """
        seq = self._sequences[seq_id]
        assert not seq.is_sealed, f"sequence {seq_id} must not have run: its memory is the prompt's end"
        assert seq.pull is None, f"sequence {seq_id} must not have run: its prefix is not here"
        assert num_computed_tokens > seq.num_computed_tokens, "a step computes at least one token"
        seq.num_computed_tokens = num_computed_tokens
        self._sequences.publish_blocks(seq, seq.num_published_blocks)
        for position in sorted(position for position in seq.saves if position <= num_computed_tokens):
            if position != seq.num_prompt_tokens:
                self._publish_save(seq, position)
        seq.src_slot = seq.dst_slot
        if seq.src_checkpoint is not None:
            self._coordinator.unpin(seq.src_checkpoint)
            seq.src_checkpoint = None
        if seq.prompt_end is not None:
            self._coordinator.unpin(seq.prompt_end)
            seq.prompt_end = None

    def finish_prompt(self, seq_id: str, output_row: Any | None, *, seal: bool = False) -> PromptEnd:
        """The prompt is computed (after ``complete_step``), or the hit was exact. Publishes its end when caching is on.

        ``seal=True`` (prefill nodes): the sequence will run no further step, so its running slot and tail block become
        the prompt's end themselves, without a copy, a spare slot or a spare block.
        ``seal=False``: the end goes to the slot planned at the prompt's end, else the running slot becomes the end and
        the sequence continues in a fresh one; without a free slot or block it is skipped and counted.
        """
        return self._prompt_ends.finish(self._sequences[seq_id], output_row, seal=seal)

    def free(self, seq_id: str, *, donate: bool) -> None:
        """Finish, abort or preempt. ``donate``: the running state becomes the checkpoint of ``num_computed_tokens``."""
        seq = self._sequences[seq_id]
        assert seq.pull is None, f"sequence {seq_id} waits for a read: abandon it"
        if donate:
            self._donate(seq)
        self._sequences.remove(seq)

    def fork(self, seq_id: str, child_id: str) -> bool:
        """Between ``finish_prompt`` and the next step: a child that continues the same prompt. False: no memory.

        The child's own key chain is ``sequence(child_id).keys``.
        """
        return self._prompt_ends.fork(self._sequences[seq_id], child_id)

    def lease(self, seq_id: str, lease_id: str, deadline_s: float) -> LeasedPrefix:
        """After ``finish_prompt``: pin the prompt for a remote reader until ``deadline_s`` on the manager's clock.

        Works with caching disabled too. The sequence runs no further step if its end had not been kept (it is sealed).
        """
        return self._prompt_ends.lease(self._sequences[seq_id], lease_id, deadline_s)

    def release_lease(self, lease_id: str) -> bool:
        lease = self.leases.take(lease_id)
        if lease is None:
            return False
        self._prompt_ends.end_lease(lease)
        return True

    def expire_leases(self) -> list[str]:
        expired = self.leases.take_expired(self._clock())
        for lease in expired:
            self._prompt_ends.end_lease(lease)
        self._counters.leases_expired += len(expired)
        return [lease.lease_id for lease in expired]

    def next_lease_deadline(self) -> float | None:
        return self.leases.next_deadline()

    def lookup_remote(self, keys: PrefixKeys, num_tokens: int) -> RemoteHit:
        """What of a prefix of ``num_tokens`` is here if a peer supplies the rest. No side effects."""
        return self._coordinator.lookup_remote(keys, num_tokens)

    def accept_remote(self, seq_id: str, keys: PrefixKeys, num_tokens: int) -> PullPlan | None:
        """Pin what is here and allocate destinations for the rest. ``None``: does not fit now, nothing changed."""
        return self._remote.accept(seq_id, keys, num_tokens)

    def commit_remote(self, seq_id: str, output_row: Any | None) -> None:
        """The bytes were validated: publish them; the sequence is runnable at ``num_computed_tokens`` = N.

        Never fails for want of memory.
        """
        self._remote.commit(self._sequences[seq_id], output_row)

    def abandon_remote(self, seq_id: str, *, quarantine: bool) -> None:
        """The pull failed. ``quarantine``: its destinations may still be written; kept under ``seq_id``."""
        self._remote.abandon(self._sequences[seq_id], quarantine=quarantine)

    def release_quarantine(self, seq_id: str) -> bool:
        """The read into these destinations became terminal. False: nothing was quarantined under that id."""
        return self._remote.release(seq_id)

    def stats(self) -> CacheStats:
        counters, coordinator = self._counters, self._coordinator
        return CacheStats(
            blocks=coordinator.blocks.counts(),
            slots=coordinator.slots.counts(),
            num_cached_prefix_blocks=len(coordinator.attention),
            num_marked_blocks=coordinator.attention.num_marked,
            num_checkpoints=len(coordinator.state),
            num_sequences=len(self._sequences),
            query_tokens=counters.query_tokens,
            hit_tokens=dict(counters.hit_tokens),
            lost_tokens=dict(counters.lost_tokens),
            checkpoints_saved=dict(counters.checkpoints_saved),
            checkpoints_skipped=dict(counters.checkpoints_skipped),
            checkpoints_evicted=dict(counters.checkpoints_evicted),
            evictions=dict(counters.evictions),
            leases_active=len(self.leases),
            leases_expired=counters.leases_expired,
        )

    def check(self) -> list[str]:
        """Violated invariants, [] when all hold."""
        return invariants.check(self._coordinator, self._sequences, self.leases, self._remote.quarantined)

    def _publish_save(self, seq: CachedSequence, position: int) -> None:
        """A planned slot holds the state at ``position`` now. Without a spare block for an open tail it is skipped."""
        coordinator = self._coordinator
        needs_copy = self._sequences.needs_copy(seq, position)
        if not coordinator.caches_states:
            pass
        elif needs_copy and not coordinator.can_allocate(1, 0):
            self._counters.checkpoints_skipped["no_block"] += 1
        else:
            tail = self._sequences.tail_block(seq, position)
            checkpoint = coordinator.make_checkpoint(seq.keys, position, seq.saves[position], tail)
            if coordinator.publish_checkpoint(checkpoint, "save") and needs_copy:
                self._sequences.continue_in_copy(seq, position)
        self._sequences.drop_save(seq, position)

    def _donate(self, seq: CachedSequence) -> None:
        """The running slot and the open block become a checkpoint of what was computed, without a copy."""
        position, coordinator = seq.num_computed_tokens, self._coordinator
        if not coordinator.caches_states or seq.is_sealed or not seq.owns_state or position == 0:
            return
        if seq.keys.num_tokens < position:
            self._counters.checkpoints_skipped["no_keys"] += 1
            return
        tail = self._sequences.tail_block(seq, position)
        if not self.config.has_state and not tail:
            return  # a boundary of a dense model is found through its block alone
        self._sequences.publish_blocks(seq, 0)
        coordinator.publish_checkpoint(coordinator.make_checkpoint(seq.keys, position, seq.dst_slot, tail), "donated")

    def _count_hit(self, hit: PrefixHit, num_prompt_tokens: int) -> None:
        resumed, attention = hit.num_tokens, max(hit.num_attention_tokens, hit.num_written_tokens)
        state = resumed if self.config.has_state else None
        self._counters.count_query(num_prompt_tokens, attention=attention, state=state, joint=resumed)
        if self.config.has_state:
            lost = {
                "no_state": min(attention, num_prompt_tokens - 1) - resumed,
                "no_attention": hit.num_state_tokens - max(resumed, attention),
            }
            for reason, num_tokens in lost.items():
                if num_tokens > 0:
                    self._counters.lost_tokens[reason] += num_tokens
