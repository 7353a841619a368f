"""Decides what the next step computes. Pure Python: it knows sequences, token budgets and the cache manager, no
tensors.

Continuous batching with chunked prefill: running sequences first (a decode row each, or the next chunk of a prompt),
what is left of ``max_num_batched_tokens`` goes to waiting prompts, first come first served within a priority. When
memory runs out, the last running sequence in order is preempted: its state is donated to the cache, and it is later
resumed from whatever of it is still there.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.engine.plan import Rows, Segment, StepPlan
from common.engine.sequence import Sequence, SequenceStatus
from common.engine.shared_prefixes import MAX_COMPARED, has_to_wait, is_computing, junctions_with
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.prefix.hits import PrefixHit
from common.kv_cache.sharing.remote_prefix import PullPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``max_num_seqs``: sequences that hold memory at a time. ``max_num_batched_tokens``: tokens computed in a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(slots=True)
class Schedule:
    """One step: ``sequences`` goes with ``plan.segments``; ``row_only`` sample from a row they already have; ``pulls``
    are to be started now."""

    plan: StepPlan = field(default_factory=StepPlan)
    sequences: list[Sequence] = field(default_factory=list)
    row_only: list[Sequence] = field(default_factory=list)
    pulls: list[tuple[Sequence, PullPlan]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.sequences or self.row_only or self.pulls)


class Scheduler:
    """Owned by the engine thread. Every sequence that it holds is in exactly one of waiting, transferring, running."""

    def __init__(
        self, config: SchedulerConfig, manager: KVCacheManager, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._manager = manager
        self._clock = clock
        self.waiting: list[Sequence] = []
        self.transferring: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def has_room(self) -> bool:
        """Whether one more sequence may hold memory."""
        return len(self.running) + len(self.transferring) < self._config.max_num_seqs

    def add(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        insort(self.waiting, sequence, key=lambda s: s.order)

    def add_running(self, sequence: Sequence) -> None:
        """A sequence that has its memory already (a fork, a pulled prompt) joins the batch."""
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        """Forgets the sequence; its memory is the caller's business."""
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.TRANSFERRING:
            del self.transferring[sequence.seq_id]
        elif sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> Schedule:
        """Plans one step and takes the memory for it; what runs comes before what waits."""
        schedule = Schedule()
        num_preemptions = self.num_preemptions
        for sequence in self.running:
            self._keep_for_waiting(sequence)
        budget = self._schedule_running(schedule, self._config.max_num_batched_tokens)
        if self.num_preemptions == num_preemptions:
            # Otherwise memory is short, and what a preemption freed is not given away in the same step.
            self._admit_waiting(schedule, budget)
        schedule.plan.block_copies = self._manager.take_block_copies()
        return schedule

    def _schedule_running(self, schedule: Schedule, budget: int) -> int:
        """Returns the tokens that are left of ``budget``."""
        for sequence in list(self.running):
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for an earlier one
            if sequence.pending_row is not None:
                schedule.row_only.append(sequence)
                continue
            num_tokens = self._chunk_size(sequence, sequence.num_computed_tokens, budget)
            if num_tokens == 0:
                continue
            if not self._extend_or_preempt(sequence, sequence.num_computed_tokens + num_tokens):
                continue
            self._add_segment(schedule, sequence, num_tokens)
            budget -= num_tokens
        return budget

    def _extend_or_preempt(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence has blocks for ``num_tokens`` tokens now, others having been preempted for it if need
        be; False: it was preempted itself."""
        while not self._manager.extend(sequence.seq_id, num_tokens):
            victim = self.running[-1]  # last in order: never one that this step has already planned
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Takes the sequence's memory back. Its state becomes a checkpoint, so that it goes on from there if that is
        still cached when its turn comes again."""
        logger.info("preempted request_id=%s computed=%d", sequence.request.request_id, sequence.num_computed_tokens)
        self._manager.free(sequence.seq_id, donate=True)
        self.running.remove(sequence)
        sequence.num_computed_tokens = 0
        sequence.pending_row = None
        sequence.remote = None
        sequence.num_preemptions += 1
        if sequence.prompt_logprobs is not None and not sequence.is_prompt_done:
            sequence.prompt_logprobs = [None]
        self.num_preemptions += 1
        self.add(sequence)

    def _admit_waiting(self, schedule: Schedule, budget: int) -> None:
        """Stops at the first sequence that does not fit: nobody overtakes it, so nobody starves. Only those that wait
        for what a running prompt is computing let others pass.

        A sequence gets the blocks of all its tokens at once. With blocks for a part of them it could be preempted for
        want of the rest, start again and be preempted again, for as long as somebody's lease holds that memory.
        """
        num_passed = 0  # sequences at the front of the queue that wait for a running prompt
        while num_passed < min(len(self.waiting), MAX_COMPARED) and self.has_room():
            sequence = self.waiting[num_passed]
            if sequence.remote is not None:
                if not self._start_pull(schedule, sequence):
                    return
                continue
            if budget == 0:
                return
            hit = None
            if not sequence.request.skip_prefix_lookup:
                hit = self._manager.lookup(sequence.keys, sequence.num_tokens)
                if self._manager.config.caches_states and has_to_wait(sequence, hit.num_tokens, self.running):
                    num_passed += 1
                    continue
            num_computed = hit.num_tokens if hit is not None else 0
            num_tokens = self._chunk_size(sequence, num_computed, budget)
            if not self._manager.admit(
                sequence.seq_id,
                sequence.keys,
                hit,
                sequence.num_tokens,
                num_prompt_tokens=sequence.num_prompt_tokens,
            ):
                return
            self.waiting.remove(sequence)
            self._begin(sequence, hit)
            if num_tokens == 0:
                assert hit is not None
                assert hit.output_row is not None
                sequence.pending_row = hit.output_row
                schedule.row_only.append(sequence)
                continue
            self._add_segment(schedule, sequence, num_tokens)
            budget -= num_tokens

    def _begin(self, sequence: Sequence, hit: PrefixHit | None) -> None:
        """The sequence was admitted, and goes on from ``hit``."""
        num_computed = hit.num_tokens if hit is not None else 0
        sequence.save_positions = self._manager.save_positions(
            sequence.num_prompt_tokens, hit, sequence.request.semantic_boundaries
        )
        sequence.num_computed_tokens = num_computed
        num_hit = min(num_computed, sequence.num_prompt_tokens)
        if sequence.num_preemptions == 0 and not sequence.transferred_bytes:
            sequence.num_local_hit = num_hit  # otherwise the hit may be what it computed itself, or pulled
        sequence.num_prompt_computed = max(sequence.num_prompt_computed, sequence.num_prompt_tokens - num_hit)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self._clock()
        self.add_running(sequence)
        self._keep_for_waiting(sequence)

    def _keep_for_waiting(self, sequence: Sequence) -> None:
        """Lets this prompt's states be kept where prompts that wait will go on from them."""
        config = self._manager.config
        if not (self.waiting and config.has_state and config.caches_states and is_computing(sequence)):
            return
        for position in junctions_with(sequence, self.waiting[:MAX_COMPARED]):
            sequence.save_positions.setdefault(position, "junction")

    def _chunk_size(self, sequence: Sequence, start: int, budget: int) -> int:
        """Tokens to compute next; the cache manager may want a prompt's chunk to end at a block's boundary."""
        num_tokens = min(sequence.num_tokens - start, budget)
        if num_tokens <= 1:
            return num_tokens
        return self._manager.chunk_size(start, num_tokens, sequence.num_tokens)

    def _start_pull(self, schedule: Schedule, sequence: Sequence) -> bool:
        """Takes the memory that a remote prefix will be read into. False: it does not fit now."""
        plan = self._manager.accept_remote(sequence.seq_id, sequence.keys, sequence.remote.num_tokens)
        if plan is None:
            return False
        self.waiting.remove(sequence)
        sequence.num_local_hit = plan.num_local_tokens
        now = self._clock()
        sequence.scheduled_s = sequence.transfer_start_s = now
        sequence.status = SequenceStatus.TRANSFERRING
        self.transferring[sequence.seq_id] = sequence
        schedule.pulls.append((sequence, plan))
        return True

    def _add_segment(self, schedule: Schedule, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed_tokens
        end = start + num_tokens
        saves = self._manager.plan_saves(sequence.seq_id, start, end, self._wanted_saves(sequence))
        view = self._manager.sequence(sequence.seq_id)
        if sequence.prompt_logprobs is not None and not sequence.is_prompt_done:
            rows = Rows.ALL
        else:
            rows = Rows.LAST if end == sequence.num_tokens else Rows.NONE
        schedule.plan.segments.append(
            Segment(
                request_id=sequence.seq_id,
                token_ids=sequence.token_ids[start:end],
                start=start,
                tables=view.tables,
                src_slot=view.src_slot,
                dst_slot=view.dst_slot,
                save_offsets=tuple(position - start for position, _ in saves),
                save_slots=tuple(slot for _, slot in saves),
                rows=rows,
            )
        )
        schedule.sequences.append(sequence)

    @staticmethod
    def _wanted_saves(sequence: Sequence) -> Mapping[int, str]:
        """A prompt without sampling keeps its end without a save: the running slot itself becomes that checkpoint."""
        end = sequence.num_prompt_tokens
        if sequence.num_computed_tokens >= end:
            return {}
        if sequence.sampling is not None:
            return sequence.save_positions
        return {position: why for position, why in sequence.save_positions.items() if position != end}
