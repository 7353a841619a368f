"""Which rows of a step belong to which segment, and which state slots each segment reads and writes, as tensors: what
the recurrent torch ops read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.ops.step.chunks import Span, SpanChunks, cut_into_chunks, state_cuts
from common.ops.step.segment import SegmentLike


@dataclass(slots=True)
class StateMetadata:
    """Rows and slots of one step for the recurrent ops.

    Attributes:
        spans: segments of more than one token.
        decode_rows, decode_src, decode_dst: [num_decode] row, source and destination slot of each decode row.
        decode_saves, decode_save_slots: [n] which of the decode rows also write which slot.
    """

    spans: tuple[Span, ...]
    decode_rows: Tensor
    decode_src: Tensor
    decode_dst: Tensor
    decode_saves: Tensor
    decode_save_slots: Tensor
    device: torch.device
    _chunks: dict[int, SpanChunks] = field(default_factory=dict)

    @property
    def num_decode(self) -> int:
        return int(self.decode_rows.shape[0])

    @property
    def longest_run(self) -> int:
        """Tokens between two points at which some state is read or written, at most."""
        longest = 0
        for span in self.spans:
            cuts = state_cuts(span)
            longest = max(longest, *(b - a for a, b in itertools.pairwise(cuts)))
        return longest

    def store_decode(self, pool: Tensor, state: Tensor) -> None:
        """Write the states [num_decode, ...] after the decode rows to their slots and saves."""
        state = state.to(pool.dtype)
        pool[self.decode_dst] = state
        if self.decode_saves.shape[0]:
            pool[self.decode_save_slots] = state[self.decode_saves]

    def chunks(self, size: int) -> SpanChunks:
        """The spans cut into chunks of ``size``, cached for the step."""
        if size not in self._chunks:
            self._chunks[size] = cut_into_chunks(self.spans, size, self.device)
        return self._chunks[size]


def build_state(segments: Sequence[SegmentLike], begins: Sequence[int], device: torch.device) -> StateMetadata:
    spans: list[Span] = []
    decode: list[tuple[int, int, int]] = []
    saves: list[tuple[int, int]] = []
    for begin, segment in zip(begins, segments, strict=False):
        pairs = tuple(sorted(zip(segment.save_offsets, segment.save_slots, strict=True)))
        if segment.num_tokens == 1:
            saves.extend((len(decode), slot) for _, slot in pairs)
            decode.append((begin, segment.src_slot, segment.dst_slot))
        else:
            spans.append(Span(begin, begin + segment.num_tokens, segment.src_slot, segment.dst_slot, pairs))
    rows = torch.tensor(decode, dtype=torch.long).reshape(-1, 3).to(device)
    saved = torch.tensor(saves, dtype=torch.long).reshape(-1, 2).to(device)
    return StateMetadata(
        spans=tuple(spans),
        decode_rows=rows[:, 0].contiguous(),
        decode_src=rows[:, 1].contiguous(),
        decode_dst=rows[:, 2].contiguous(),
        decode_saves=saved[:, 0].contiguous(),
        decode_save_slots=saved[:, 1].contiguous(),
        device=device,
    )
