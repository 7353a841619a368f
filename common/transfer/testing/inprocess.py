"""The same contract between backends of one process: plain memory copies, for tests.

Backends find each other in a hub that is passed in. A read is copied when it is polled, so a test decides what happens
between post and read: ``InProcessHub.freeze`` keeps a peer's reads in flight (as a stopped process does), closing a
backend fails them (as a dead one does).
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from common.errors import TransferError
from common.transfer.announcement import PeerMetadata, RankMetadata
from common.transfer.backend import TransferBackend
from common.transfer.codes import TransferCode
from common.transfer.reads import CheckedRead, Handle, Read, ReadStatus, check_reads
from common.transfer.regions import Peer, PoolLayout, Region
from common.transfer.sole_reference import SoleReference


class InProcessAgent:
    """What a backend is in its hub, for as long as anything holds it: a transport's agent is no less stubborn."""

    def __init__(self, hub: InProcessHub, name: str) -> None:
        self.name = name
        hub.join(self)

    def copy(self, reads: Sequence[CheckedRead]) -> None:
        for read in reads:
            for local_offset, remote_offset, length in read.runs.tolist():
                ctypes.memmove(read.local.address + local_offset, read.remote.address + remote_offset, length)


class InProcessHub:
    """Which agents are alive and which of them are frozen, by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: set[str] = set()
        self._frozen: set[str] = set()

    def join(self, agent: InProcessAgent) -> None:
        """Until it ends."""
        self._alive.add(agent.name)
        # Without the lock: the collector may run this while its thread has it.
        weakref.finalize(agent, self._alive.discard, agent.name)

    def freeze(self, name: str) -> None:
        """Reads from this backend stay in flight from now on."""
        with self._lock:
            self._frozen.add(name)

    def thaw(self, name: str) -> None:
        with self._lock:
            self._frozen.discard(name)

    def is_alive(self, name: str) -> bool:
        return name in self._alive

    def is_frozen(self, name: str) -> bool:
        with self._lock:
            return name in self._frozen


class _InProcessHandle(Handle):
    """``pending``: what has not arrived, by the name of its agent."""

    __slots__ = ("pending", "reader")

    def __init__(self, reader: str, peer: Peer, reads: Sequence[CheckedRead]) -> None:
        super().__init__(peer, reads)
        self.reader = reader
        names = [rank.name for rank in peer.ranks]
        ranks = sorted({read.rank for read in reads}) or [0]
        self.pending = {names[rank]: [read for read in reads if read.rank == rank] for rank in ranks}


class InProcessBackend(TransferBackend):
    """See ``TransferBackend``. Only backends of the same hub can be peers; only ``cpu`` regions."""

    kind = "inprocess"

    def __init__(
        self,
        hub: InProcessHub,
        *,
        engine_id: str,
        epoch: int,
        fingerprint: str = "",
        layout: PoolLayout | None = None,
    ) -> None:
        super().__init__(engine_id=engine_id, epoch=epoch, fingerprint=fingerprint, layout=layout)
        self._hub = hub
        self._agent = self._new_agent()
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._peers: dict[str, Peer] = {}
        self._disconnected: set[str] = set()
        self._closed = False

    @property
    def name(self) -> str:
        return self._agent.value.name

    @property
    def regions(self) -> Mapping[str, Region]:
        return MappingProxyType(self._regions)

    def register(self, regions: Sequence[Region]) -> None:
        with self._lock:
            self._check_open()
            names = [region.name for region in regions]
            taken = sorted(name for name in names if name in self._regions or names.count(name) > 1)
            foreign = sorted(region.name for region in regions if region.device != "cpu")
            if taken or foreign:
                raise TransferError(
                    f"regions registered twice: {taken}, not on the cpu: {foreign}",
                    code=TransferCode.REGISTRATION_FAILED,
                )
            self._regions.update({region.name: region for region in regions})

    def metadata(self) -> bytes:
        with self._lock:
            self._check_open()
            exported = tuple(region for region in self._regions.values() if region.exported)
            return PeerMetadata(
                backend=self.kind,
                engine_id=self.engine_id,
                epoch=self.epoch,
                fingerprint=self.fingerprint,
                ranks=(RankMetadata(self.name, "", exported),),
                layout=None if self.layout is None else self.layout.document,
            ).to_bytes()

    def add_peer(self, metadata: bytes) -> Peer:
        announced = PeerMetadata.from_bytes(metadata)
        with self._lock:
            self._check_open()
            self._check_announcement(announced)
            for rank in announced.ranks:
                if not self._hub.is_alive(rank.name):
                    raise TransferError(f"peer {rank.name} is not in this hub", code=TransferCode.TRANSFER_FAILED)
            new = announced.peer()
            peer = self._peers.get(new.name)
            if peer is None or peer.ranks != new.ranks:
                peer = new
            for other in [known for known in self._peers.values() if known.engine_id == peer.engine_id]:
                del self._peers[other.name]
            self._peers[peer.name] = peer
            self._disconnected.discard(peer.name)
            return peer

    def remove_peer(self, peer: Peer) -> None:
        with self._lock:
            self._check_open()
            self._peers.pop(peer.name, None)

    def post_read(self, peer: Peer, reads: Sequence[Read]) -> Handle:
        with self._lock:
            self._check_open()
            known = self._peers.get(peer.name)
            if known is None:
                raise TransferError(
                    f"peer {peer.name} (epoch {peer.epoch}) was never added, removed, or has restarted since",
                    code=TransferCode.UNKNOWN_PEER,
                )
            if peer.name in self._disconnected:
                raise TransferError(
                    f"peer {peer.name} disconnected and was not added again", code=TransferCode.PEER_DISCONNECTED
                )
            return _InProcessHandle(self.name, known, check_reads(self._regions, known, reads))

    def poll(self, handle: Handle) -> ReadStatus:
        assert isinstance(handle, _InProcessHandle)
        with self._lock:
            self._check_open()
            if handle.status.is_terminal:
                return handle.status
            if handle.reader != self.name:
                handle.error = TransferError(
                    f"the agent that read from {handle.peer.name} ended", code=TransferCode.AGENT_RECREATED
                )
                handle.status = ReadStatus.FAILED
                return handle.status
            for name, reads in list(handle.pending.items()):
                if not self._hub.is_alive(name):
                    self._disconnected.add(handle.peer.name)
                    handle.error = TransferError(f"peer {name} is gone", code=TransferCode.PEER_DISCONNECTED)
                elif self._hub.is_frozen(name):
                    continue
                else:
                    self._agent.value.copy(reads)
                del handle.pending[name]
            if not handle.pending:
                handle.status = ReadStatus.DONE if handle.error is None else ReadStatus.FAILED
            return handle.status

    def release(self, handle: Handle) -> None:
        with self._lock:
            self._check_open()
            if not handle.status.is_terminal:
                raise TransferError(
                    f"read of {handle.num_bytes} bytes from {handle.peer.name} is still in flight",
                    code=TransferCode.HANDLE_ACTIVE,
                )

    def recreate(self) -> None:
        with self._lock:
            self._check_open()
            self._end_agent()
            self._agent = self._new_agent()
            self._peers.clear()
            self._disconnected.clear()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._end_agent()
            self._closed = True

    def _new_agent(self) -> SoleReference[InProcessAgent]:
        return SoleReference(InProcessAgent(self._hub, f"{self.engine_id}-{secrets.token_hex(8)}"))

    def _end_agent(self) -> None:
        if self._agent.is_shared() or not self._agent.drop():
            raise TransferError(
                f"agent {self.name} lives on, it is held by {self._agent.holders()}", code=TransferCode.AGENT_ALIVE
            )

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"transfer backend of {self.engine_id} is closed", code=TransferCode.CLOSED)
