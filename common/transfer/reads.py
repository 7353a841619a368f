"""Reads: what is asked for, whether it can be right, how many descriptors it takes, and the handle of one that was
posted."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from common.errors import TransferError
from common.transfer.codes import TransferCode
from common.transfer.regions import Peer, Region

PairArray = np.ndarray[Any, np.dtype[np.int64]]  # [num_pairs, 2]: local unit, remote unit
RunArray = np.ndarray[Any, np.dtype[np.int64]]  # [num_runs, 3]: first local unit, first remote unit, length


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


def check_reads(regions: Mapping[str, Region], peer: Peer, reads: Sequence[Read]) -> list[CheckedRead]:
    """Check ``reads`` from ``peer`` against its regions and the local ``regions``, then merge.

    Raises:
        TransferError: as ``TransferBackend.post_read``.
    """
    checked: list[CheckedRead] = []
    for read in reads:
        local = regions.get(read.local_region)
        remote = peer.regions.get(read.remote_region)
        if local is None or remote is None:
            side, name, known = (
                ("local", read.local_region, regions)
                if local is None
                else (f"peer {peer.engine_id}'s", read.remote_region, peer.regions)
            )
            raise TransferError(f"no {side} region {name!r}, known: {sorted(known)}", code=TransferCode.UNKNOWN_REGION)
        check_unit_bytes(peer.engine_id, local, remote)
        pairs = _pair_array(local, read.pairs)
        _check_units(local, remote, pairs)
        if len(pairs):
            checked.append(CheckedRead(local, remote, merge_pairs(pairs)))
    return checked


def check_unit_bytes(engine_id: str, local: Region, remote: Region) -> None:
    """Raises TransferError (``region_mismatch``, with both values) unless a unit is as large on both sides."""
    if local.unit_bytes != remote.unit_bytes:
        raise TransferError(
            f"region {remote.name!r} of peer {engine_id} has {remote.unit_bytes} bytes per unit, "
            f"local region {local.name!r} has {local.unit_bytes}",
            code=TransferCode.REGION_MISMATCH,
        )


def check_memory_kind(engine_id: str, local: Region, remote: Region) -> None:
    """Raises TransferError (``region_mismatch``, with both devices) unless both regions are in host memory, or both in
    that of GPUs. Between the two kinds UCX takes TCP, even within one host: 0.2 GB/s instead of 22."""
    if local.device.partition(":")[0] != remote.device.partition(":")[0]:
        raise TransferError(
            f"region {remote.name!r} of peer {engine_id} is on {remote.device}, local region {local.name!r} on "
            f"{local.device}: nodes on CPUs and nodes on GPUs do not read from each other",
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
