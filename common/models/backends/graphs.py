"""Steps of decode rows without the model's Python code: recorded once for each of a few numbers of rows, as CUDA
graphs, then launched again.

A step of fewer rows is padded with rows that read and write nothing (``StepBuffer.write``). What differs from step to
step are the step's words, which a graph reads from where they were when it was recorded; its result is in memory of
its own, from which the wanted rows are copied. Steps with drafts, or with several saves a row, run through the model's
code. Before a number of rows is recorded it runs once: kernels are compiled there, and matrix products choose their
algorithms, which a recording cannot. A node does both before it serves, with steps of nothing but padding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.models.adapter.forward_context import ForwardContext, set_forward_context
from common.ops.step.device_step import DeviceStep, StepBuffer

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Numbers of rows that are recorded. Padding costs a third of the rows at most, and nearly nothing of the weights'
reading, which is what a step of few rows waits for."""


class Graphs(Protocol):
    """Who records."""

    def capture(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """``call`` as something that does it again, on the same memory, and hands out the same result's place. ``call``
        itself has no effect now, but it was run before.

        Raises:
            RuntimeError: it cannot be recorded.
        """


class CudaGraphs:
    """CUDA's own, all in one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        # thread_local: transfers and images work on other threads meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = call()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


class GraphedSteps:
    """Recorded steps of one model on one set of pools. Runs on the engine's thread, like the pools themselves."""

    max_rows_with_prompts = 0

    def __init__(self, steps: StepBuffer, graphs: Graphs) -> None:
        self._steps, self._graphs = steps, graphs
        self._version = steps.version
        self._rows: dict[int, Tensor] = {}  # the head's input, by number of rows
        self._recorded: dict[tuple[str, int], Callable[[], Tensor] | None] = {}  # None: it cannot be recorded
        self._was_run: set[tuple[str, int]] = set()

    def record_ahead(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        context: ForwardContext,
        max_rows: int,
    ) -> None:
        """The largest first: the others find their memory in its."""
        most = _bucket(min(max_rows, BUCKETS[-1]))
        began_s = time.monotonic()
        for num_rows in sorted((each for each in BUCKETS if each <= (most or 0)), reverse=True):
            for _ in range(2):  # runs, records
                hidden = self._padded_forward(forward, context, (), (), num_rows)
                self.head(head, hidden)
        recorded = sorted(rows for (name, rows), each in self._recorded.items() if name == "forward" and each)
        logger.info("decode steps recorded rows=%s seconds=%.1f", recorded, time.monotonic() - began_s)

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
        segments = context.metadata.group_tables.segments
        is_plain = all(each.num_tokens == 1 and len(each.save_slots) < 2 for each in segments)
        num_rows = _bucket(len(token_ids)) if is_plain else None
        return self._padded_forward(forward, context, token_ids, positions, num_rows)[: len(token_ids)]

    def _padded_forward(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        context: ForwardContext,
        token_ids: Sequence[int] | Tensor,
        positions: Sequence[int],
        num_rows: int | None,
    ) -> Tensor:
        """[``num_rows``, hidden]; None: not padded, and not recorded."""
        steps = self._write(context, token_ids, positions, num_rows)

        def call() -> Tensor:
            with set_forward_context(context):
                return forward(steps[0].token_ids, steps[0].positions)

        if num_rows is None:
            return call()
        if self._steps.version != self._version:
            logger.info("a step's words have moved: decode steps are recorded again")
            self._recorded = {key: each for key, each in self._recorded.items() if key[0] != "forward"}
            self._version = self._steps.version
        return self._run(("forward", num_rows), call)

    def _write(
        self,
        context: ForwardContext,
        token_ids: Sequence[int] | Tensor,
        positions: Sequence[int],
        num_rows: int | None = None,
    ) -> list[DeviceStep]:
        groups = [metadata.group_tables for metadata in context.group_metadata]
        steps = self._steps.write(groups, token_ids=token_ids, positions=positions, num_rows=num_rows)
        for metadata, step in zip(context.group_metadata, steps, strict=True):
            metadata.on_device = step
        return steps

    def draft(
        self,
        draft: Callable[[Tensor, Tensor, Tensor], Tensor],
        context: ForwardContext,
        hidden: Tensor,
        token_ids: Sequence[int],
        positions: Sequence[int],
    ) -> Tensor:
        """``draft``(rows [num_rows, hidden], token ids, positions) -> [num_rows, hidden], in ``context``. The caller
        asks for the result's values before the next call: so the step's words are not overwritten under it."""
        steps = self._write(context, token_ids, positions)
        with set_forward_context(context):
            return draft(hidden, steps[0].token_ids, steps[0].positions)

    def head(self, head: Callable[[Tensor], Tensor], rows: Tensor, *, has_drafts: bool = False) -> Tensor:
        """``head``(rows [num_rows, hidden]) -> [num_rows, vocab]."""
        count = rows.shape[0]
        num_rows = _bucket(count)
        if num_rows is None:
            return head(rows)
        if num_rows not in self._rows:
            self._rows[num_rows] = rows.new_zeros(num_rows, rows.shape[1])
        place = self._rows[num_rows]
        place[:count].copy_(rows)
        return self._run(("head", num_rows), lambda: head(place))[:count]

    def _run(self, key: tuple[str, int], call: Callable[[], Tensor]) -> Tensor:
        """``call``'s result, which it makes of what is in memory, always of the same."""
        if key not in self._recorded:
            if key not in self._was_run:
                self._was_run.add(key)
                return call()
            self._recorded[key] = self._record(key, call)
        replay = self._recorded[key]
        return call() if replay is None else replay().clone()

    def _record(self, key: tuple[str, int], call: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
        try:
            return self._graphs.capture(call)
        except RuntimeError as exc:
            logger.warning("steps are not recorded %s rows=%d reason=%s", *key, exc)
            return None


def _bucket(num_rows: int) -> int | None:
    """The least number of rows that is recorded and enough; None: there are too many."""
    return next((each for each in BUCKETS if each >= num_rows), None)
