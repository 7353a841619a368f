"""The contract of moving bytes between processes: one-sided READs of numbered units out of declared regions.

A *region* is a range of memory cut in units of one size: a pool of KV blocks, a pool of state slots, a table of
generations (16-byte units). A node registers its regions once, announces them as data (``metadata``), and reads units
of a peer's regions into its own. Reads only: nobody ever writes into another process's memory.

Life of a read: 1 ``post_read`` checks every id and size, merges neighbours and posts; 2 ``poll`` until the status is
terminal (``DONE`` or ``FAILED``); 3 ``release``. The destination units belong to the transfer from 1 until a terminal
status, or until ``close`` or ``recreate`` has destroyed the transport's agent; nothing else (a deadline, removing the
peer, dropping the handle) makes them safe to use again, because a frozen peer that wakes up may still deliver.

What was read is only *bytes from some time between post and done*. Whether they are the bytes that were promised is
decided by ``Puller``, which reads the holder's generations afterwards.
"""

from __future__ import annotations

import abc
import base64
import binascii
import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from common.errors import TransferError

# 2: generations are 16 bytes, with a content tag.
METADATA_VERSION = 2

PairArray = np.ndarray[Any, np.dtype[np.int64]]  # [num_pairs, 2]: local unit, remote unit
RunArray = np.ndarray[Any, np.dtype[np.int64]]  # [num_runs, 3]: first local unit, first remote unit, length


class TransferCode:
    """``TransferError.code`` values raised in this package; also the ``reason`` of a failed pull. A fixed set: they are
    metric labels."""

    BAD_METADATA = "bad_metadata"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    REGION_MISMATCH = "region_mismatch"
    UNKNOWN_REGION = "unknown_region"
    UNIT_OUT_OF_RANGE = "unit_out_of_range"
    UNKNOWN_PEER = "unknown_peer"
    PEER_DISCONNECTED = "peer_disconnected"
    REGISTRATION_FAILED = "registration_failed"
    BACKEND_UNAVAILABLE = "backend_unavailable"
    TRANSFER_FAILED = "transfer_failed"
    HANDLE_ACTIVE = "handle_active"
    AGENT_RECREATED = "agent_recreated"
    UNVERIFIED_PULL = "unverified_pull"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Region:
    """A range of local memory: ``num_units`` units of ``unit_bytes`` bytes from ``address`` on, contiguous.

    ``device`` is ``cpu`` or a device string such as ``cuda:0``. The memory must stay mapped until the backend is
    closed; the registering process owns it, and ``owner`` (any object) is kept alive as long as the backend knows the
    region. ``null_unit``: unit 0 is the null entry and is refused as a destination. ``exported``: announced to peers;
    scratch memory is not.

    Raises:
        TransferError: ``region_mismatch`` when a number cannot be right (named in the message).
    """

    name: str
    address: int
    num_units: int
    unit_bytes: int
    device: str = "cpu"
    null_unit: bool = False
    exported: bool = True
    owner: object = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for label, value in (("address", self.address), ("num_units", self.num_units), ("unit_bytes", self.unit_bytes)):
            if value <= 0:
                raise TransferError(
                    f"region {self.name!r}: {label} must be positive, got {value}", code=TransferCode.REGION_MISMATCH
                )

    @property
    def num_bytes(self) -> int:
        return self.num_units * self.unit_bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer whose metadata was accepted by ``add_peer``.

    ``name`` is unique per process start of the peer: a restarted peer is another ``Peer`` with the same ``engine_id``
    and another ``epoch``. ``regions``: what it announced; the addresses are the peer's.
    """

    name: str
    engine_id: str
    epoch: int
    regions: Mapping[str, Region] = field(hash=False, compare=False)


@dataclass(frozen=True, slots=True)
class PeerMetadata:
    """What one backend announces to others. JSON on the wire (never pickle); ``agent`` is the transport's own opaque
    blob.

    ``engine_id`` names the node, ``epoch`` its life (random, new with each start), ``fingerprint`` the layout of its
    pools: compared before anything else is used.
    """

    backend: str
    name: str
    engine_id: str
    epoch: int
    fingerprint: str
    agent: str
    regions: tuple[Region, ...]

    def to_bytes(self) -> bytes:
        """UTF-8 JSON."""
        regions = [
            {
                "name": region.name,
                "address": region.address,
                "num_units": region.num_units,
                "unit_bytes": region.unit_bytes,
                "num_bytes": region.num_bytes,
                "device": region.device,
            }
            for region in self.regions
        ]
        document = {
            "version": METADATA_VERSION,
            "backend": self.backend,
            "name": self.name,
            "engine_id": self.engine_id,
            "epoch": self.epoch,
            "fingerprint": self.fingerprint,
            "agent": self.agent,
            "regions": regions,
        }
        return json.dumps(document).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PeerMetadata:
        """Parse and check an announcement.

        Raises:
            TransferError: ``bad_metadata`` (not ours, another version, a field missing or of another type),
                ``region_mismatch`` (announced total bytes are not ``num_units * unit_bytes``, or a name twice).
        """
        try:
            document = json.loads(data)
        except ValueError as exc:
            raise TransferError(f"peer metadata is not JSON: {exc}", code=TransferCode.BAD_METADATA) from exc
        if not isinstance(document, dict):
            raise TransferError("peer metadata is not a JSON object", code=TransferCode.BAD_METADATA)
        version = _field(document, "version", int)
        if version != METADATA_VERSION:
            raise TransferError(
                f"peer metadata version {version}, this node speaks {METADATA_VERSION}", code=TransferCode.BAD_METADATA
            )
        regions = tuple(_region_from_json(entry) for entry in _field(document, "regions", list))
        names = [region.name for region in regions]
        if len(set(names)) != len(names):
            raise TransferError(f"peer announces a region twice: {names}", code=TransferCode.REGION_MISMATCH)
        return cls(
            backend=_field(document, "backend", str),
            name=_field(document, "name", str),
            engine_id=_field(document, "engine_id", str),
            epoch=_field(document, "epoch", int),
            fingerprint=_field(document, "fingerprint", str),
            agent=_field(document, "agent", str),
            regions=regions,
        )

    def agent_blob(self) -> bytes:
        """``agent``, decoded from base64.

        Raises:
            TransferError: ``bad_metadata``.
        """
        try:
            return base64.b64decode(self.agent, validate=True)
        except binascii.Error as exc:
            raise TransferError(
                f"peer {self.engine_id}: agent metadata is not base64", code=TransferCode.BAD_METADATA
            ) from exc


def _field(document: Mapping[str, Any], name: str, kind: type) -> Any:
    value = document.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TransferError(
            f"peer metadata: {name} must be {kind.__name__}, got {type(value).__name__}",
            code=TransferCode.BAD_METADATA,
        )
    return value


def _region_from_json(entry: Any) -> Region:
    if not isinstance(entry, dict):
        raise TransferError("peer metadata: a region must be an object", code=TransferCode.BAD_METADATA)
    region = Region(
        name=_field(entry, "name", str),
        address=_field(entry, "address", int),
        num_units=_field(entry, "num_units", int),
        unit_bytes=_field(entry, "unit_bytes", int),
        device=_field(entry, "device", str),
    )
    num_bytes = _field(entry, "num_bytes", int)
    if num_bytes != region.num_bytes:
        raise TransferError(
            f"peer region {region.name!r}: announced {num_bytes} bytes, but {region.num_units} units of "
            f"{region.unit_bytes} bytes are {region.num_bytes}",
            code=TransferCode.REGION_MISMATCH,
        )
    return region


@dataclass(frozen=True, slots=True)
class Read:
    """Units to copy from a peer's region into a local one: ``pairs`` of (local unit, remote unit), in any order."""

    local_region: str
    remote_region: str
    pairs: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CheckedRead:
    """A ``Read`` whose regions and ids were found good, merged: each run is one descriptor."""

    local: Region
    remote: Region
    runs: RunArray

    @property
    def num_bytes(self) -> int:
        return int(self.runs[:, 2].sum()) * self.local.unit_bytes


class ReadStatus(enum.Enum):
    """State of a posted read. ``DONE`` and ``FAILED`` are terminal: the transfer will not touch the destination
    again."""

    IN_PROGRESS = "in_progress"
    DONE = "done"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self is not ReadStatus.IN_PROGRESS


class Handle:
    """One posted read. Owned by whoever posted it, until ``release``.

    Attributes:
        peer: the source.
        num_bytes: payload.
        num_descriptors: after merging.
        status: as of the last poll.
        error: why it failed; set once ``status`` is ``FAILED`` (may be known a little earlier, never trust the
            destination before the status says so).
    """

    __slots__ = ("error", "num_bytes", "num_descriptors", "peer", "status")

    def __init__(self, peer: Peer, reads: Sequence[CheckedRead]) -> None:
        self.peer = peer
        self.num_bytes = sum(read.num_bytes for read in reads)
        self.num_descriptors = sum(len(read.runs) for read in reads)
        self.status = ReadStatus.IN_PROGRESS
        self.error: TransferError | None = None


def merge_pairs(pairs: PairArray) -> RunArray:
    """Runs [num_runs, 3] of (first local unit, first remote unit, length) that cover ``pairs`` [num_pairs, 2], by
    ascending remote unit.

    Two pairs join when they are consecutive on both sides, whatever order they came in.
    """
    if len(pairs) == 0:
        return np.empty((0, 3), dtype=np.int64)
    ordered = pairs[np.argsort(pairs[:, 1], kind="stable")]
    starts = np.flatnonzero(np.concatenate(([True], (np.diff(ordered, axis=0) != 1).any(axis=1))))
    runs = np.empty((len(starts), 3), dtype=np.int64)
    runs[:, :2] = ordered[starts]
    runs[:, 2] = np.diff(starts, append=len(ordered))
    return runs


class TransferBackend(abc.ABC):
    """Moves bytes for one process. Life: create, ``register``, ``metadata``, any number of peers and reads, ``close``.

    Threads: ``register``, ``metadata``, ``add_peer``, ``remove_peer`` may be called from any thread, also while another
    thread posts and polls; ``post_read``, ``poll``, ``release`` and ``recreate`` belong to one thread at a time (the
    puller's). No call waits for a peer, except that ``add_peer`` may take milliseconds, and every call waits for a
    ``recreate`` that runs (do not call them on an event loop).

    Every method raises ``TransferError`` with code ``closed`` after ``close``. Nothing here raises a third-party error.
    """

    kind: str

    def __init__(self, *, engine_id: str, epoch: int, fingerprint: str = "") -> None:
        """``epoch``: this process's random life number, the value of entry 0 of its generation tables."""
        self.engine_id = engine_id
        self.epoch = epoch
        self.fingerprint = fingerprint

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
        """This process's announcement for ``add_peer`` elsewhere: ``PeerMetadata`` as UTF-8 JSON. Another one after
        ``recreate``."""

    @abc.abstractmethod
    def add_peer(self, metadata: bytes) -> Peer:
        """Accept a peer's announcement, so that its regions can be read.

        Adding the same announcement again returns the same ``Peer``, and revives it when it was disconnected or
        removed. A new life of a known ``engine_id`` supersedes the old one: reads in flight end as they will, new ones
        from the old ``Peer`` are refused.

        Raises:
            TransferError: ``bad_metadata``, ``fingerprint_mismatch``, ``region_mismatch`` (a region that both sides
            have
                differs in ``unit_bytes``; both values are in the message), ``transfer_failed`` (refused by the
                transport). The set of peers is unchanged then.
        """

    @abc.abstractmethod
    def remove_peer(self, peer: Peer) -> None:
        """Forget a peer; unknown ones are fine. Reads in flight stay in flight and must still be polled."""

    @abc.abstractmethod
    def post_read(self, peer: Peer, reads: Sequence[Read]) -> Handle:
        """Start copying; does not wait. Everything in ``reads`` is one transfer with one outcome.

        The destination units belong to the transfer from here until ``poll`` says a terminal status.

        Raises:
            TransferError: nothing was posted and the destination is untouched. ``unknown_peer`` (never added, removed
            or
                superseded), ``unknown_region``, ``region_mismatch``, ``unit_out_of_range`` (an id outside of either
                region, the null unit as destination, a destination named twice), ``peer_disconnected``,
                ``transfer_failed``.
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
        returns (or raises) their destinations are never written again. All peers have to be added again. Peers that
        read from here get ``peer_disconnected`` and have to fetch ``metadata`` anew.

        Raises:
            TransferError: ``backend_unavailable`` or ``registration_failed``: there is no agent now; what needs one
                raises ``backend_unavailable`` until another call succeeds.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Destroy the transport's agent, reads in flight included; idempotent.

        When it returns, no destination is written any more: memory of reads that never became terminal may be reused.
        Must not run while another thread is inside a call.
        """

    # Shared by the implementations.

    def _check_announcement(self, metadata: PeerMetadata) -> None:
        """Raise unless ``metadata`` describes pools that this process can read into."""
        if metadata.backend != self.kind:
            raise TransferError(
                f"peer {metadata.engine_id} moves bytes with {metadata.backend!r}, this node with {self.kind!r}",
                code=TransferCode.BAD_METADATA,
            )
        if metadata.fingerprint != self.fingerprint:
            raise TransferError(
                f"peer {metadata.engine_id} has layout fingerprint {metadata.fingerprint!r}, "
                f"this node {self.fingerprint!r}",
                code=TransferCode.FINGERPRINT_MISMATCH,
            )
        for remote in metadata.regions:
            local = self.regions.get(remote.name)
            if local is not None:
                _check_unit_bytes(metadata.engine_id, local, remote)

    def _checked(self, peer: Peer, reads: Sequence[Read]) -> list[CheckedRead]:
        """Check ``reads`` against both sides' regions, then merge. Raises as ``post_read``."""
        checked: list[CheckedRead] = []
        for read in reads:
            local = self.regions.get(read.local_region)
            remote = peer.regions.get(read.remote_region)
            if local is None or remote is None:
                side, name, known = (
                    ("local", read.local_region, self.regions)
                    if local is None
                    else (f"peer {peer.engine_id}'s", read.remote_region, peer.regions)
                )
                raise TransferError(
                    f"no {side} region {name!r}, known: {sorted(known)}", code=TransferCode.UNKNOWN_REGION
                )
            _check_unit_bytes(peer.engine_id, local, remote)
            pairs = _pair_array(local, read.pairs)
            _check_units(local, remote, pairs)
            if len(pairs):
                checked.append(CheckedRead(local, remote, merge_pairs(pairs)))
        return checked


def _check_unit_bytes(engine_id: str, local: Region, remote: Region) -> None:
    if local.unit_bytes != remote.unit_bytes:
        raise TransferError(
            f"region {remote.name!r} of peer {engine_id} has {remote.unit_bytes} bytes per unit, "
            f"local region {local.name!r} has {local.unit_bytes}",
            code=TransferCode.REGION_MISMATCH,
        )


def _pair_array(local: Region, pairs: Sequence[tuple[int, int]]) -> PairArray:
    """As an array: checking, sorting and merging 16,384 pairs takes 3 ms, item by item it were 20."""
    try:
        return np.fromiter(chain.from_iterable(pairs), np.int64, 2 * len(pairs)).reshape(-1, 2)
    except (OverflowError, TypeError, ValueError) as exc:
        raise TransferError(
            f"region {local.name!r}: unit numbers that are no numbers of units: {exc}",
            code=TransferCode.UNIT_OUT_OF_RANGE,
        ) from exc


def _check_units(local: Region, remote: Region, pairs: PairArray) -> None:
    first_local = 1 if local.null_unit else 0
    for side, column, first, region in (("local", 0, first_local, local), ("remote", 1, 0, remote)):
        units = pairs[:, column]
        wrong = units[(units < first) | (units >= region.num_units)]
        if len(wrong):
            raise TransferError(
                f"{side} unit {wrong[0]} is outside of [{first}, {region.num_units}) of region {region.name!r}",
                code=TransferCode.UNIT_OUT_OF_RANGE,
            )
    if not np.diff(np.sort(pairs[:, 0])).all():
        raise TransferError(
            f"region {local.name!r}: a local unit is the destination of two remote units",
            code=TransferCode.UNIT_OUT_OF_RANGE,
        )
