"""Tensors that lie between pages which fault, for kernels that read or write beside what they were given."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.ops.step.device_spans import ANY_LENGTH, DeviceChunks, DeviceTiles
from common.ops.step.device_step import DeviceStep
from tests.support.triton_interpreter import TRITON_DEVICE

_PAGE = mmap.PAGESIZE
_PROT_NONE = 0
_LIBC = ctypes.CDLL(None, use_errno=True)
_FILL = 0xFF
"""Every byte that is no element: NaN in floats, -1 in integers."""


@dataclass
class _Memory:
    """``words``: all bytes between the pages; ``outside``: those that belong to no element."""

    words: Tensor
    outside: Tensor
    keep: Any


class Guards:
    """Makes copies of tensors, of the same strides, that end where a page begins which may not be touched (on a GPU:
    plain memory). What is beside the elements, and between them, is NaN (-1) and must stay so: :meth:`check`."""

    def __init__(self) -> None:
        self._memories: list[_Memory] = []

    def __call__(self, x: Tensor) -> Tensor:
        """A guarded copy of ``x`` on ``TRITON_DEVICE``."""
        span = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1 if x.numel() else 0
        num_bytes = span * x.element_size()
        data = -(-max(num_bytes, 1) // _PAGE) * _PAGE
        words, keep = _between_pages(data)
        words.fill_(_FILL)
        copy = words[data - num_bytes :].view(x.dtype).as_strided(x.shape, x.stride())
        copy.copy_(x)
        outside = torch.ones(data, dtype=torch.bool, device=words.device)
        is_gap = torch.ones(span, dtype=torch.bool, device=words.device)
        is_gap.as_strided(x.shape, x.stride()).fill_(False)
        outside[data - num_bytes :] = is_gap.repeat_interleave(x.element_size())
        self._memories.append(_Memory(words, outside, keep))
        return copy

    def step(self, step: DeviceStep) -> DeviceStep:
        """The same step, its tensors and those of its chunks and tiles guarded."""
        values = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
        return _GuardedStep(self, {name: self(v) if isinstance(v, Tensor) else v for name, v in values.items()})

    def check(self) -> None:
        """Nothing was written beside the elements of any tensor."""
        for memory in self._memories:
            assert bool((memory.words[memory.outside] == _FILL).all()), "a kernel wrote beside a tensor's elements"


def _between_pages(num_bytes: int) -> tuple[Tensor, Any]:
    if TRITON_DEVICE != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=TRITON_DEVICE), None
    area = mmap.mmap(-1, num_bytes + 2 * _PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for at in (address, address + _PAGE + num_bytes):
        assert _LIBC.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(_PAGE), _PROT_NONE) == 0
    return torch.frombuffer(area, dtype=torch.uint8, count=num_bytes, offset=_PAGE), area


class _GuardedStep(DeviceStep):
    def __init__(self, guard: Guards, values: dict[str, Any]) -> None:
        super().__init__(**values)
        self._guard = guard

    def chunks(self, size: int, lengths: range = ANY_LENGTH) -> DeviceChunks:
        if (size, lengths) not in self._chunks:
            self._chunks[size, lengths] = self._guarded(super().chunks(size, lengths))
        return self._chunks[size, lengths]

    def tiles(self, size: int) -> DeviceTiles:
        if size not in self._tiles:
            self._tiles[size] = self._guarded(super().tiles(size))
        return self._tiles[size]

    def _guarded(self, tables: Any) -> Any:
        values = {field.name: getattr(tables, field.name) for field in dataclasses.fields(tables)}
        return dataclasses.replace(
            tables, **{name: self._guard(v) for name, v in values.items() if isinstance(v, Tensor)}
        )
