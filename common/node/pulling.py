"""Joins the engine to the transfer layer: a pull plan of the cache manager becomes a pull job, its outcome a commit.

1 the engine accepted a remote prefix (``start``, on the engine thread), 2 the puller reads and validates on its own
thread, 3 the outcome goes back to the engine as a command between steps. The destinations belong to the read until the
outcome says that it is terminal; if it never was, they wait in quarantine for ``end_quarantine``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from common.errors import TransferError
from common.kv_cache.manager import PullPlan
from common.transfer.backend import Peer, Read
from common.transfer.puller import ExpectedGeneration, Puller, PullJob, PullOutcome, PullStatus

logger = logging.getLogger(__name__)

BLOCKS, SLOTS = "blocks", "slots"
BLOCK_GENERATIONS, SLOT_GENERATIONS = "block_generations", "slot_generations"


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """What a holder promised, checked and connected: everything the engine and the puller need of a manifest.

    ``block_ids``/``block_generations`` cover ``num_tokens`` positions; ``slot_id`` 0 without recurrent layers.
    ``output_row``: [hidden] tensor on this node's device.
    """

    url: str
    peer: Peer
    engine_id: str
    epoch: int
    lease_id: str
    prefix_key: bytes
    num_tokens: int
    block_ids: tuple[int, ...]
    block_generations: tuple[int, ...]
    slot_id: int
    slot_generation: int
    output_row: Any


@dataclass(frozen=True, slots=True)
class FinishedPull:
    """The engine's view of an outcome (``common.engine.core.PullResult``)."""

    ok: bool
    terminal: bool
    reason: str
    num_bytes: int
    num_blocks: int
    num_states: int


class PullListener(Protocol):
    """Who wants to know; called on the poll thread, must not block."""

    def on_outcome(
        self, seq_id: str, remote: RemotePrefix, result: FinishedPull, outcome: PullOutcome | None
    ) -> None: ...

    def on_terminal(self, seq_id: str) -> None: ...


class PullSource:
    """``common.engine.core.PrefixSource`` over a ``Puller``.

    ``after_read`` is called with the plan once the bytes are here and valid, before the commit: the place where tests
    damage what arrived.
    """

    def __init__(self, puller: Puller, listener: PullListener, timeout_s: float) -> None:
        self._puller = puller
        self._listener = listener
        self._timeout_s = timeout_s
        self.after_read: Callable[[PullPlan], None] | None = None

    def start(self, seq_id: str, remote: RemotePrefix, plan: PullPlan) -> None:
        num_states = 1 if plan.slot_id else 0
        if plan.is_empty:
            self._listener.on_outcome(seq_id, remote, FinishedPull(True, True, "", 0, 0, 0), None)
            return
        reads: list[Read] = []
        generations: list[ExpectedGeneration] = []
        if plan.block_pairs:
            pairs = [(local, remote.block_ids[index]) for index, local in plan.block_pairs]
            reads.append(Read(BLOCKS, BLOCKS, pairs))
            generations += [
                ExpectedGeneration(BLOCK_GENERATIONS, remote.block_ids[index], remote.block_generations[index])
                for index, _ in plan.block_pairs
            ]
        if plan.slot_id:
            reads.append(Read(SLOTS, SLOTS, [(plan.slot_id, remote.slot_id)]))
            generations.append(ExpectedGeneration(SLOT_GENERATIONS, remote.slot_id, remote.slot_generation))

        def on_done(outcome: PullOutcome) -> None:
            ok = outcome.status is PullStatus.OK
            if ok and self.after_read is not None:
                self.after_read(plan)
            result = FinishedPull(
                ok=ok,
                terminal=outcome.terminal,
                reason=outcome.reason,
                num_bytes=outcome.num_bytes if ok else 0,
                num_blocks=len(plan.block_pairs) if ok else 0,
                num_states=num_states if ok else 0,
            )
            self._listener.on_outcome(seq_id, remote, result, outcome)

        deadline = time.monotonic() + self._timeout_s
        job = PullJob(seq_id, remote.peer, reads, generations, remote.epoch, deadline)
        try:
            self._puller.submit(job, on_done, self._listener.on_terminal)
        except TransferError as exc:  # nothing was posted
            logger.warning("pull refused seq_id=%s: %s", seq_id, exc.message)
            self._listener.on_outcome(seq_id, remote, FinishedPull(False, True, exc.code, 0, 0, 0), None)

    def cancel(self, seq_id: str) -> None:
        self._puller.cancel(seq_id)
