"""Steps of few rows, without the model's Python code: recorded once per number of rows, then replayed.

Most of a small model's step of few rows (decode rows, drafts, what of a prompt fits beside them) is spent in module
calls and tensor operations of a few microseconds each. The kernels that they call are the same in every step
(:mod:`common.models.cpu.recorder`), and a replayed step gives the same bits as the forward that it was recorded from.
How the rows are cut into segments is in the step's words alone, which kernels read and the program does not have.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from common.models.adapter.forward_context import ForwardContext, set_forward_context
from common.models.adapter.pool_views import PoolViews
from common.models.cpu.arena import Arena
from common.models.cpu.program import Program
from common.models.cpu.recorder import Recorder
from common.ops.cpu.backend import CppOps
from common.ops.interface import Ops
from common.ops.step.attention_metadata import AttentionMetadata

logger = logging.getLogger(__name__)

MAX_ROWS = 192
"""Rows of the largest step that is recorded. What is spared is 7 ms of a size M step of any size and a twentieth of its
time; a program takes 0.3 MB."""
_ARENA_BYTES = 256 << 20
"""Address space of the arena; only the pages that the widest step has used are resident."""
_STEPS_BEFORE_RECORDING = 1
"""Steps with one number of rows before the next such step is recorded: recording takes as long as about ten steps of a
small model, which a number of rows that comes once does not earn back."""
_FEW_ROWS = 16
_SPANS_BEFORE_RECORDING, _MANY_BEFORE_RECORDING = 2, 8
"""The same of steps with drafts or prompts: of up to ``_FEW_ROWS``, as one sequence has them (what a lone sequence's
first steps take, ``common.engine.drafting.allowance`` does not charge), and of more, whose numbers are many: what is
lost by not replaying so many is about what recording takes."""


class Replay:
    """Programs of one model on one set of pools. Runs on the engine's thread, like the pools themselves."""

    max_rows_with_prompts = MAX_ROWS

    def __init__(self, ops: Ops, views: PoolViews) -> None:
        assert isinstance(ops, CppOps), "torch's ops look at values"
        self._ops = ops
        self._arena = Arena(_ARENA_BYTES)
        self._pools = [pool for layer in views.attention.values() for pool in (layer.key, layer.value)]
        self._pools += [pool for tensors in views.state.values() for pool in tensors.values()]
        self._constants: dict[Any, Any] = {}
        self._programs: dict[tuple[str, int, int], Program | None] = {}
        self._num_steps: Counter[tuple[str, int, int]] = Counter()  # unrecorded so far

    def record_ahead(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        context: ForwardContext,
        max_rows: int,
    ) -> None:
        """A program takes ten steps' time to record, when it is wanted."""

    def forward(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        context: ForwardContext,
        token_ids: Sequence[int] | Tensor,
        positions: Sequence[int],
        *,
        has_spans: bool = False,
    ) -> Tensor:
        """``forward``(token ids [num_rows], positions [num_rows]) -> [num_rows, hidden], in ``context``."""
        inputs = (torch.as_tensor(token_ids), torch.tensor(positions))

        def call(*tensors: Tensor) -> Tensor:
            with set_forward_context(context):
                return forward(*tensors)

        return self._run("forward", call, inputs, context.group_metadata, has_spans)

    def draft(
        self,
        draft: Callable[[Tensor, Tensor, Tensor], Tensor],
        context: ForwardContext,
        hidden: Tensor,
        token_ids: Sequence[int],
        positions: Sequence[int],
    ) -> Tensor:
        """``draft``(rows [num_rows, hidden], token ids, positions) -> [num_rows, hidden], in ``context``."""

        def call(*tensors: Tensor) -> Tensor:
            with set_forward_context(context):
                return draft(*tensors)

        inputs = (hidden, torch.tensor(token_ids), torch.tensor(positions))
        return self._run("draft", call, inputs, context.group_metadata)

    def head(self, head: Callable[[Tensor], Tensor], rows: Tensor, *, has_drafts: bool = False) -> Tensor:
        """``head``(rows [num_rows, hidden]) -> [num_rows, vocab]."""
        return self._run("head", head, (rows,), (), has_drafts)

    def _run(
        self,
        name: str,
        call: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        group_metadata: Sequence[AttentionMetadata],
        is_varied: bool = False,
    ) -> Tensor:
        """The result of ``call`` on ``inputs``, recorded or replayed; its memory is the caller's own."""
        num_rows = inputs[0].shape[0]
        key = (name, num_rows, torch.get_num_threads())
        if num_rows > MAX_ROWS:
            return call(*inputs)
        if key not in self._programs:
            if self._num_steps[key] < _num_before_recording(num_rows, is_varied):
                self._num_steps[key] += 1
                return call(*inputs)
            return self._record(key, call, inputs, group_metadata)
        program = self._programs[key]
        if program is None:
            return call(*inputs)
        for place, x in zip(program.inputs, inputs, strict=True):
            place.copy_(x)
        program.run([metadata.packed for metadata in group_metadata])
        return program.output.clone()

    def _record(
        self,
        key: tuple[str, int, int],
        call: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        group_metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        self._programs[key] = None  # stays so if the recording raises: it is not tried again
        steps = [metadata.packed for metadata in group_metadata]
        recorder = Recorder(self._ops, self._arena, inputs, self._pools, steps, self._constants)
        try:
            with recorder.recording():
                output = call(*recorder.inputs)
        except BaseException:
            self._constants.clear()
            raise
        if any(metadata.has_tensors for metadata in group_metadata):
            recorder.refuse("an operation read the attention metadata as a tensor")
        self._programs[key] = recorder.finish(output)
        if recorder.reason:
            # A constant is found by its arguments' addresses, which other tensors may get unless a program keeps them.
            self._constants.clear()
            logger.info("steps are not replayed %s rows=%d reason=%s", key[0], key[1], recorder.reason)
        return output.clone()


def _num_before_recording(num_rows: int, is_varied: bool) -> int:
    if not is_varied:
        return _STEPS_BEFORE_RECORDING
    return _SPANS_BEFORE_RECORDING if num_rows <= _FEW_ROWS else _MANY_BEFORE_RECORDING
