"""READs over NIXL: UCX by default (shared memory, TCP or RDMA, whatever ``UCX_TLS`` and UCX itself choose).

One NIXL agent per backend, under a name that is new with each process start: metadata of an earlier life can never be
taken for this one's. NIXL facts this file is built on (1.5.1):

- A disconnect makes NIXL drop the peer's metadata, later posts raise "not found" until the metadata is loaded again.
- Releasing an unfinished transfer does not stop the bytes. Only a terminal status, or the end of the agent, does.
- Its Python class starts the progress thread with a poll timeout of 0: a core at 100 % per idle agent (measured), and
  reads at half speed where cores are few. The bindings below that class take a timeout, so they are used directly; with
  10 ms an idle agent costs 0.5 % and a 16 KiB read still takes 0.03 ms (shared memory), because traffic wakes the
  thread.
- A holder answers reads over TCP from its progress thread; without one it answers nothing.
- UCX emulates READs over TCP, and may end the *holder's* process (SIGABRT "unexpected error: Endpoint timeout", or a
  SIGSEGV) when a reader goes away while large answers to it are half sent: a frozen holder that wakes up after its
  reader made itself a new agent (2 of 3 runs), a healthy one whose reader is killed in mid-read (4 of 26 kills within
  reads of 96 MiB) or makes itself a new agent (1 of 12). No setting of UCX was found that avoids it; a supervisor has
  to start the node again. Over shared memory nothing is answered, so nothing breaks.
- Over shared memory the copy happens inside the post, with the GIL released and the lock of UCX's worker held, for
  which the progress thread spins: what else a copy would have to wait for is done before (``FreshPages``).
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from common.errors import TransferError
from common.transfer.backend import TransferBackend
from common.transfer.codes import TransferCode
from common.transfer.nixl.bindings import load_bindings
from common.transfer.nixl.descriptors import by_memory, descriptor_rows, memory_kind
from common.transfer.nixl.fresh_pages import FreshPages
from common.transfer.reads import CheckedRead, Handle, Read, ReadStatus
from common.transfer.regions import Peer, PeerMetadata, Region

logger = logging.getLogger(__name__)

PROGRESS_TIMEOUT_US = 10_000


class _NixlHandle(Handle):
    """One NIXL transfer per pair of memory kinds; together they are one read."""

    __slots__ = ("pending", "remote", "transfers")

    def __init__(self, remote: _Remote, reads: Sequence[CheckedRead]) -> None:
        super().__init__(remote.peer, reads)
        self.remote = remote
        self.transfers: list[int] = []
        self.pending: list[int] = []


@dataclass(slots=True, eq=False)
class _Remote:
    """A peer's place in the agent. ``loaded``: NIXL has its metadata. ``accepting``: new reads are allowed.
    ``num_handles``: unreleased reads; the metadata is not taken away under them."""

    peer: Peer
    blob: bytes
    loaded: bool = True
    accepting: bool = True
    num_handles: int = 0


def check_plugins(names: Sequence[str]) -> None:
    """That a ``NixlBackend`` of these ``backends`` can be made, before anything slow. Raises as it does."""
    nixl = load_bindings()
    _check_plugins(nixl.nixlAgent("check", nixl.nixlAgentConfig()), names)


def _check_plugins(agent: Any, names: Sequence[str]) -> None:
    available = agent.getAvailPlugins()
    missing = [name for name in names if name not in available]
    if missing or not names:
        raise TransferError(
            f"--nixl-backends {' '.join(names)}: NIXL has no {missing}, only {sorted(available)}",
            param="nixl_backends",
            code=TransferCode.BACKEND_UNAVAILABLE,
        )


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
        backends: Sequence[str] = ("UCX",),
        bindings: Any = None,
    ) -> None:
        """Create the agent and its threads. ``bindings``: what ``load_bindings`` returned (default: call it).

        Raises:
            TransferError: ``backend_unavailable`` when NIXL or one of ``backends`` is not there or does not start.
        """
        super().__init__(engine_id=engine_id, epoch=epoch, fingerprint=fingerprint)
        self._nixl = load_bindings() if bindings is None else bindings
        # NIXL's own errors have no common base; the bindings raise the built-in ones for arguments they cannot convert.
        self._errors: tuple[type[Exception], ...] = (
            RuntimeError,
            TypeError,
            ValueError,
            *(kind for kind in vars(self._nixl).values() if isinstance(kind, type) and issubclass(kind, Exception)),
        )
        self._backends = list(backends)
        self._name = self._new_name()
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._fresh: dict[str, FreshPages] = {}
        self._remotes: dict[str, _Remote] = {}
        self._handles: set[_NixlHandle] = set()
        self._closed = False
        # What ``metadata`` returned, as long as it holds: a peer that shakes hands need not wait for a post, which over
        # shared memory lasts as long as the whole copy.
        self._announced: bytes | None = None
        self._agent: Any = self._create_agent()

    def _new_name(self) -> str:
        return f"{self.engine_id}-{secrets.token_hex(8)}"

    def _create_agent(self) -> Any:
        nixl, backends = self._nixl, self._backends
        try:
            config = nixl.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = PROGRESS_TIMEOUT_US
            config.useListenThread = False
            config.captureTelemetry = False
            # Peers are added and removed from other threads than the one that posts and polls.
            config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
            agent = nixl.nixlAgent(self._name, config)
            _check_plugins(agent, backends)
            for name in backends:
                agent.createBackend(name, {})
        except TransferError:
            raise
        except self._errors as exc:
            raise TransferError(
                f"NIXL agent with backends {backends} did not start: {exc}", code=TransferCode.BACKEND_UNAVAILABLE
            ) from exc
        return agent

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
            self._register_with(agent, regions)
            self._regions.update({region.name: region for region in regions})
            self._fresh.update({region.name: FreshPages(region) for region in regions if region.device == "cpu"})
            self._announced = None

    def metadata(self) -> bytes:
        announced = self._announced
        if announced is not None:
            return announced
        with self._lock:
            try:
                blob = self._open_agent().getLocalMD()
            except TransferError:
                raise
            except self._errors as exc:
                raise TransferError(f"NIXL gave no metadata: {exc}") from exc
            self._announced = PeerMetadata(
                backend=self.kind,
                name=self._name,
                engine_id=self.engine_id,
                epoch=self.epoch,
                fingerprint=self.fingerprint,
                agent=base64.b64encode(blob).decode(),
                regions=tuple(region for region in self._regions.values() if region.exported),
            ).to_bytes()
            return self._announced

    def add_peer(self, metadata: bytes) -> Peer:
        announced = PeerMetadata.from_bytes(metadata)
        with self._lock:
            self._open_agent()
            self._check_announcement(announced)
            blob = announced.agent_blob()
            remote = self._remotes.get(announced.name)
            if remote is None or remote.blob != blob:
                peer = Peer(
                    name=announced.name,
                    engine_id=announced.engine_id,
                    epoch=announced.epoch,
                    regions=MappingProxyType({region.name: region for region in announced.regions}),
                )
                if remote is not None:
                    self._unload(remote)
                remote = _Remote(peer, blob)
                self._load(remote)
                self._remotes[peer.name] = remote
            elif not remote.loaded:
                self._load(remote)
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
            if not remote.loaded:
                raise TransferError(
                    f"peer {peer.name} disconnected and was not added again", code=TransferCode.PEER_DISCONNECTED
                )
            checked = self._checked(remote.peer, reads)
            for read in checked:
                if read.local.name in self._fresh:
                    self._fresh[read.local.name].touch(read.runs)
            handle = _NixlHandle(remote, checked)
            # All transfers are created before the first is posted, so that an error raised from here means: nothing
            # moves.
            try:
                for (local_memory, remote_memory), group in by_memory(checked).items():
                    handle.transfers.append(
                        agent.createXferReq(
                            self._nixl.NIXL_READ,
                            self._nixl.nixlXferDList(
                                getattr(self._nixl, local_memory), descriptor_rows(group, local=True)
                            ),
                            self._nixl.nixlXferDList(
                                getattr(self._nixl, remote_memory), descriptor_rows(group, local=False)
                            ),
                            peer.name,
                        )
                    )
            except self._errors as exc:
                self._release_transfers(handle)
                raise self._translate(exc, remote, "creating a read") from exc
            remote.num_handles += 1
            self._handles.add(handle)
            for transfer in handle.transfers:
                try:
                    if agent.postXferReq(transfer) != self._nixl.NIXL_SUCCESS:
                        handle.pending.append(transfer)
                except self._errors as exc:
                    # Part of it may be on its way: the status says when it no longer is.
                    handle.error = self._translate(exc, remote, "posting a read", cause=exc)
                    handle.pending.append(transfer)
                    break
            return handle

    def poll(self, handle: Handle) -> ReadStatus:
        assert isinstance(handle, _NixlHandle)
        self._check_open()
        if handle.status.is_terminal:
            return handle.status
        agent = self._open_agent()
        still_pending: list[int] = []
        for transfer in handle.pending:
            try:
                state = agent.getXferStatus(transfer)
            except self._errors as exc:
                if handle.error is None:
                    handle.error = self._translate(exc, handle.remote, "reading", cause=exc)
                continue
            if state == self._nixl.NIXL_IN_PROG:
                still_pending.append(transfer)
            elif state != self._nixl.NIXL_SUCCESS and handle.error is None:
                handle.error = TransferError(f"reading, peer {handle.peer.name}: NIXL status {state}")
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
            agent = self._create_agent()
            self._register_with(agent, list(self._regions.values()))
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
            self._closed = True
            self._destroy_agent()

    # Below: callers hold the lock.

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError(f"transfer backend of {self.engine_id} is closed", code=TransferCode.CLOSED)

    def _open_agent(self) -> Any:
        self._check_open()
        if self._agent is None:
            raise TransferError(
                f"transfer backend of {self.engine_id} has no agent: recreating it failed",
                code=TransferCode.BACKEND_UNAVAILABLE,
            )
        return self._agent

    def _destroy_agent(self) -> None:
        if self._agent is None:
            return
        for handle in self._handles:
            self._release_transfers(handle)
        self._announced = None
        # The last reference: the agent ends here, and with it whatever it still had in flight.
        self._agent = None
        for handle in self._handles:
            if not handle.status.is_terminal:
                handle.error = TransferError(
                    f"the agent that read from {handle.peer.name} ended", code=TransferCode.AGENT_RECREATED
                )
                handle.status = ReadStatus.FAILED
        self._handles.clear()
        self._remotes.clear()

    def _register_with(self, agent: Any, regions: Sequence[Region]) -> None:
        entries: dict[str, list[tuple[int, int, int, str]]] = {}
        for region in regions:
            memory, device_id = memory_kind(region.device)
            entries.setdefault(memory, []).append((region.address, region.num_bytes, device_id, region.name))
        registered: list[Any] = []
        try:
            for memory, rows in entries.items():
                descriptors = self._nixl.nixlRegDList(getattr(self._nixl, memory), rows)
                agent.registerMem(descriptors, [])
                registered.append(descriptors)
        except self._errors as exc:
            for descriptors in registered:
                agent.deregisterMem(descriptors, [])
            sizes = {region.name: region.num_bytes for region in regions}
            raise TransferError(
                f"NIXL refused to register {sizes} (bytes): {exc}", code=TransferCode.REGISTRATION_FAILED
            ) from exc

    def _load(self, remote: _Remote) -> None:
        try:
            name = self._agent.loadRemoteMD(remote.blob)
        except self._errors as exc:
            raise self._translate(exc, remote, "loading its metadata") from exc
        name = name.decode() if isinstance(name, bytes) else name
        if name != remote.peer.name:
            self._agent.invalidateRemoteMD(name)
            raise TransferError(
                f"peer announces the name {remote.peer.name!r}, its agent is {name!r}", code=TransferCode.BAD_METADATA
            )
        remote.loaded = True

    def _unload(self, remote: _Remote) -> None:
        if remote.loaded:
            remote.loaded = False
            try:
                self._agent.invalidateRemoteMD(remote.peer.name)
            except self._errors as exc:
                # NIXL has dropped it already, on a disconnect that no read of ours has met.
                logger.debug("removing peer %s: %s", remote.peer.name, exc)

    def _retire(self, remote: _Remote) -> None:
        remote.accepting = False
        if remote.num_handles == 0:
            self._unload(remote)
            if self._remotes.get(remote.peer.name) is remote:
                del self._remotes[remote.peer.name]

    def _release_transfers(self, handle: _NixlHandle) -> None:
        for transfer in handle.transfers:
            try:
                self._agent.releaseXferReq(transfer)
            except self._errors as exc:
                logger.debug("releasing a read from %s: %s", handle.peer.name, exc)
        handle.transfers.clear()
        handle.pending.clear()

    def _translate(
        self, exc: Exception, remote: _Remote, doing: str, *, cause: Exception | None = None
    ) -> TransferError:
        """Ours for NIXL's. ``cause``: for errors that are kept instead of raised."""
        nixl = self._nixl
        code = TransferCode.TRANSFER_FAILED
        if isinstance(exc, (nixl.nixlRemoteDisconnectError, nixl.nixlNotFoundError)):
            # NIXL has forgotten the peer: it must be added again.
            remote.loaded = False
            code = TransferCode.PEER_DISCONNECTED
        error = TransferError(f"{doing}, peer {remote.peer.name}: {type(exc).__name__} {exc}", code=code)
        error.__cause__ = cause
        return error
