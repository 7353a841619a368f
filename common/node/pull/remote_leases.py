"""Leases that this node holds at its peers, each renewed from when its manifest arrives until its pull has ended.

Renewal runs on the event loop, never in the model loop, so a long step does not let a lease run out. A release is
sent by a task of its own, because the handler that wants it may be being cancelled; it carries the id of the request
that had the lease, unless it is for several.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from common.errors import TransferError
from common.node.peers.directory import PeerDirectory
from common.telemetry.context import current_request_id
from common.wire.routes import LEASE_RELEASE_ROUTE, LEASE_RENEW_ROUTE

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 6
"""Renewals within the time that a lease lasts: it survives several lost ones in a row."""

MIN_RENEWAL_INTERVAL_S = 0.005
"""The shortest time between two renewals: how long a lease lasts is read from a manifest, which may be made up."""

RELEASE_TIMEOUT_S = 2.0
"""How long a holder has to answer a release."""

RELEASE_TRIES = 3
"""Then the lease expires. A holder with hundreds of requests at once may answer late, and memory is what it lacks."""

GIVE_BACK_S = 30.0
"""How long a lease that nobody uses is worth asking for; most would have ended by then."""

GIVEN_BACK_AT_ONCE = 8
"""Fewer than ``CHECKS_AT_ONCE``: those that are read go first, also where a holder does not answer."""

RENEW_TIMEOUT_S = 1.0
"""How long a holder has to answer a renewal; the next one follows anyway."""


@dataclass(slots=True)
class _Held:
    url: str
    interval_s: float
    due_s: float  # when to renew next, on time.monotonic
    request_id: str | None


@dataclass(slots=True)
class _Unsent:
    """Releases that go out in one call, and for which requests."""

    lease_ids: list[str] = field(default_factory=list)
    request_ids: set[str | None] = field(default_factory=set)


class RemoteLeases:
    """Lives on the event loop between ``start`` and ``close``."""

    def __init__(self, peers: PeerDirectory) -> None:
        self._peers = peers
        self._held: dict[str, _Held] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._renewals: dict[str, asyncio.Task[None]] = {}  # one at a time per holder
        self._releases: set[asyncio.Task[None]] = set()
        self._returning: set[asyncio.Task[None]] = set()
        self._giving_back = asyncio.Semaphore(GIVEN_BACK_AT_ONCE)
        self._is_closed = False
        self._unsent: dict[tuple[str, bool], _Unsent] = {}  # releases of this turn of the loop, one call for each key

    def start(self) -> None:
        self._task = asyncio.create_task(self._renew_forever(), name="lease-renewal")

    async def close(self) -> None:
        self._is_closed = True
        ending = [*self._renewals.values(), *self._returning]
        if self._task is not None:
            ending.append(self._task)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for lease_id in list(self._held):
            self.release(lease_id)
        if self._releases:
            await asyncio.wait(self._releases, timeout=RELEASE_TIMEOUT_S)

    def hold(self, lease_id: str, url: str, lease_seconds: float) -> None:
        """For the request that the caller works for."""
        interval_s = max(lease_seconds / RENEWALS_PER_LEASE, MIN_RENEWAL_INTERVAL_S)
        self._held[lease_id] = _Held(url, interval_s, time.monotonic() + interval_s, current_request_id())
        self._changed.set()

    def release(self, lease_id: str) -> bool:
        """Tells the holder that its memory is free. False: not held here. Does not wait."""
        held = self._held.pop(lease_id, None)
        if held is None:
            return False
        self._tell(lease_id, held.url, held.request_id, may_come=False)
        return True

    def call_off(self, lease_id: str, url: str) -> None:
        """Tells a peer that nobody wants this prompt: its lease ends, and a leg that still computes, or is yet to come,
        is aborted."""
        self._tell(lease_id, url, current_request_id(), may_come=True)

    def give_back(self, lease_id: str, confirm: Callable[[], Awaitable[None]]) -> None:
        """Ends a lease that is not held here and that nobody will use. ``confirm`` holds it, or raises TransferError:
        then it is not for whoever brought it to end. Does not wait."""
        if not self._is_closed:
            task = asyncio.create_task(self._give_back(lease_id, confirm), name=f"give back {lease_id}")
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _give_back(self, lease_id: str, confirm: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(GIVE_BACK_S), self._giving_back:
                if lease_id in self._held:
                    return  # another request brought it too, and reads
                await confirm()
        except (TransferError, TimeoutError) as exc:
            logger.info("lease left to expire lease_id=%s: %s", lease_id, str(exc) or type(exc).__name__)
        else:
            self.release(lease_id)

    def _tell(self, lease_id: str, url: str, request_id: str | None, *, may_come: bool) -> None:
        """One call for all that are told in this turn of the loop: a request may have 2,048 leases."""
        unsent = self._unsent.setdefault((url, may_come), _Unsent())
        unsent.lease_ids.append(lease_id)
        unsent.request_ids.add(request_id)
        if len(unsent.lease_ids) == 1:
            task = asyncio.create_task(self._release(url, may_come=may_come))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, url: str, *, may_come: bool) -> None:
        unsent = self._unsent.pop((url, may_come))
        lease_ids = unsent.lease_ids
        request_id = unsent.request_ids.pop() if len(unsent.request_ids) == 1 else None
        body = {"lease_ids": lease_ids, "may_come": may_come}
        for tries_left in reversed(range(RELEASE_TRIES)):
            try:
                await self._peers.post(url, LEASE_RELEASE_ROUTE, body, RELEASE_TIMEOUT_S, request_id)
                return
            except TransferError as exc:
                if not tries_left:
                    logger.warning(
                        "%d leases not released lease_id=%s: %s; they will expire", len(lease_ids), lease_ids[0], exc
                    )

    async def _renew_forever(self) -> None:
        """Renews what is due, one call per holder, and sleeps until the next is due or a new lease comes in. It does
        not wait for the calls: a holder that does not answer must not cost the leases at another."""
        while True:
            now = time.monotonic()
            due: dict[str, list[str]] = defaultdict(list)
            for lease_id, held in self._held.items():
                if held.due_s <= now:
                    held.due_s = now + held.interval_s
                    due[held.url].append(lease_id)
            for url, lease_ids in due.items():
                if url not in self._renewals:
                    self._renewals[url] = asyncio.create_task(self._renew(url, lease_ids))
            self._changed.clear()
            next_s = min((held.due_s for held in self._held.values()), default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if next_s is None else next_s - time.monotonic()):
                    await self._changed.wait()

    async def _renew(self, url: str, lease_ids: list[str]) -> None:
        try:
            await self._peers.post(url, LEASE_RENEW_ROUTE, {"lease_ids": lease_ids}, RENEW_TIMEOUT_S)
        except TransferError as exc:
            logger.warning("%d leases not renewed: %s", len(lease_ids), exc)
        finally:
            del self._renewals[url]
