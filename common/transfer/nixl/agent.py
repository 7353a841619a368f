"""One NIXL agent: the third-party calls of this package, with their errors translated.

Life: create (its threads start), ``register``, any number of peers and transfers, ``close``, which ends it together
with whatever it still has in flight, or says that it lives on. NIXL facts this file is built on (1.5.1):

- An agent ends with the last reference to NIXL's object. A name in a frame is one, and an error that somebody keeps
  keeps the frames that it went through: so nothing here puts that object into a name, there is one ``SoleReference``.
- A disconnect makes NIXL drop the peer's metadata, later posts raise "not found" until the metadata is loaded again. So
  does the status of the peer's other reads, unseen: their connection is the one that has failed. It says the same of
  reads whose peer we forgot ourselves, which do go on: a peer with reads in flight must not be forgotten.
- Releasing an unfinished transfer does not stop the bytes. Only a terminal status, or the end of the agent, does.
- A status of failure is the end of a read only if the connection has failed, which ends all that is on it. After other
  errors (a post that failed half way) what was posted before them may still arrive.
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

import logging
from collections.abc import Sequence
from typing import Any

from common.errors import TransferError
from common.transfer.codes import TransferCode
from common.transfer.nixl.bindings import load_bindings
from common.transfer.nixl.descriptors import by_memory, descriptor_rows, memory_kind
from common.transfer.reads import CheckedRead
from common.transfer.regions import Region
from common.transfer.sole_reference import SoleReference

logger = logging.getLogger(__name__)

PROGRESS_TIMEOUT_US = 10_000
"""Microseconds for which an idle progress thread sleeps at most; the module's opening has the measurements."""


def check_plugins(names: Sequence[str]) -> None:
    """That an agent with these plugins can be made, before anything slow. Raises as ``NixlAgent`` does."""
    nixl = load_bindings()
    _check_plugins(nixl.nixlAgent("check", nixl.nixlAgentConfig()).getAvailPlugins(), names)


def _check_plugins(available: Sequence[str], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in available]
    if missing or not names:
        raise TransferError(
            f"--nixl-backends {' '.join(names)}: NIXL has no {missing}, only {sorted(available)}",
            param="nixl_backends",
            code=TransferCode.BACKEND_UNAVAILABLE,
        )


class UnknownEndError(TransferError):
    """A transfer has failed, but what it posted before that may still arrive, until the agent is gone."""


class NixlAgent:
    """Peers are known by name, transfers by the numbers that NIXL gives them.

    Every error raised here is a ``TransferError``; ``peer_disconnected`` means that NIXL has forgotten the peer, which
    must be loaded again.
    """

    def __init__(self, nixl: Any, name: str, plugins: Sequence[str]) -> None:
        """``nixl``: the bindings module; ``plugins``: what ``--nixl-backends`` names.

        Raises:
            TransferError: ``backend_unavailable`` when a plugin is not there or does not start.
        """
        self._nixl = nixl
        self._ended_errors = (nixl.nixlRemoteDisconnectError, nixl.nixlNotFoundError, nixl.nixlNotPostedError)
        try:
            config = nixl.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = PROGRESS_TIMEOUT_US
            config.useListenThread = False
            config.captureTelemetry = False
            # Peers are added and removed from other threads than the one that posts and polls.
            config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
            self._agent = SoleReference(nixl.nixlAgent(name, config))
            _check_plugins(self._agent.value.getAvailPlugins(), plugins)
            for plugin in plugins:
                self._agent.value.createBackend(plugin, {})
        except TransferError:
            raise
        except Exception as exc:
            raise TransferError(
                f"NIXL agent with backends {list(plugins)} did not start: {exc}", code=TransferCode.BACKEND_UNAVAILABLE
            ) from exc

    def check_sole(self) -> None:
        """That nobody else holds NIXL's object, so that ``close`` will end it.

        Raises:
            TransferError: ``agent_alive``, naming who does.
        """
        if self._agent.is_shared():
            raise TransferError(
                f"the transfer agent would live on, it is held by {self._agent.holders()}",
                code=TransferCode.AGENT_ALIVE,
            )

    def close(self) -> None:
        """When it returns, the agent has ended, and nothing that it had in flight is written any more. Its transfers
        are released before: what they cost would outlive it.

        Raises:
            TransferError: ``agent_alive``: it lives on and may write.
        """
        if not self._agent.drop():
            raise TransferError("the transfer agent lives on after its end", code=TransferCode.AGENT_ALIVE)

    def register(self, regions: Sequence[Region]) -> None:
        """All or nothing. Raises TransferError (``registration_failed``)."""
        entries: dict[str, list[tuple[int, int, int, str]]] = {}
        for region in regions:
            memory, device_id = memory_kind(region.device)
            entries.setdefault(memory, []).append((region.address, region.num_bytes, device_id, region.name))
        registered: list[Any] = []
        try:
            for memory, rows in entries.items():
                descriptors = self._nixl.nixlRegDList(getattr(self._nixl, memory), rows)
                self._agent.value.registerMem(descriptors, [])
                registered.append(descriptors)
        except Exception as exc:
            for descriptors in registered:
                self._agent.value.deregisterMem(descriptors, [])
            sizes = {region.name: region.num_bytes for region in regions}
            raise TransferError(
                f"NIXL refused to register {sizes} (bytes): {exc}", code=TransferCode.REGISTRATION_FAILED
            ) from exc

    def metadata(self) -> bytes:
        """What another agent loads to read from this one."""
        try:
            blob: bytes = self._agent.value.getLocalMD()
        except Exception as exc:
            raise TransferError(f"NIXL gave no metadata: {exc}") from exc
        return blob

    def load_peer(self, name: str, blob: bytes) -> None:
        """Makes a peer known; ``bad_metadata`` when the blob is that of an agent with another name."""
        try:
            found = self._agent.value.loadRemoteMD(blob)
        except Exception as exc:
            raise self._translated(exc, name, "loading its metadata") from exc
        found = found.decode() if isinstance(found, bytes) else found
        if found != name:
            self._agent.value.invalidateRemoteMD(found)
            raise TransferError(
                f"peer announces the name {name!r}, its agent is {found!r}", code=TransferCode.BAD_METADATA
            )

    def forget_peer(self, name: str) -> None:
        """Not while reads from it are in flight."""
        try:
            self._agent.value.invalidateRemoteMD(name)
        except Exception as exc:
            # NIXL has dropped it already, on a disconnect that no read of ours has met.
            logger.debug("removing peer %s: %s", name, exc, exc_info=True)

    def create_transfers(self, peer: str, reads: Sequence[CheckedRead]) -> list[int]:
        """One transfer per pair of memory kinds; together they are the reads. Nothing moves yet: after an error none of
        them exists."""
        transfers: list[int] = []
        try:
            for (local_memory, remote_memory), group in by_memory(reads).items():
                transfers.append(
                    self._agent.value.createXferReq(
                        self._nixl.NIXL_READ,
                        self._nixl.nixlXferDList(getattr(self._nixl, local_memory), descriptor_rows(group, local=True)),
                        self._nixl.nixlXferDList(
                            getattr(self._nixl, remote_memory), descriptor_rows(group, local=False)
                        ),
                        peer,
                    )
                )
        except Exception as exc:
            self.release(peer, transfers)
            raise self._translated(exc, peer, "creating a read") from exc
        return transfers

    def post(self, peer: str, transfer: int) -> bool:
        """Whether it is done already. After an error part of it may be on its way: ``poll`` says when it no longer
        is."""
        try:
            return bool(self._agent.value.postXferReq(transfer) == self._nixl.NIXL_SUCCESS)
        except Exception as exc:
            raise self._translated(exc, peer, "posting a read") from exc

    def poll(self, peer: str, transfer: int) -> bool:
        """Whether it is done. After an error it is over, except after ``UnknownEndError``, which each later poll raises
        again."""
        try:
            state = self._agent.value.getXferStatus(transfer)
        except self._ended_errors as exc:
            raise self._translated(exc, peer, "reading") from exc
        except Exception as exc:
            raise UnknownEndError(f"reading, peer {peer}: {type(exc).__name__} {exc}") from exc
        if state not in (self._nixl.NIXL_IN_PROG, self._nixl.NIXL_SUCCESS):
            raise UnknownEndError(f"reading, peer {peer}: NIXL status {state}")
        return bool(state == self._nixl.NIXL_SUCCESS)

    def release(self, peer: str, transfers: Sequence[int]) -> None:
        for transfer in transfers:
            try:
                self._agent.value.releaseXferReq(transfer)
            except Exception as exc:
                logger.debug("releasing a read from %s: %s", peer, exc, exc_info=True)

    def _translated(self, exc: Exception, peer: str, doing: str) -> TransferError:
        is_disconnect = isinstance(exc, (self._nixl.nixlRemoteDisconnectError, self._nixl.nixlNotFoundError))
        return TransferError(
            f"{doing}, peer {peer}: {type(exc).__name__} {exc}",
            code=TransferCode.PEER_DISCONNECTED if is_disconnect else TransferCode.TRANSFER_FAILED,
        )
