"""What becomes of a prompt when its last token is computed, found or pulled.

1 its end is published, 2 it is handed out under a lease (a prompt that is only computed), ends here (only its logprobs
were asked for), or goes on: the sequence and its forks are sampled from its last row. While it is computed, its reader
is told which blocks are finished. Called after the device has done the step: what is leased or told is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from common.engine.live_sequences import LiveSequences
from common.engine.outputs import OutputList
from common.engine.plan import StepPlan
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence
from common.kv_cache.manager import KVCacheManager
from common.request import FinishReason


class Launched(Protocol):
    def wait(self) -> object: ...


class BlockCopier(Protocol):
    """Runs block copies outside a step: a model runner."""

    def launch(self, plan: StepPlan) -> Launched: ...

    def synchronize(self) -> None: ...


class FinishedPrompts:
    """Owned by the engine thread. ``lease_seconds``: how long a handed out prompt is kept without renewal."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: KVCacheManager,
        runner: BlockCopier,
        live: LiveSequences,
        outputs: OutputList,
        *,
        lease_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._runner = runner
        self._live = live
        self._outputs = outputs
        self._lease_seconds = lease_seconds
        self._clock = clock

    def report_progress(self, sequence: Sequence) -> None:
        """Reports which blocks of a prompt are finished, to the node that pulls them already; once it has begun, none
        perhaps, so that its reader takes memory while it is computed."""
        if not sequence.request.wants_progress or not sequence.request.is_prompt_only:
            return
        progress = self._manager.progress(sequence.seq_id)
        if progress.num_tokens > sequence.num_reported_tokens:
            sequence.num_reported_tokens = progress.num_tokens
            self._outputs.add(sequence, progress=progress)

    def run_copies(self, lease_id: str) -> None:
        """Block copies that must not wait for the next step: the lease's reader pulls their destinations. When they
        raise, the lease ends and takes its own with it; those of other sequences run with the next step."""
        if copies := self._manager.block_copies():
            try:
                self._runner.launch(StepPlan(block_copies=copies)).wait()
            except BaseException:
                self._runner.synchronize()  # some may still write to what the lease gives back
                self._manager.release_lease(lease_id)
                raise
            self._manager.take_block_copies()

    def finish(self, sequence: Sequence, row: Any) -> list[Sequence]:
        """The last prompt token's row ([hidden], in host memory) is known: publishes it, and hands the prompt out, or
        returns the sequences that can be sampled from it."""
        self._manager.finish_prompt(sequence.seq_id, row, seal=sequence.request.is_prompt_only)
        ready = self._begin_output(sequence)
        if sequence.request.is_prompt_only:
            deadline = self._clock() + self._lease_seconds
            lease = self._manager.lease(sequence.seq_id, sequence.request.request_id, deadline)
            self.run_copies(sequence.request.request_id)
            sequence.finish_reason = FinishReason.LENGTH
            self._outputs.add(sequence, handoff=lease)
            self._live.end(sequence, donate=True)
        return ready

    def begin_from(self, sequence: Sequence, row: Any) -> None:
        """The whole prompt was pulled, with its last row ([hidden], in host memory): what can be sampled from that is,
        in the next step."""
        for ready in self._begin_output(sequence):
            ready.pending_row = row

    def _begin_output(self, sequence: Sequence) -> list[Sequence]:
        """The whole prompt is here: the sequences that can be sampled from its last row, this one and its forks; none
        when only the prompt was asked for."""
        sequence.is_prompt_done = True
        sequence.prompt_done_s = self._clock()
        if sequence.request.is_prompt_only or self._finish_without_sampling(sequence):
            return []
        return [sequence, *self._fork(sequence)]

    def _finish_without_sampling(self, sequence: Sequence) -> bool:
        """Ends a sequence that asked for its prompt only (``max_tokens`` 0, with echo), and each of its forks."""
        assert sequence.sampling is not None
        if sequence.sampling.max_tokens > 0:
            return False
        sequence.finish_reason = FinishReason.LENGTH
        for index in range(sequence.request.num_forks):
            self._outputs.add(sequence, index=index)
        self._live.end(sequence, donate=True)
        return True

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """Makes the other continuations of a finished prompt; returns those that can be sampled now.

        A child without memory waits like a new request and finds the prompt in the cache, or computes it.
        """
        if sequence.index:
            return []
        ready: list[Sequence] = []
        request = sequence.request
        for index in range(len(self._live.of_request(request.request_id)), request.num_forks):
            child = Sequence(request, index, sequence.keys.fork())
            child.remote = None
            self._live.add(child)
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
