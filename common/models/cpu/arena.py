"""Memory with fixed addresses for the tensors of recorded forwards."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the arena is, without keeping it alive."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Place:
        return cls(x.data_ptr(), tuple(x.shape), tuple(x.stride()), x.dtype)


class Arena:
    """Memory of all programs of one model, which share it because one of them runs at a time. The address space is
    reserved; only pages that were used are resident."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._num_bytes = num_bytes
        self._begin: int = self._bytes.data_ptr()
        self._taken: list[tuple[int, int, StorageWeakRef]] = []  # begin, end and the storage that has it, ascending

    def holds(self, x: Tensor) -> bool:
        return 0 <= int(x.untyped_storage().data_ptr()) - self._begin < self._num_bytes

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A tensor in memory that no living tensor has; None: there is no room."""
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        if span == 0:
            return torch.empty_strided(shape, stride, dtype=dtype)
        size = -(-span * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._taken = [entry for entry in self._taken if not entry[2].expired()]
        begin, place = 0, 0
        while place < len(self._taken) and begin + size > self._taken[place][0]:
            begin = self._taken[place][1]
            place += 1
        if begin + size > self._num_bytes:
            return None
        flat = torch.frombuffer(self._memory, dtype=dtype, count=span, offset=begin)
        self._taken.insert(place, (begin, begin + size, StorageWeakRef(flat.untyped_storage())))
        return flat.as_strided(shape, stride)

    def view(self, place: Place) -> Tensor:
        """The tensor that was at ``place``, again."""
        if 0 in place.shape:  # an empty tensor has no address
            return torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
        offset = (place.address - self._begin) // place.dtype.itemsize
        return self._bytes.view(place.dtype).as_strided(place.shape, place.stride, offset)
