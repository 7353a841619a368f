"""Faults on demand, round any backend: what the transfer layer has to survive, made to happen when a test wants it.

Faults are queued with ``inject`` and strike reads in the order in which those are posted; ``clear`` ends them all. With
none queued everything is passed on unchanged. A read *of generations* is one into memory that is not exported (the
puller's scratch); every other one is *of data*.

- ``delay``: the read starts ``seconds`` late, and so reads what the holder's memory holds by then.
- ``hang``: the same without an end: the read starts when the faults are cleared, as that of a frozen holder does when
  it wakes; or never, when the agent is made again before.
- ``post_error``: refused when it is posted, nothing moves. ``poll_error``: everything is copied, then it is FAILED.
- ``partial``: the first half of the units is copied, then it is FAILED.
- ``stale``: other bytes than the holder's are delivered (every bit flipped), and it is DONE.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.errors import InvalidRequestError, TransferError
from common.transfer.backend import TransferBackend
from common.transfer.codes import TransferCode
from common.transfer.reads import CheckedRead, Handle, Read, ReadStatus, check_reads
from common.transfer.regions import Peer, Region

FAULT_KINDS = ("delay", "hang", "post_error", "poll_error", "partial", "stale")
FAULT_TARGETS = ("data", "generations", "both")


@dataclass(frozen=True, slots=True)
class Fault:
    """``count``: how many reads it strikes; ``on``: of which kind; ``seconds``: of ``delay``.

    Raises:
        InvalidRequestError: naming the field, its value and what it may be.
    """

    kind: str
    seconds: float = 0.0
    count: int = 1
    on: str = "data"

    def __post_init__(self) -> None:
        for name, value, allowed in (("kind", self.kind, FAULT_KINDS), ("on", self.on, FAULT_TARGETS)):
            if value not in allowed:
                raise InvalidRequestError(f"{name} is {value!r}, must be one of {', '.join(allowed)}", param=name)
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise InvalidRequestError(f"count is {self.count!r}, must be an integer of at least 1", param="count")
        if not isinstance(self.seconds, int | float) or not 0 <= self.seconds < math.inf:
            raise InvalidRequestError(f"seconds is {self.seconds!r}, must be a number of at least 0", param="seconds")


class _FaultyHandle(Handle):
    """``inner``: the read below; None while it is held back. ``due_s``: when it starts then."""

    __slots__ = ("due_s", "fault", "inner", "reads", "requested")

    def __init__(self, peer: Peer, requested: Sequence[Read], reads: Sequence[CheckedRead], fault: Fault) -> None:
        super().__init__(peer, reads)
        self.requested = requested
        self.reads = reads
        self.fault = fault
        self.inner: Handle | None = None
        self.due_s = time.monotonic() + (math.inf if fault.kind == "hang" else fault.seconds)


class FaultyBackend(TransferBackend):
    """See ``TransferBackend``; ``inject`` and ``clear`` may be called from any thread. Destinations on the CPU only."""

    def __init__(self, inner: TransferBackend) -> None:
        super().__init__(engine_id=inner.engine_id, epoch=inner.epoch, fingerprint=inner.fingerprint)
        self.kind = inner.kind
        self._inner = inner
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._held_back: set[_FaultyHandle] = set()
        self._closed = False

    def inject(self, fault: Fault) -> None:
        """Queue a fault behind those that are queued already."""
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Forget all faults; reads that are held back start now."""
        with self._lock:
            self._faults.clear()
            for handle in self._held_back:
                handle.due_s = 0.0

    @property
    def num_held_back(self) -> int:
        """Reads that a delay or a hang keeps from starting."""
        with self._lock:
            return len(self._held_back)

    @property
    def regions(self) -> Mapping[str, Region]:
        return self._inner.regions

    def register(self, regions: Sequence[Region]) -> None:
        self._inner.register(regions)

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def add_peer(self, metadata: bytes) -> Peer:
        return self._inner.add_peer(metadata)

    def remove_peer(self, peer: Peer) -> None:
        self._inner.remove_peer(peer)

    def post_read(self, peer: Peer, reads: Sequence[Read]) -> Handle:
        fault = self._next_fault(reads)
        if fault is None:
            return self._inner.post_read(peer, reads)
        if fault.kind == "post_error":
            raise TransferError(f"injected: post_error, peer {peer.name}", code=TransferCode.TRANSFER_FAILED)
        handle = _FaultyHandle(peer, reads, check_reads(self.regions, peer, reads), fault)
        if fault.kind in ("delay", "hang"):
            with self._lock:
                self._held_back.add(handle)
        elif fault.kind == "partial":
            handle.inner = self._inner.post_read(peer, _first_half(reads))
        else:
            handle.inner = self._inner.post_read(peer, reads)
        return handle

    def poll(self, handle: Handle) -> ReadStatus:
        if not isinstance(handle, _FaultyHandle):
            return self._inner.poll(handle)
        self._check_open()
        if handle.status.is_terminal:
            return handle.status
        if handle.inner is None and not self._start(handle):
            return handle.status
        assert handle.inner is not None
        status = self._inner.poll(handle.inner)
        handle.error = handle.inner.error
        if status is ReadStatus.DONE and handle.fault.kind in ("poll_error", "partial"):
            handle.error = TransferError(f"injected: {handle.fault.kind}, peer {handle.peer.name}")
            status = ReadStatus.FAILED
        if status is ReadStatus.DONE and handle.fault.kind == "stale":
            for read in handle.reads:
                _flip(read)
        handle.status = status
        return status

    def release(self, handle: Handle) -> None:
        if not isinstance(handle, _FaultyHandle):
            self._inner.release(handle)
            return
        self._check_open()
        if not handle.status.is_terminal:
            raise TransferError(
                f"read of {handle.num_bytes} bytes from {handle.peer.name} is still in flight",
                code=TransferCode.HANDLE_ACTIVE,
            )
        if handle.inner is not None:
            self._inner.release(handle.inner)

    def recreate(self) -> None:
        try:
            self._inner.recreate()
        except TransferError as exc:
            if exc.code != TransferCode.AGENT_ALIVE:
                self._drop_held_back()
            raise
        self._drop_held_back()

    def close(self) -> None:
        self._inner.close()
        self._closed = True
        self._drop_held_back()

    def _next_fault(self, reads: Sequence[Read]) -> Fault | None:
        """The first queued fault that strikes such a read; it has one strike less from here on."""
        regions = self._inner.regions
        local = [regions[read.local_region] for read in reads if read.local_region in regions]
        target = "data" if any(region.exported for region in local) else "generations"
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.on in ("both", target):
                    if fault.count == 1:
                        del self._faults[index]
                    else:
                        self._faults[index] = dataclasses.replace(fault, count=fault.count - 1)
                    return fault
        return None

    def _start(self, handle: _FaultyHandle) -> bool:
        """Post a read that was held back, if its time has come. False: nothing to poll below."""
        with self._lock:
            if time.monotonic() < handle.due_s:
                return False
            self._held_back.discard(handle)
        try:
            handle.inner = self._inner.post_read(handle.peer, handle.requested)
        except TransferError as exc:
            handle.error = exc
            handle.status = ReadStatus.FAILED
        return handle.inner is not None

    def _drop_held_back(self) -> None:
        """They never start: their agent ends."""
        with self._lock:
            for handle in self._held_back:
                handle.error = TransferError(
                    f"the agent reading {handle.peer.name} ended", code=TransferCode.AGENT_RECREATED
                )
                handle.status = ReadStatus.FAILED
            self._held_back.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"transfer backend of {self.engine_id} is closed", code=TransferCode.CLOSED)


def _first_half(reads: Sequence[Read]) -> list[Read]:
    """Half of the units, in the order in which they were named; at least one is left out."""
    left = sum(len(read.pairs) for read in reads) // 2
    half: list[Read] = []
    for read in reads:
        half.append(dataclasses.replace(read, pairs=read.pairs[:left]))
        left -= len(half[-1].pairs)
    return half


def _flip(read: CheckedRead) -> None:
    for local_offset, _, length in read.runs.tolist():
        memory = (ctypes.c_char * length).from_address(read.local.address + local_offset)
        memory.raw = memory.raw.translate(_FLIPPED)


_FLIPPED = bytes(255 - value for value in range(256))
