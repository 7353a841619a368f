"""What a model runs on, chosen once when it is loaded: its ops, what they make of its weights, how the words of a step
reach them, how steps of decode rows are run again without the model's Python code, and when a launched step is over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from common.models.adapter.forward_context import ForwardContext
from common.models.adapter.pool_views import PoolViews
from common.ops.interface import Ops


class Event(Protocol):
    """A place in a device's queue of work; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Returns when the device has come to it; raises what the work before it raised."""


class StepRunner(Protocol):
    """Runs steps of decode rows, recorded ones where there are any. Results are the caller's own memory.

    Attributes:
        max_rows_with_prompts: a step of up to so many rows may have prompts in it; 0: none may.
    """

    max_rows_with_prompts: int

    def record_ahead(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        context: ForwardContext,
        max_rows: int,
    ) -> None:
        """Before the first step: records steps of up to ``max_rows`` rows where that cannot wait until they come.
        ``context``: of no rows. Writes nothing to the pools."""

    def forward(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        context: ForwardContext,
        token_ids: Sequence[int] | Tensor,
        positions: Sequence[int],
        *,
        has_spans: bool = False,
    ) -> Tensor:
        """``forward``(token ids [num_rows], positions [num_rows]) -> [num_rows, hidden], in ``context``. ``token_ids``:
        a tensor is on the device, and may not have its values yet. ``has_spans``: a segment has several rows, and there
        may be another number of them each time."""

    def draft(
        self,
        draft: Callable[[Tensor, Tensor, Tensor], Tensor],
        context: ForwardContext,
        hidden: Tensor,
        token_ids: Sequence[int],
        positions: Sequence[int],
    ) -> Tensor:
        """``draft``(rows [num_rows, hidden], token ids, positions) -> [num_rows, hidden], in ``context``."""

    def head(self, head: Callable[[Tensor], Tensor], rows: Tensor, *, has_drafts: bool = False) -> Tensor:
        """``head``(rows [num_rows, hidden]) -> [num_rows, vocab]."""


class ModelBackend(ABC):
    """``ops``: what the patched functions call; ``device``: where weights and pools are."""

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self.ops = ops
        self.device = device

    @abstractmethod
    def prepare(self, model: nn.Module, *, is_compact: bool) -> None:
        """Puts what the ops bring along into a loaded model, before it is patched. ``is_compact``: weights packed for
        decode steps rather than for prompts, where the ops pack any."""

    @abstractmethod
    def create_step_runner(self, views: PoolViews) -> StepRunner | None:
        """Of one model on one set of pools; None: every step runs through the model's code."""

    @abstractmethod
    def is_same(self, recorded: Tensor, expected: Tensor) -> bool:
        """Whether a recorded step gave what the model's code gives, as this backend promises it."""

    @abstractmethod
    def inputs(self, context: ForwardContext, token_ids: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and positions of a step, [num_tokens] each, on the device; what the ops read of it too.
        ``token_ids``: as of :class:`StepRunner`."""

    @abstractmethod
    def record_event(self) -> Event | None:
        """Of all that was launched so far; None: it is over."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when the device runs nothing of this process; raises when it cannot go on."""
