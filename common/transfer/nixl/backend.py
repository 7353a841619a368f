"""READs over NIXL: UCX by default (shared memory, TCP or RDMA, whatever ``UCX_TLS`` and UCX itself choose).

One NIXL agent per backend, under a name that is new with each process start: metadata of an earlier life can never be
taken for this one's. This file keeps what the contract promises about peers and handles; ``NixlAgent`` makes the calls.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from common.errors import TransferError
from common.transfer.announcement import PeerMetadata, RankMetadata
from common.transfer.backend import TransferBackend
from common.transfer.codes import TransferCode
from common.transfer.nixl.agent import NixlAgent, UnknownEndError
from common.transfer.nixl.bindings import load_bindings
from common.transfer.nixl.fresh_pages import FreshPages
from common.transfer.reads import CheckedRead, Handle, Read, ReadStatus, check_reads
from common.transfer.regions import Peer, PoolLayout, Region

logger = logging.getLogger(__name__)


_Transfer = tuple[str, int]
"""Name of the peer's agent, and NIXL's number."""


class _NixlHandle(Handle):
    """``transfers``: what the read consists of, none once they are released; ``pending``: those that are not
    terminal."""

    __slots__ = ("pending", "remote", "transfers")

    def __init__(self, remote: _Remote, reads: Sequence[CheckedRead], transfers: list[_Transfer]) -> None:
        super().__init__(remote.peer, reads)
        self.remote = remote
        self.transfers = transfers
        self.pending: list[_Transfer] = []


@dataclass(slots=True, eq=False)
class _Remote:
    """A peer's place in the agent. ``blobs``: metadata of its ranks' agents, by name; ``loaded``: those that NIXL has.
    ``accepting``: new reads are allowed. ``num_handles``: unreleased reads; the metadata is not taken away under
    them."""

    peer: Peer
    blobs: dict[str, bytes]
    loaded: set[str] = field(default_factory=set)
    accepting: bool = True
    num_handles: int = 0

    @property
    def is_connected(self) -> bool:
        return len(self.loaded) == len(self.blobs)


class NixlBackend(TransferBackend):
    """See ``TransferBackend``. ``backends``: NIXL plugin names (``--nixl-backends``); NIXL uses what both sides
    have."""

    kind = "nixl"

    def __init__(
        self,
        *,
        engine_id: str,
        epoch: int,
        fingerprint: str = "",
        layout: PoolLayout | None = None,
        backends: Sequence[str] = ("UCX",),
        bindings: Any = None,
        enter_thread: Callable[[], None] | None = None,
    ) -> None:
        """Create the agent and its threads. ``bindings``: what ``load_bindings`` returned (default: call it).
        ``enter_thread``: called once on each thread before NIXL is: UCX takes the memory of a GPU for none where a
        thread has no CUDA context.

        Raises:
            TransferError: ``backend_unavailable`` when NIXL or one of ``backends`` is not there or does not start.
        """
        super().__init__(engine_id=engine_id, epoch=epoch, fingerprint=fingerprint, layout=layout)
        self._nixl = load_bindings() if bindings is None else bindings
        self._enter_thread = enter_thread
        self._thread = threading.local()
        self._plugins = tuple(backends)
        self._name = self._new_name()
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._fresh: dict[str, FreshPages] = {}
        self._remotes: dict[str, _Remote] = {}
        self._handles: set[_NixlHandle] = set()
        self._closed = False
        # What ``metadata`` returned, until the regions or the agent change. A new peer gets it without the lock, which
        # a post holds as long as the whole copy lasts over shared memory.
        self._announced: bytes | None = None
        self._agent: NixlAgent | None = NixlAgent(self._nixl, self._name, self._plugins)

    def _new_name(self) -> str:
        return f"{self.engine_id}-{secrets.token_hex(8)}"

    @property
    def regions(self) -> Mapping[str, Region]:
        return MappingProxyType(self._regions)

    def register(self, regions: Sequence[Region]) -> None:
        with self._lock:
            agent = self._open_agent()
            names = [region.name for region in regions]
            taken = sorted(name for name in names if name in self._regions or names.count(name) > 1)
            if taken:
                raise TransferError(f"regions {taken} registered twice", code=TransferCode.REGISTRATION_FAILED)
            agent.register(regions)
            self._regions.update({region.name: region for region in regions})
            self._fresh.update({region.name: FreshPages(region) for region in regions if region.device == "cpu"})
            self._announced = None

    def metadata(self) -> bytes:
        announced = self._announced
        if announced is not None:
            return announced
        with self._lock:
            blob = base64.b64encode(self._open_agent().metadata()).decode()
            exported = tuple(region for region in self._regions.values() if region.exported)
            self._announced = PeerMetadata(
                backend=self.kind,
                engine_id=self.engine_id,
                epoch=self.epoch,
                fingerprint=self.fingerprint,
                ranks=(RankMetadata(self._name, blob, exported),),
                layout=None if self.layout is None else self.layout.document,
            ).to_bytes()
            return self._announced

    def add_peer(self, metadata: bytes) -> Peer:
        announced = PeerMetadata.from_bytes(metadata)
        with self._lock:
            agent = self._open_agent()
            self._check_announcement(announced)
            blobs = {rank.name: rank.agent_blob() for rank in announced.ranks}
            remote = self._remotes.get(announced.ranks[0].name)
            if remote is None or remote.blobs != blobs:
                for other in [each for each in self._remotes.values() if not blobs.keys().isdisjoint(each.blobs)]:
                    if other.num_handles:
                        # NIXL would say of each that it is over, and it would go on.
                        raise TransferError(
                            f"peer {other.peer.name} has other metadata than before, and {other.num_handles} reads "
                            "from it are in flight",
                            code=TransferCode.BAD_METADATA,
                        )
                    self._unload(other)
                remote = _Remote(announced.peer(), blobs)
            self._load(agent, remote)
            remote.accepting = True
            for other in list(self._remotes.values()):
                if other is not remote and other.peer.engine_id == announced.engine_id:
                    self._retire(other)
            return remote.peer

    def remove_peer(self, peer: Peer) -> None:
        with self._lock:
            self._check_open()
            remote = self._remotes.get(peer.name)
            if remote is not None:
                self._retire(remote)

    def post_read(self, peer: Peer, reads: Sequence[Read]) -> Handle:
        with self._lock:
            agent = self._open_agent()
            remote = self._remotes.get(peer.name)
            if remote is None or not remote.accepting:
                raise TransferError(
                    f"peer {peer.name} (epoch {peer.epoch}) was never added, removed, or has restarted since",
                    code=TransferCode.UNKNOWN_PEER,
                )
            if not remote.is_connected:
                raise TransferError(
                    f"peer {peer.name} disconnected and was not added again", code=TransferCode.PEER_DISCONNECTED
                )
            checked = check_reads(self._regions, remote.peer, reads)
            for read in checked:
                if read.local.name in self._fresh:
                    self._fresh[read.local.name].touch(read.runs)
            # All transfers are created before the first is posted: an error raised from here means that nothing moves.
            transfers = self._create_transfers(agent, remote, checked)
            handle = _NixlHandle(remote, checked, transfers)
            remote.num_handles += 1
            self._handles.add(handle)
            for transfer in transfers:
                try:
                    if not agent.post(*transfer):
                        handle.pending.append(transfer)
                except TransferError as exc:
                    # Part of it may be on its way: the status says when it no longer is.
                    _note_disconnect(remote, transfer[0], exc)
                    handle.error = _without_frames(exc)
                    handle.pending.append(transfer)
                    break
            return handle

    def poll(self, handle: Handle) -> ReadStatus:
        assert isinstance(handle, _NixlHandle)
        self._check_open()
        if handle.status.is_terminal:
            return handle.status
        if handle.pending and not handle.transfers:
            return handle.status  # released for an agent that then did not end
        agent = self._open_agent()
        still_pending: list[_Transfer] = []
        for transfer in handle.pending:
            try:
                if not agent.poll(*transfer):
                    still_pending.append(transfer)
            except TransferError as exc:
                if isinstance(exc, UnknownEndError):
                    still_pending.append(transfer)
                _note_disconnect(handle.remote, transfer[0], exc)
                if handle.error is None:
                    handle.error = _without_frames(exc)
        handle.pending = still_pending
        if not still_pending:
            handle.status = ReadStatus.DONE if handle.error is None else ReadStatus.FAILED
        return handle.status

    def release(self, handle: Handle) -> None:
        assert isinstance(handle, _NixlHandle)
        with self._lock:
            self._check_open()
            if not handle.status.is_terminal:
                raise TransferError(
                    f"read of {handle.num_bytes} bytes from {handle.peer.name} is still in flight",
                    code=TransferCode.HANDLE_ACTIVE,
                )
            if handle not in self._handles:
                return
            self._handles.discard(handle)
            self._release_transfers(handle)
            handle.remote.num_handles -= 1
            if not handle.remote.accepting:
                self._retire(handle.remote)

    def recreate(self) -> None:
        with self._lock:
            self._check_open()
            num_ended = sum(not handle.status.is_terminal for handle in self._handles)
            started_s = time.monotonic()
            self._destroy_agent()
            destroyed_s = time.monotonic()
            self._name = self._new_name()
            agent = NixlAgent(self._nixl, self._name, self._plugins)
            try:
                agent.register(list(self._regions.values()))
            except TransferError:
                agent.close()
                raise
            self._agent = agent
            logger.warning(
                "transfer agent recreated name=%s reads_ended=%d seconds=%.3f (destroying %.3f)",
                self._name,
                num_ended,
                time.monotonic() - started_s,
                destroyed_s - started_s,
            )

    def close(self) -> None:
        with self._lock:
            self._destroy_agent()
            self._closed = True

    # Below: callers hold the lock.

    def _enter(self) -> None:
        if self._enter_thread is not None and not hasattr(self._thread, "is_entered"):
            self._enter_thread()
            self._thread.is_entered = True

    def _check_open(self) -> None:
        self._enter()
        if self._closed:
            raise TransferError(f"transfer backend of {self.engine_id} is closed", code=TransferCode.CLOSED)

    def _open_agent(self) -> NixlAgent:
        self._check_open()
        if self._agent is None:
            raise TransferError(
                f"transfer backend of {self.engine_id} has no agent: recreating it failed",
                code=TransferCode.BACKEND_UNAVAILABLE,
            )
        return self._agent

    def _destroy_agent(self) -> None:
        """Ends every read. Raises TransferError (``agent_alive``): none has ended."""
        self._enter()
        if self._agent is None:
            return
        self._agent.check_sole()
        for handle in self._handles:
            self._release_transfers(handle)
        self._agent.close()
        self._agent = None
        self._announced = None
        for handle in self._handles:
            if not handle.status.is_terminal:
                handle.error = TransferError(
                    f"the agent that read from {handle.peer.name} ended", code=TransferCode.AGENT_RECREATED
                )
                handle.status = ReadStatus.FAILED
        self._handles.clear()
        self._remotes.clear()

    def _load(self, agent: NixlAgent, remote: _Remote) -> None:
        """All of its ranks; after an error the set of peers is as before."""
        try:
            for name, blob in remote.blobs.items():
                if name not in remote.loaded:
                    agent.load_peer(name, blob)
                    remote.loaded.add(name)
        except TransferError:
            if self._remotes.get(remote.peer.name) is not remote:
                self._unload(remote)
            raise
        self._remotes[remote.peer.name] = remote

    def _unload(self, remote: _Remote) -> None:
        if self._agent is not None:
            while remote.loaded:
                self._agent.forget_peer(remote.loaded.pop())

    def _create_transfers(self, agent: NixlAgent, remote: _Remote, reads: Sequence[CheckedRead]) -> list[_Transfer]:
        transfers: list[_Transfer] = []
        for rank in sorted({read.rank for read in reads}):
            name = remote.peer.ranks[rank].name
            try:
                numbers = agent.create_transfers(name, [read for read in reads if read.rank == rank])
            except TransferError as exc:
                _release(agent, transfers)
                _note_disconnect(remote, name, exc)
                raise
            transfers += [(name, number) for number in numbers]
        return transfers

    def _retire(self, remote: _Remote) -> None:
        """No new reads from this peer; it is forgotten once its last read is released."""
        remote.accepting = False
        if remote.num_handles == 0:
            self._unload(remote)
            if self._remotes.get(remote.peer.name) is remote:
                del self._remotes[remote.peer.name]

    def _release_transfers(self, handle: _NixlHandle) -> None:
        assert self._agent is not None
        _release(self._agent, handle.transfers)
        handle.transfers.clear()


def _release(agent: NixlAgent, transfers: Sequence[_Transfer]) -> None:
    for name, number in transfers:
        agent.release(name, [number])


def _without_frames(error: TransferError) -> TransferError:
    """To be kept: a traceback keeps the handle that the error is kept in, among other things."""
    return TransferError(error.message, code=error.code)


def _note_disconnect(remote: _Remote, name: str, error: TransferError) -> None:
    """NIXL has forgotten an agent that disconnected: its peer must be added again."""
    if error.code == TransferCode.PEER_DISCONNECTED:
        remote.loaded.discard(name)
