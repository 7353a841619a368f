"""What the poll thread of a ``Puller`` does: every post, every poll and every callback.

Each round: 1 take what was submitted, 2 poll reads that outlived their pulls, 3 move each pull on as far as it goes
without waiting, 4 recreate the agent when somebody waits for that and the pulls in progress have ended or had their
time. Leaves by the puller's ``close``, or by an error of our own, in both cases with an outcome for every pull: nobody
waits for a thread that is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from common.errors import TransferError
from common.transfer.backend import TransferBackend
from common.transfer.codes import TransferCode
from common.transfer.generation_check import GenerationCheck, ScratchMemory
from common.transfer.jobs import PullOutcome, PullReason, PullStatus
from common.transfer.pull import Phase, Pull, PullQueue, Unterminated
from common.transfer.reads import Handle, ReadStatus

logger = logging.getLogger(__name__)

SPIN_ROUNDS = 16
"""Rounds without news after which the thread begins to sleep between polls; until then it only yields. A read over
shared memory is done by then."""
MIN_SLEEP_S = 0.0002
"""Seconds of the first sleep; each further round without news adds as much. A submit or cancel ends any sleep."""
MAX_SLEEP_S = 0.001
"""Seconds of the longest sleep while a pull is open: how late its end may be noticed."""
UNTERMINATED_SLEEP_S = 0.02
"""Seconds between polls when only reads that outlived their pulls are in flight: nobody waits for those."""


class PollLoop:
    """``run`` on a thread of its own, once; nothing else is called from outside. ``fence``: between the bytes of a read
    and the generations that prove them, which a transport may copy out of the holder's memory on this processor."""

    def __init__(
        self, backend: TransferBackend, scratch: ScratchMemory, queue: PullQueue, fence: Callable[[], None]
    ) -> None:
        self._backend = backend
        self._scratch = scratch
        self._queue = queue
        self._fence = fence
        self._pulls: list[Pull] = []
        self._unterminated: list[Unterminated] = []
        self._is_draining = False
        self._agent = 0  # grows with each recreation

    def run(self) -> None:
        """Returns when the puller is closed. On an error of ours the puller closes itself."""
        why = "the puller was closed"
        try:
            self._run_rounds()
        except Exception:
            why = "the puller failed"
            logger.exception("the puller's thread ends: every pull fails from here on")
        finally:
            self._end_all(why)

    def _run_rounds(self) -> None:
        quiet_rounds = 0
        while self._wait(quiet_rounds):
            moved = self._step()
            if self._is_draining:
                moved = self._maybe_recreate() or moved
            quiet_rounds = 0 if moved else quiet_rounds + 1

    def _end_all(self, why: str) -> None:
        with self._queue.condition:
            self._queue.is_closing = True
            pulls = list(self._queue.open_pulls.values())
        for pull in pulls:
            self._report(pull, PullStatus.FAILED, TransferCode.CLOSED, why)
        self._pulls.clear()
        for recreation in self._queue.take_recreations():
            recreation.error = TransferError("puller is closed", code=TransferCode.CLOSED)
            recreation.done.set()

    def _wait(self, quiet_rounds: int) -> bool:
        """Sleeps until there may be news, and takes what was submitted. False: closing."""
        with self._queue.condition:
            if not self._queue.is_woken:
                if not self._pulls and not self._queue.recreations:
                    self._queue.condition.wait(UNTERMINATED_SLEEP_S if self._unterminated else None)
                elif quiet_rounds >= SPIN_ROUNDS:
                    self._queue.condition.wait(min(MAX_SLEEP_S, MIN_SLEEP_S * (1 + quiet_rounds - SPIN_ROUNDS)))
            self._queue.is_woken = False
            self._pulls.extend(self._queue.submitted)
            self._queue.submitted.clear()
            self._is_draining = bool(self._queue.recreations)
            closing = self._queue.is_closing
        if quiet_rounds:
            time.sleep(0)
        return not closing

    def _step(self) -> bool:
        """Advance every pull once. True when any of them moved."""
        moved = self._reap_unterminated()
        open_pulls: list[Pull] = []
        for pull in self._pulls:
            phase = pull.phase
            try:
                finished = self._advance(pull)
            except Exception:
                logger.exception("pull failed pull_id=%s phase=%s", pull.job.pull_id, phase.value)
                self._end(pull, PullStatus.FAILED, TransferCode.TRANSFER_FAILED, "internal error")
                finished = True
            if not finished:
                open_pulls.append(pull)
            moved = moved or finished or pull.phase is not phase
        self._pulls = open_pulls
        return moved

    def _advance(self, pull: Pull) -> bool:
        """Move a pull on as far as it goes without waiting. True: it has its outcome."""
        must_end = pull.abandoned or time.monotonic() >= pull.job.deadline_s
        if pull.handle is not None:
            status = self._poll(pull.handle)
            if not status.is_terminal:
                # What is in flight while VERIFYING writes scratch memory only: the destination is safe already.
                if must_end or (pull.cancelled and pull.phase is not Phase.READING):
                    return self._give_up(pull)
                return False
            handle, pull.handle = pull.handle, None
            if pull.phase is Phase.READING:
                pull.phase = Phase.WAITING_FOR_SCRATCH
            self._release(handle)
            if status is ReadStatus.FAILED:
                return self._fail(pull, handle.error or TransferError("read failed without a reason"))
            if pull.phase is Phase.VERIFYING and self._find_stale(pull):
                return True
        verified = pull.phase is Phase.VERIFYING and pull.check is not None and pull.check.is_complete
        if (must_end or pull.cancelled) and not verified:
            return self._give_up(pull)
        try:
            return self._post_next(pull)
        except TransferError as exc:
            return self._fail(pull, exc)

    def _post_next(self, pull: Pull) -> bool:
        """Post what comes next: the data, then the generations segment by segment. True: nothing did, the pull is
        OK."""
        job = pull.job
        if pull.phase is Phase.QUEUED:
            if self._is_draining:
                return False
            if any(len(read.pairs) for read in job.reads):
                # Before the post: whatever else it raises, something may be on its way.
                pull.phase = Phase.READING
                try:
                    pull.handle = self._backend.post_read(job.peer, job.reads)
                except TransferError:
                    pull.phase = Phase.QUEUED
                    raise
                pull.num_bytes = pull.handle.num_bytes
                pull.num_descriptors = pull.handle.num_descriptors
        if pull.check is None:
            pull.check = GenerationCheck(job)
        if pull.handle is not None:
            return False
        if pull.check.is_complete:
            self._end(pull, PullStatus.OK)
            return True
        if pull.segment is None:
            pull.segment = self._scratch.take()
            if pull.segment is None:
                pull.phase = Phase.WAITING_FOR_SCRATCH
                return False
        self._fence()
        pull.handle = self._backend.post_read(job.peer, pull.check.reads(self._scratch, pull.segment))
        pull.phase = Phase.VERIFYING
        return False

    def _find_stale(self, pull: Pull) -> bool:
        """Compare the segment of generations that has arrived. True: one differs, the pull has ended STALE."""
        assert pull.segment is not None
        assert pull.check is not None
        mismatch = pull.check.compare(self._scratch, pull.segment)
        if mismatch is not None:
            self._end(pull, PullStatus.STALE, mismatch.reason, mismatch.message)
        return mismatch is not None

    def _give_up(self, pull: Pull) -> bool:
        waited_s = time.monotonic() - pull.submitted_s
        if pull.cancelled:
            status, reason, message = PullStatus.CANCELLED, PullReason.CANCELLED, f"cancelled after {waited_s:.3f} s"
        elif pull.abandoned:
            status, reason = PullStatus.TIMED_OUT, PullReason.PEER_LOST
            message = f"peer {pull.job.peer.engine_id} was lost after {waited_s:.3f} s, {pull.phase.value}"
        else:
            status, reason = PullStatus.TIMED_OUT, PullReason.DEADLINE
            message = f"not finished after {waited_s:.3f} s, {pull.phase.value}"
        self._end(pull, status, reason, message)
        return True

    def _fail(self, pull: Pull, error: TransferError) -> bool:
        if pull.cancelled:
            return self._give_up(pull)
        self._end(pull, PullStatus.FAILED, error.code, error.message)
        return True

    def _end(self, pull: Pull, status: PullStatus, reason: str = "", message: str = "") -> None:
        """Gives back the pull's scratch, keeps polling what is in flight, reports."""
        reading = pull.phase is Phase.READING
        if pull.handle is not None or reading:
            self._unterminated.append(
                Unterminated(
                    pull.job.pull_id,
                    pull.handle,
                    time.monotonic(),
                    self._agent,
                    on_terminal=pull.on_terminal if reading else None,
                    segment=pull.segment,
                    holds_destination=reading,
                )
            )
            self._count_unterminated()
        elif pull.segment is not None:
            self._scratch.put_back(pull.segment)
        self._report(pull, status, reason, message)

    def _report(self, pull: Pull, status: PullStatus, reason: str, message: str) -> None:
        with self._queue.condition:
            del self._queue.open_pulls[pull.job.pull_id]
        outcome = PullOutcome(
            pull_id=pull.job.pull_id,
            status=status,
            terminal=pull.phase is not Phase.READING,
            num_bytes=pull.num_bytes,
            num_descriptors=pull.num_descriptors,
            seconds=time.monotonic() - pull.submitted_s,
            reason=reason,
            message=message,
        )
        try:
            pull.on_done(outcome)
        except Exception:
            logger.exception("on_done raised pull_id=%s", outcome.pull_id)

    def _reap_unterminated(self) -> bool:
        """Polls the reads that outlived their pulls. True when one became terminal."""
        still: list[Unterminated] = []
        ended: list[Unterminated] = []
        for entry in self._unterminated:
            (ended if self._is_terminal(entry) else still).append(entry)
        self._unterminated = still
        if not ended:
            return False
        self._count_unterminated()
        for entry in ended:
            if entry.handle is not None:
                self._release(entry.handle)
            if entry.segment is not None:
                self._scratch.put_back(entry.segment)
            if entry.on_terminal is not None:
                try:
                    entry.on_terminal(entry.pull_id)
                except Exception:
                    logger.exception("on_terminal raised pull_id=%s", entry.pull_id)
        return True

    def _maybe_recreate(self) -> bool:
        """Recreates the backend once no pull has a read in flight, or the time to drain is over."""
        with self._queue.condition:
            until_s = min(recreation.drain_until_s for recreation in self._queue.recreations)
        if any(pull.phase is not Phase.QUEUED for pull in self._pulls) and time.monotonic() < until_s:
            return False
        error: TransferError | None = None
        try:
            self._backend.recreate()
            self._agent += 1
        except TransferError as exc:
            error = exc
        # The old agent's reads are terminal now (unless it lives on): this finds them, their pulls end, on_terminal is
        # called.
        self._step()
        recreations = self._queue.take_recreations()
        for recreation in recreations:
            recreation.error = error
            recreation.done.set()
        return True

    def _is_terminal(self, entry: Unterminated) -> bool:
        return entry.agent < self._agent if entry.handle is None else self._poll(entry.handle).is_terminal

    def _poll(self, handle: Handle) -> ReadStatus:
        try:
            return self._backend.poll(handle)
        except TransferError as exc:
            if exc.code != TransferCode.CLOSED:  # nothing is known of the read
                return ReadStatus.IN_PROGRESS
            # The backend was closed under us: the agent is gone, and nothing is in flight without it.
            handle.error = exc
            return ReadStatus.FAILED

    def _release(self, handle: Handle) -> None:
        try:
            self._backend.release(handle)
        except TransferError as exc:
            logger.debug("releasing a read from %s: %s", handle.peer.name, exc)

    def _count_unterminated(self) -> None:
        with self._queue.condition:
            self._queue.num_unterminated = sum(entry.holds_destination for entry in self._unterminated)
            self._queue.unterminated_since_s = min((entry.since_s for entry in self._unterminated), default=None)
