"""One sequence's pull: manifests come in, their blocks are read in parts, one outcome goes to the engine.

1 wait for a manifest that says more than the last one, 2 read its new blocks and check them against the holder's
generations and against tags computed from our own tokens, 3 again, until the final manifest, whose part has the tail
and the state, 4 compare digests, 5 the manifests are their holder's word. Leaves by ``FinishedPull``: ok only when
every part was. One part is in flight at a time; what the holder finishes meanwhile becomes the next part.

The destinations belong to the read until the outcome. When that says ``terminal=False``, a frozen peer may still write
them, and ``on_terminal`` follows once it cannot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from common.errors import PrefillLegAbortedError, TandemError
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.pools.generations import content_tag
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.node.peers.directory import PeerDirectory
from common.node.pull.manifest_stream import OWN_ABORT_WAIT_S, ManifestStream, ReadablePrefix
from common.node.pull.prefix_reader import FinishedPull
from common.node.regions import SLOT_GENERATIONS, SLOTS, block_generations_region, block_region
from common.transfer.codes import TransferCode
from common.transfer.jobs import ExpectedGeneration, PullJob, PullOutcome, PullReason, PullStatus
from common.transfer.joint_puller import PullRunner
from common.transfer.reads import Read
from common.transfer.regions import Peer

AGENT_CODES = (TransferCode.PEER_DISCONNECTED, TransferCode.UNKNOWN_PEER, TransferCode.AGENT_RECREATED)
"""Codes of a read that failed because the peer's transfer agent, or ours, was made again. After a new handshake the
same bytes can be read, so such a read is tried once more."""


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """A prefix that a peer has or is computing: all that the engine and the puller need to pull it.

    ``keys`` are those of the request's own tokens, hashed up to ``num_tokens``; ``prefix_key`` is theirs at that
    position. ``manifests`` says where the bytes are.
    """

    url: str
    lease_id: str
    prefix_key: bytes
    num_tokens: int
    keys: PrefixKeys
    manifests: ManifestStream

    @property
    def is_final(self) -> bool:
        """Whether the peer is known to have all of it. Readable from any thread."""
        return self.manifests.final is not None

    def close(self) -> None:
        """Its holder is told that nobody reads it any more."""
        self.manifests.close()


class PullStopped(Exception):  # noqa: N818 - no error: the way out of a pull, whatever the reason
    def __init__(self, reason: str, *, terminal: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.terminal = terminal


@dataclass(slots=True)
class _Progress:
    """Sums over the parts that were read so far."""

    num_bytes: int = 0
    num_descriptors: int = 0
    num_early_parts: int = 0
    seconds: float = 0.0
    num_parts: int = 0


T = TypeVar("T")
Check = Callable[[PullPlan, ReadablePrefix], Awaitable[None]]
"""Compares what arrived with the holder's digests, before the commit. Raises TransferError when they differ."""


class PullTask:
    """Made and run on the event loop; ``run`` is called once."""

    def __init__(
        self,
        seq_id: str,
        remote: RemotePrefix,
        plan: PullPlan,
        *,
        puller: PullRunner,
        peers: PeerDirectory,
        timeout_s: float,
        check: Check,
        on_terminal: Callable[[], None],
    ) -> None:
        self._seq_id = seq_id
        self._remote = remote
        self._plan = plan
        self._puller = puller
        self._peers = peers
        self._timeout_s = timeout_s
        self._check = check
        self._on_terminal = on_terminal
        self._loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[str] = self._loop.create_future()
        self._in_flight: str | None = None
        self._is_terminal = True  # no read that may write outlives its part
        self._is_ended = False
        self._unread = [list(pairs) for pairs in plan.pairs]  # per group: (index in the table, local block id)
        self._progress = _Progress()

    async def run(self) -> FinishedPull:
        """The one outcome; ``on_terminal`` may be called once after it. Raises only CancelledError."""
        unsubscribe = self._peers.liveness.subscribe(self._remote.url, lambda why: self._stop(PullReason.PEER_LOST))
        try:
            prefix = await self._read_all()
            await self._check(self._plan, prefix)
            await self._unless_stopped(self._remote.manifests.confirmed(), self._timeout_s)
            if self._stopped.done() and self._stopped.result() == PullReason.CANCELLED:
                raise PullStopped(PullReason.CANCELLED)
        except PullStopped as stopped:
            return self.failed(stopped.reason)
        except PrefillLegAbortedError as exc:
            # A client that leaves ends both legs, this one a moment later: that is no failure.
            await asyncio.wait({self._stopped}, timeout=OWN_ABORT_WAIT_S)
            return self.failed(self._stopped.result() if self._stopped.done() else exc.code)
        except TandemError as exc:
            return self.failed(exc.code)
        finally:
            unsubscribe()
            self._is_ended = True
        progress, plan = self._progress, self._plan
        return FinishedPull(
            ok=True,
            terminal=True,
            num_bytes=progress.num_bytes,
            num_blocks=sum(len(pairs) for pairs in plan.pairs),
            num_states=int(plan.slot_id > 0),
            output_row=prefix.output_row,
            final_s=prefix.known_s,
            seconds=progress.seconds,
            num_descriptors=progress.num_descriptors,
            num_early_parts=progress.num_early_parts,
        )

    def cancel(self) -> None:
        """The request was aborted. The outcome follows as soon as the destinations are safe."""
        self._stop(PullReason.CANCELLED)

    def failed(self, reason: str) -> FinishedPull:
        return FinishedPull(ok=False, terminal=self._is_terminal, reason=reason, seconds=self._progress.seconds)

    def _stop(self, reason: str) -> None:
        if not self._stopped.done():
            self._stopped.set_result(reason)
        if self._in_flight is not None:
            (self._puller.cancel if reason == PullReason.CANCELLED else self._puller.abandon)(self._in_flight)

    async def _read_all(self) -> ReadablePrefix:
        # Manifests whose blocks are all here already count as well: a holder that goes on computing is waited for,
        # however long that takes. The first chunk has no deadline of its own, as the queue before it has none
        # (``HandoffReader._first_part``).
        after = 0
        while True:
            timeout_s = self._timeout_s if after else None
            prefix = await self._unless_stopped(self._remote.manifests.beyond(after), timeout_s)
            await self._read_part(prefix)
            if prefix.is_final:
                return prefix
            after = prefix.num_tokens

    async def _unless_stopped(self, coming: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """What comes, at most ``timeout_s`` from now, if any. Raises PullStopped, or what ``coming`` raises."""
        waiting = asyncio.ensure_future(coming)
        try:
            both: tuple[asyncio.Future[Any], ...] = (waiting, self._stopped)
            await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                raise PullStopped(self._stopped.result())
            if not waiting.done():
                raise PullStopped(PullReason.DEADLINE)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _read_part(self, prefix: ReadablePrefix) -> None:
        reads, generations = self._take_part(prefix)
        if not reads:
            return
        outcome = await self._pull(prefix, reads, generations)
        # Never into memory that an earlier read may still write: what it brings later would not be noticed.
        if outcome.reason in AGENT_CODES and outcome.terminal and not self._stopped.done():
            self._peers.forget(self._remote.url)
            outcome = await self._pull(prefix, reads, generations)
        if outcome.status is not PullStatus.OK:
            raise PullStopped(outcome.reason)
        progress = self._progress
        progress.num_bytes += outcome.num_bytes
        progress.num_descriptors += outcome.num_descriptors
        progress.seconds += outcome.seconds
        progress.num_early_parts += not prefix.is_final and self._remote.manifests.final is None

    def _take_part(self, prefix: ReadablePrefix) -> tuple[list[Read], list[ExpectedGeneration]]:
        """What of the plan can be read now; the next part leaves it out."""
        keys, num_tokens = self._remote.keys, self._remote.num_tokens
        limit = -(-num_tokens // keys.block_size) if prefix.is_final else prefix.num_tokens // keys.block_size
        reads: list[Read] = []
        generations: list[ExpectedGeneration] = []
        for group, pairs in enumerate(self._unread):
            part = [pair for pair in pairs if pair[0] < limit]
            if not part:
                continue
            self._unread[group] = pairs[len(part) :]
            remote_ids, values = prefix.block_ids[group], prefix.block_generations[group]
            region, table = block_region(group), block_generations_region(group)
            reads.append(Read(region, region, [(local, remote_ids[index]) for index, local in part]))
            for index, _ in part:
                tag = content_tag(keys.key_at(min((index + 1) * keys.block_size, num_tokens)))
                generations.append(ExpectedGeneration(table, remote_ids[index], values[index], tag))
        if prefix.is_final and self._plan.slot_id:
            reads.append(Read(SLOTS, SLOTS, [(self._plan.slot_id, prefix.slot_id)]))
            tag = content_tag(self._remote.prefix_key)
            generations.append(ExpectedGeneration(SLOT_GENERATIONS, prefix.slot_id, prefix.slot_generation, tag))
        return reads, generations

    async def _pull(
        self, prefix: ReadablePrefix, reads: list[Read], generations: list[ExpectedGeneration]
    ) -> PullOutcome:
        """One part, until its outcome. Raises TransferError when nothing was posted."""
        # A handshake waits for the transport, which may be busy with another peer for long.
        connecting = self._peers.connect(self._remote.url, prefix.engine_id, prefix.epoch)
        peer: Peer = await self._unless_stopped(connecting, self._timeout_s)
        self._progress.num_parts += 1
        pull_id = f"{self._seq_id}/part-{self._progress.num_parts}"
        arrived: asyncio.Future[PullOutcome] = self._loop.create_future()

        def arrive(outcome: PullOutcome) -> None:
            self._is_terminal = outcome.terminal
            if not arrived.done():
                arrived.set_result(outcome)

        job = PullJob(pull_id, peer, reads, generations, prefix.epoch, time.monotonic() + self._timeout_s)
        self._in_flight = pull_id
        try:
            self._puller.submit(
                job,
                lambda outcome: self._call_soon(arrive, outcome),
                lambda _: self._call_soon(self._become_terminal),
            )
            self._is_terminal = False  # until the outcome, which comes with a later round of the loop
            return await arrived
        finally:
            self._in_flight = None

    def _become_terminal(self) -> None:
        """The read that outlived its part cannot write any more. Comes after ``arrive``: both take the same way."""
        self._is_terminal = True
        if self._is_ended:
            self._on_terminal()

    def _call_soon(self, function: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
