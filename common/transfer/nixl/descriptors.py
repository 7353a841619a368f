"""Checked reads in NIXL's words: kinds of memory, and rows of (address, bytes, device id)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.errors import TransferError
from common.transfer.codes import TransferCode
from common.transfer.reads import CheckedRead


def memory_kind(device: str) -> tuple[str, int]:
    """Name of NIXL's memory kind, and the device id, of a device string."""
    if device == "cpu":
        return "DRAM_SEG", 0
    kind, _, index = device.partition(":")
    if kind == "cuda" and (not index or index.isdecimal()):
        return "VRAM_SEG", int(index or 0)
    raise TransferError(f"unknown device {device!r}, use cpu or cuda:N", code=TransferCode.REGISTRATION_FAILED)


def by_memory(reads: Sequence[CheckedRead]) -> dict[tuple[str, str], list[CheckedRead]]:
    """The reads by (local, remote) kind of memory: a NIXL transfer has one kind on each side."""
    groups: dict[tuple[str, str], list[CheckedRead]] = {}
    for read in reads:
        key = (memory_kind(read.local.device)[0], memory_kind(read.remote.device)[0])
        groups.setdefault(key, []).append(read)
    return groups


def descriptor_rows(reads: Sequence[CheckedRead], *, local: bool) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """[num_descriptors, 3]: address, bytes, device id. As one array: a list of tuples is converted one by one."""
    parts = []
    for read in reads:
        region = read.local if local else read.remote
        runs = read.runs.astype(np.uint64)
        part = np.empty_like(runs)
        part[:, 0] = np.uint64(region.address) + runs[:, 0 if local else 1]
        part[:, 1] = runs[:, 2]
        part[:, 2] = memory_kind(region.device)[1]
        parts.append(part)
    return np.concatenate(parts)
