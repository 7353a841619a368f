"""One step as int32 words on the device, in one copy: what Triton kernels read.

Rows, slots and block tables of all attention groups go into one piece of host memory (page-locked where the device is a
GPU), and from there to the device in one transfer. Segments of one token are *decode rows*; longer ones, and those with
several saves, are *spans*, whose chunks and tiles (``device_spans``) are made when an op first asks. A step may be
padded with rows that nothing is read from and nothing is written for, so that a recorded graph serves fewer rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from common.ops.step.device_spans import ANY_LENGTH, DeviceChunks, DeviceTiles, SpanRows, cut_chunks, cut_tiles
from common.ops.step.segment import SegmentLike, TableLike

Words: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""Whole numbers, one after another."""
_NUM_SHARED = 7
"""Fields that all groups share: the first ones of a step in memory, in the order of :class:`DeviceStep`."""


@dataclass(frozen=True, slots=True)
class GroupTables:
    """A step in one attention group, on the host. ``tables``: of each segment; none without attention layers.
    ``block_ids``: those that the step needs of all tables, each table's from its place in ``begins`` on."""

    segments: Sequence[SegmentLike]
    tables: Sequence[TableLike]
    block_ids: Words
    begins: Sequence[int]
    block_size: int
    window: int


@dataclass(slots=True)
class DeviceStep:
    """A step in one attention group. All tensors are int32 and contiguous.

    Attributes:
        num_rows: packed rows, padding included; ``num_decode`` and ``num_spans``: of them, and segments that are no
            decode row.
        token_ids, positions: [num_rows] of each row, for the model; positions as rotary embeddings count them.
        decode_rows, decode_src, decode_dst, decode_save: [num_decode] packed row, slot that the state is read from,
            slot that it is written to (-1: a padding row, to be left alone) and one more slot that it is written to
            (-1: none).
        decode_len: [num_decode] keys that the row's sequence has with the row itself; 0: a padding row.
        decode_begin: [num_decode] where the row's block table begins in ``block_ids``.
        write_place: [num_rows] block id * block_size + place in the block where the row's K/V go; -1: nowhere.
        block_ids: block tables of all segments of all groups, one after another.
        seen: [num_rows] position behind the last one that the row sees; None: each row sees as far as itself.
    """

    num_rows: int
    block_size: int
    window: int
    token_ids: Tensor
    positions: Tensor
    decode_rows: Tensor
    decode_src: Tensor
    decode_dst: Tensor
    decode_save: Tensor
    decode_len: Tensor
    decode_begin: Tensor
    write_place: Tensor
    block_ids: Tensor
    seen: Tensor | None
    span_rows: tuple[SpanRows, ...]
    _chunks: dict[tuple[int, range], DeviceChunks] = field(default_factory=dict)
    _tiles: dict[int, DeviceTiles] = field(default_factory=dict)

    @property
    def num_decode(self) -> int:
        return int(self.decode_rows.shape[0])

    @property
    def num_spans(self) -> int:
        return len(self.span_rows)

    @property
    def device(self) -> torch.device:
        return self.decode_rows.device

    def chunks(self, size: int, lengths: range = ANY_LENGTH) -> DeviceChunks:
        """The spans with a number of rows in ``lengths``, cut into chunks of at most ``size`` rows, and at saves; made
        once per step."""
        key = (size, lengths)
        if key not in self._chunks:
            spans = [span for span in self.span_rows if span.num_rows in lengths]
            self._chunks[key] = cut_chunks(spans, size, self.device)
        return self._chunks[key]

    def tiles(self, size: int) -> DeviceTiles:
        """The spans cut into tiles of at most ``size`` query rows; made once per step."""
        if size not in self._tiles:
            self._tiles[size] = cut_tiles(self.span_rows, size, self.device)
        return self._tiles[size]


class StepBuffer:
    """The memory of steps: on a GPU page-locked on the host, and at one address on the device, which graphs keep. A
    step is written when the one before the last has ended on the device. Its tensors are views of this memory: on the
    device the next step's words come behind what was launched, on the host they have a place of their own."""

    def __init__(self, device: torch.device, num_words: int = 0) -> None:
        """``num_words``: words that fit without moving to a larger place.

        Attributes:
            version: another number when it has moved: graphs that were recorded before read the old place.
        """
        self._device = device
        self.version = 0
        self._grow(num_words)

    def _grow(self, num_words: int) -> None:
        is_pinned = self._device.type == "cuda"
        self._host = torch.empty(num_words, dtype=torch.int32, pin_memory=is_pinned)
        self._own, self._next_host = self._host, self._host
        if is_pinned:
            self._own = torch.empty(num_words, dtype=torch.int32, device=self._device)
            self._next_host = torch.empty_like(self._host, pin_memory=True)
        self.num_words = num_words
        self.version += 1

    def write(
        self,
        groups: Sequence[GroupTables],
        *,
        token_ids: Sequence[int] | Words | Tensor | None = None,
        positions: Sequence[int] | None = None,
        num_rows: int | None = None,
    ) -> list[DeviceStep]:
        """The step of each group. ``token_ids``: of each packed row, on the device if it is a tensor, whose values
        nobody asks for; None: zeros. ``positions``: as rotary embeddings
        count them; None: those in the sequence. ``num_rows``: pad to so many, of steps of decode rows alone."""
        known = None if isinstance(token_ids, Tensor) else token_ids
        parts = _fixed_parts(groups, known, positions, num_rows)
        sizes = [len(part) for part in parts]
        num_fixed = sum(sizes)
        total = num_fixed + sum(len(group.block_ids) for group in groups)
        if total > self.num_words:
            self._grow(1 << (total - 1).bit_length())
        self._host, self._next_host = self._next_host, self._host
        at, words = 0, self._host.numpy()
        for part in (*parts, *(group.block_ids for group in groups)):
            words[at : at + len(part)] = part
            at += len(part)
        if self._own is not self._host:
            self._own[:at].copy_(self._host[:at], non_blocking=True)
        own: list[Tensor] = list(self._own[:num_fixed].split(sizes))
        ids, places, rows, src, dst, save, lengths = own[:_NUM_SHARED]
        if isinstance(token_ids, Tensor):
            ids[: len(token_ids)].copy_(token_ids)
        # Up to the buffer's end: a graph that was recorded on a step reads longer tables later.
        block_ids = self._own[num_fixed:]
        spans, num_groups = _span_rows(groups), len(groups)
        seen = own[-1] if len(own) > _NUM_SHARED + 2 * num_groups else None
        return [
            DeviceStep(
                len(own[0]),
                group.block_size,
                group.window,
                ids,
                places,
                rows,
                src,
                dst,
                save,
                lengths,
                own[_NUM_SHARED + index],
                own[_NUM_SHARED + num_groups + index],
                block_ids,
                seen,
                spans[index],
            )
            for index, group in enumerate(groups)
        ]


def _is_decode(segment: SegmentLike) -> bool:
    return segment.num_tokens == 1 and len(segment.save_slots) < 2


def _fixed_parts(
    groups: Sequence[GroupTables],
    token_ids: Sequence[int] | Words | None,
    positions: Sequence[int] | None,
    num_rows: int | None,
) -> list[Words]:
    """Token ids, positions, decode rows' row, source, destination, save and length; each group's table begins; each
    group's places; what rows see, if they see beyond themselves."""
    segments = groups[0].segments
    counts = np.array([segment.num_tokens for segment in segments], np.int64)
    first_rows = np.cumsum(counts) - counts
    count = int(counts.sum())
    padded = num_rows or count
    assert padded >= count, "a step is padded, never cut"
    indices = [index for index, segment in enumerate(segments) if _is_decode(segment)]
    assert padded == count or len(indices) == len(segments), "only steps of decode rows are padded"
    decode = [
        (
            int(first_rows[index]),
            segments[index].src_slot,
            segments[index].dst_slot,
            segments[index].save_slots[0] if segments[index].save_slots else -1,
            segments[index].start + 1,
        )
        for index in indices
    ]
    decode += [(row, 0, -1, -1, 0) for row in range(count, padded)]
    starts = np.array([segment.start for segment in segments], np.int64)
    own = np.arange(count) + np.repeat(starts - first_rows, counts)
    extra = padded - count
    parts = [
        _padded(np.zeros(count) if token_ids is None else token_ids, extra),
        _padded(own if positions is None else positions, extra),
        *np.array(decode, np.int32).reshape(-1, 5).T,
    ]
    base = 0
    for group in groups:
        begins = np.asarray(group.begins, np.int32)[:-1] if group.tables else np.zeros(len(segments), np.int32)
        parts.append(_padded(begins[indices] + base, extra))
        base += len(group.block_ids)
    parts += [_padded(_places(group, own, counts), extra, -1) for group in groups]
    if any(segment.whole for segment in segments):
        parts.append(_seen(segments))
    return parts


def _padded(values: Sequence[int] | Words, extra: int, fill: int = 0) -> Words:
    return np.concatenate([np.asarray(values, np.int32), np.full(extra, fill, np.int32)])


def _places(group: GroupTables, positions: Words, counts: Words) -> Words:
    """[num_tokens] where each row's K/V go."""
    if not group.tables:
        return np.full(len(positions), -1, np.int32)
    size = group.block_size
    begins = np.repeat(np.asarray(group.begins)[:-1], counts)
    places = group.block_ids[begins + positions // size] * size + positions % size
    places[positions < np.repeat([table.write_from for table in group.tables], counts)] = -1
    words: Words = places.astype(np.int32)
    return words


def _seen(segments: Sequence[SegmentLike]) -> Words:
    ends = []
    for segment in segments:
        own = np.arange(segment.start + 1, segment.start + segment.num_tokens + 1, dtype=np.int32)
        for first, end in segment.whole:
            own[max(first, segment.start) - segment.start : end - segment.start] = end
        ends.append(own)
    return np.concatenate(ends)


def _span_rows(groups: Sequence[GroupTables]) -> list[tuple[SpanRows, ...]]:
    """The spans in each group; they differ in where their tables begin."""
    results = []
    base = 0
    for group in groups:
        spans, row = [], 0
        for index, segment in enumerate(group.segments):
            if not _is_decode(segment):
                saves = tuple(sorted(zip(segment.save_offsets, segment.save_slots, strict=True)))
                table = base + group.begins[index] if group.tables else 0
                spans.append(
                    SpanRows(row, segment.num_tokens, segment.start, segment.src_slot, segment.dst_slot, saves, table)
                )
            row += segment.num_tokens
        base += len(group.block_ids)
        results.append(tuple(spans))
    return results
