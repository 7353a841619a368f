"""What goes wrong stays with the request whose fault it is.

What raises for one sequence ends that one, if the cache is sound without it. What raises for a forward may be any of
its sequences' fault: all of them go back to what is cached, and those that were in it run alone until each has caught
up. ``EngineDeadError``: nothing can be computed any more, or the cache is not known to be sound.
"""

from __future__ import annotations

import logging

from common.engine.live_sequences import LiveSequences
from common.engine.model_runner import ModelRunner
from common.engine.outputs import OutputList
from common.engine.remote_prefixes import RemotePrefixes
from common.engine.scheduler import Scheduler
from common.engine.scheduling.schedule import Schedule
from common.engine.sequence import Sequence
from common.errors import DeadlineExceededError, EngineDeadError, InvalidRequestError, TandemError, TransferError
from common.kv_cache.manager import KVCacheManager

logger = logging.getLogger(__name__)

MAX_FAILED_FORWARDS = 16
"""Forwards that may raise one after the other. The first one may be any of its sequences' fault, each one after it ran
a single sequence: with so many in a row it is the device or the model that fails."""

REFUSALS = (InvalidRequestError, DeadlineExceededError, TransferError)
"""Of what is raised for a sequence: what says that its request cannot be served, and nothing of the cache."""


class Containment:
    """Owned by the engine thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: KVCacheManager,
        runner: ModelRunner,
        live: LiveSequences,
        remote: RemotePrefixes,
        outputs: OutputList,
    ) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._runner = runner
        self._live = live
        self._remote = remote
        self._outputs = outputs
        self._num_failed_forwards = 0

    def forward_succeeded(self) -> None:
        self._num_failed_forwards = 0

    def forward_failed(self, schedule: Schedule, cause: Exception) -> None:
        """A forward raised. Nothing of it was published, but the states that it ran on may be half advanced: all that
        run are taken back to what is cached of them. A step that was ahead of it has been forgotten."""
        self._num_failed_forwards += 1
        if self._num_failed_forwards >= MAX_FAILED_FORWARDS:
            raise EngineDeadError(f"{self._num_failed_forwards} forwards in a row raised: {cause}") from cause
        try:
            self._runner.synchronize()
        except Exception as exc:  # noqa: BLE001  # whatever it is, nothing can be computed any more
            raise EngineDeadError(f"the device cannot go on: {exc}") from cause
        running = [each for each in schedule.sequences if not each.is_over]
        for sequence in schedule.sequences:
            if sequence.is_over:
                self._live.end(sequence, donate=False)
        if len(schedule.sequences) == 1 == len(running):
            self.fail(running[0], cause)
        elif running:
            logger.error("a forward of %d sequences raised", len(running), exc_info=cause)
            self._scheduler.suspects.add(running)
        for sequence in list(self._scheduler.running):
            self._scheduler.preempt(sequence, donate=False)

    def fail(self, sequence: Sequence, cause: Exception, *, is_read_over: bool | None = None) -> None:
        """Ends one request for what was raised on its behalf; the others go on, if the cache is sound without it.
        ``is_read_over``: no read can write to its memory any more; None: if one is under way, its result is to come."""
        request_id, seq_id = sequence.request.request_id, sequence.seq_id
        logger.error("request failed request_id=%s", request_id, exc_info=cause)
        try:
            if sequence.is_ahead:
                self._runner.synchronize()  # the step in flight names its memory
            error = cause if isinstance(cause, TandemError) else TandemError("the engine failed on this request")
            if self._manager.has_sequence(seq_id) and self._manager.is_pulled(seq_id):
                if is_read_over is None:
                    self._outputs.add_error(sequence, error)
                    self._remote.abort(sequence)
                    return
                self._manager.abandon_remote(seq_id, quarantine=not is_read_over)
            if sequence.request.is_prompt_only:
                self._manager.release_lease(request_id)
            self._live.fail(sequence, error)
            # It takes 0.15 s of 200,000 blocks: not for what a caller may do again and again.
            violations = self._manager.check() if not isinstance(cause, REFUSALS) else []
        except Exception as exc:  # noqa: BLE001  # whatever it is, the cache is not known to be sound
            raise EngineDeadError(f"request {request_id} failed and could not be ended: {exc}") from cause
        if violations:
            raise EngineDeadError(f"request {request_id} left the cache inconsistent: {violations[0]}") from cause
