"""The engine: one deterministic ``step`` that a single thread calls over and over.

``launch``: 1 expire leases, 2 schedule, 3 start pulls, 4 give the device the forward. ``collect``: 5 wait until the
device has done it, 6 publish what the step completed, 7 hand out or fork finished prompts, 8 sample, 9 finish.
Everything else (add, abort, finish, pull results, leases) is called by the same thread between a ``collect`` and the
next ``launch``; where steps are launched ahead (``common.engine.tokens.ahead``) between two ``step`` calls, and what
needs it collects the one in flight first. So nobody ever reads a block or state that is still being written, and memory
that a forward names is neither free nor leased nor the destination of a pull before the device is done with it.

A fault belongs to its request: whatever raises for one sequence (lookup, admission, forward, publication, sampling)
fails that one, and the others go on (``common.engine.containment``). ``EngineDeadError`` says that nothing can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.engine.containment import Containment
from common.engine.finished_prompts import FinishedPrompts
from common.engine.live_sequences import LiveSequences
from common.engine.model_runner import Forward, ModelRunner
from common.engine.outputs import OutputList, RequestOutput
from common.engine.pacing.step_model import StepModel, StepShape
from common.engine.plan import Segment
from common.engine.remote_prefixes import PrefixSource, PullResult, RemotePrefixes
from common.engine.sampling.sampler import Sampler
from common.engine.scheduler import LowerTiers, Scheduler
from common.engine.scheduling.schedule import Schedule, shape_of
from common.engine.sequence import Sequence, SequenceStatus
from common.engine.speculation import Speculation
from common.engine.tokens.ahead import AheadSteps, Order
from common.engine.tokens.grammars import Sampled, StepGrammars
from common.engine.tokens.step_tokens import StepTokens
from common.errors import HandedOverError, InvalidRequestError
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.sharing.leases import LeasedPrefix
from common.request import FinishReason, Request

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 256
"""Rows of a prompt whose logits are in memory at a time. With a vocabulary of 150,000 that is 150 MB in float32."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was launched. ``forward``: None when nothing is to be computed. ``shape``: None when how long it
    takes says nothing about other steps. ``is_ahead``: before the one before it was collected."""

    schedule: Schedule
    forward: Forward | None
    shape: StepShape | None
    started_s: float
    is_ahead: bool = False


class EngineCore:
    """Joins scheduler, cache manager, model runner and sampler. Owned by the engine thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: KVCacheManager,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        max_model_len: int,
        lease_seconds: float,
        recompute_on_load_failure: bool,
        local_prefill_limit: int | None = None,
        async_scheduling: bool = False,
        grammars: StepGrammars | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._runner = runner
        self._sampler = sampler
        self.grammars = grammars if grammars is not None else StepGrammars(None, None)
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._outputs = OutputList()
        self._live = LiveSequences(scheduler, manager, self._outputs)
        self._remote = RemotePrefixes(
            scheduler,
            manager,
            self._live,
            recompute_on_load_failure=recompute_on_load_failure,
            local_prefill_limit=local_prefill_limit,
            clock=clock,
        )
        self._prompts = FinishedPrompts(
            scheduler, manager, runner, self._live, self._outputs, lease_seconds=lease_seconds, clock=clock
        )
        self._containment = Containment(scheduler, manager, runner, self._live, self._remote, self._outputs)
        self._tokens = StepTokens(
            scheduler,
            manager,
            runner,
            sampler,
            self.grammars,
            self._outputs,
            max_model_len=max_model_len,
            clock=clock,
            fail=self._containment.fail,
            end=self._end_exactly,
        )
        self.ahead_steps = AheadSteps(scheduler, max_model_len=max_model_len) if async_scheduling else None
        """Who plans steps that are launched ahead; None: every step is collected before the next one is launched."""
        self._ahead: StepInFlight | None = None
        self._deliver: Callable[[list[RequestOutput]], None] | None = None
        self._collected_s = 0.0
        self.step_seconds = {"prompt": 0.0, "decode": 0.0}
        """Of all steps that ran a forward: those with prompt tokens, and those that only generated. Readable from any
        thread."""
        self._why_ordinary = Order.OTHERS
        self._is_stalled = False
        self._is_in_flight = False

    def pull_with(self, source: PrefixSource, tiers: LowerTiers | None = None) -> None:
        """Sets who moves prefixes here, and what is below this node's memory. Called once, before the first request."""
        self._remote.source = source
        self._scheduler.tiers = tiers

    # --- called between steps

    def _check_collected(self) -> None:
        """A step in flight names memory, and what is told of it is not true yet: collects one that is ahead."""
        assert not self._is_in_flight, "called between launch and collect"
        if self._ahead is not None:
            self._collect(self._take_ahead())

    def settle(self) -> None:
        """Before anybody looks for what has ended: the memory of a sequence that is over is given back as if no step
        were in flight that still runs it."""
        if self._ahead is not None and any(each.is_over for each in self._ahead.schedule.sequences):
            self._check_collected()

    def has_work(self) -> bool:
        """Whether a step would do something now. A queue whose head waits for memory that others hold is no work: the
        command or the deadline that frees memory comes first."""
        if self._outputs or self._ahead is not None:
            return True
        return self._scheduler.has_work() and not self._is_stalled

    @property
    def num_running(self) -> int:
        return self._scheduler.num_holding

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_uncomputed_prompt_tokens(self) -> int:
        """As the scheduler's."""
        return self._scheduler.num_uncomputed_prompt_tokens

    @property
    def step_model(self) -> StepModel:
        """How long this engine's steps take; its lines are readable from any thread."""
        return self._scheduler.step_model

    @property
    def speculation(self) -> Speculation | None:
        """Who drafts, and what came of it; its counts are readable from any thread."""
        return self._scheduler.speculation

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Sets what makes the engine's thread take a step, from any thread, when a grammar is compiled."""
        self.grammars.wake_with(wake)

    def deliver_with(self, deliver: Callable[[list[RequestOutput]], None]) -> None:
        """Sets who takes what is known before a step's forward; otherwise it comes with what the step produces."""
        self._deliver = deliver

    def prepare_grammar(self, grammar: str) -> None:
        """Begins to compile the grammar of a request that will be added. Callable from any thread."""
        self.grammars.prepare(grammar)

    def next_deadline_s(self) -> float | None:
        deadlines = (self._manager.next_lease_deadline(), self.grammars.next_deadline_s())
        return min((each for each in deadlines if each is not None), default=None)

    def add_request(self, request: Request) -> None:
        """Queues a request. Its remote prefix must be one of this prompt (and this cache salt).

        Raises:
            InvalidRequestError: the id is another's, maybe one that has left but whose read may still write.
        """
        assert not self._is_in_flight, "called between launch and collect"
        self.settle()
        if self._live.of_request(request.request_id) or self._manager.is_quarantined(f"{request.request_id}#0"):
            raise InvalidRequestError(f"request id {request.request_id} is in use")
        keys = self._manager.prefix_keys(request.prompt_token_ids, request.cache_salt, images=request.images)
        sequence = Sequence(request, 0, keys)
        error = self._remote.find_refusal(sequence)
        if error is None and request.is_prompt_only and self._manager.leases.renew(request.request_id, 0.0):
            error = InvalidRequestError(f"lease id {request.request_id} is in use")
        if error is None:
            error = self.grammars.begin(sequence)
        self._live.add(sequence)
        self._scheduler.add(sequence)
        if error is not None:
            self._live.fail(sequence, error)

    def abort(self, request_id: str) -> None:
        """The caller left: frees everything the request holds; unknown or finished ids are ignored. What was computed
        stays cached: who stops an answer often goes on from there. What wrong drafts have left to run of an answer that
        is told already is run nevertheless."""
        assert not self._is_in_flight, "called between launch and collect"
        for sequence in self._live.of_request(request_id):
            if sequence.status is SequenceStatus.TRANSFERRING:
                self._remote.abort(sequence)
            elif sequence.is_ahead:
                sequence.aborted = True
            elif sequence.finish_reason is not None:
                self._end_exactly(sequence)
            else:
                self._end(sequence)
        logger.info("aborted request_id=%s", request_id)

    def hand_over(self, request_id: str, lease_id: str) -> LeasedPrefix | None:
        """Ends a stream that goes on at another node: its caller has each of its tokens by then, then HandedOverError;
        the state behind all but the last of them is leased (behind fewer where drafts were wrong just then). None:
        there is nothing to lease, or no such stream any more.

        Raises:
            InvalidRequestError: the lease's id is in use.
        """
        self._check_collected()
        going_on = [each for each in self._live.of_request(request_id) if not each.is_over and each.is_prompt_done]
        if len(going_on) != 1:
            return None
        [sequence] = going_on
        self.abort(request_id)
        self._outputs.add_error(sequence, HandedOverError(f"request {request_id} goes on at another node"))
        return self.lease_prefix(sequence.keys, lease_id, deeper_than=0)

    def finish(self, request_id: str, index: int) -> None:
        """Ends one continuation that is complete for its reader (a stop string); its state stays cached. It may have
        ended by itself meanwhile; then nothing is reported again."""
        assert not self._is_in_flight, "called between launch and collect"
        for sequence in self._live.of_request(request_id):
            if sequence.index != index or sequence.is_over or sequence.status is SequenceStatus.FINISHED:
                continue
            sequence.finish_reason = FinishReason.STOP
            self._outputs.add(sequence)
            if sequence.status is SequenceStatus.TRANSFERRING:  # of what it had generated, for it had been preempted
                self._remote.abort(sequence)
            else:
                self._end_exactly(sequence)

    def finish_pull(self, seq_id: str, result: PullResult) -> None:
        """The pull of a remote prefix ended. A prompt that came whole, with its last row, is sampled from in the next
        step."""
        self._check_collected()
        sequence = self._live[seq_id]
        try:
            row = self._remote.finish(sequence, result)
            if row is not None:
                self._prompts.begin_from(sequence, row)
        except Exception as exc:  # noqa: BLE001  # whatever it is, it is this request's
            self._containment.fail(sequence, exc, is_read_over=result.terminal)

    def end_quarantine(self, seq_id: str) -> None:
        self._check_collected()
        self._manager.release_quarantine(seq_id)

    def lease_prefix(self, keys: PrefixKeys, lease_id: str, *, deeper_than: int) -> LeasedPrefix | None:
        """Leases the deepest prefix of these tokens that is cached here with its state; None: nothing deeper than
        ``deeper_than`` tokens.

        Raises:
            InvalidRequestError: the id is in use.
        """
        self._check_collected()
        if self._live.of_request(lease_id) or self._manager.leases.renew(lease_id, 0.0):
            raise InvalidRequestError(f"id {lease_id} is in use", param="id")
        deadline_s = self._clock() + self._lease_seconds
        lease = self._manager.lease_prefix(keys, keys.num_tokens, lease_id, deadline_s, deeper_than=deeper_than)
        if lease is not None:
            self._prompts.run_copies(lease_id)
        return lease

    def num_local_tokens(self, keys: PrefixKeys) -> int:
        """How many of these tokens would not be computed here, as of now: they are in memory, or in a tier."""
        hit, tiers = self._manager.lookup(keys, keys.num_tokens), self._scheduler.tiers
        below = tiers.find(keys, keys.num_tokens, hit) if tiers is not None else None
        return hit.num_tokens if below is None else below.num_tokens

    # --- the step

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns what it produced. A step without work only expires leases. With steps ahead: launches
        the one behind it before it is collected, if that can be.

        Raises:
            EngineDeadError: this engine cannot go on.
        """
        if self.ahead_steps is None:
            return self.collect(self.launch())
        if self._outputs:
            return self._outputs.take()  # of a step that a command has collected
        step = self._take_ahead() if self._ahead is not None else self.launch()
        self._ahead = self._launch_ahead(self.ahead_steps, step)
        return self.collect(step)

    def _take_ahead(self) -> StepInFlight:
        step, self._ahead = self._ahead, None
        assert step is not None
        for sequence in step.schedule.sequences:
            sequence.is_ahead = False
        return step

    def _launch_ahead(self, steps: AheadSteps, before: StepInFlight) -> StepInFlight | None:
        """Launches the step behind ``before``, whose tokens are not known. None: it has to wait for them."""
        if before.forward is not None and not before.is_ahead:
            steps.count(self._why_ordinary)
        if before.is_ahead:
            self._give_up_what_is_late(self._clock())
        schedule = steps.follow(before.schedule, before.forward)
        if isinstance(schedule, Order):
            self._why_ordinary = schedule
            return None
        started_s = self._clock()
        try:
            schedule.plan.draw = self._tokens.drawer(schedule, num_unknown=1)
            forward = self._runner.launch(schedule.plan)
        except Exception:  # whatever it is, it comes again in the ordinary order
            logger.warning("a step could not be launched ahead", exc_info=True)
            self._why_ordinary = Order.ERROR
            return None
        for sequence in schedule.sequences:
            sequence.is_ahead = True
        steps.count(Order.AHEAD)
        return StepInFlight(schedule, forward, shape_of(schedule), started_s, is_ahead=True)

    def _give_up_what_is_late(self, now_s: float) -> None:
        self._manager.expire_leases()
        for sequence, refusal in self.grammars.take_failed(now_s):
            self._containment.fail(sequence, refusal)

    def launch(self) -> StepInFlight:
        """Plans a step and gives it to the device; until it was collected nothing else may be called."""
        self._check_collected()
        started_s = self._clock()
        self._give_up_what_is_late(started_s)
        schedule = self._scheduler.schedule()
        self._is_stalled = schedule.is_empty
        for sequence, error in schedule.failed:
            self._containment.fail(sequence, error)
        self._remote.give_up_optional()
        for sequence, plan in schedule.pulls:
            try:
                self._remote.start(sequence, plan)
            except Exception as exc:  # noqa: BLE001  # as in finish_pull
                self._containment.fail(sequence, exc, is_read_over=True)
        for sequence in schedule.sequences:
            if sequence.num_reported_tokens < 0:  # later chunks' blocks are told when these are done
                self._prompts.report_progress(sequence)
        if self._outputs and self._deliver is not None:
            self._deliver(self._outputs.take())
        forward = None
        if schedule.sequences or schedule.plan.block_copies:
            try:
                if self.ahead_steps is not None:
                    schedule.plan.draw = self._tokens.drawer(schedule)
                forward = self._runner.launch(schedule.plan)
            except Exception as exc:  # noqa: BLE001  # whatever it is, a sequence of the step may have caused it
                self._start_again(schedule, exc)
                schedule = Schedule()
        self._is_in_flight = True
        self.grammars.launch(schedule)
        return StepInFlight(schedule, forward, shape_of(schedule), started_s)

    def collect(self, step: StepInFlight) -> list[RequestOutput]:
        """Waits for the device, publishes what the step computed, and returns what it produced.

        Raises:
            EngineDeadError: this engine cannot go on.
        """
        self._is_in_flight = False
        self._collect(step)
        return self._outputs.take()

    def _collect(self, step: StepInFlight) -> None:
        schedule, forward = step.schedule, step.forward
        rows: list[torch.Tensor] = []
        if forward is not None:
            try:
                rows = forward.wait()
            except Exception as exc:  # noqa: BLE001  # as in launch
                self._start_again(schedule, exc)
                return
            self._containment.forward_succeeded()
        to_sample: list[Sampled] = []
        for sequence, segment, hidden in zip(schedule.sequences, schedule.plan.segments, rows, strict=True):
            if step.is_ahead and sequence.is_over:
                self._end(sequence)  # the row is one past its end
                continue
            try:
                self._complete(sequence, segment, hidden, to_sample, is_ahead=step.is_ahead)
            except Exception as exc:  # noqa: BLE001  # as in finish_pull
                self._containment.fail(sequence, exc)
        for sequence in schedule.row_only:
            row, sequence.pending_row = sequence.pending_row, None
            if sequence.is_prompt_done:
                to_sample.append((sequence, row))
                continue
            try:
                # An exact prefix hit: done without a forward.
                to_sample.extend((ready, row) for ready in self._prompts.finish(sequence, row))
            except Exception as exc:  # noqa: BLE001  # as in finish_pull
                self._containment.fail(sequence, exc)
        if forward is not None and forward.token_ids is not None:
            token_ids = dict(zip(schedule.sequences, forward.token_ids.tolist(), strict=True))
            self._tokens.take([(sequence, token_ids[sequence]) for sequence, _ in to_sample])
        else:
            self._tokens.sample(to_sample)
        if schedule.sequences:
            now = self._clock()
            # The device has come to a step that was ahead when the one before it was over.
            seconds, gap_s = now - max(step.started_s, self._collected_s), now - self._collected_s
            self._collected_s = now
            only_decodes = step.shape is not None and not step.shape.num_prompt_tokens
            self.step_seconds["decode" if only_decodes else "prompt"] += seconds
            if step.shape is not None:
                self.step_model.observe(step.shape, seconds, gap_s)
            if self.speculation is not None:
                num_rows = sum(segment.num_tokens for segment in schedule.plan.segments)
                self.speculation.end_step(
                    len(schedule.sequences), num_rows, seconds, has_prompts=not schedule.plan.only_decodes
                )

    def _complete(
        self,
        sequence: Sequence,
        segment: Segment,
        hidden: torch.Tensor,
        to_sample: list[Sampled],
        *,
        is_ahead: bool,
    ) -> None:
        """Publishes what the forward wrote for one sequence; one whose next token is due goes to ``to_sample``. Where
        drafts were run nobody knows yet what of it is right."""
        if self._scheduler.speculation is not None and segment.start + segment.num_tokens > sequence.num_tokens:
            self._tokens.verify(sequence, segment, hidden)
            return
        sequence.num_computed_tokens += segment.num_tokens
        self._manager.complete_step(sequence.seq_id, sequence.num_computed_tokens, is_ahead=is_ahead)
        if sequence.prompt_logprobs is not None and not sequence.is_prompt_done:
            self._append_prompt_logprobs(sequence, segment.start, hidden)
        if sequence.finish_reason is not None:
            # Its answer has been told; the state behind a wrong draft has caught up with it.
            sequence.num_to_replay -= segment.num_tokens
            if not sequence.num_to_replay:
                self._end(sequence)
            return
        if sequence.num_uncomputed_tokens:
            sequence.num_to_replay = max(0, sequence.num_to_replay - segment.num_tokens)
            self._prompts.report_progress(sequence)
            return
        self._scheduler.suspects.caught_up(sequence)
        sequence.num_to_replay = 0
        if sequence.is_prompt_done:
            sequence.last_row = row = hidden[-1]
            to_sample.append((sequence, row))
        else:
            # Kept in host memory: a view would pin the whole step's rows, and manifests are made on other threads.
            row = hidden[-1].to("cpu", copy=True)
            to_sample.extend((ready, row) for ready in self._prompts.finish(sequence, row))

    def _start_again(self, schedule: Schedule, cause: Exception) -> None:
        """A forward raised: nothing of the step is used."""
        if self._ahead is not None:
            self._take_ahead()  # it went on from what was not computed
        self._containment.forward_failed(schedule, cause)

    def _end(self, sequence: Sequence) -> None:
        """The sequence is complete, or its reader has left; its state stays cached."""
        try:
            self._live.end(sequence, donate=True)
        except Exception as exc:  # noqa: BLE001  # as in finish_pull
            self._containment.fail(sequence, exc)

    def _end_exactly(self, sequence: Sequence) -> None:
        """The answer is told. Where wrong drafts have left its state behind, what is right of it runs once more with
        the next step, so that the next turn finds its end. A step that is ahead names its memory, which is given back
        when that is collected."""
        if not sequence.is_ahead and not (sequence.num_to_replay and self._manager.config.caches_states):
            self._end(sequence)

    def _append_prompt_logprobs(self, sequence: Sequence, start: int, hidden: torch.Tensor) -> None:
        assert sequence.prompt_logprobs is not None
        assert sequence.sampling is not None
        following = sequence.token_ids[start + 1 : start + 1 + hidden.shape[0]]
        for begin in range(0, len(following), PROMPT_LOGPROB_ROWS):
            next_ids = following[begin : begin + PROMPT_LOGPROB_ROWS]
            logits = self._runner.logits(hidden[begin : begin + len(next_ids)])
            num_top = sequence.sampling.prompt_logprobs or 0
            sequence.prompt_logprobs.extend(self._sampler.prompt_logprobs(logits, next_ids, num_top))
