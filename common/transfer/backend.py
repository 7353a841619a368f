"""The contract of moving bytes between processes: one-sided READs of numbered units out of declared regions.

A *region* is a range of memory cut in units of one size: a pool of KV blocks, a pool of state slots, a table of
generations (16-byte units). A node registers its regions once, announces them as data (``metadata``), and reads units
of a peer's regions into its own. Reads only: nobody ever writes into another process's memory.

Life of a read: 1 ``post_read`` checks every id and size, merges neighbours and posts; 2 ``poll`` until the status is
terminal (``DONE`` or ``FAILED``); 3 ``release``. The destination units belong to the transfer from 1 until a terminal
status, or until ``close`` or ``recreate`` has destroyed the transport's agent; nothing else (a deadline, removing the
peer, dropping the handle) makes them safe to use again, because a frozen peer that wakes up may still deliver.

What was read is only *bytes from some time between post and done*. Whether they are what the holder's manifest promised
is decided by ``Puller``, which reads the holder's generations afterwards.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from itertools import chain

from common.errors import LayoutMismatchError, TransferError
from common.transfer.announcement import PeerMetadata
from common.transfer.codes import TransferCode
from common.transfer.reads import Handle, Read, ReadStatus, check_memory_kind, check_unit_bytes
from common.transfer.regions import Peer, PoolLayout, Region


class TransferBackend(abc.ABC):
    """Moves bytes for one process. Life: create, ``register``, ``metadata``, any number of peers and reads, ``close``.

    Threads: ``register``, ``metadata``, ``add_peer``, ``remove_peer`` may be called from any thread, also while another
    thread posts and polls; ``post_read``, ``poll``, ``release`` and ``recreate`` belong to one thread at a time (the
    puller's). No call waits for a peer, except that ``add_peer`` may take milliseconds, and every call waits for a
    ``recreate`` that runs (do not call them on an event loop).

    Every method raises ``TransferError`` with code ``closed`` after ``close``. Nothing here raises a third-party error.
    """

    kind: str

    def __init__(self, *, engine_id: str, epoch: int, fingerprint: str = "", layout: PoolLayout | None = None) -> None:
        """``epoch``: this process's random life number, the value of entry 0 of its generation tables. ``layout``: of
        its pools; None: nothing is announced or compared but sizes."""
        self.engine_id = engine_id
        self.epoch = epoch
        self.fingerprint = fingerprint
        self.layout = layout

    @property
    @abc.abstractmethod
    def regions(self) -> Mapping[str, Region]:
        """Registered regions by name."""

    @abc.abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Make local memory readable by peers and usable as a destination. All or nothing.

        Exported regions have to be registered before ``metadata`` is handed out: a peer never learns of later ones.

        Raises:
            TransferError: ``registration_failed`` (name taken, unknown device, refused by the transport).
        """

    @abc.abstractmethod
    def metadata(self) -> bytes:
        """This process's announcement for ``add_peer`` elsewhere: ``PeerMetadata`` of one rank as UTF-8 JSON, which a
        node of several joins with the others'. Another one after ``recreate``."""

    @abc.abstractmethod
    def add_peer(self, metadata: bytes) -> Peer:
        """Accept a peer's announcement, so that its regions can be read: those of all its ranks, or none.

        Adding the same announcement again returns the same ``Peer``, and revives it when it was disconnected or
        removed. A new life of a known ``engine_id`` supersedes the old one: reads in flight end as they will, new ones
        from the old ``Peer`` are refused. What ends one rank of a peer, such as a disconnect, ends the peer.

        Raises:
            TransferError: ``bad_metadata``, ``layout_mismatch``, ``fingerprint_mismatch``, ``region_mismatch`` (a
                region's ``unit_bytes`` are not those of its layout, or it is in another kind of memory than the local
                one of its name; both values are in the message),
                ``transfer_failed`` (refused by the transport). The set of peers is unchanged then.
        """

    @abc.abstractmethod
    def remove_peer(self, peer: Peer) -> None:
        """Forget a peer; unknown ones are fine. Reads in flight stay in flight and must still be polled."""

    @abc.abstractmethod
    def post_read(self, peer: Peer, reads: Sequence[Read]) -> Handle:
        """Start copying; does not wait. Everything in ``reads`` is one transfer with one outcome, whichever ranks of
        the peer it is from: terminal once nothing comes from any of them.

        The destination units belong to the transfer from here until ``poll`` says a terminal status.

        Raises:
            TransferError: nothing was posted and the destination is untouched. ``unknown_peer`` (never added, removed
                or superseded), ``unknown_region``, ``region_mismatch``, ``unit_out_of_range`` (an id outside of either
                region, a piece outside of either unit, the null unit as destination, a destination named twice),
                ``peer_disconnected``, ``transfer_failed``.
        """

    @abc.abstractmethod
    def poll(self, handle: Handle) -> ReadStatus:
        """Status now; never blocks. ``FAILED`` leaves the reason in ``handle.error``; terminal statuses are final.

        Raises:
            TransferError: only ``closed``.
        """

    @abc.abstractmethod
    def release(self, handle: Handle) -> None:
        """Give back the transport's resources of a terminal handle. Releasing twice is fine.

        Raises:
            TransferError: ``handle_active`` when the last polled status is not terminal; nothing happened.
        """

    @abc.abstractmethod
    def recreate(self) -> None:
        """Destroy the transport's agent and make a new one, under a new name, with the same regions.

        Reads in flight end: their handles are ``FAILED`` with code ``agent_recreated`` from here on, and when this
        returns their destinations are never written again. All peers have to be added again. Peers that read from here
        get ``peer_disconnected`` and have to fetch ``metadata`` anew.

        Raises:
            TransferError: ``agent_alive``: the old agent could not be proven dead, because something holds it. No read
                has ended by this, peers stay; call again later. ``backend_unavailable`` or ``registration_failed``:
                every read has ended, there is no agent now; what needs one raises ``backend_unavailable`` until
                another call succeeds.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Destroy the transport's agent, reads in flight included; idempotent.

        When it returns, no destination is written any more: memory of reads that never became terminal may be reused.
        Must not run while another thread is inside a call.

        Raises:
            TransferError: ``agent_alive``, as ``recreate``; nothing is closed.
        """

    def _check_announcement(self, metadata: PeerMetadata) -> None:
        """For implementations: raises unless ``metadata`` describes pools that this process can read into."""
        if metadata.backend != self.kind:
            raise TransferError(
                f"peer {metadata.engine_id} moves bytes with {metadata.backend!r}, this node with {self.kind!r}",
                code=TransferCode.BAD_METADATA,
            )
        # Before the fingerprint, which a layout is part of: it would only say that something differs.
        unit_bytes = {} if self.layout is None else self._check_layout(self.layout, metadata)
        if metadata.fingerprint != self.fingerprint:
            raise TransferError(
                f"peer {metadata.engine_id} has layout fingerprint {metadata.fingerprint!r}, "
                f"this node {self.fingerprint!r}",
                code=TransferCode.FINGERPRINT_MISMATCH,
            )
        for remote in chain.from_iterable(rank.regions for rank in metadata.ranks):
            local = self.regions.get(remote.name)
            if local is not None:
                check_unit_bytes(metadata.engine_id, local, remote, unit_bytes.get(remote.name))
                check_memory_kind(metadata.engine_id, local, remote)

    def _check_layout(self, layout: PoolLayout, metadata: PeerMetadata) -> Mapping[str, int]:
        try:
            num_ranks = layout.num_ranks(metadata.layout)
            if num_ranks != len(metadata.ranks):
                raise LayoutMismatchError(f"it announces {len(metadata.ranks)} ranks, its layout has {num_ranks}")
            return layout.check(metadata.layout)
        except LayoutMismatchError as exc:
            raise LayoutMismatchError(f"peer {metadata.engine_id}: {exc.message}") from exc
