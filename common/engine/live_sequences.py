"""Every sequence that the engine has, from its request's arrival to its end.

A sequence enters with ``add`` and leaves with ``end`` (its memory is given back), ``fail`` (an error is reported
as well) or ``forget`` (its memory is somebody else's by then). A request's id is in use until its last sequence left.
"""

from __future__ import annotations

from common.engine.outputs import OutputList
from common.engine.scheduler import Scheduler
from common.engine.sequence import Sequence, SequenceStatus
from common.errors import TandemError
from common.kv_cache.manager import KVCacheManager
from common.request import FinishReason


class LiveSequences:
    """Owned by the engine thread."""

    def __init__(self, scheduler: Scheduler, manager: KVCacheManager, outputs: OutputList) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._outputs = outputs
        self._by_id: dict[str, Sequence] = {}
        self._by_request: dict[str, list[Sequence]] = {}
        # What is preempted with only its state left to compute ends.
        scheduler.end = lambda sequence, donate: self.end(sequence, donate=donate)

    def __getitem__(self, seq_id: str) -> Sequence:
        return self._by_id[seq_id]

    def of_request(self, request_id: str) -> list[Sequence]:
        """All sequences that the request has had so far, ended ones included; none once the last has ended."""
        return list(self._by_request.get(request_id, ()))

    def add(self, sequence: Sequence) -> None:
        self._by_id[sequence.seq_id] = sequence
        self._by_request.setdefault(sequence.request.request_id, []).append(sequence)

    def end(self, sequence: Sequence, *, donate: bool) -> None:
        """Gives the sequence's memory back (a waiting one has none) and forgets it. ``donate``: its state stays
        cached."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if self._manager.has_sequence(sequence.seq_id):
            self._manager.free(sequence.seq_id, donate=donate)
        self.forget(sequence)

    def fail(self, sequence: Sequence, error: TandemError) -> None:
        """Reports the error and ends the sequence; what it computed is not kept."""
        sequence.finish_reason = FinishReason.ERROR
        self._outputs.add_error(sequence, error)
        self.end(sequence, donate=False)

    def forget(self, sequence: Sequence) -> None:
        """Takes the sequence off every list; its memory is the caller's business."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._scheduler.remove(sequence)
        del self._by_id[sequence.seq_id]
        siblings = self._by_request[sequence.request.request_id]
        if all(each.status is SequenceStatus.FINISHED for each in siblings):
            del self._by_request[sequence.request.request_id]
