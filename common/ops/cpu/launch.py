"""How a compiled kernel is found and called, and who may listen: a tape writes the calls of a step down, to make them
again.

A kernel takes two addresses: its arguments, an array of 64-bit words, and the step (``cpp/step.h``; 0 for kernels that
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
"""What kernels know, and by which number (``cpp/vector.h``)."""


class Tape(Protocol):
    """Is told of every kernel call while it is the active one."""

    def add_kernel(self, function: Any, words: array[int], step_address: int, kept: tuple[Any, ...]) -> None:
        """The kernel has just run. ``kept``: what ``words`` has addresses of and nobody else holds."""

    def refuse(self, reason: str) -> None:
        """What runs now would have to look different next time."""


_TAPE: ContextVar[Tape | None] = ContextVar("tape", default=None)


def find_kernel(library: ctypes.CDLL, name: str) -> Any:
    """``tandem_<name>``, for :func:`launch`."""
    function = getattr(library, f"tandem_{name}")
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), None
    return function


def launch(function: Any, words: list[int], step_address: int = 0, kept: tuple[Any, ...] = ()) -> None:
    """Run a kernel."""
    packed = array("q", words)
    function(packed.buffer_info()[0], step_address)
    tape = _TAPE.get()
    if tape is not None:
        tape.add_kernel(function, packed, step_address, kept)


def refuse_tape(reason: str) -> None:
    """Tell the active tape, if there is one, that this step cannot be replayed."""
    tape = _TAPE.get()
    if tape is not None:
        tape.refuse(reason)


@contextmanager
def listening(tape: Tape) -> Iterator[None]:
    """Make ``tape`` the active one for the body."""
    token = _TAPE.set(tape)
    try:
        yield
    finally:
        _TAPE.reset(token)
