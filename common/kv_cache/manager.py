"""The cache manager: all that the scheduler and the node's services see of the cache.

Life of a sequence, local: ``lookup`` -> ``admit`` -> per step (``extend``, ``plan_saves``, ``sequence``,
``take_block_copies``, forward, ``complete_step``) -> ``finish_prompt`` -> (``fork`` | ``lease``) -> ``free``.
Remote: ``accept_remote`` -> read and validate -> ``commit_remote`` | ``abandon_remote`` -> as above from the first
step.

Called by the engine thread between steps only; ``leases.renew`` and ``events.since`` alone are thread-safe. Nothing
blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.images.span import ImageSpan
from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.checkpoints.save_policy import SavePolicy
from common.kv_cache.coordinator import Coordinator
from common.kv_cache.eviction.base import Outlook
from common.kv_cache.invariants import find_violations
from common.kv_cache.keys import PrefixKeys, prompt_root
from common.kv_cache.observe.events import CacheSnapshot, EventLog
from common.kv_cache.observe.stats import CacheCounters, CacheStats
from common.kv_cache.pools.generations import GenerationTables
from common.kv_cache.prefix.hits import PrefixHit
from common.kv_cache.sequences.allocation import SequenceView
from common.kv_cache.sequences.checkpoint_saver import CheckpointSaver
from common.kv_cache.sequences.prompt_ends import PromptEnd, PromptEnds
from common.kv_cache.sequences.rollback import Rollback
from common.kv_cache.sequences.sequence_table import SequenceTable
from common.kv_cache.sharing.lease_manager import LeaseManager
from common.kv_cache.sharing.leases import LeasedClosure, LeasedPrefix, LeaseTable, PrefixProgress
from common.kv_cache.sharing.remote_prefix import PullPlan, RemotePrefixes
from common.kv_cache.spec import KVCacheConfig
from common.kv_cache.tiers.leaving import LeavingPrefixes


class KVCacheManager:
    """
    Attributes:
        config: sizes and policy.
        generations: per-unit counters and the epoch, for registration with the transfer backend.
        leases: ``leases.renew`` may be called from any thread.
        events: what was stored and removed; None unless the configuration asks for it. ``events.since`` may be called
            from any thread.
    """

    def __init__(self, config: KVCacheConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.generations = GenerationTables(config.pool_sizes)
        self.leases = LeaseTable()
        self._clock = clock
        self._counters = CacheCounters()
        self._coordinator = Coordinator(config, self.generations, self._counters)
        self.events: EventLog | None = self._coordinator.events
        self._save_policy = SavePolicy(config)
        self._sequences = SequenceTable(config, self._coordinator, self._save_policy, self._counters)
        self._saver = CheckpointSaver(self._sequences)
        self._rollback = Rollback(self._sequences)
        self._prompt_ends = PromptEnds(self._sequences)
        self._lease_manager = LeaseManager(self._sequences, self.leases)
        self._remote = RemotePrefixes(self._sequences, self._prompt_ends)

    def prefix_keys(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> PrefixKeys:
        """Key chain of a prompt, hashed lazily; extend it with generated tokens as they come.

        Prompts share a prefix only when the salt is equal too, and the images in it.
        """
        root = prompt_root(self.config.root_key, cache_salt)
        return PrefixKeys(root, self.config.block_size, token_ids, images)

    def lookup(self, keys: PrefixKeys, num_tokens: int) -> PrefixHit:
        """Where a prompt of ``num_tokens`` can be resumed from local memory. No side effects."""
        return self._coordinator.lookup.local(keys, num_tokens)

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
        if not coordinator.lookup.is_current(hit, keys):
            return False
        allocation = sequences.create(seq_id, keys, num_prompt_tokens or keys.num_tokens)
        allocation.num_computed_tokens = hit.num_tokens
        # First touch the hits of all groups, then allocate: allocation may evict what was just found.
        for group, table, found, num_written in zip(
            coordinator.groups, allocation.tables, hit.tables, hit.num_written, strict=False
        ):
            table.block_ids = list(found)
            table.num_published = len(found)
            table.first_block = group.first_needed(hit.num_tokens)
            table.write_from = num_written
            group.pool.hold(filter(None, found))
        checkpoint = hit.checkpoint
        if checkpoint is not None:
            coordinator.pin(checkpoint)
            coordinator.state.touch(checkpoint)
            allocation.src_checkpoint = checkpoint
            allocation.src_slot = checkpoint.slot_id
        num_covered = max(num_tokens, *hit.num_written, 0)
        if not coordinator.can_allocate(sequences.missing_blocks(allocation, num_covered), int(self.config.has_state)):
            sequences.remove(allocation)
            return False
        coordinator.policy.admitted(keys, allocation.num_prompt_tokens)
        coordinator.lookup.remember(keys, allocation.num_prompt_tokens)
        sequences.grow(allocation, num_covered)
        if checkpoint is not None and checkpoint.tail_block_ids:
            index = checkpoint.position // self.config.block_size
            sequences.copy_tail(allocation, checkpoint, tuple(len(found) > index for found in hit.tables))
        if self.config.has_state:
            allocation.dst_slot = coordinator.allocate_slot()
        self._count_hit(hit, allocation.num_prompt_tokens)
        return True

    def extend(self, seq_id: str, num_tokens: int) -> bool:
        """Cover ``num_tokens`` positions with blocks. False: no memory, nothing changed."""
        allocation = self._sequences[seq_id]
        if not self._coordinator.can_allocate(self._sequences.missing_blocks(allocation, num_tokens), 0):
            return False
        self._sequences.grow(allocation, num_tokens)
        return True

    def extend_ahead(self, seq_id: str, num_tokens: int, src_slot: int) -> SequenceView | None:
        """For a step that is launched before the one in flight was completed, which leaves its state in ``src_slot``:
        cover ``num_tokens`` positions, and run the last of them from there into the sequence's other slot. ``None``: no
        memory, or a block is to be copied first; nothing changed. Completed with ``is_ahead``."""
        allocation, coordinator = self._sequences[seq_id], self._coordinator
        if any(self._sequences.copies) or any(position % self.config.block_size for position in allocation.saves):
            return None  # what is kept in the middle of a block takes the block away when its step is completed
        needs_slot = self.config.has_state and not allocation.other_slot
        if not coordinator.can_allocate(self._sequences.missing_blocks(allocation, num_tokens), int(needs_slot)):
            return None
        self._sequences.grow(allocation, num_tokens)
        if needs_slot:
            allocation.other_slot = coordinator.allocate_slot()
        view = self.sequence(seq_id)
        tables = view.tables
        if coordinator.window_groups:
            tables = self._sequences.tables_ahead(allocation, num_tokens - 1)
        dst_slot = allocation.other_slot if src_slot == allocation.dst_slot else allocation.dst_slot
        return replace(view, tables=tables, src_slot=src_slot, dst_slot=dst_slot)

    def has_sequence(self, seq_id: str) -> bool:
        """Whether the sequence holds memory."""
        return seq_id in self._sequences

    def sequence(self, seq_id: str) -> SequenceView:
        allocation = self._sequences[seq_id]
        return SequenceView(
            tables=allocation.tables,
            src_slot=allocation.src_slot,
            dst_slot=allocation.dst_slot,
            num_computed_tokens=allocation.num_computed_tokens,
            num_prompt_tokens=allocation.num_prompt_tokens,
            keys=allocation.keys,
        )

    def take_block_copies(self) -> dict[int, list[tuple[int, int]]]:
        """Drain the (source, destination) block copies to run before the next forward, by attention group; groups
        without any are left out. Call it last, when the step's plan is complete. No destination is the source of
        another pair."""
        return {group_id: copies.drain() for group_id, copies in enumerate(self._sequences.copies) if copies}

    def block_copies(self) -> dict[int, list[tuple[int, int]]]:
        """What ``take_block_copies`` would give; all of it stays queued, with its sources held. For copies that may
        fail without their sequences: take them once they have run. A pair may run again before the next forward."""
        return {group_id: copies.pairs() for group_id, copies in enumerate(self._sequences.copies) if copies}

    def save_positions(
        self, num_prompt_tokens: int, hit: PrefixHit | None, boundaries: Sequence[int] = ()
    ) -> dict[int, str]:
        """Exact positions at which the policy wants states kept for this prompt, and why each.

        ``boundaries``: positions with a meaning (ends of messages, cache marks), most valuable first.
        """
        resume, junction = (hit.num_tokens, hit.junction) if hit is not None else (0, None)
        return self._save_policy.prompt_positions(num_prompt_tokens, resume, junction, boundaries)

    def chunk_size(self, start: int, num_tokens: int, num_known_tokens: int) -> int:
        """How many of the next ``num_tokens`` tokens (at least 1) to run in one step of a sequence that has
        ``num_known_tokens``: fewer in mode ``align``, never 0."""
        return self._save_policy.chunk_size(start, num_tokens, num_known_tokens)

    def plan_saves(
        self, seq_id: str, start: int, end: int, wanted: Mapping[int, str] | Collection[int]
    ) -> tuple[tuple[int, int], ...]:
        """(position, slot), ascending, for what the step (start, end] is to keep: of ``wanted``, and the boundaries it
        passes while generating. What finds no slot is skipped and counted, shallow positions first."""
        return self._saver.plan(self._sequences[seq_id], start, end, wanted)

    def max_drafts(self, num_known_tokens: int, num_drafts: int) -> int:
        """How many drafts to run behind ``num_known_tokens`` tokens: in mode ``align`` a step ends at a boundary."""
        return self._save_policy.max_drafts(num_known_tokens, num_drafts)

    def plan_rollback(self, seq_id: str, first: int, last: int) -> tuple[tuple[int, int], ...] | None:
        """(position, slot), ascending, for states that a step with drafts can go back to: at ``first``, and as far as
        slots reach up to ``last``. None: the sequence must run without drafts now. ``complete_drafts`` follows, or
        ``free``."""
        return self._rollback.plan(self._sequences[seq_id], first, last)

    def complete_drafts(self, seq_id: str, end: int, num_right: int) -> int:
        """``complete_step`` of a step that ran drafts: of the tokens before ``end`` the first ``num_right`` are right.
        Returns ``num_computed_tokens``: the rest of the right ones is to be computed again."""
        position = self._rollback.settle(self._sequences[seq_id], end, num_right)
        self.complete_step(seq_id, position)
        return position

    def complete_step(self, seq_id: str, num_computed_tokens: int, *, is_ahead: bool = False) -> None:
        """After the step: publish full blocks and the step's saves, advance src := dst, unpin the resumed checkpoint.
        ``is_ahead``: it was planned with ``extend_ahead``.

        Full blocks are published as far as ``keys`` reach: extend the keys first.
        """
        allocation = self._sequences[seq_id]
        assert not allocation.is_sealed, f"sequence {seq_id} must not have run: its memory is the prompt's end"
        assert allocation.pull is None, f"sequence {seq_id} must not have run: its prefix is not here"
        assert num_computed_tokens > allocation.num_computed_tokens, "a step computes at least one token"
        allocation.num_computed_tokens = num_computed_tokens
        self._sequences.publish_blocks(allocation)
        self._saver.publish(allocation)
        if is_ahead:
            allocation.dst_slot, allocation.other_slot = allocation.other_slot, allocation.dst_slot
        allocation.src_slot = allocation.dst_slot
        if allocation.src_checkpoint is not None:
            self._coordinator.unpin(allocation.src_checkpoint)
            allocation.src_checkpoint = None
        if allocation.prompt_end is not None:
            self._coordinator.unpin(allocation.prompt_end)
            allocation.prompt_end = None
        if self._coordinator.window_groups:
            self._sequences.release_passed(allocation)

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
        allocation = self._sequences[seq_id]
        assert allocation.pull is None, f"sequence {seq_id} waits for a read: abandon it"
        if donate:
            self._saver.donate(allocation)
        self._sequences.remove(allocation)

    def fork(self, seq_id: str, child_id: str) -> bool:
        """Between ``finish_prompt`` and the next step: a child that continues the same prompt. False: no memory.

        The child's own key chain is ``sequence(child_id).keys``.
        """
        return self._prompt_ends.fork(self._sequences[seq_id], child_id)

    def progress(self, seq_id: str) -> PrefixProgress:
        """The full blocks of a running prompt that are computed, for a remote reader who does not want to wait."""
        return self._lease_manager.progress(self._sequences[seq_id])

    def lease(self, seq_id: str, lease_id: str, deadline_s: float) -> LeasedPrefix:
        """After ``finish_prompt``: pin the prompt for a remote reader until ``deadline_s`` on the manager's clock.

        Works with caching disabled too. The sequence runs no further step if its end had not been kept (it is sealed).
        Run ``take_block_copies`` before the sequence is freed and before the reader is told.
        """
        allocation = self._sequences[seq_id]
        if allocation.prompt_end is None:
            self._prompt_ends.finish(allocation, None, seal=True)
        return self._lease_manager.lease_prompt(allocation, lease_id, deadline_s)

    def lease_prefix(
        self, keys: PrefixKeys, num_tokens: int, lease_id: str, deadline_s: float, *, deeper_than: int
    ) -> LeasedPrefix | None:
        """Pin the deepest cached prefix of these ``num_tokens`` tokens from which they could be resumed here: a
        checkpoint, or a block boundary of a dense model. None: nothing deeper than ``deeper_than`` tokens, or no memory
        to copy its tail block.

        Run ``take_block_copies`` before the reader is told.
        """
        hit = self._coordinator.lookup.local(keys, num_tokens)
        return self._lease_manager.lease_cached(keys, hit, lease_id, deadline_s, deeper_than)

    def lease_closure(self, key: bytes, lease_id: str, deadline_s: float) -> LeasedClosure | None:
        """Pin a checkpoint with every block that resuming there reads. None: it is not here whole."""
        return self._lease_manager.lease_closure(key, lease_id, deadline_s)

    def release_lease(self, lease_id: str) -> bool:
        lease = self.leases.take(lease_id)
        if lease is None:
            return False
        self._lease_manager.end(lease)
        return True

    def expire_leases(self) -> list[str]:
        expired = self.leases.take_expired(self._clock())
        for lease in expired:
            self._lease_manager.end(lease)
        self._counters.leases_expired += len(expired)
        return [lease.lease_id for lease in expired]

    def next_lease_deadline(self) -> float | None:
        return self.leases.next_deadline()

    def accept_remote(self, seq_id: str, keys: PrefixKeys, num_tokens: int) -> PullPlan | None:
        """Pin what is here and allocate destinations for the rest. ``None``: does not fit now, nothing changed."""
        return self._remote.accept(seq_id, keys, num_tokens)

    def commit_remote(self, seq_id: str, output_row: Any | None, *, seal: bool = False) -> None:
        """The bytes were validated: publish them; the sequence is runnable at ``num_computed_tokens`` = N.

        Never fails for want of memory. ``seal=True``: it will not run, only its content is wanted: nothing is copied.
        """
        self._remote.commit(self._sequences[seq_id], output_row, seal=seal)

    def is_pulled(self, seq_id: str) -> bool:
        """Whether the sequence's memory is the destination of a read that was neither committed nor abandoned."""
        return self._sequences[seq_id].pull is not None

    def abandon_remote(self, seq_id: str, *, quarantine: bool) -> None:
        """The pull failed. ``quarantine``: its destinations may still be written; kept under ``seq_id``."""
        self._remote.abandon(self._sequences[seq_id], quarantine=quarantine)

    def is_quarantined(self, seq_id: str) -> bool:
        """Whether destinations of a read under that id may still be written."""
        return seq_id in self._remote.quarantined

    def release_quarantine(self, seq_id: str) -> bool:
        """The read into these destinations became terminal. False: nothing was quarantined under that id."""
        return self._remote.release(seq_id)

    def leaving_prefixes(
        self, on_evict: Callable[[Checkpoint], None], own_bytes: Callable[[Checkpoint], int] | None = None
    ) -> LeavingPrefixes:
        """What tiers below the pools may take in; parameters as there."""
        return LeavingPrefixes(self._coordinator, on_evict, own_bytes)

    def outlook(self, key: bytes) -> Outlook | None:
        """What is expected of a checkpoint that is here, or was. None: nothing is known."""
        return self._coordinator.policy.outlook(key)

    def remember(self, checkpoint: Checkpoint) -> None:
        """A checkpoint that a tier kept from an earlier life of this node."""
        self._coordinator.policy.remember(checkpoint)

    def stats(self) -> CacheStats:
        counters, coordinator = self._counters, self._coordinator
        return CacheStats(
            blocks=coordinator.block_counts(),
            group_blocks={group.group.label: group.pool.counts() for group in coordinator.groups},
            slots=coordinator.slots.counts(),
            num_cached_prefix_blocks=sum(map(len, coordinator.groups)),
            num_marked_blocks=sum(group.num_marked for group in coordinator.full_groups),
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
        return find_violations(self._coordinator, self._sequences, self.leases, self._remote.quarantined)

    def snapshot(self) -> CacheSnapshot:
        """Everything findable now, to start from before following ``events``."""
        assert self.events is not None, "the configuration asks for no events"
        return self._coordinator.snapshot(self.events.last_sequence_number)

    def _count_hit(self, hit: PrefixHit, num_prompt_tokens: int) -> None:
        resumed, size = hit.num_tokens, self.config.block_size
        hits = {"joint": resumed}
        for group, table, num_written in zip(self._coordinator.groups, hit.tables, hit.num_written, strict=False):
            # A window's own blocks; what is null was not needed, so nobody found it.
            num_null = table.count(0)
            hits[group.group.label] = num_written - num_null * size
        lost = {"no_window": hit.num_windowless_tokens - resumed}
        if self.config.has_state:
            hits["state"] = resumed
            attention = max(hit.num_attention_tokens, resumed)
            lost["no_state"] = min(attention, num_prompt_tokens - 1) - max(resumed, hit.num_windowless_tokens)
            lost["no_attention"] = hit.num_state_tokens - attention
        self._counters.count_query(num_prompt_tokens, hits)
        for reason, num_tokens in lost.items():
            if num_tokens > 0:
                self._counters.lost_tokens[reason] += num_tokens
