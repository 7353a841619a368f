"""One sequence's pull: offers come in, parts are read as they come, one outcome goes to the engine.

1 wait for an offer beyond the last one, 2 read its new blocks and check them against the holder's generations and
against tags computed from our own tokens, 3 again, until the final offer, whose part has the tail and the state, 4
compare digests. Leaves by ``FinishedPull``: ok only when every part was. One part is in flight at a time; what is
finished meanwhile becomes the next one.

The destinations are the read's until the outcome. When that says ``terminal=False``, a frozen peer may still write
them, and ``on_terminal`` follows once it cannot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from common.errors import PrefillLegAbortedError, TandemError
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.manager import PullPlan
from common.kv_cache.pools.generations import content_tag
from common.node.peers.peers import PeerDirectory
from common.node.pull.manifest_stream import OWN_ABORT_WAIT_S, Offer, Offers
from common.node.pull.regions import SLOT_GENERATIONS, SLOTS, block_generations_region, block_region
from common.transfer.codes import TransferCode
from common.transfer.jobs import ExpectedGeneration, PullJob, PullOutcome, PullReason, PullStatus
from common.transfer.puller import Puller
from common.transfer.reads import Read
from common.transfer.regions import Peer

AGENT_CODES = (TransferCode.PEER_DISCONNECTED, TransferCode.UNKNOWN_PEER, TransferCode.AGENT_RECREATED)
"""The peer's agent, or ours, is another one now: after a new handshake the same bytes can be read."""


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """A prefix that a peer has or is computing: all that the engine and the puller need to take it in.

    ``keys`` are those of the request's own tokens, hashed up to ``num_tokens``; ``prefix_key`` is theirs at that
    position. ``offers`` says where the bytes are.
    """

    url: str
    lease_id: str
    prefix_key: bytes
    num_tokens: int
    keys: PrefixKeys
    offers: Offers


@dataclass(frozen=True, slots=True)
class FinishedPull:
    """How a pull ended (``common.engine.remote_prefixes.PullResult``), and what it took.

    ``reason``: empty when ok, else one word. ``final_s``: when the final offer was known, on ``time.monotonic``: what
    the client waits for begins there. ``seconds``: of reading and checking. ``num_early_parts``: parts that were here
    before the final offer was known.
    """

    ok: bool
    terminal: bool
    reason: str = ""
    num_bytes: int = 0
    num_blocks: int = 0
    num_states: int = 0
    output_row: Any = None
    final_s: float | None = None
    seconds: float = 0.0
    num_descriptors: int = 0
    num_early_parts: int = 0


class PullStopped(Exception):  # noqa: N818 - the way out of a conversation, whatever the reason
    def __init__(self, reason: str, *, terminal: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.terminal = terminal


@dataclass(slots=True)
class _Read:
    """What was read so far."""

    num_bytes: int = 0
    num_descriptors: int = 0
    num_early_parts: int = 0
    seconds: float = 0.0
    num_parts: int = 0
    pairs: list[list[tuple[int, int]]] = field(default_factory=list)


Check = Callable[[PullPlan, Offer], Awaitable[None]]
"""Looks at what arrived, before the commit. Raises TransferError when it is not what was sent."""


class Conversation:
    """Made and run on the event loop; ``run`` once."""

    def __init__(
        self,
        seq_id: str,
        remote: RemotePrefix,
        plan: PullPlan,
        *,
        puller: Puller,
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
        self._left = [list(pairs) for pairs in plan.pairs]
        self._read = _Read()

    async def run(self) -> FinishedPull:
        """The one outcome; ``on_terminal`` may be called once after it. Raises only CancelledError."""
        unsubscribe = self._peers.liveness.subscribe(self._remote.url, lambda why: self._stop(PullReason.PEER_LOST))
        try:
            offer = await self._read_all()
            await self._check(self._plan, offer)
            if self._stopped.done() and self._stopped.result() == PullReason.CANCELLED:
                raise PullStopped(PullReason.CANCELLED)
        except PullStopped as stopped:
            return self.failed(stopped.reason)
        except PrefillLegAbortedError as exc:
            # A client that leaves ends both legs, this one a moment later: no failure, nothing to compute.
            await asyncio.wait({self._stopped}, timeout=OWN_ABORT_WAIT_S)
            return self.failed(self._stopped.result() if self._stopped.done() else exc.code)
        except TandemError as exc:
            return self.failed(exc.code)
        finally:
            unsubscribe()
            self._is_ended = True
        read, plan = self._read, self._plan
        return FinishedPull(
            ok=True,
            terminal=True,
            num_bytes=read.num_bytes,
            num_blocks=sum(len(pairs) for pairs in plan.pairs),
            num_states=int(plan.slot_id > 0),
            output_row=offer.output_row,
            final_s=offer.known_s,
            seconds=read.seconds,
            num_descriptors=read.num_descriptors,
            num_early_parts=read.num_early_parts,
        )

    def cancel(self) -> None:
        """The request was aborted. The outcome follows as soon as the destinations are safe."""
        self._stop(PullReason.CANCELLED)

    def failed(self, reason: str) -> FinishedPull:
        return FinishedPull(ok=False, terminal=self._is_terminal, reason=reason, seconds=self._read.seconds)

    def _stop(self, reason: str) -> None:
        if not self._stopped.done():
            self._stopped.set_result(reason)
        if self._in_flight is not None:
            (self._puller.cancel if reason == PullReason.CANCELLED else self._puller.abandon)(self._in_flight)

    async def _read_all(self) -> Offer:
        # Also of what is here already: a holder that gets on is waited for, however long that takes it.
        after = 0
        while True:
            offer = await self._next_offer(after)
            await self._read_part(offer)
            if offer.is_final:
                return offer
            after = offer.num_tokens

    async def _next_offer(self, after: int) -> Offer:
        waiting = asyncio.ensure_future(self._remote.offers.beyond(after))
        try:
            await asyncio.wait({waiting, self._stopped}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._stopped.done():
                raise PullStopped(self._stopped.result())
            if not waiting.done():
                raise PullStopped(PullReason.DEADLINE)
            return waiting.result()
        finally:
            waiting.cancel()

    async def _read_part(self, offer: Offer) -> None:
        reads, generations = self._take_part(offer)
        if not reads:
            return
        outcome = await self._pull(offer, reads, generations)
        if outcome.status is not PullStatus.OK and outcome.reason in AGENT_CODES and not self._stopped.done():
            self._peers.forget(self._remote.url)
            outcome = await self._pull(offer, reads, generations)
        if outcome.status is not PullStatus.OK:
            raise PullStopped(outcome.reason)
        read = self._read
        read.num_bytes += outcome.num_bytes
        read.num_descriptors += outcome.num_descriptors
        read.seconds += outcome.seconds
        read.num_early_parts += not offer.is_final and self._remote.offers.final is None

    def _take_part(self, offer: Offer) -> tuple[list[Read], list[ExpectedGeneration]]:
        """What of the plan this offer makes readable; it is left out of the next part."""
        keys, num_tokens = self._remote.keys, self._remote.num_tokens
        limit = -(-num_tokens // keys.block_size) if offer.is_final else offer.num_tokens // keys.block_size
        reads: list[Read] = []
        generations: list[ExpectedGeneration] = []
        for group, pairs in enumerate(self._left):
            part = [pair for pair in pairs if pair[0] < limit]
            if not part:
                continue
            self._left[group] = pairs[len(part) :]
            remote_ids, values = offer.block_ids[group], offer.block_generations[group]
            region, table = block_region(group), block_generations_region(group)
            reads.append(Read(region, region, [(local, remote_ids[index]) for index, local in part]))
            for index, _ in part:
                tag = content_tag(keys.key_at(min((index + 1) * keys.block_size, num_tokens)))
                generations.append(ExpectedGeneration(table, remote_ids[index], values[index], tag))
        if offer.is_final and self._plan.slot_id:
            reads.append(Read(SLOTS, SLOTS, [(self._plan.slot_id, offer.slot_id)]))
            tag = content_tag(self._remote.prefix_key)
            generations.append(ExpectedGeneration(SLOT_GENERATIONS, offer.slot_id, offer.slot_generation, tag))
        return reads, generations

    async def _pull(self, offer: Offer, reads: list[Read], generations: list[ExpectedGeneration]) -> PullOutcome:
        """One part, until its outcome. Raises TransferError when nothing was posted."""
        peer: Peer = await self._peers.connect(self._remote.url, offer.engine_id, offer.epoch)
        if self._stopped.done():
            raise PullStopped(self._stopped.result())
        self._read.num_parts += 1
        pull_id = f"{self._seq_id}/part-{self._read.num_parts}"
        arrived: asyncio.Future[PullOutcome] = self._loop.create_future()

        def arrive(outcome: PullOutcome) -> None:
            self._is_terminal = outcome.terminal
            if not arrived.done():
                arrived.set_result(outcome)

        job = PullJob(pull_id, peer, reads, generations, offer.epoch, time.monotonic() + self._timeout_s)
        self._in_flight = pull_id
        try:
            self._puller.submit(
                job,
                lambda outcome: self._call_soon(arrive, outcome),
                lambda _: self._call_soon(self._become_terminal),
            )
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
