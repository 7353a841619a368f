"""One pull on its way, and what the threads that share a puller tell each other about it."""

from __future__ import annotations

import enum
import threading
from collections import deque
from dataclasses import dataclass, field

from common.errors import TransferError
from common.transfer.codes import TransferCode
from common.transfer.generation_check import GenerationCheck
from common.transfer.jobs import DoneCallback, PullJob, TerminalCallback
from common.transfer.reads import Handle


class Phase(enum.Enum):
    """READING: the destination may be written. In every other phase it is not."""

    QUEUED = "queued"
    READING = "reading"
    WAITING_FOR_SCRATCH = "waiting_for_scratch"
    VERIFYING = "verifying"


@dataclass(slots=True, eq=False)
class Pull:
    """A pull without an outcome. ``handle``: the read in flight, of data or of generations by ``phase``. ``check``:
    what is still to be verified; made once the data is in flight, so that it costs no time. ``abandoned``: give up at
    once, whatever is in flight."""

    job: PullJob
    on_done: DoneCallback
    on_terminal: TerminalCallback | None
    submitted_s: float
    phase: Phase = Phase.QUEUED
    check: GenerationCheck | None = None
    handle: Handle | None = None
    segment: int | None = None
    num_bytes: int = 0
    num_descriptors: int = 0
    cancelled: bool = False
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class Unterminated:
    """A read in flight whose pull has its outcome. ``segment``: scratch memory that it may still write. ``handle``:
    None when posting it raised what nobody expects: whether something is on its way is not known, until the agent that
    was to post it, the ``agent``-th, is gone."""

    pull_id: str
    handle: Handle | None
    since_s: float
    agent: int
    on_terminal: TerminalCallback | None = None
    segment: int | None = None
    holds_destination: bool = True


@dataclass(slots=True, eq=False)
class Recreation:
    """Someone waits for a new agent. ``drain_until_s``: when the reads that are still in flight are ended."""

    drain_until_s: float
    done: threading.Event = field(default_factory=threading.Event)
    error: TransferError | None = None


class PullQueue:
    """What any thread leaves for the poll thread: pulls, and requests for a new agent. Every attribute is guarded by
    ``condition``.

    Attributes:
        submitted: pulls that the poll thread has not taken yet.
        open_pulls: by id, those without an outcome.
        recreations: who waits for a new agent.
        is_woken: the poll thread must not sleep before it has read the queue again.
        is_closing: nothing new is taken, everything open is reported.
        num_unterminated: reads that outlived their pulls and may still write destinations.
        unterminated_since_s: since when the oldest read that outlived its pull has done so, also one that holds scratch
            memory alone, on ``time.monotonic``; None without any.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.submitted: deque[Pull] = deque()
        self.open_pulls: dict[str, Pull] = {}
        self.recreations: list[Recreation] = []
        self.is_woken = False
        self.is_closing = False
        self.num_unterminated = 0
        self.unterminated_since_s: float | None = None

    def check_open(self) -> None:
        """Raises TransferError (``closed``). The caller holds the lock."""
        if self.is_closing:
            raise TransferError("puller is closed", code=TransferCode.CLOSED)

    def wake(self) -> None:
        """The caller holds the lock."""
        self.is_woken = True
        self.condition.notify()

    def take_recreations(self) -> list[Recreation]:
        with self.condition:
            recreations, self.recreations = self.recreations, []
        return recreations
