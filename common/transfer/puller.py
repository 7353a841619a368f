"""Pulls: data reads, then the check that the bytes are what the holder promised. One thread owns every post and poll.

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

import threading
import time
from collections.abc import Callable

from common.errors import TransferError
from common.fence import Fence
from common.transfer.backend import TransferBackend
from common.transfer.codes import TransferCode
from common.transfer.generation_check import ScratchMemory
from common.transfer.jobs import DoneCallback, PullJob, TerminalCallback
from common.transfer.poll_loop import PollLoop
from common.transfer.pull import Phase, Pull, PullQueue, Recreation

THREAD_CHECK_S = 1.0
"""Seconds between two checks that the poll thread still lives, while somebody waits for a new agent."""

RECREATE_S = 30.0
"""Seconds that a new agent may take once the reads had their time. It takes 0.05 s, unless UCX waits for a peer."""


class Puller:
    """Runs pulls on one backend. Create after the backend, ``close`` before it.

    Callbacks run on the poll thread: they must be short and must not block (hand over to a queue or to
    ``loop.call_soon_threadsafe``), and must not call ``close`` or ``recreate_backend``. What they raise is logged and
    otherwise ignored. Each submitted pull gets ``on_done`` exactly once; a pull whose outcome had ``terminal=False``
    gets ``on_terminal`` once, later, unless the puller is closed before.
    """

    def __init__(
        self, backend: TransferBackend, *, name: str = "puller", fence: Callable[[], None] | None = None
    ) -> None:
        """Register the scratch memory and start the poll thread.

        Raises:
            TransferError: as ``TransferBackend.register``.
        """
        scratch = ScratchMemory(f"{name}_scratch")
        backend.register([scratch.region])
        self._queue = PullQueue()
        poll_loop = PollLoop(backend, scratch, self._queue, fence or Fence())
        self._thread = threading.Thread(target=poll_loop.run, name=name, daemon=True)
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
        pull = Pull(job, on_done, on_terminal, time.monotonic())
        with self._queue.condition:
            self._queue.check_open()
            if job.pull_id in self._queue.open_pulls:
                raise TransferError(f"pull id {job.pull_id} is in use")
            self._queue.open_pulls[job.pull_id] = pull
            self._queue.submitted.append(pull)
            self._queue.wake()

    def cancel(self, pull_id: str) -> bool:
        """Give a pull up, from any thread. False when it is unknown or its outcome was already reported.

        The outcome is CANCELLED as soon as its destination is safe (nothing posted yet, or the transfer terminal); at
        the pull's deadline it is reported with ``terminal=False`` otherwise.
        """
        with self._queue.condition:
            pull = self._queue.open_pulls.get(pull_id)
            if pull is None:
                return False
            pull.cancelled = True
            self._queue.wake()
            return True

    def abandon(self, pull_id: str) -> bool:
        """Give a pull up now, whatever is in flight: its peer is dead or does not answer. From any thread; False when
        it is unknown or its outcome was already reported.

        The outcome is TIMED_OUT with reason ``peer_lost`` (CANCELLED when it had been cancelled before), at once,
        ``terminal`` as it is true.
        """
        with self._queue.condition:
            pull = self._queue.open_pulls.get(pull_id)
            if pull is None:
                return False
            pull.abandoned = True
            self._queue.wake()
            return True

    def recreate_backend(self, timeout_s: float) -> None:
        """End every read that does not end by itself: the one way to get destinations back from a frozen peer.

        1 No pull starts any more (submitted ones wait), 2 the others get up to ``timeout_s`` to end as they would, 3
        ``TransferBackend.recreate``, 4 what was still in flight ends: pulls FAILED (``agent_recreated``, terminal),
        reads that outlived their pulls get their ``on_terminal``, 5 waiting pulls start; their peers have to be added
        again, so most end FAILED (``unknown_peer``). Callable from any thread but the callbacks'; returns after 4.

        Raises:
            TransferError: ``closed``; as ``TransferBackend.recreate``: after ``agent_alive`` nothing of 4 has happened
                and everything is as before, after the others 4 holds, but nothing can be read until another call
                succeeds; ``backend_unavailable``: 3 has not returned for ``RECREATE_S``.
        """
        recreation = Recreation(time.monotonic() + timeout_s)
        with self._queue.condition:
            self._queue.check_open()
            self._queue.recreations.append(recreation)
            self._queue.wake()
        while not recreation.done.wait(THREAD_CHECK_S):
            if not self._thread.is_alive():
                raise TransferError("the puller's thread ended", code=TransferCode.CLOSED)
            if time.monotonic() > recreation.drain_until_s + RECREATE_S:
                raise TransferError(
                    f"no new transfer agent after {RECREATE_S:g} s", code=TransferCode.BACKEND_UNAVAILABLE
                )
        if recreation.error is not None:
            raise recreation.error

    @property
    def is_alive(self) -> bool:
        """False: closed, or the poll thread has died of our own error; every pull is refused or reported FAILED."""
        return self._thread.is_alive()

    @property
    def num_active(self) -> int:
        """Pulls without an outcome."""
        with self._queue.condition:
            return len(self._queue.open_pulls)

    @property
    def is_draining(self) -> bool:
        """Somebody waits in ``recreate_backend``: no pull starts."""
        with self._queue.condition:
            return bool(self._queue.recreations)

    @property
    def num_in_flight(self) -> int:
        """Pulls whose data the transport may be writing now, those that have their outcome included."""
        with self._queue.condition:
            reading = sum(pull.phase is Phase.READING for pull in self._queue.open_pulls.values())
            return reading + self._queue.num_unterminated

    @property
    def num_unterminated(self) -> int:
        """Pulls whose outcome had ``terminal=False`` and whose transfer is still not terminal."""
        with self._queue.condition:
            return self._queue.num_unterminated

    @property
    def oldest_unterminated_s(self) -> float:
        """Seconds for which the oldest read that outlived its pull has been without a terminal status, one that holds
        scratch memory alone included; 0.0 without any."""
        with self._queue.condition:
            since_s = self._queue.unterminated_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop the thread; pulls without an outcome are reported FAILED (reason ``closed``), ``terminal`` as it is
        true.

        Idempotent. False when the thread did not end within ``timeout_s``. Close the backend afterwards: that is what
        makes the destinations of unterminated pulls reusable.
        """
        with self._queue.condition:
            self._queue.is_closing = True
            self._queue.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
