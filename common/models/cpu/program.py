"""A forward as it is replayed: compiled calls and torch operations on fixed places, in order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from common.ops.cpu.backend import CppOps
from common.ops.step.packed import PackedStep


class Program:
    """A recorded forward. Write ``inputs``, call :meth:`run`, read ``output``: all are places in the arena, which the
    next program may overwrite."""

    def __init__(
        self,
        ops: CppOps,
        inputs: tuple[Tensor, ...],
        output: Tensor,
        stages: list[Callable[[], None]],
        steps: list[array[int]],
        kept: list[Any],
    ) -> None:
        self.inputs, self.output = inputs, output
        self._stages, self._steps = stages, steps
        self._kept = (ops, kept)

    def run(self, steps: Sequence[PackedStep]) -> None:
        """``steps``: the step of each attention group."""
        for own, step in zip(self._steps, steps, strict=True):
            own[:] = step.header  # in place: the calls have its address
        for stage in self._stages:
            stage()
