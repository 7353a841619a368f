"""Models on a GPU: kernels between the ops, a step's words in one copy, CUDA graphs of decode steps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.models.adapter.forward_context import ForwardContext
from common.models.adapter.pool_views import PoolViews
from common.models.backends.backend import Event, ModelBackend
from common.models.backends.graphs import CudaGraphs, GraphedSteps
from common.models.fused.fuse import fuse_model
from common.ops.interface import Ops
from common.ops.step.device_step import StepBuffer

_STEP_WORDS = 1 << 20
"""4 MiB for a step's words: 8,000 rows and the tables of 64 sequences of 200,000 tokens in blocks of 16. A larger step
moves them, and graphs are recorded again."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Root mean square of the difference of a recorded step, relative to that of the step itself: matrix products may be
cut in another way while a graph is recorded."""


class CudaBackend(ModelBackend):
    """With torch's ops, which ask for values, no step is recorded. ``graphs``: who records; None: CUDA does."""

    def __init__(self, ops: Ops, device: torch.device, graphs: Any = None) -> None:
        super().__init__(ops, device)
        self._has_kernels = ops.name == "triton"
        self._graphs = graphs
        self._steps = StepBuffer(device, _STEP_WORDS) if self._has_kernels else None

    def prepare(self, model: nn.Module, *, is_compact: bool) -> None:
        fuse_model(model, self.ops)

    def create_step_runner(self, views: PoolViews) -> GraphedSteps | None:
        if self._steps is None:
            return None
        graphs = CudaGraphs(self.device) if self._graphs is None else self._graphs
        return GraphedSteps(self._steps, graphs)

    def is_same(self, recorded: Tensor, expected: Tensor) -> bool:
        """To rounding."""
        error = (recorded.float() - expected.float()).square().mean().sqrt()
        return bool(error <= _TOLERANCE[expected.dtype] * expected.float().square().mean().sqrt())

    def inputs(self, context: ForwardContext, token_ids: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        ids = token_ids if isinstance(token_ids, Tensor) else np.frombuffer(array("q", token_ids), np.int64)
        if self._steps is None:
            return torch.as_tensor(ids).to(self.device), context.metadata.positions
        steps = self._steps.write([metadata.group_tables for metadata in context.group_metadata], token_ids=ids)
        for metadata, step in zip(context.group_metadata, steps, strict=True):
            metadata.on_device = step
        return steps[0].token_ids, steps[0].positions

    def record_event(self) -> Event | None:
        # The thread that waits sleeps: others of this process have work.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        launched: Event = event
        return launched

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
