"""Prompts that are computed here under an agreed name while their readers already wait.

Life of a rendezvous: 1 *awaited*: its reader came before its leg, 2 *running*: the leg is here, its finished blocks
become known step by step, 3 *final*: leased under the same name, or *failed*: with the leg's error. Leaves by: release
(a leg that runs is called off), the end of its lease, ``KEEP_S`` after it failed or ``LEG_WAIT_S`` without a leg; until
then a reader that comes late is told. An entry owns no memory: the running sequence does, then the lease.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequestError, QueueFullError, RequestAbortedError, TandemError, TransferError
from common.wire.handoff import rendezvous_id_of
from common.wire.manifest import Manifest, PartialManifest
from common.wire.manifest_reader import TRANSFER_PARAMS_KEY

logger = logging.getLogger(__name__)

MAX_OPEN = 4096
"""Entries in all. Far more than legs and readers that a node can serve at once; bounds what made-up ids can fill."""

LEG_WAIT_S = 5.0
"""How long a reader waits for a leg that has not come. A proxy sends both legs at once, so this is far more than the
network takes."""

KEEP_S = 10.0
"""How long an entry whose leg failed is kept, for a reader that comes late."""

LEASE_CHECK_S = 5.0
"""How often the entry of a leased prompt checks that the lease still exists; it costs nothing to keep until then."""


@dataclass(slots=True, eq=False)
class _Entry:
    rendezvous_id: str
    has_leg: bool = False
    part: PartialManifest | None = None
    told: PartialManifest | None = None  # as it was when a reader was last answered
    manifest: Manifest | None = None
    error: TandemError | None = None
    is_released: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class RendezvousTable:
    """Used on the event loop only.

    ``is_in_use(id)``: whether a lease or a running request has this id. ``call_off(id)``: ends the leg of this id.
    """

    def __init__(
        self,
        *,
        is_in_use: Callable[[str], bool],
        call_off: Callable[[str], None],
        leg_wait_s: float = LEG_WAIT_S,
    ) -> None:
        self._is_in_use = is_in_use
        self._call_off = call_off
        self._leg_wait_s = leg_wait_s
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    # --- the leg's side

    def open(self, rendezvous_id: str) -> None:
        """The leg is here.

        Raises:
            InvalidRequestError: the id is in use, by a leg, a finished prompt or a lease.
            RequestAbortedError: its reader has already given it up.
            TooManyRendezvousError: too many are open.
        """
        entry = self._entries.get(rendezvous_id)
        if (entry is not None and entry.has_leg) or self._is_in_use(rendezvous_id):
            raise InvalidRequestError(
                f"kv_transfer_params.tandem_rendezvous {rendezvous_id} is in use",
                param="kv_transfer_params.tandem_rendezvous",
            )
        if entry is None:
            entry = self._create(rendezvous_id)
        entry.has_leg = True
        self._stop_timer(entry)
        if entry.is_released:
            self._remove(entry)
            raise not_wanted()

    def advance(self, rendezvous_id: str, part: PartialManifest) -> None:
        """More of the prompt is finished."""
        entry = self._entries[rendezvous_id]
        entry.part = part
        entry.wake()

    def finish(self, rendezvous_id: str, manifest: Manifest) -> bool:
        """The prompt is finished and leased. False: its reader gave it up while it was; release the lease."""
        entry = self._entries[rendezvous_id]
        if entry.is_released:
            self._remove(entry)
            return False
        entry.manifest = manifest
        entry.wake()
        self._check_lease_later(entry)
        return True

    def fail(self, rendezvous_id: str, error: TandemError) -> None:
        """The leg ended without a prompt. Readers that wait are told, and those that come within ``KEEP_S``."""
        entry = self._entries[rendezvous_id]
        entry.error = error
        entry.wake()
        self._remove_later(entry, KEEP_S)

    def refuse(self, rendezvous_id: str, error: TandemError) -> None:
        """A leg was refused before it began: as ``fail``, unless the name is another leg's."""
        entry = self._entries.get(rendezvous_id)
        if entry is None:
            if len(self._entries) >= MAX_OPEN or self._is_in_use(rendezvous_id):
                return  # a reader that comes later finds nothing, which is an error as well
            entry = self._create(rendezvous_id)
        if not entry.has_leg:
            entry.has_leg = True
            self.fail(rendezvous_id, error)

    # --- the reader's side

    async def wait(
        self, rendezvous_id: str, after: int, wait_seconds: float, have: int = 0
    ) -> Manifest | PartialManifest | None:
        """What is finished beyond ``after`` tokens, as soon as anything is, at first as soon as the leg has begun to
        compute; None: nothing new within ``wait_seconds``.

        A part leaves out the blocks of the first ``have`` tokens when the reader has them from the last answer and they
        are still the ones: else a long prompt would cost the square of its length.

        Raises:
            TransferError: ``unknown_pull``: no leg of this id has come within ``leg_wait_s``.
            TooManyRendezvousError: too many are open.
            TandemError: the leg's own.
        """
        entry = self._entries.get(rendezvous_id)
        if entry is None:
            entry = self._create(rendezvous_id)
            self._remove_later(entry, self._leg_wait_s)
        try:
            async with asyncio.timeout(wait_seconds):
                while True:
                    if entry.error is not None:
                        raise entry.error
                    if entry.manifest is not None:
                        return entry.manifest
                    is_first = after == 0 and entry.told is None
                    if entry.part is not None and (entry.part.num_tokens > after or is_first):
                        told, entry.told = entry.told, entry.part
                        return _untold(entry.part, told, have)
                    if self._entries.get(rendezvous_id) is not entry:
                        raise UnknownPullError(
                            f"no leg of rendezvous {rendezvous_id} is here, or came within {self._leg_wait_s:g} s"
                        )
                    await entry.changed.wait()
        except TimeoutError:
            return None

    def release(self, rendezvous_id: str, *, may_come: bool = False) -> bool:
        """Nobody wants the prompt any more: its leg is called off. False: unknown. A lease is the caller's to end.

        ``may_come``: a leg that is not here yet may be on its way, and is called off when it comes.
        """
        entry = self._entries.get(rendezvous_id)
        if entry is None:
            if may_come and len(self._entries) < MAX_OPEN and not self._is_in_use(rendezvous_id):
                entry = self._create(rendezvous_id)
                entry.is_released = True
                self._remove_later(entry, self._leg_wait_s)
            return False
        entry.is_released = True
        if entry.manifest is not None:
            self._remove(entry)
        elif entry.has_leg and entry.error is None:
            logger.info("rendezvous called off id=%s", rendezvous_id)
            self._call_off(rendezvous_id)
        return True

    def is_called_off(self, lease_id: str) -> bool:
        """Whether a reader has given up what was not here yet under this id: a leg, or the lease that its query asks
        for. Its release can overtake its query."""
        entry = self._entries.get(lease_id)
        return entry is not None and entry.is_released

    # --- bookkeeping

    def _create(self, rendezvous_id: str) -> _Entry:
        if len(self._entries) >= MAX_OPEN:
            raise TooManyRendezvousError(f"{len(self._entries)} rendezvous are open, the limit is {MAX_OPEN}")
        entry = self._entries[rendezvous_id] = _Entry(rendezvous_id)
        return entry

    def _remove(self, entry: _Entry) -> None:
        self._stop_timer(entry)
        if self._entries.get(entry.rendezvous_id) is entry:
            del self._entries[entry.rendezvous_id]
        entry.wake()

    def _remove_later(self, entry: _Entry, delay_s: float) -> None:
        self._stop_timer(entry)
        entry.timer = asyncio.get_running_loop().call_later(delay_s, self._remove, entry)

    def _check_lease_later(self, entry: _Entry) -> None:
        entry.timer = asyncio.get_running_loop().call_later(LEASE_CHECK_S, self._check_lease, entry)

    def _check_lease(self, entry: _Entry) -> None:
        if self._is_in_use(entry.rendezvous_id):
            self._check_lease_later(entry)
        else:
            self._remove(entry)

    @staticmethod
    def _stop_timer(entry: _Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None


def _untold(part: PartialManifest, told: PartialManifest | None, have: int) -> PartialManifest:
    """All of the part, unless the last answer reached the reader (``have`` is what it said) and holds: a sequence that
    was preempted meanwhile may have other blocks."""
    num_blocks = have // part.block_size
    if told is None or told.num_tokens != have:
        return part
    tables = zip(told.block_ids, told.generations, part.block_ids, part.generations, strict=True)
    for told_ids, told_generations, ids, generations in tables:
        first = bisect_left(ids, True, key=bool)  # null below a window, which has moved on
        if ids[first:num_blocks] != told_ids[first:] or generations[first:num_blocks] != told_generations[first:]:
            return part
    return part.beyond(num_blocks)


def not_wanted() -> RequestAbortedError:
    """Of a leg whose reader has given it up."""
    return RequestAbortedError("its reader does not want the prompt any more")


class TooManyRendezvousError(QueueFullError):
    """Of the table, not of a leg that found its node's queue full."""


class UnknownPullError(TransferError):
    status = 404
    type = "not_found_error"
    code = "unknown_pull"


def refused_rendezvous(body: Mapping[str, Any]) -> str | None:
    """The rendezvous of a prefill leg whose body may be wrong in any way; None when it names none."""
    params = body.get(TRANSFER_PARAMS_KEY)
    if not isinstance(params, Mapping) or params.get("do_remote_decode") is not True:
        return None
    try:
        return rendezvous_id_of(params)
    except InvalidRequestError:
        return None
