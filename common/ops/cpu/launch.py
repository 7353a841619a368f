"""How a compiled kernel is found and called, and how its calls are recorded, for a replay of the step.

A kernel takes two addresses: its arguments, an array of 64-bit words, and the step (``src/step.h``; 0 for kernels that
read none).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Protocol

import torch

DTYPES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1})
"""The dtypes that kernels compute on, and the number by which ``src/vector.h`` knows each."""


class KernelRecorder(Protocol):
    """Is told of every kernel call while it is the active one."""

    def add_kernel(self, function: Any, words: array[int], step_address: int, kept: tuple[Any, ...]) -> None:
        """``function`` has just run. ``kept``: objects that ``words`` has addresses of and nobody else holds."""

    def refuse(self, reason: str) -> None:
        """The call that runs now would have other arguments in the next step, so the step cannot be replayed."""


_RECORDER: ContextVar[KernelRecorder | None] = ContextVar("kernel_recorder", default=None)


def find_kernel(library: ctypes.CDLL, name: str) -> Any:
    """``tandem_<name>``, for :func:`launch`."""
    function = getattr(library, f"tandem_{name}")
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), None
    return function


def launch(function: Any, words: list[int], step_address: int = 0, kept: tuple[Any, ...] = ()) -> None:
    """Run a kernel."""
    packed = array("q", words)
    function(packed.buffer_info()[0], step_address)
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.add_kernel(function, packed, step_address, kept)


def refuse_replay(reason: str) -> None:
    """Tell the active recorder, if there is one, that this step cannot be replayed."""
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.refuse(reason)


@contextmanager
def recording_kernels(recorder: KernelRecorder) -> Iterator[None]:
    """Make ``recorder`` the active one for the body."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)
