"""Pulls: data reads, then the check that the bytes are those that were promised. One thread owns every post and poll.

Life of a pull: 1 ``submit`` (any thread), 2 the poll thread posts the data READ, 3 every data transfer has reported
done, 4 only then the holder's generations are READ into scratch memory (transports deliver over several lanes that are
not ordered among each other, so reading them along with the data would prove nothing), 5 they equal the expected ones
and the epoch is the expected one: ``OK``. Leaves by ``on_done``: OK, STALE, FAILED, TIMED_OUT, CANCELLED.

Who owns the destination units: the pull, from ``submit`` until ``on_done`` with ``terminal=True``. With
``terminal=False`` (a deadline passed while the transport may still write) they stay the transport's until
``on_terminal``; the caller keeps them in quarantine. Whatever is not ``OK`` must be discarded.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from common.errors import TransferError
from common.transfer.backend import Handle, Peer, Read, ReadStatus, Region, TransferBackend, TransferCode

logger = logging.getLogger(__name__)

DoneCallback = Callable[["PullOutcome"], None]
TerminalCallback = Callable[[str], None]

SCRATCH_SEGMENTS = 32
SEGMENT_ENTRIES = 2048
GENERATION_BYTES = 8

# Between two polls: a few rounds that only yield (a read over shared memory is done by then), then sleeps that grow to
# the maximum; a submit or cancel wakes the thread at once. Reads nobody waits for any more are looked at at leisure.
SPIN_ROUNDS = 16
MIN_SLEEP_S = 0.0002
MAX_SLEEP_S = 0.001
UNTERMINATED_SLEEP_S = 0.02


class PullStatus(enum.Enum):
    OK = "ok"
    STALE = "stale"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ExpectedGeneration:
    """Entry ``unit`` of the peer's generations region ``region`` must still be ``value`` after the read."""

    region: str
    unit: int
    value: int


@dataclass(frozen=True, slots=True)
class PullJob:
    """What to read and what must hold afterwards.

    ``epoch`` is compared with entry 0 of each generations region that ``generations`` names. Data reads without any
    expected generation are refused: they could not be verified. ``deadline_s`` is absolute, on ``time.monotonic``.
    """

    pull_id: str
    peer: Peer
    reads: Sequence[Read]
    generations: Sequence[ExpectedGeneration]
    epoch: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a pull ended. ``num_bytes`` and ``num_descriptors`` count the data reads that were posted, not the
    generations; ``seconds`` from submit to this outcome.

    ``reason``: empty when OK, else one word of a fixed set: ``stale_generation``, ``stale_epoch``, ``deadline``,
    ``cancelled``, or a ``TransferCode``. ``message`` says the same to people, with numbers.
    """

    pull_id: str
    status: PullStatus
    terminal: bool
    num_bytes: int
    num_descriptors: int
    seconds: float
    reason: str = ""
    message: str = ""


class _Phase(enum.Enum):
    QUEUED = "queued"
    READING = "reading"
    WAITING_FOR_SCRATCH = "waiting_for_scratch"
    VERIFYING = "verifying"


@dataclass(slots=True, eq=False)
class _Pull:
    """A pull without an outcome. ``handle``: the read in flight, of data or of generations by ``phase``. ``checks``:
    what is still to be verified, one read's worth each; the first is in flight while VERIFYING."""

    job: PullJob
    on_done: DoneCallback
    on_terminal: TerminalCallback | None
    submitted_s: float
    checks: deque[list[ExpectedGeneration]]
    phase: _Phase = _Phase.QUEUED
    handle: Handle | None = None
    segment: int | None = None
    num_bytes: int = 0
    num_descriptors: int = 0
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Unterminated:
    """A read in flight whose pull has its outcome. ``segment``: scratch memory that it may still write."""

    pull_id: str
    handle: Handle
    on_terminal: TerminalCallback | None = None
    segment: int | None = None
    holds_destination: bool = field(default=True)


class Puller:
    """Runs pulls on one backend. Create after the backend, ``close`` before it.

    Callbacks run on the poll thread: they must be short and must not block (hand over to a queue or to
    ``loop.call_soon_threadsafe``), and must not call ``close``. What they raise is logged and otherwise ignored. Each
    submitted pull gets ``on_done`` exactly once; a pull whose outcome had ``terminal=False`` gets ``on_terminal`` once,
    later, unless the puller is closed before.
    """

    def __init__(self, backend: TransferBackend, *, name: str = "puller") -> None:
        """Register the scratch memory and start the poll thread.

        Raises:
            TransferError: as ``TransferBackend.register``.
        """
        self._backend = backend
        self._scratch = (ctypes.c_uint64 * (SCRATCH_SEGMENTS * SEGMENT_ENTRIES))()
        self._scratch_region = Region(
            name=f"{name}_scratch",
            address=ctypes.addressof(self._scratch),
            num_units=len(self._scratch),
            unit_bytes=GENERATION_BYTES,
            exported=False,
            owner=self._scratch,
        )
        backend.register([self._scratch_region])
        self._condition = threading.Condition()
        # Guarded by the condition's lock.
        self._inbox: deque[_Pull] = deque()
        self._open_pulls: dict[str, _Pull] = {}
        self._woken = False
        self._closing = False
        self._num_unterminated = 0
        # The poll thread's own.
        self._pulls: list[_Pull] = []
        self._unterminated: list[_Unterminated] = []
        self._free_segments = list(range(SCRATCH_SEGMENTS))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: PullJob, on_done: DoneCallback, on_terminal: TerminalCallback | None = None) -> None:
        """Queue a pull; returns at once, from any thread. A pull with nothing to read and nothing to check is OK at
        once.

        Raises:
            TransferError: ``closed``, ``unverified_pull`` (data without expected generations), ``transfer_failed`` (the
                pull id is in use). No callback follows then.
        """
        if not job.generations and any(read.pairs for read in job.reads):
            raise TransferError(
                f"pull {job.pull_id} names no generations, its bytes could not be verified",
                code=TransferCode.UNVERIFIED_PULL,
            )
        pull = _Pull(job, on_done, on_terminal, time.monotonic(), deque(_check_chunks(job)))
        with self._condition:
            if self._closing:
                raise TransferError("puller is closed", code=TransferCode.CLOSED)
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

    @property
    def num_active(self) -> int:
        """Pulls without an outcome."""
        with self._condition:
            return len(self._open_pulls)

    @property
    def num_unterminated(self) -> int:
        """Pulls whose outcome had ``terminal=False`` and whose transfer is still not terminal."""
        with self._condition:
            return self._num_unterminated

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

    def _wake(self) -> None:
        self._woken = True
        self._condition.notify()

    # Everything below runs on the poll thread.

    def _run(self) -> None:
        quiet_rounds = 0
        while self._wait(quiet_rounds):
            moved = self._step()
            quiet_rounds = 0 if moved else quiet_rounds + 1
        for pull in self._pulls:
            in_flight = pull.handle is not None and pull.phase is _Phase.READING
            self._report(pull, PullStatus.FAILED, TransferCode.CLOSED, "the puller was closed", terminal=not in_flight)
        self._pulls.clear()

    def _wait(self, quiet_rounds: int) -> bool:
        """Sleep as long as it makes sense, take in what was submitted. False: closing."""
        with self._condition:
            if not self._woken:
                if not self._pulls:
                    self._condition.wait(UNTERMINATED_SLEEP_S if self._unterminated else None)
                elif quiet_rounds >= SPIN_ROUNDS:
                    self._condition.wait(min(MAX_SLEEP_S, MIN_SLEEP_S * (1 + quiet_rounds - SPIN_ROUNDS)))
            self._woken = False
            self._pulls.extend(self._inbox)
            self._inbox.clear()
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
        late = time.monotonic() >= pull.job.deadline_s
        if pull.handle is not None:
            status = self._poll(pull.handle)
            if not status.is_terminal:
                reading = pull.phase is _Phase.READING
                # What is in flight while VERIFYING writes scratch memory only: the destination is safe already.
                if late or (pull.cancelled and not reading):
                    return self._give_up(pull, terminal=not reading)
                return False
            handle, pull.handle = pull.handle, None
            self._release(handle)
            if status is ReadStatus.FAILED:
                return self._fail(pull, handle.error or TransferError("read failed without a reason"))
            if pull.phase is _Phase.VERIFYING and self._find_stale(pull):
                return True
        verified = pull.phase is _Phase.VERIFYING and not pull.checks
        if (late or pull.cancelled) and not verified:
            return self._give_up(pull, terminal=True)
        try:
            return self._post_next(pull)
        except TransferError as exc:
            return self._fail(pull, exc)

    def _post_next(self, pull: _Pull) -> bool:
        """Post what comes next: the data, then the generations chunk by chunk. True: nothing did, the pull is OK."""
        job = pull.job
        if pull.phase is _Phase.QUEUED and any(read.pairs for read in job.reads):
            pull.handle = self._backend.post_read(job.peer, job.reads)
            pull.phase = _Phase.READING
            pull.num_bytes = pull.handle.num_bytes
            pull.num_descriptors = pull.handle.num_descriptors
            return False
        if not pull.checks:
            self._end(pull, PullStatus.OK)
            return True
        if pull.segment is None:
            if not self._free_segments:
                pull.phase = _Phase.WAITING_FOR_SCRATCH
                return False
            pull.segment = self._free_segments.pop()
        pairs: dict[str, list[tuple[int, int]]] = {}
        for unit, check in enumerate(pull.checks[0], start=pull.segment * SEGMENT_ENTRIES):
            pairs.setdefault(check.region, []).append((unit, check.unit))
        name = self._scratch_region.name
        reads = [Read(name, region, region_pairs) for region, region_pairs in pairs.items()]
        pull.handle = self._backend.post_read(job.peer, reads)
        pull.phase = _Phase.VERIFYING
        return False

    def _find_stale(self, pull: _Pull) -> bool:
        """Compare the chunk of generations that has arrived. True: one differs, the pull has ended STALE."""
        assert pull.segment is not None
        for unit, check in enumerate(pull.checks.popleft(), start=pull.segment * SEGMENT_ENTRIES):
            found = self._scratch[unit]
            if found != check.value:
                what, reason = ("epoch", "stale_epoch") if check.unit == 0 else ("generation", "stale_generation")
                message = f"{what} of {check.region}[{check.unit}] is {found}, promised was {check.value}"
                self._end(pull, PullStatus.STALE, reason, message)
                return True
        return False

    def _give_up(self, pull: _Pull, *, terminal: bool) -> bool:
        waited_s = time.monotonic() - pull.submitted_s
        if pull.cancelled:
            self._end(pull, PullStatus.CANCELLED, "cancelled", f"cancelled after {waited_s:.3f} s", terminal=terminal)
        else:
            message = f"not finished after {waited_s:.3f} s, {pull.phase.value}"
            self._end(pull, PullStatus.TIMED_OUT, "deadline", message, terminal=terminal)
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
                    on_terminal=None if terminal else pull.on_terminal,
                    segment=pull.segment,
                    holds_destination=not terminal,
                )
            )
            self._count_unterminated()
        elif pull.segment is not None:
            self._free_segments.append(pull.segment)
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
                self._free_segments.append(entry.segment)
            if entry.on_terminal is not None:
                try:
                    entry.on_terminal(entry.pull_id)
                except Exception:
                    logger.exception("on_terminal raised pull_id=%s", entry.pull_id)
        return True

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
        count = sum(entry.holds_destination for entry in self._unterminated)
        with self._condition:
            self._num_unterminated = count


def _check_chunks(job: PullJob) -> Iterator[list[ExpectedGeneration]]:
    """What to verify, epochs first in each table, in ascending units (neighbours merge), a scratch segment's worth a
    time."""
    by_region: dict[str, list[ExpectedGeneration]] = {}
    for expected in job.generations:
        by_region.setdefault(expected.region, [ExpectedGeneration(expected.region, 0, job.epoch)]).append(expected)
    checks = [check for entries in by_region.values() for check in sorted(entries, key=lambda expected: expected.unit)]
    for start in range(0, len(checks), SEGMENT_ENTRIES):
        yield checks[start : start + SEGMENT_ENTRIES]
