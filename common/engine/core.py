"""The engine: one synchronous, deterministic ``step`` that a single thread calls over and over.

A step: 1 expire leases, 2 schedule, 3 start pulls, 4 forward, 5 publish what the step completed, 6 hand out or fork
finished prompts, 7 sample, 8 finish. Everything else (add, abort, finish, pull results, leases) is called by the same
thread between steps. Publication follows completion: nobody ever reads a block or state that is still being written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from common.engine.model_runner import ModelRunner
from common.engine.plan import StepPlan
from common.engine.rates import StepTimes
from common.engine.sampler import Sampler, SampleTask
from common.engine.scheduler import Schedule, Scheduler
from common.engine.sequence import Sequence, SequenceStatus
from common.errors import InvalidRequestError, TandemError, TransferError
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.results import LeasedPrefix, PrefixProgress, PullPlan
from common.request import FinishReason, PhaseSeconds, Request, RequestOutput, TokenLogprob

logger = logging.getLogger(__name__)

HINT_PATIENCE_S = 1.0
"""For how long a queue stands still, with nothing running, before those in it let go of what they hold elsewhere."""

PROMPT_LOGPROB_ROWS = 256
"""Prompt rows whose logits exist at a time: with a vocabulary of 150,000 that is 150 MB."""


class PrefixSource(Protocol):
    """Moves a remote prefix into this node's pools; implemented by the node over its transfer layer.

    ``start`` must not block. Exactly one ``EngineCore.finish_pull`` follows each ``start`` (and, when that one said the
    read is not terminal, exactly one ``EngineCore.end_quarantine`` some day). ``give_up``: a prefix that was not
    started will not be.
    """

    def start(self, seq_id: str, remote: Any, plan: PullPlan) -> None: ...

    def cancel(self, seq_id: str) -> None: ...

    def give_up(self, remote: Any) -> None: ...


class PullResult(Protocol):
    """What the core needs of a pull's outcome. ``terminal`` False: the destination may still be written.

    ``output_row``: [hidden], the prompt's last row, when the pulled prefix is a whole prompt. ``final_s``: when the
    holder had finished, on the engine's clock: the transfer that the request waits for begins there.
    """

    ok: bool
    terminal: bool
    reason: str
    num_bytes: int
    num_blocks: int
    num_states: int
    output_row: torch.Tensor | None
    final_s: float | None


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
        source: PrefixSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._runner = runner
        self._sampler = sampler
        self._max_model_len = max_model_len
        self._lease_seconds = lease_seconds
        self._recompute = recompute_on_load_failure
        self._local_prefill_limit = local_prefill_limit
        self.source = source
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._by_request: dict[str, list[Sequence]] = {}
        self._outputs: list[RequestOutput] = []
        self._is_stalled = False
        self._still_since_s: float | None = None
        self.step_times = StepTimes()

    # --- called between steps

    def has_work(self) -> bool:
        """Whether a step would do something now. A queue whose head waits for memory that others hold is no work: the
        command or the deadline that frees memory comes first."""
        return bool(self._outputs) or (self._scheduler.has_work() and not self._is_stalled)

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running) + len(self._scheduler.transferring)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_uncomputed_prompt_tokens(self) -> int:
        """Of all requests that are here; what a waiting one will find in the cache counts. Readable from any thread."""
        queued = [*self._scheduler.waiting, *self._scheduler.running]
        return sum(max(0, each.num_prompt_tokens - each.num_computed_tokens) for each in queued)

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    def next_deadline_s(self) -> float | None:
        return self._manager.next_lease_deadline()

    def add_request(self, request: Request) -> None:
        """Queues a request. A handed-over prefix must be one of this prompt (and this cache salt).

        Raises:
            InvalidRequestError: the id is another's, maybe one that has left but whose read may still write.
        """
        if request.request_id in self._by_request or self._manager.is_quarantined(f"{request.request_id}#0"):
            raise InvalidRequestError(f"request id {request.request_id} is in use")
        sequence = Sequence(request, 0, self._manager.prefix_keys(request.prompt_token_ids, request.cache_salt))
        self._track(sequence)
        self._scheduler.add(sequence)
        remote = request.remote
        if remote is not None and (
            remote.num_tokens > sequence.num_prompt_tokens
            or sequence.keys.key_at(remote.num_tokens) != remote.prefix_key
        ):
            message = "kv_transfer_params.tandem_prefix_key is not the key of prompt_token_ids (and cache_salt) here"
            param = "kv_transfer_params.tandem_prefix_key"
            self._emit_error(sequence, InvalidRequestError(message, param=param))
        elif request.sampling is None and self._manager.leases.renew(request.request_id, 0.0):
            self._emit_error(sequence, InvalidRequestError(f"lease id {request.request_id} is in use"))
        elif request.lost_remote:
            error = self._refuse_to_compute(sequence, "its holder could not be used")
            if error is not None:
                self._emit_error(sequence, error)

    def abort(self, request_id: str) -> None:
        """The caller left: frees everything the request holds; unknown or finished ids are ignored. What was computed
        stays cached: who stops an answer often goes on from there."""
        for sequence in list(self._by_request.get(request_id, ())):
            if sequence.status is SequenceStatus.TRANSFERRING:
                sequence.aborted = True  # its memory is a destination until the read is terminal: finish_pull frees it
                assert self.source is not None
                self.source.cancel(sequence.seq_id)
            else:
                self._end(sequence, donate=True)
        logger.info("aborted request_id=%s", request_id)

    def finish(self, request_id: str, index: int) -> None:
        """Ends one continuation that is complete for its reader (a stop string); its state stays cached. It may have
        ended by itself meanwhile: nothing is told twice."""
        not_now = (SequenceStatus.TRANSFERRING, SequenceStatus.FINISHED)
        for sequence in list(self._by_request.get(request_id, ())):
            if sequence.index == index and sequence.status not in not_now:
                sequence.finish_reason = FinishReason.STOP
                self._emit(sequence, [], None)
                self._end(sequence, donate=True)

    def fail_running(self, error: TandemError) -> list[RequestOutput]:
        """After a step raised: nothing of it was published, so its sequences fail and their memory is free again."""
        for sequence in list(self._scheduler.running):
            self._emit_error(sequence, error)
        outputs, self._outputs = self._outputs, []
        return outputs

    def finish_pull(self, seq_id: str, result: PullResult) -> None:
        """The pull of a remote prefix ended: commit what was validated, or discard and recompute, or fail typed."""
        sequence = self._sequences[seq_id]
        sequence.transfer_end_s = self._clock()
        if result.final_s is not None:
            assert sequence.transfer_start_s is not None
            sequence.transfer_start_s = max(sequence.transfer_start_s, result.final_s)
        if result.ok and not sequence.aborted:
            self._commit_pull(sequence, result)
            return
        self._manager.abandon_remote(seq_id, quarantine=not result.terminal)
        if sequence.aborted:
            self._untrack(sequence)
            return
        sequence.remote = None
        logger.warning("pull failed request_id=%s reason=%s", sequence.request.request_id, result.reason)
        error = self._refuse_to_compute(sequence, result.reason)
        if error is not None:
            self._emit_error(sequence, error)
        else:
            self._wait_again(sequence)

    def end_quarantine(self, seq_id: str) -> None:
        self._manager.release_quarantine(seq_id)

    def lease_prefix(self, keys: PrefixKeys, lease_id: str, *, deeper_than: int) -> LeasedPrefix | None:
        """Leases the deepest prefix of these tokens that is cached here with its state; None: nothing deeper than
        ``deeper_than`` tokens.

        Raises:
            InvalidRequestError: the id is in use.
        """
        if lease_id in self._by_request or self._manager.leases.renew(lease_id, 0.0):
            raise InvalidRequestError(f"id {lease_id} is in use", param="id")
        deadline_s = self._clock() + self._lease_seconds
        lease = self._manager.lease_prefix(keys, keys.num_tokens, lease_id, deadline_s, deeper_than=deeper_than)
        self._run_copies()
        return lease

    def num_local_tokens(self, keys: PrefixKeys) -> int:
        """How many of these tokens would not be computed here, as of now."""
        return self._manager.lookup(keys, keys.num_tokens).num_tokens

    def _refuse_to_compute(self, sequence: Sequence, reason: str) -> TransferError | None:
        """Why a prompt whose remote prefix was lost is not computed here; None: it is."""
        if sequence.request.is_remote_optional:
            return None
        num_prompt_tokens = sequence.num_prompt_tokens
        lost = f"the prefix of {num_prompt_tokens} tokens could not be pulled: {reason}"
        if not self._recompute:
            return TransferError(lost)
        if self._local_prefill_limit is None:
            return None
        num_left = num_prompt_tokens - self._manager.lookup(sequence.keys, num_prompt_tokens).num_tokens
        if num_left <= self._local_prefill_limit:
            return None
        return TransferError(
            f"{lost}; {num_left} tokens would have to be computed here, --local-prefill-limit is "
            f"{self._local_prefill_limit}"
        )

    def _wait_again(self, sequence: Sequence) -> None:
        """From transferring back to its old place in the queue."""
        sequence.remote = None
        del self._scheduler.transferring[sequence.seq_id]
        self._scheduler.add(sequence)

    def _commit_pull(self, sequence: Sequence, result: PullResult) -> None:
        row, num_tokens = result.output_row, sequence.remote.num_tokens
        sequence.transferred_bytes = result.num_bytes
        sequence.transferred_blocks = result.num_blocks
        sequence.transferred_states = result.num_states
        if num_tokens < sequence.num_prompt_tokens or row is None or sequence.sampling is None:
            # Into the cache, most recently used: the sequence is admitted like any that finds a prefix there.
            self._manager.commit_remote(sequence.seq_id, row, seal=True)
            self._manager.free(sequence.seq_id, donate=True)
            self._wait_again(sequence)
            return
        self._manager.commit_remote(sequence.seq_id, row)
        sequence.remote = None
        sequence.num_computed_tokens = sequence.num_prompt_tokens
        sequence.is_prompt_done = True
        del self._scheduler.transferring[sequence.seq_id]
        self._scheduler.add_running(sequence)
        sequence.prompt_done_s = self._clock()
        if self._finish_without_sampling(sequence):
            return
        for ready in (sequence, *self._fork(sequence, row)):
            ready.pending_row = row

    def _drop_hints(self) -> None:
        """Ends a circle: this queue waits for memory that others have leased, while leases of its own keep memory from
        them. Hints are what can be done without."""
        scheduler = self._scheduler
        if not scheduler.waiting or scheduler.running or scheduler.transferring:
            self._still_since_s = None
            return
        now = self._clock()
        if self._still_since_s is None:
            self._still_since_s = now
        if now - self._still_since_s < HINT_PATIENCE_S:
            return
        for sequence in scheduler.waiting:
            if sequence.remote is not None and sequence.request.is_remote_optional:
                assert self.source is not None
                logger.warning("prefix given up request_id=%s: no memory for it", sequence.request.request_id)
                self.source.give_up(sequence.remote)
                sequence.remote = None

    # --- the step

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns what it produced. A step without work only expires leases."""
        started_s = self._clock()
        self._manager.expire_leases()
        schedule = self._scheduler.schedule()
        self._is_stalled = schedule.is_empty
        self._drop_hints()
        for sequence, plan in schedule.pulls:
            assert self.source is not None
            self.source.start(sequence.seq_id, sequence.remote, plan)
        rows: list[torch.Tensor] = []
        if schedule.sequences or schedule.plan.block_copies:
            rows = self._runner.forward(schedule.plan)
        num_prompt_tokens = _num_prompt_tokens(schedule)
        to_sample = self._complete(schedule, rows)
        for sequence in schedule.row_only:
            row, sequence.pending_row = sequence.pending_row, None
            if not sequence.is_prompt_done:  # an exact prefix hit: the prompt is done without a forward
                self._finish_prompt(sequence, row, to_sample)
            else:
                to_sample.append((sequence, row))
        self._sample(to_sample)
        if schedule.sequences:
            self.step_times.observe(num_prompt_tokens, self._clock() - started_s)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _complete(self, schedule: Schedule, rows: list[torch.Tensor]) -> list[tuple[Sequence, torch.Tensor]]:
        """Publishes what the forward wrote; returns the (sequence, last row) pairs whose next token is due."""
        to_sample: list[tuple[Sequence, torch.Tensor]] = []
        for sequence, segment, hidden in zip(schedule.sequences, schedule.plan.segments, rows, strict=True):
            sequence.num_computed_tokens += segment.num_tokens
            self._manager.complete_step(sequence.seq_id, sequence.num_computed_tokens)
            if sequence.prompt_logprobs is not None and not sequence.is_prompt_done:
                self._append_prompt_logprobs(sequence, segment.start, hidden)
            if sequence.num_uncomputed_tokens:
                self._show_progress(sequence)
                continue
            row = hidden[-1]
            if sequence.is_prompt_done:
                to_sample.append((sequence, row))
            else:
                self._finish_prompt(sequence, row.clone(), to_sample)  # kept: must not pin the whole step's rows
        return to_sample

    def _show_progress(self, sequence: Sequence) -> None:
        """Tells the reader of a handed-out prompt which of its blocks are finished."""
        if not sequence.request.wants_progress or sequence.sampling is not None:
            return
        progress = self._manager.progress(sequence.seq_id)
        if progress.num_tokens > sequence.num_shown_tokens:
            sequence.num_shown_tokens = progress.num_tokens
            self._emit(sequence, [], None, progress=progress)

    def _run_copies(self) -> None:
        """Block copies that must not wait for the next step: their destinations are promised to a reader."""
        if copies := self._manager.take_all_block_copies():
            self._runner.forward(StepPlan(block_copies=copies))

    def _finish_prompt(
        self, sequence: Sequence, row: torch.Tensor, to_sample: list[tuple[Sequence, torch.Tensor]]
    ) -> None:
        """The last prompt token's row is known: publish it, then hand the prompt out, or go on to sample from it."""
        sequence.is_prompt_done = True
        sequence.prompt_done_s = self._clock()
        sampling = sequence.sampling
        self._manager.finish_prompt(sequence.seq_id, row, seal=sampling is None)
        if sampling is None:
            deadline = self._clock() + self._lease_seconds
            lease = self._manager.lease(sequence.seq_id, sequence.request.request_id, deadline)
            self._run_copies()
            sequence.finish_reason = FinishReason.LENGTH
            self._emit(sequence, [], None, handoff=lease)
            self._end(sequence, donate=True)
        elif not self._finish_without_sampling(sequence):
            to_sample.append((sequence, row))
            to_sample.extend((child, row) for child in self._fork(sequence, row))

    def _finish_without_sampling(self, sequence: Sequence) -> bool:
        """Ends a sequence that asked for its prompt only (``max_tokens`` 0, with echo), and each of its forks."""
        if sequence.sampling is None or sequence.sampling.max_tokens > 0:
            return False
        sequence.finish_reason = FinishReason.LENGTH
        for index in range(sequence.request.num_forks):
            self._emit(sequence, [], None, index=index)
        self._end(sequence, donate=True)
        return True

    def _fork(self, sequence: Sequence, row: torch.Tensor) -> list[Sequence]:
        """Makes the other continuations of a finished prompt; returns those that can sample from ``row`` now.

        A child without memory waits like a new request and finds the prompt in the cache, or computes it.
        """
        if sequence.index or sequence.sampling is None:
            return []
        ready: list[Sequence] = []
        request = sequence.request
        for index in range(len(self._by_request[request.request_id]), request.num_forks):
            child = Sequence(request, index, self._manager.prefix_keys(request.prompt_token_ids, request.cache_salt))
            child.remote = None
            self._track(child)
            if self._scheduler.has_room() and self._manager.fork(sequence.seq_id, child.seq_id):
                child.keys = self._manager.sequence(child.seq_id).keys
                child.num_computed_tokens = child.num_prompt_tokens
                child.is_prompt_done = True
                child.prompt_done_s = sequence.prompt_done_s
                child.prompt_logprobs = sequence.prompt_logprobs
                self._scheduler.add_running(child)
                ready.append(child)
            else:
                self._scheduler.add(child)
        return ready

    def _append_prompt_logprobs(self, sequence: Sequence, start: int, hidden: torch.Tensor) -> None:
        assert sequence.prompt_logprobs is not None
        assert sequence.sampling is not None
        following = sequence.token_ids[start + 1 : start + 1 + hidden.shape[0]]
        for begin in range(0, len(following), PROMPT_LOGPROB_ROWS):
            next_ids = following[begin : begin + PROMPT_LOGPROB_ROWS]
            logits = self._runner.logits(hidden[begin : begin + len(next_ids)])
            num_top = sequence.sampling.logprobs or 0
            sequence.prompt_logprobs.extend(self._sampler.prompt_logprobs(logits, next_ids, num_top))

    def _sample(self, to_sample: list[tuple[Sequence, torch.Tensor]]) -> None:
        if not to_sample:
            return
        logits = self._runner.logits(torch.stack([row for _, row in to_sample]))
        tasks = []
        for sequence, _ in to_sample:
            assert sequence.sampling is not None
            tasks.append(
                SampleTask(
                    params=sequence.sampling,
                    prompt_token_ids=sequence.given_token_ids,
                    output_token_ids=sequence.output_token_ids,
                    eos_token_ids=sequence.request.eos_token_ids,
                    index=sequence.index,
                )
            )
        now = self._clock()
        for (sequence, _), token in zip(to_sample, self._sampler.sample(logits, tasks), strict=True):
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            sequence.append(token.token_id)
            sequence.check_stop(token.token_id, self._max_model_len)
            self._emit(sequence, [token.token_id], token)
            if sequence.finish_reason is not None:
                self._end(sequence, donate=True)

    # --- bookkeeping

    def _track(self, sequence: Sequence) -> None:
        self._sequences[sequence.seq_id] = sequence
        self._by_request.setdefault(sequence.request.request_id, []).append(sequence)

    def _untrack(self, sequence: Sequence) -> None:
        if sequence.status is not SequenceStatus.FINISHED:
            self._scheduler.remove(sequence)
        del self._sequences[sequence.seq_id]
        siblings = self._by_request[sequence.request.request_id]
        if all(s.status is SequenceStatus.FINISHED for s in siblings):
            del self._by_request[sequence.request.request_id]

    def _end(self, sequence: Sequence, *, donate: bool) -> None:
        """Gives the sequence's memory back (a waiting one has none) and forgets it."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._manager.free(sequence.seq_id, donate=donate)
        self._untrack(sequence)

    def _emit(
        self,
        sequence: Sequence,
        token_ids: list[int],
        token: TokenLogprob | None,
        *,
        index: int | None = None,
        handoff: LeasedPrefix | None = None,
        progress: PrefixProgress | None = None,
    ) -> None:
        """``index``: of the continuation that is told of, when it is not the sequence's own."""
        wants_logprobs = sequence.sampling is not None and sequence.sampling.logprobs is not None
        is_first = sequence.num_output_tokens <= 1
        self._outputs.append(
            RequestOutput(
                request_id=sequence.request.request_id,
                index=sequence.index if index is None else index,
                token_ids=token_ids,
                logprobs=[token] if wants_logprobs and token is not None else None,
                prompt_logprobs=sequence.prompt_logprobs if is_first else None,
                finish_reason=sequence.finish_reason,
                stop_reason=sequence.stop_reason,
                num_cached_tokens=sequence.num_local_hit,
                num_local_computed_tokens=sequence.num_prompt_computed,
                transferred_bytes=sequence.transferred_bytes,
                transferred_blocks=sequence.transferred_blocks,
                transferred_states=sequence.transferred_states,
                seconds=_phase_seconds(sequence),
                handoff=handoff,
                progress=progress,
            )
        )

    def _emit_error(self, sequence: Sequence, error: TandemError) -> None:
        sequence.finish_reason = FinishReason.ERROR
        self._outputs.append(
            RequestOutput(
                sequence.request.request_id, sequence.index, [], finish_reason=FinishReason.ERROR, error=error
            )
        )
        self._end(sequence, donate=False)


def _num_prompt_tokens(schedule: Schedule) -> int:
    planned = zip(schedule.sequences, schedule.plan.segments, strict=True)
    return sum(segment.num_tokens for sequence, segment in planned if not sequence.is_prompt_done)


def _phase_seconds(sequence: Sequence) -> PhaseSeconds:
    arrival, scheduled = sequence.request.arrival_s, sequence.scheduled_s
    queue = scheduled - arrival if scheduled is not None else 0.0
    transfer = None
    if sequence.transfer_start_s is not None and sequence.transfer_end_s is not None:
        transfer = sequence.transfer_end_s - sequence.transfer_start_s
    prefill = None
    if sequence.prompt_done_s is not None and scheduled is not None and sequence.num_prompt_computed:
        prefill = sequence.prompt_done_s - scheduled - (transfer or 0.0)
    first_token = None
    if sequence.first_token_s is not None and sequence.prompt_done_s is not None:
        first_token = sequence.first_token_s - sequence.prompt_done_s
    return PhaseSeconds(queue=queue, prefill=prefill, transfer=transfer, first_token=first_token, scheduled_s=scheduled)
