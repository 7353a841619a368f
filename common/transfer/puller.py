"""Pulls: data reads, then the check that the bytes are those that were promised. One thread owns every post and poll.

Life of a pull: 1 ``submit`` (any thread), 2 the poll thread posts the data READ, 3 every data transfer has reported
done, 4 only then the holder's generations are READ into scratch memory (transports deliver over several lanes that are
not ordered among each other, so reading them along with the data would prove nothing), 5 they and the content tags
equal the expected ones and the epoch is the expected one: ``OK``. Leaves by ``on_done``: OK, STALE, FAILED, TIMED_OUT,
CANCELLED.

Who owns the destination units: the pull, from ``submit`` until ``on_done`` with ``terminal=True``. With
``terminal=False`` (a deadline passed, or the peer was lost, while the transport may still write) they stay the
transport's until ``on_terminal``; the caller keeps them in quarantine. Whatever is not ``OK`` must be discarded.

A transport that never ends such a read is ended itself: ``recreate_backend``.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from common.errors import TransferError
from common.transfer.backend import Handle, ReadStatus, TransferBackend, TransferCode
from common.transfer.generation_check import GenerationCheck, ScratchMemory
from common.transfer.jobs import (
    DoneCallback,
    PullJob,
    PullOutcome,
    PullReason,
    PullStatus,
    TerminalCallback,
)

logger = logging.getLogger(__name__)

# Between two polls: a few rounds that only yield (a read over shared memory is done by then), then sleeps that grow to
# the maximum; a submit or cancel wakes the thread at once. Reads nobody waits for any more are looked at at leisure.
SPIN_ROUNDS = 16
MIN_SLEEP_S = 0.0002
MAX_SLEEP_S = 0.001
UNTERMINATED_SLEEP_S = 0.02
THREAD_CHECK_S = 1.0


class _Phase(enum.Enum):
    QUEUED = "queued"
    READING = "reading"
    WAITING_FOR_SCRATCH = "waiting_for_scratch"
    VERIFYING = "verifying"


@dataclass(slots=True, eq=False)
class _Pull:
    """A pull without an outcome. ``handle``: the read in flight, of data or of generations by ``phase``. ``check``:
    what is still to be verified; made once the data is in flight, so that it costs no time. ``abandoned``: give up at
    once, whatever is in flight."""

    job: PullJob
    on_done: DoneCallback
    on_terminal: TerminalCallback | None
    submitted_s: float
    phase: _Phase = _Phase.QUEUED
    check: GenerationCheck | None = None
    handle: Handle | None = None
    segment: int | None = None
    num_bytes: int = 0
    num_descriptors: int = 0
    cancelled: bool = False
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class _Unterminated:
    """A read in flight whose pull has its outcome. ``segment``: scratch memory that it may still write."""

    pull_id: str
    handle: Handle
    since_s: float
    on_terminal: TerminalCallback | None = None
    segment: int | None = None
    holds_destination: bool = True


@dataclass(slots=True, eq=False)
class _Recreation:
    """Someone waits for a new agent. ``drain_until_s``: when the reads that are still in flight are ended."""

    drain_until_s: float
    done: threading.Event = field(default_factory=threading.Event)
    error: TransferError | None = None


class Puller:
    """Runs pulls on one backend. Create after the backend, ``close`` before it.

    Callbacks run on the poll thread: they must be short and must not block (hand over to a queue or to
    ``loop.call_soon_threadsafe``), and must not call ``close`` or ``recreate_backend``. What they raise is logged and
    otherwise ignored. Each submitted pull gets ``on_done`` exactly once; a pull whose outcome had ``terminal=False``
    gets ``on_terminal`` once, later, unless the puller is closed before.
    """

    def __init__(self, backend: TransferBackend, *, name: str = "puller") -> None:
        """Register the scratch memory and start the poll thread.

        Raises:
            TransferError: as ``TransferBackend.register``.
        """
        self._backend = backend
        self._scratch = ScratchMemory(f"{name}_scratch")
        backend.register([self._scratch.region])
        self._condition = threading.Condition()
        # Guarded by the condition's lock.
        self._inbox: deque[_Pull] = deque()
        self._open_pulls: dict[str, _Pull] = {}
        self._recreations: list[_Recreation] = []
        self._woken = False
        self._closing = False
        self._unterminated_since_s: tuple[float, ...] = ()
        # The poll thread's own.
        self._pulls: list[_Pull] = []
        self._unterminated: list[_Unterminated] = []
        self._draining = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: PullJob, on_done: DoneCallback, on_terminal: TerminalCallback | None = None) -> None:
        """Queue a pull; returns at once, from any thread. A pull with nothing to read and nothing to check is OK at
        once.

        Raises:
            TransferError: ``closed``, ``unverified_pull`` (data without expected generations), ``transfer_failed`` (the
                pull id is in use). No callback follows then.
        """
        if not job.generations and any(len(read.pairs) for read in job.reads):
            raise TransferError(
                f"pull {job.pull_id} names no generations, its bytes could not be verified",
                code=TransferCode.UNVERIFIED_PULL,
            )
        pull = _Pull(job, on_done, on_terminal, time.monotonic())
        with self._condition:
            self._check_open()
            if job.pull_id in self._open_pulls:
                raise TransferError(f"pull id {job.pull_id} is in use")
            self._open_pulls[job.pull_id] = pull
            self._inbox.append(pull)
            self._wake()

    def cancel(self, pull_id: str) -> bool:
        """Give a pull up, from any thread. False when it is unknown or its outcome was already reported.

        The outcome is CANCELLED as soon as its destination is safe (nothing posted yet, or the transfer terminal); at
        the pull's deadline it is reported with ``terminal=False`` otherwise.
        """
        with self._condition:
            pull = self._open_pulls.get(pull_id)
            if pull is None:
                return False
            pull.cancelled = True
            self._wake()
            return True

    def abandon(self, pull_id: str) -> bool:
        """Give a pull up now, whatever is in flight: its peer is dead or does not answer. From any thread; False when
        it is unknown or its outcome was already reported.

        The outcome is TIMED_OUT with reason ``peer_lost`` (CANCELLED when it had been cancelled before), at once,
        ``terminal`` as it is true.
        """
        with self._condition:
            pull = self._open_pulls.get(pull_id)
            if pull is None:
                return False
            pull.abandoned = True
            self._wake()
            return True

    def recreate_backend(self, timeout_s: float) -> None:
        """End every read that does not end by itself: the one way to get destinations back from a frozen peer.

        1 No pull starts any more (submitted ones wait), 2 the others get up to ``timeout_s`` to end as they would, 3
        ``TransferBackend.recreate``, 4 what was still in flight ends: pulls FAILED (``agent_recreated``, terminal),
        reads that outlived their pulls get their ``on_terminal``, 5 waiting pulls start; their peers have to be added
        again, so most end FAILED (``unknown_peer``). Callable from any thread but the callbacks'; returns after 4.

        Raises:
            TransferError: ``closed``, or as ``TransferBackend.recreate``; 4 holds in any case, but nothing can be read
                until another call succeeds.
        """
        recreation = _Recreation(time.monotonic() + timeout_s)
        with self._condition:
            self._check_open()
            self._recreations.append(recreation)
            self._wake()
        while not recreation.done.wait(THREAD_CHECK_S):
            if not self._thread.is_alive():
                raise TransferError("the puller's thread ended", code=TransferCode.CLOSED)
        if recreation.error is not None:
            raise recreation.error

    @property
    def num_active(self) -> int:
        """Pulls without an outcome."""
        with self._condition:
            return len(self._open_pulls)

    @property
    def is_draining(self) -> bool:
        """Somebody waits in ``recreate_backend``: no pull starts."""
        with self._condition:
            return bool(self._recreations)

    @property
    def num_unterminated(self) -> int:
        """Pulls whose outcome had ``terminal=False`` and whose transfer is still not terminal."""
        with self._condition:
            return len(self._unterminated_since_s)

    @property
    def oldest_unterminated_s(self) -> float:
        """Seconds for which the oldest of them has been without a terminal status; 0.0 without any."""
        with self._condition:
            since_s = self._unterminated_since_s
        return time.monotonic() - min(since_s) if since_s else 0.0

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop the thread; pulls without an outcome are reported FAILED (reason ``closed``), ``terminal`` as it is
        true.

        Idempotent. False when the thread did not end within ``timeout_s``. Close the backend afterwards: that is what
        makes the destinations of unterminated pulls reusable.
        """
        with self._condition:
            self._closing = True
            self._wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _check_open(self) -> None:
        if self._closing:
            raise TransferError("puller is closed", code=TransferCode.CLOSED)

    def _wake(self) -> None:
        self._woken = True
        self._condition.notify()

    # Everything below runs on the poll thread.

    def _run(self) -> None:
        quiet_rounds = 0
        while self._wait(quiet_rounds):
            moved = self._step()
            if self._draining:
                moved = self._maybe_recreate() or moved
            quiet_rounds = 0 if moved else quiet_rounds + 1
        for pull in self._pulls:
            in_flight = pull.handle is not None and pull.phase is _Phase.READING
            self._report(pull, PullStatus.FAILED, TransferCode.CLOSED, "the puller was closed", terminal=not in_flight)
        self._pulls.clear()
        with self._condition:
            recreations = self._take_recreations()
        for recreation in recreations:
            recreation.error = TransferError("puller is closed", code=TransferCode.CLOSED)
            recreation.done.set()

    def _wait(self, quiet_rounds: int) -> bool:
        """Sleep as long as it makes sense, take in what was submitted. False: closing."""
        with self._condition:
            if not self._woken:
                if not self._pulls and not self._recreations:
                    self._condition.wait(UNTERMINATED_SLEEP_S if self._unterminated else None)
                elif quiet_rounds >= SPIN_ROUNDS:
                    self._condition.wait(min(MAX_SLEEP_S, MIN_SLEEP_S * (1 + quiet_rounds - SPIN_ROUNDS)))
            self._woken = False
            self._pulls.extend(self._inbox)
            self._inbox.clear()
            self._draining = bool(self._recreations)
            closing = self._closing
        if quiet_rounds:
            time.sleep(0)
        return not closing

    def _step(self) -> bool:
        """Advance every pull once. True when any of them moved."""
        moved = self._reap_unterminated()
        open_pulls: list[_Pull] = []
        for pull in self._pulls:
            phase = pull.phase
            try:
                finished = self._advance(pull)
            except Exception:
                logger.exception("pull failed pull_id=%s phase=%s", pull.job.pull_id, phase.value)
                terminal = pull.handle is None or pull.phase is not _Phase.READING
                self._end(pull, PullStatus.FAILED, TransferCode.TRANSFER_FAILED, "internal error", terminal=terminal)
                finished = True
            if not finished:
                open_pulls.append(pull)
            moved = moved or finished or pull.phase is not phase
        self._pulls = open_pulls
        return moved

    def _advance(self, pull: _Pull) -> bool:
        """Move a pull on as far as it goes without waiting. True: it has its outcome."""
        must_end = pull.abandoned or time.monotonic() >= pull.job.deadline_s
        if pull.handle is not None:
            status = self._poll(pull.handle)
            if not status.is_terminal:
                reading = pull.phase is _Phase.READING
                # What is in flight while VERIFYING writes scratch memory only: the destination is safe already.
                if must_end or (pull.cancelled and not reading):
                    return self._give_up(pull, terminal=not reading)
                return False
            handle, pull.handle = pull.handle, None
            self._release(handle)
            if status is ReadStatus.FAILED:
                return self._fail(pull, handle.error or TransferError("read failed without a reason"))
            if pull.phase is _Phase.VERIFYING and self._find_stale(pull):
                return True
        verified = pull.phase is _Phase.VERIFYING and pull.check is not None and pull.check.is_complete
        if (must_end or pull.cancelled) and not verified:
            return self._give_up(pull, terminal=True)
        try:
            return self._post_next(pull)
        except TransferError as exc:
            return self._fail(pull, exc)

    def _post_next(self, pull: _Pull) -> bool:
        """Post what comes next: the data, then the generations segment by segment. True: nothing did, the pull is
        OK."""
        job = pull.job
        if pull.phase is _Phase.QUEUED:
            if self._draining:
                return False
            if any(len(read.pairs) for read in job.reads):
                pull.handle = self._backend.post_read(job.peer, job.reads)
                pull.phase = _Phase.READING
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
                pull.phase = _Phase.WAITING_FOR_SCRATCH
                return False
        pull.handle = self._backend.post_read(job.peer, pull.check.reads(self._scratch, pull.segment))
        pull.phase = _Phase.VERIFYING
        return False

    def _find_stale(self, pull: _Pull) -> bool:
        """Compare the segment of generations that has arrived. True: one differs, the pull has ended STALE."""
        assert pull.segment is not None
        assert pull.check is not None
        mismatch = pull.check.compare(self._scratch, pull.segment)
        if mismatch is not None:
            self._end(pull, PullStatus.STALE, mismatch.reason, mismatch.message)
        return mismatch is not None

    def _give_up(self, pull: _Pull, *, terminal: bool) -> bool:
        waited_s = time.monotonic() - pull.submitted_s
        if pull.cancelled:
            status, reason, message = PullStatus.CANCELLED, PullReason.CANCELLED, f"cancelled after {waited_s:.3f} s"
        elif pull.abandoned:
            status, reason = PullStatus.TIMED_OUT, PullReason.PEER_LOST
            message = f"peer {pull.job.peer.engine_id} was lost after {waited_s:.3f} s, {pull.phase.value}"
        else:
            status, reason = PullStatus.TIMED_OUT, PullReason.DEADLINE
            message = f"not finished after {waited_s:.3f} s, {pull.phase.value}"
        self._end(pull, status, reason, message, terminal=terminal)
        return True

    def _fail(self, pull: _Pull, error: TransferError) -> bool:
        if pull.cancelled:
            return self._give_up(pull, terminal=True)
        self._end(pull, PullStatus.FAILED, error.code, error.message)
        return True

    def _end(
        self, pull: _Pull, status: PullStatus, reason: str = "", message: str = "", *, terminal: bool = True
    ) -> None:
        """Give back the pull's scratch, keep watching what is in flight, report."""
        if pull.handle is not None:
            self._unterminated.append(
                _Unterminated(
                    pull.job.pull_id,
                    pull.handle,
                    time.monotonic(),
                    on_terminal=None if terminal else pull.on_terminal,
                    segment=pull.segment,
                    holds_destination=not terminal,
                )
            )
            self._count_unterminated()
        elif pull.segment is not None:
            self._scratch.put_back(pull.segment)
        self._report(pull, status, reason, message, terminal=terminal)

    def _report(self, pull: _Pull, status: PullStatus, reason: str, message: str, *, terminal: bool) -> None:
        with self._condition:
            del self._open_pulls[pull.job.pull_id]
        outcome = PullOutcome(
            pull_id=pull.job.pull_id,
            status=status,
            terminal=terminal,
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
        """Look at the reads that outlived their pulls. True when one became terminal."""
        still: list[_Unterminated] = []
        ended: list[_Unterminated] = []
        for entry in self._unterminated:
            (ended if self._poll(entry.handle).is_terminal else still).append(entry)
        self._unterminated = still
        if not ended:
            return False
        self._count_unterminated()
        for entry in ended:
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
        """Recreate the backend once nothing but hopeless reads is in flight, or the drain has taken long enough."""
        with self._condition:
            until_s = min(recreation.drain_until_s for recreation in self._recreations)
        if any(pull.phase is not _Phase.QUEUED for pull in self._pulls) and time.monotonic() < until_s:
            return False
        error: TransferError | None = None
        try:
            self._backend.recreate()
        except TransferError as exc:
            error = exc
        # The old agent's reads are terminal now: this finds them, their pulls end, on_terminal is called.
        self._step()
        with self._condition:
            recreations = self._take_recreations()
        for recreation in recreations:
            recreation.error = error
            recreation.done.set()
        return True

    def _take_recreations(self) -> list[_Recreation]:
        recreations, self._recreations = self._recreations, []
        return recreations

    def _poll(self, handle: Handle) -> ReadStatus:
        try:
            return self._backend.poll(handle)
        except TransferError as exc:
            # The backend was closed under us: the agent is gone, and nothing is in flight without it.
            handle.error = exc
            return ReadStatus.FAILED

    def _release(self, handle: Handle) -> None:
        try:
            self._backend.release(handle)
        except TransferError as exc:
            logger.debug("releasing a read from %s: %s", handle.peer.name, exc)

    def _count_unterminated(self) -> None:
        since_s = tuple(entry.since_s for entry in self._unterminated if entry.holds_destination)
        with self._condition:
            self._unterminated_since_s = since_s
