"""A puller over a recording backend, and what its callbacks said."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.transfer.backend import TransferBackend
from common.transfer.jobs import ExpectedGeneration, PullJob, PullOutcome
from common.transfer.puller import Puller
from common.transfer.reads import Read
from common.transfer.regions import Peer
from tests.support.transfer_memory import BLOCK_GENERATIONS, BLOCKS, SLOT_GENERATIONS, SLOTS, EndpointMemory
from tests.support.transfer_recording import RecordingBackend
from tests.support.transfer_sites import PATIENCE_S

EPOCH = 77
LONG_S = 60.0
SHORT_S = 0.5


def expected(region: str, units: Sequence[int]) -> list[ExpectedGeneration]:
    return [
        ExpectedGeneration(region, unit, EndpointMemory.first_generation(unit), EndpointMemory.first_tag(unit))
        for unit in units
    ]


@dataclass
class Rig:
    """A puller with its backend, and what its callbacks said."""

    backend: RecordingBackend
    puller: Puller
    outcomes: queue.Queue[PullOutcome] = field(default_factory=queue.Queue)
    terminals: queue.Queue[str] = field(default_factory=queue.Queue)

    def submit(
        self,
        peer: Peer,
        pairs: Sequence[tuple[int, int]] = (),
        slots: Sequence[tuple[int, int]] = (),
        *,
        pull_id: str = "pull",
        generations: Sequence[ExpectedGeneration] | None = None,
        epoch: int = EPOCH,
        timeout_s: float = LONG_S,
    ) -> None:
        if generations is None:
            generations = [
                *expected(BLOCK_GENERATIONS, [remote for _, remote in pairs]),
                *expected(SLOT_GENERATIONS, [remote for _, remote in slots]),
            ]
        job = PullJob(
            pull_id=pull_id,
            peer=peer,
            reads=[Read(BLOCKS, BLOCKS, pairs), Read(SLOTS, SLOTS, slots)],
            generations=generations,
            epoch=epoch,
            deadline_s=time.monotonic() + timeout_s,
        )
        self.puller.submit(job, self.outcomes.put, self.terminals.put)

    def outcome(self) -> PullOutcome:
        return self.outcomes.get(timeout=PATIENCE_S)

    def pull(self, peer: Peer, *args: Sequence[tuple[int, int]], **options: object) -> PullOutcome:
        self.submit(peer, *args, **options)  # type: ignore[arg-type]
        return self.outcome()


class Rigs:
    """Makes rigs, and closes their pullers; the backends are closed by their site, later."""

    def __init__(self) -> None:
        self._rigs: list[Rig] = []

    def __call__(self, backend: TransferBackend) -> Rig:
        recording = RecordingBackend(backend)
        rig = Rig(recording, Puller(recording))
        self._rigs.append(rig)
        return rig

    def close(self) -> None:
        for rig in self._rigs:
            assert rig.puller.close()
