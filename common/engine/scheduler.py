"""Decides what the next step computes. Pure Python: it knows sequences, token budgets and the cache manager, no
tensors.

Continuous batching with chunked prefill: first a decode row of each sequence that generates, then the next chunks of
running prompts, then waiting prompts, first come first served within a priority. Beside decode rows prompts get a share
of the step that lets no stream stand still for a long prompt. When memory runs out, the last running sequence in order
is preempted: its state is donated to the cache, and it is later resumed from whatever of it is still there.

What raises for one sequence is that sequence's fault (``Schedule.failed``). Those that were in a forward that raised
are suspects: each runs alone until it has caught up, so that the one whose fault it is fails alone.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

from common.engine.pacing.step_model import StepModel
from common.engine.scheduling.head_drafts import HeadDrafts
from common.engine.scheduling.image_chunks import ImageChunks
from common.engine.scheduling.prompt_share import PromptShare
from common.engine.scheduling.schedule import Schedule
from common.engine.scheduling.segments import Segments
from common.engine.scheduling.shared_prefixes import (
    MAX_COMPARED,
    MovedPrefix,
    has_to_wait,
    is_computing,
    junctions_with,
    still_waits,
    who_pulls,
    who_reads,
)
from common.engine.scheduling.suspects import Suspects
from common.engine.sequence import Sequence, SequenceStatus
from common.engine.speculation import Speculation
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.prefix.hits import PrefixHit

logger = logging.getLogger(__name__)

PROMPT_FLOOR = 16
"""Decode rows leave one ``PROMPT_FLOOR``-th of ``max_num_batched_tokens`` to prompts, so that these come to an end
however many generate."""

REST_SHARE = 8
"""What a chunk would leave of a prompt is computed with it if that is one ``REST_SHARE``-th of it at most: a step of a
token or two takes as long as one of many rows, and may have to wait."""

MAX_TIER_READS = 2
"""Prefixes that are read from tiers for one sequence: when one is bad, the next shallower one; then it is computed."""


class TierPrefix(MovedPrefix, Protocol):
    """A prefix in a tier. ``is_being_read``: another sequence has begun to; ``begin``: this one has."""

    @property
    def is_being_read(self) -> bool: ...

    def begin(self) -> None: ...


class LowerTiers(Protocol):
    """What this node keeps below its memory. ``find``: of a sequence's ``num_tokens`` tokens, what is sooner read
    than computed beyond what memory has (``hit``)."""

    def find(self, keys: PrefixKeys, num_tokens: int, hit: PrefixHit) -> TierPrefix | None: ...


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``max_num_seqs``: sequences that hold memory at a time. ``max_num_batched_tokens``: tokens computed in a step, of
    which an image may be the last that does not fit. ``images_are_whole``: no step may end inside an image."""

    max_num_seqs: int
    max_num_batched_tokens: int
    images_are_whole: bool = False


class Scheduler:
    """Owned by the engine thread. Every sequence that it holds is in exactly one of waiting, transferring, running."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        clock: Callable[[], float] = time.monotonic,
        speculation: Speculation | None = None,
    ) -> None:
        self._config = config
        self._manager = manager
        self._clock = clock
        self.speculation = speculation
        self.step_model = StepModel(clock)
        self.suspects = Suspects()
        self._images = ImageChunks(is_whole=config.images_are_whole)
        self.segments = Segments(manager, self._images)
        self._head_drafts = HeadDrafts(manager, self.segments)
        self._share = PromptShare(config.max_num_batched_tokens, self.step_model, clock)
        self.waiting: list[Sequence] = []
        self.transferring: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.tiers: LowerTiers | None = None
        self.end: Callable[[Sequence, bool], None] | None = None
        self.num_preemptions = 0
        self._num_steps = 0

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_holding(self) -> int:
        """Sequences that hold memory: those that run, and those for which a prefix is read."""
        return len(self.running) + len(self.transferring)

    @property
    def num_uncomputed_prompt_tokens(self) -> int:
        """Of the prompts that wait or run, at most: what a waiting one will find in the cache is counted too. Readable
        from any thread."""
        queued = [*self.waiting, *self.running]
        return sum(max(0, each.num_prompt_tokens - each.num_computed_tokens) for each in queued)

    def has_room(self) -> bool:
        """Whether one more sequence may hold memory."""
        return self.num_holding < self._config.max_num_seqs

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
        self.suspects.forget(sequence)

    def schedule(self) -> Schedule:
        """Plans one step and takes the memory for it; what runs comes before what waits."""
        schedule = Schedule()
        self._num_steps += 1
        admits = not self.suspects.is_any_alone
        self._schedule_rows(schedule)
        if schedule.is_empty and (suspect := self.suspects.next_alone()) is not None:
            self._schedule_alone(schedule, suspect)
        if schedule.is_empty:
            self._schedule_together(schedule, admits=admits)
        if self.speculation is not None:
            schedule.plan.only_decodes = all(each.is_decoding for each in schedule.sequences)
        schedule.plan.block_copies = self._manager.take_block_copies()
        return schedule

    def runs_the_same_again(self) -> bool:
        """Whether the next step would be of the same sequences as the last one: all that run were in it, and none that
        waits can join them before one of them ends."""
        if (self.waiting and self.has_room()) or self.suspects.is_any_alone:
            return False
        return all(each.last_step == self._num_steps for each in self.running)

    def begin_step(self, sequences: Iterable[Sequence]) -> None:
        """A step of these sequences was planned elsewhere."""
        self._num_steps += 1
        for sequence in sequences:
            sequence.last_step = self._num_steps

    def _schedule_rows(self, schedule: Schedule) -> None:
        """Those that have the row of their next token: a step without a forward, so that it does not wait for that of
        the others, and they are in it."""
        for sequence in self.running:
            has_row = sequence.pending_row is not None and not sequence.waits_for_grammar
            if has_row and not self._begins_later(schedule, sequence):
                schedule.row_only.append(sequence)

    def _schedule_alone(self, schedule: Schedule, suspect: Sequence) -> None:
        budget = self._config.max_num_batched_tokens
        if suspect.status is SequenceStatus.RUNNING:
            self._plan(schedule, suspect, budget)
        elif self.has_room():
            self._try_to_admit(schedule, suspect, budget)

    def _schedule_together(self, schedule: Schedule, *, admits: bool) -> None:
        num_preemptions = self.num_preemptions
        for sequence in self.running:
            self._keep_for_waiting(sequence)
        budget = self._schedule_running(schedule)
        if admits and self.num_preemptions == num_preemptions:
            # Otherwise memory is short, and what a preemption freed is not given away in the same step.
            self._admit_waiting(schedule, budget)

    def _schedule_running(self, schedule: Schedule) -> int:
        """Returns the tokens that are left for waiting prompts."""
        limit = self._config.max_num_batched_tokens
        decoding = [each for each in self.running if each.is_decoding]
        prompts = [each for each in self.running if not each.is_decoding]
        budget = limit
        if prompts or self.waiting:
            budget -= max(1, limit // PROMPT_FLOOR)
        if len(decoding) > budget:
            decoding.sort(key=lambda each: each.last_step)  # those that found no place in the last step come first
        if self.speculation is None:
            for sequence in decoding:
                budget -= self._plan(schedule, sequence, budget)
            num_rows = len(schedule.sequences)
        else:
            num_rows = self._plan_with_drafts(schedule, decoding, budget)
        budget = limit
        if num_rows:
            queue = [*prompts, *self.waiting[:MAX_COMPARED]]
            budget = self._share.budget(num_rows, self._share.tokens(schedule, queue))
        for sequence in prompts:
            budget -= self._plan(schedule, sequence, budget)
        return budget

    def _plan_with_drafts(self, schedule: Schedule, decoding: list[Sequence], budget: int) -> int:
        """Plans those that generate; what they leave of ``budget`` their drafts may have. Returns the rows."""
        num_known = sum(each.num_uncomputed_tokens for each in decoding)
        spare = max(0, budget - num_known)
        assert self.speculation is not None
        self.speculation.begin_step(len(decoding), num_known - len(decoding))
        self._head_drafts.guess(self.speculation, decoding, spare, self._num_steps)
        num_rows = 0
        for sequence in decoding:
            num_rows += self._plan(schedule, sequence, budget - num_rows, spare, len(decoding))
            spare -= len(sequence.drafts)
        return num_rows

    def _plan(
        self, schedule: Schedule, sequence: Sequence, budget: int, max_drafts: int = 0, num_sequences: int = 0
    ) -> int:
        """Plans what a running sequence computes next, at most ``budget`` tokens; returns how many it is.
        ``max_drafts``: of them may be drafted, in a step of ``num_sequences``."""
        if sequence.status is not SequenceStatus.RUNNING:
            return 0  # preempted for an earlier one
        if sequence.pending_row is not None:
            return 0  # its grammar is not ready, or it begins later
        try:
            num_tokens = self._chunk_size(schedule, sequence, sequence.num_computed_tokens, budget)
            if num_tokens == 0 or not self._extend_or_preempt(sequence, sequence.num_computed_tokens + num_tokens):
                return 0
            if max_drafts and sequence.num_computed_tokens + num_tokens == sequence.num_tokens:
                sequence.drafts = self._drafts(sequence, min(max_drafts, budget - num_tokens), num_sequences)
            self._add_segment(schedule, sequence, num_tokens)
        except Exception as exc:  # noqa: BLE001  # whatever it is, it is this sequence's
            schedule.failed.append((sequence, exc))
            return 0
        return num_tokens + len(sequence.drafts)

    def _begins_later(self, schedule: Schedule, sequence: Sequence) -> bool:
        streams = (each for each in self.running if each.is_decoding and each.pending_row is None)
        return self._share.begins_later(sequence, chain(streams, schedule.row_only))

    def _drafts(self, sequence: Sequence, max_drafts: int, num_sequences: int) -> list[int]:
        """What the sequence may run behind its last token. It has the blocks for it then; nobody is preempted for
        a draft."""
        assert self.speculation is not None
        end = sequence.num_tokens
        max_drafts = self._manager.max_drafts(end, max_drafts)
        drafts = self.speculation.propose(sequence, max_drafts, num_sequences)
        if not drafts or not self._manager.extend(sequence.seq_id, end + len(drafts)):
            return []
        return drafts

    def _extend_or_preempt(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence has blocks for ``num_tokens`` tokens now, others having been preempted for it if need
        be; False: it was preempted itself."""
        while not self._manager.extend(sequence.seq_id, num_tokens):
            # The last in order that this step has not planned: in the end the sequence itself.
            victim = next(each for each in reversed(self.running) if each.last_step != self._num_steps)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence, *, donate: bool = True) -> None:
        """Takes the sequence's memory back. ``donate``: its state becomes a checkpoint, so that it goes on from there
        if that is still cached when its turn comes again. One that has only its state left to compute ends."""
        if sequence.finish_reason is not None:
            assert self.end is not None
            self.end(sequence, donate)
            return
        logger.info("preempted request_id=%s computed=%d", sequence.request.request_id, sequence.num_computed_tokens)
        self._manager.free(sequence.seq_id, donate=donate)
        self.running.remove(sequence)
        sequence.lose_memory()
        self.num_preemptions += 1
        self.add(sequence)

    def _admit_waiting(self, schedule: Schedule, budget: int) -> None:
        """Stops at the first sequence for which there is no memory: nobody overtakes it, so nobody starves. Those that
        wait for what a running prompt is computing, or another's pull brings, let others pass; those for which this
        step has no tokens left let pulls pass that are as urgent, which need none: a transfer does not wait for
        another's prompt."""
        num_passed = num_compared = 0  # sequences at the front of the queue that stay there; those with tokens to hash
        least_urgent: int | None = None
        while num_passed < len(self.waiting) and num_compared < MAX_COMPARED and self.has_room():
            sequence = self.waiting[num_passed]
            if least_urgent is not None and sequence.request.priority > least_urgent:
                return
            if still_waits(sequence):
                num_passed += 1
                continue
            if sequence.remote is None and budget <= 0:
                least_urgent = sequence.request.priority
                num_passed += 1
                num_compared += 1
                continue
            num_tokens = self._try_to_admit(schedule, sequence, budget)
            if num_tokens is None:
                return
            budget -= num_tokens
            if sequence.status is SequenceStatus.WAITING:
                num_passed += 1
                num_compared += sequence.remote is None

    def _try_to_admit(self, schedule: Schedule, sequence: Sequence, budget: int) -> int | None:
        try:
            return self._admit(schedule, sequence, budget)
        except Exception as exc:  # noqa: BLE001  # as in _plan
            schedule.failed.append((sequence, exc))
            return 0

    def _admit(self, schedule: Schedule, sequence: Sequence, budget: int) -> int | None:
        """Gives a waiting sequence its memory and plans its first chunk, or its pull; it goes on waiting when a running
        prompt computes the same, or another's pull brings it. Returns the tokens that it computes in this step; None:
        it does not fit now.

        A sequence gets the blocks of all its tokens at once. With blocks for a part of them it could be preempted for
        want of the rest, start again and be preempted again, for as long as somebody's lease holds that memory.
        """
        if sequence.remote is not None:
            sequence.awaited = who_pulls(sequence, self.transferring.values())
            if sequence.awaited is not None:
                return 0
            return 0 if self._start_pull(schedule, sequence, sequence.remote) else None
        hit = PrefixHit()
        if sequence.is_prompt_done or not sequence.request.skip_prefix_lookup:
            hit = self._manager.lookup(sequence.keys, sequence.num_tokens)
            if self._has_to_wait(sequence, hit.num_tokens):
                return 0
            below = self._find_below(sequence, hit)
            if below is not None:
                return self._read_below(schedule, sequence, below)
        self._images.check(sequence.request, hit.num_tokens)
        num_tokens = self._chunk_size(schedule, sequence, hit.num_tokens, budget)
        if num_tokens == 0 and hit.num_tokens < sequence.num_tokens:
            return 0  # for an image that is being processed
        if not self._manager.admit(
            sequence.seq_id,
            sequence.keys,
            hit,
            sequence.num_tokens,
            num_prompt_tokens=sequence.num_prompt_tokens,
        ):
            return None
        self.waiting.remove(sequence)
        self._begin(sequence, hit)
        if num_tokens == 0:
            assert hit.output_row is not None
            sequence.pending_row = hit.output_row
            if not self._begins_later(schedule, sequence):
                schedule.row_only.append(sequence)
        else:
            self._add_segment(schedule, sequence, num_tokens)
        return num_tokens

    def _has_to_wait(self, sequence: Sequence, num_found: int) -> bool:
        config = self._manager.config
        longest_chunk = self._config.max_num_batched_tokens if config.keeps_ends_of_chunks else 1
        return config.caches_states and has_to_wait(sequence, num_found, self.running, longest_chunk)

    def _begin(self, sequence: Sequence, hit: PrefixHit) -> None:
        """The sequence was admitted, and goes on from ``hit``."""
        sequence.save_positions = self._manager.save_positions(
            sequence.num_prompt_tokens, hit, sequence.request.semantic_boundaries
        )
        sequence.num_computed_tokens = hit.num_tokens
        num_hit = min(hit.num_tokens, sequence.num_prompt_tokens)
        if sequence.num_preemptions == 0 and not sequence.transferred_bytes:
            sequence.num_local_hit = num_hit  # otherwise the hit may be what it computed itself, or pulled
        sequence.num_prompt_computed = max(sequence.num_prompt_computed, sequence.num_prompt_tokens - num_hit)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self._clock()
        self.add_running(sequence)
        self._keep_for_waiting(sequence)

    def _keep_for_waiting(self, sequence: Sequence) -> None:
        """Lets this prompt's states be kept where prompts that wait, or of which a prefix comes, will go on from
        them."""
        config = self._manager.config
        if not (config.has_state and config.caches_states and is_computing(sequence)):
            return
        others = chain(islice(self.transferring.values(), MAX_COMPARED), self.waiting[:MAX_COMPARED])
        for position in junctions_with(sequence, others):
            sequence.save_positions.setdefault(position, "junction")

    def _chunk_size(self, schedule: Schedule, sequence: Sequence, start: int, budget: int) -> int:
        """Tokens to compute next, of a prompt that ends soon after ``budget`` all; the cache manager may want a chunk
        to end at a block's boundary, and an image that is not processed yet ends it. Of an answer that is told the last
        token is not run."""
        num_left = sequence.num_tokens - (sequence.finish_reason is not None) - start
        if budget < num_left <= budget + budget // REST_SHARE:
            num_planned = sum(segment.num_tokens for segment in schedule.plan.segments)
            budget = min(num_left, self._config.max_num_batched_tokens - num_planned)
        num_tokens = max(0, min(num_left, budget))
        if num_tokens > 1:
            num_tokens = self._manager.chunk_size(start, num_tokens, sequence.num_tokens)
        return self._images.end(sequence.request, start, start + num_tokens) - start

    def _find_below(self, sequence: Sequence, hit: PrefixHit) -> TierPrefix | None:
        if self.tiers is None or sequence.num_tier_reads == MAX_TIER_READS:
            return None
        return self.tiers.find(sequence.keys, sequence.num_tokens, hit)

    def _read_below(self, schedule: Schedule, sequence: Sequence, below: TierPrefix) -> int | None:
        """As ``_admit``."""
        if below.is_being_read:
            return 0
        sequence.awaited = who_reads(sequence, below, self.transferring.values())
        if sequence.awaited is not None:
            return 0
        if not self._start_pull(schedule, sequence, below):
            return None
        below.begin()
        sequence.tier_prefix = below
        sequence.num_tier_reads += 1
        return 0

    def _start_pull(self, schedule: Schedule, sequence: Sequence, prefix: Any) -> bool:
        """Takes the memory that a prefix will be read into. False: it does not fit now."""
        plan = self._manager.accept_remote(sequence.seq_id, sequence.keys, prefix.num_tokens)
        if plan is None:
            return False
        self.waiting.remove(sequence)
        if not sequence.is_prompt_done:  # otherwise what is reported of its prompt is over
            sequence.num_local_hit = plan.num_local_tokens
            sequence.scheduled_s = sequence.transfer_start_s = self._clock()
        sequence.status = SequenceStatus.TRANSFERRING
        sequence.pull_plan = plan
        self.transferring[sequence.seq_id] = sequence
        schedule.pulls.append((sequence, plan))
        return True

    def _add_segment(self, schedule: Schedule, sequence: Sequence, num_tokens: int) -> None:
        schedule.plan.segments.append(self.segments.next(sequence, num_tokens, self.speculation))
        schedule.sequences.append(sequence)
        sequence.last_step = self._num_steps
