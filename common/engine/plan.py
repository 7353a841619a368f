"""One step of the model as plain data: what the scheduler decides and the model runner executes.

All rows of a step are packed into one ``[1, T]`` forward: prompt chunks and decode rows in any mix, in the order of
``StepPlan.segments``. Memory named in a plan is neither freed nor reused until the step has completed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.images.span import ImageSpan
from common.kv_cache.sequences.allocation import BlockTable


class Rows(enum.Enum):
    """Which final hidden rows of a segment are needed."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence.

    Attributes:
        token_ids: the tokens to run, [num_tokens]; drafted ones last.
        start: position of the first one = tokens already computed.
        tables: one block table per attention group (none without attention layers), as the cache keeps them. Each
            covers positions 0 .. start + num_tokens - 1, null (0) before a sliding window; K/V of positions below its
            ``write_from`` are in shared, immutable blocks already and are not written again.
        src_slot, dst_slot: the state before ``start`` is read from src, the state after the segment goes to dst. src 0
            (the null slot) is the zero state. They may be equal. 0, 0 without recurrent layers.
        save_offsets, save_slots: additionally, the state after the first ``offset`` tokens (1 .. num_tokens) of this
            segment is written to the slot, inside the same forward.
        rows: which rows of the last hidden state to return.
        images, image_inputs: as of the request.
        whole: [start, end) of positions that see each other in both directions, those which have tokens here; none ends
            behind the segment.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    tables: Sequence[BlockTable]
    src_slot: int
    dst_slot: int
    save_offsets: tuple[int, ...] = ()
    save_slots: tuple[int, ...] = ()
    rows: Rows = Rows.LAST
    images: Sequence[ImageSpan] = ()
    image_inputs: Sequence[Any] = ()
    whole: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class DrawnIds:
    """``tokens``: [num_rows] drawn by the step before, on the device; ``rows``: which of them, one for each segment."""

    tokens: Any
    rows: list[int]


@dataclass(slots=True)
class StepPlan:
    """``block_copies``, (source, destination) by attention group, run before the forward: copy-on-write of tail
    blocks. ``only_decodes``: its segments are of sequences that generate, some with more than one row. ``ids_from``:
    where the input ids are taken on the device, instead of the segments' own, which nobody on the host knows yet.
    ``draw``: of segments of one row each, logits [num_segments, vocab] -> their next tokens, on the device."""

    segments: list[Segment] = field(default_factory=list)
    block_copies: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    only_decodes: bool = False
    ids_from: DrawnIds | None = None
    draw: Callable[[Any], Any] | None = None
