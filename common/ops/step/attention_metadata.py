"""Where the rows of one packed step live: what every op needs to know, made once per step and shared by all layers.

A step packs segments (consecutive tokens of one sequence) one after another. Segments of one token are *decode rows*
and go through one batched update; longer ones are *spans*. Nothing here is per token in Python: loops run over
segments and chunks.

A slot or block that a step writes is read by no other segment of the same step; the planner of the step guarantees it.
That they are in the pools, and that tables are long enough, is checked here (``check.py``), once for all layers.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.ops.step.check import PoolSizes, check_blocks, check_lengths, check_slots, check_whole
from common.ops.step.device_step import DeviceStep, GroupTables, StepBuffer
from common.ops.step.packed import PackedStep
from common.ops.step.paged_metadata import PagedMetadata, build_paged
from common.ops.step.segment import SegmentLike
from common.ops.step.state_metadata import StateMetadata, build_state


class AttentionMetadata:
    """Everything the ops need to know about one step; each form of it is made when a backend first asks for it.

    Lives for one step: the segments that it was built from must not change before its last use.

    Attributes:
        num_tokens: packed rows of the step.
        device: where index tensors live.
        window: attention at position p sees keys p - window + 1 .. p; 0: all up to p. Table entries of blocks that lie
            before the window of a segment's first row are the null block.
    """

    def __init__(
        self,
        segments: Sequence[SegmentLike],
        *,
        block_size: int,
        device: torch.device,
        sizes: PoolSizes,
        window: int = 0,
        group_id: int = 0,
    ) -> None:
        """``segments`` are packed in this order; ``group_id``: the attention group whose block tables count; ``sizes``:
        of that group's pool and of the slots'.

        Raises:
            StepMemoryError: a segment names memory that is not there.
        """
        self._segments = segments
        self._tables = [s.tables[group_id] for s in segments if s.tables]  # without attention layers there are none
        self._begins = list(itertools.accumulate((s.num_tokens for s in segments), initial=0))
        self._block_size = block_size
        self.num_tokens = self._begins[-1]
        self.device = device
        self.window = window
        if sizes.num_slots:
            check_slots(segments, sizes.num_slots)
        # Ids beyond a segment's last position may be there; they are not read.
        block_ids = [
            table.block_ids[: -(-(s.start + s.num_tokens) // block_size)]
            for s, table in zip(segments, self._tables, strict=False)
        ]
        self._block_ids = array("q", list(itertools.chain.from_iterable(block_ids)))
        self._table_begins = list(itertools.accumulate(map(len, block_ids), initial=0))
        if sizes.num_blocks and segments:
            check_lengths(segments, self._tables, list(map(len, block_ids)), block_size)
            check_blocks(segments, self._block_ids, self._table_begins, sizes.num_blocks, block_size, window)
            check_whole(segments)

    @functools.cached_property
    def positions(self) -> Tensor:
        """[num_tokens] position of each row in its sequence."""
        starts = [s.start for s in self._segments]
        if self.num_tokens == len(starts):  # decode rows only
            return torch.tensor(starts, dtype=torch.long, device=self.device)
        if len(starts) == 1:
            return torch.arange(starts[0], starts[0] + self.num_tokens, device=self.device)
        counts = torch.tensor([s.num_tokens for s in self._segments])
        shifts = torch.tensor([start - begin for start, begin in zip(starts, self._begins, strict=False)])
        return (torch.arange(self.num_tokens) + shifts.repeat_interleave(counts)).to(self.device)

    @functools.cached_property
    def state(self) -> StateMetadata:
        """Index tensors of the recurrent ops."""
        return build_state(self._segments, self._begins, self.device)

    @functools.cached_property
    def paged(self) -> PagedMetadata:
        """Index tensors of paged attention; the segments must have block tables."""
        ids, begins = torch.frombuffer(self._block_ids, dtype=torch.long), self._table_begins
        return build_paged(
            self._segments, self._tables, self._begins, ids, begins, self._block_size, self.window, self.device
        )

    @property
    def group_tables(self) -> GroupTables:
        """The step on the host, as :class:`StepBuffer` takes it."""
        ids = np.frombuffer(self._block_ids, np.int64) if self._block_ids else np.empty(0, np.int64)
        return GroupTables(self._segments, self._tables, ids, self._table_begins, self._block_size, self.window)

    @functools.cached_property
    def on_device(self) -> DeviceStep:
        """The step as Triton kernels read it. Whoever writes the steps of all groups in one piece sets it before the
        first op asks."""
        return StepBuffer(self.device).write([self.group_tables])[0]

    @property
    def has_tensors(self) -> bool:
        """Whether any form but ``packed`` was asked for."""
        return not vars(self).keys().isdisjoint(("positions", "state", "paged"))

    @functools.cached_property
    def packed(self) -> PackedStep:
        """The step as compiled kernels read it."""
        tables, ids = self._tables, self._block_ids
        return PackedStep(self._segments, tables, self._begins, ids, self._table_begins, self._block_size)
