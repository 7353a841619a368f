"""Segments of more than one token as tables on the device: chunks for the scans, which end where a state is saved, and
tiles of query rows for attention."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WHOLE_RUN = 1 << 30
"""As the size of chunks: each is all rows between two points at which a state is saved."""
ANY_LENGTH = range(1, WHOLE_RUN)


@dataclass(frozen=True, slots=True)
class SpanRows:
    """A segment: ``num_rows`` packed rows from ``row`` on, the first of them at position ``start``. ``saves``: (offset
    1 .. num_rows, slot), ascending. ``table``: where its block table begins."""

    row: int
    num_rows: int
    start: int
    src_slot: int
    dst_slot: int
    saves: tuple[tuple[int, int], ...]
    table: int


@dataclass(frozen=True, slots=True)
class DeviceChunks:
    """All spans cut into chunks; chunks of a span follow one another. Tensors are int32.

    Attributes:
        size: most rows of a chunk.
        span_begin: [num_spans + 1] first chunk of each span.
        row, length: [num_chunks] first packed row, and number of rows.
        load: [num_chunks] slot that holds the state before the chunk; -1: it is that after the chunk before.
        store_begin: [num_chunks + 1] first entry of each chunk in ``store_slot``.
        store_slot: [n] slots that the state after the chunk goes to.
    """

    size: int
    span_begin: Tensor
    row: Tensor
    length: Tensor
    load: Tensor
    store_begin: Tensor
    store_slot: Tensor

    @property
    def num_spans(self) -> int:
        return int(self.span_begin.shape[0]) - 1

    @property
    def num_chunks(self) -> int:
        return int(self.row.shape[0])


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """All spans cut into tiles of query rows, those with the most keys first. Tensors are int32, [num_tiles].

    Attributes:
        size: most rows of a tile.
        row, length: first packed row, and number of rows.
        begin, src: first packed row of its span, and the slot that the span's state is read from.
        start: position of the first row in its sequence.
        end: position behind the segment's last row: keys up to there are written.
        table: where the sequence's block table begins in ``DeviceStep.block_ids``.
    """

    size: int
    row: Tensor
    length: Tensor
    begin: Tensor
    src: Tensor
    start: Tensor
    end: Tensor
    table: Tensor

    @property
    def num_tiles(self) -> int:
        return int(self.row.shape[0])


def _upload(parts: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each as a tensor, in one copy."""
    host = torch.tensor(list(itertools.chain.from_iterable(parts)), dtype=torch.int32)
    if device.type == "cuda":
        host = host.pin_memory()
    return list(host.to(device, non_blocking=True).split([len(part) for part in parts]))


def cut_chunks(spans: Sequence[SpanRows], size: int, device: torch.device) -> DeviceChunks:
    span_begin, row, length, load, store_begin, store_slot = [0], [], [], [], [0], []
    for span in spans:
        stores: dict[int, list[int]] = {}
        for offset, slot in (*span.saves, (span.num_rows, span.dst_slot)):
            stores.setdefault(offset, []).append(slot)
        cuts = sorted({0, *stores})
        for begin, end in itertools.pairwise(cuts):
            for at in range(begin, end, size):
                row.append(span.row + at)
                length.append(min(size, end - at))
                load.append(span.src_slot if at == 0 else -1)
                if at + size >= end:
                    store_slot += stores[end]
                store_begin.append(len(store_slot))
        span_begin.append(len(row))
    tensors = _upload((span_begin, row, length, load, store_begin, store_slot), device)
    return DeviceChunks(size, *tensors)


def cut_tiles(spans: Sequence[SpanRows], size: int, device: torch.device) -> DeviceTiles:
    tiles = [
        (
            span.row + at,
            min(size, span.num_rows - at),
            span.row,
            span.src_slot,
            span.start + at,
            span.start + span.num_rows,
            span.table,
        )
        for span in spans
        for at in range(0, span.num_rows, size)
    ]
    tiles.sort(key=lambda tile: -tile[4])
    columns: Sequence[Sequence[int]] = list(zip(*tiles, strict=True)) or [()] * 7
    return DeviceTiles(size, *_upload(columns, device))
