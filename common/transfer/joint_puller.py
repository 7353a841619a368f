"""One pull by all ranks of a node: each reads its own share into its own memory, and it counts when all of them did.

Life: 1 ``submit`` gives the job to every rank's puller, 2 the first that fails calls the others off, 3 ``on_done`` once
the last has its outcome: OK when all are, else how the first failed, ``terminal`` when nothing writes any more at any
of them, 4 if not, ``on_terminal`` once that is so. Who gave the destination units waits for 3 or 4, as with one puller:
what one rank has read is dropped where another has failed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.errors import TransferError
from common.transfer.jobs import DoneCallback, PullJob, PullOutcome, PullStatus, TerminalCallback


class PullRunner(Protocol):
    """What ``Puller`` does of pulls. Callbacks may come on any thread, also within a call of this."""

    def submit(self, job: PullJob, on_done: DoneCallback, on_terminal: TerminalCallback | None = None) -> None: ...

    def cancel(self, pull_id: str) -> bool: ...

    def abandon(self, pull_id: str) -> bool: ...


@dataclass(slots=True, eq=False)
class _JointPull:
    """``num_open``: ranks without an outcome; ``num_writing``: those whose read may still write."""

    job: PullJob
    on_done: DoneCallback
    on_terminal: TerminalCallback | None
    num_open: int
    num_writing: int = 0
    outcomes: list[PullOutcome] = field(default_factory=list)
    failed: PullOutcome | None = None


class JointPuller:
    """``PullRunner`` of a node of ranks. ``ranks``: one each, in order; a rank in another process is one that passes
    calls on to it."""

    def __init__(self, ranks: Sequence[PullRunner]) -> None:
        assert ranks
        self._ranks = ranks
        self._lock = threading.Lock()

    def submit(self, job: PullJob, on_done: DoneCallback, on_terminal: TerminalCallback | None = None) -> None:
        """Raises as ``Puller.submit``, when the first rank takes nothing; when a later one does not, its error is how
        the pull failed."""
        pull = _JointPull(job, on_done, on_terminal, len(self._ranks))
        for index, rank in enumerate(self._ranks):
            try:
                rank.submit(job, lambda outcome: self._end(pull, outcome), lambda _: self._end_writing(pull))
            except TransferError as exc:
                if index == 0:
                    raise
                outcome = PullOutcome(job.pull_id, PullStatus.FAILED, True, 0, 0, 0.0, exc.code, exc.message)
                self._end(pull, outcome)
        with self._lock:
            failed = pull.failed
        if failed is not None:  # before some of the ranks had the job
            self.cancel(job.pull_id)

    def cancel(self, pull_id: str) -> bool:
        return sum(rank.cancel(pull_id) for rank in self._ranks) > 0

    def abandon(self, pull_id: str) -> bool:
        return sum(rank.abandon(pull_id) for rank in self._ranks) > 0

    def _end(self, pull: _JointPull, outcome: PullOutcome) -> None:
        with self._lock:
            is_first_failure = pull.failed is None and outcome.status is not PullStatus.OK
            if is_first_failure:
                pull.failed = outcome
            pull.outcomes.append(outcome)
            pull.num_writing += not outcome.terminal
            pull.num_open -= 1
            is_last = pull.num_open == 0
            if is_last:  # with the lock: the end of what still writes is told after this
                pull.on_done(_joined(pull))
        if is_first_failure and not is_last:
            self.cancel(pull.job.pull_id)

    def _end_writing(self, pull: _JointPull) -> None:
        with self._lock:
            pull.num_writing -= 1
            if pull.num_writing == pull.num_open == 0 and pull.on_terminal is not None:
                pull.on_terminal(pull.job.pull_id)


def _joined(pull: _JointPull) -> PullOutcome:
    return replace(
        pull.failed or pull.outcomes[0],
        terminal=pull.num_writing == 0,
        num_bytes=sum(each.num_bytes for each in pull.outcomes),
        num_descriptors=sum(each.num_descriptors for each in pull.outcomes),
        seconds=max(each.seconds for each in pull.outcomes),
    )
