"""Segments of more than one token, cut into chunks that the scans of the torch ops work on side by side.

Everything inside a chunk is batched over all chunks of all spans; only the state goes from chunk to chunk. A state that
is to be saved ends its chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """A segment of more than one token: rows [begin, end); ``saves`` are (offset 1 .. end - begin, slot), ascending."""

    begin: int
    end: int
    src_slot: int
    dst_slot: int
    saves: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """One chunk of the sequential walk over states: read ``load_slot`` first (None: go on from the chunk before), and
    write the state after the chunk to ``store_slots``."""

    load_slot: int | None
    store_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpanChunks:
    """All spans cut into chunks of ``size`` rows; a chunk never crosses a save point.

    Attributes:
        rows: [num_chunks, size] packed row of each place; padding places repeat a row of the chunk.
        padding: [num_chunks, size] True where a place is padding, or None when there is none.
        places, targets: [n] flat place in [num_chunks * size] of every real row, and the packed row it belongs to.
        walk: one entry per chunk.
    """

    size: int
    rows: Tensor
    padding: Tensor | None
    places: Tensor
    targets: Tensor
    walk: tuple[ChunkStep, ...]

    def gather(self, x: Tensor) -> Tensor:
        """[num_tokens, ...] -> [num_chunks, size, ...]."""
        return x[self.rows]

    def scatter(self, out: Tensor, chunked: Tensor) -> None:
        """Write [num_chunks, size, ...] back to its rows of ``out`` [num_tokens, ...]."""
        flat = chunked.flatten(0, 1)
        out[self.targets] = (flat if self.padding is None else flat[self.places]).to(out.dtype)


def state_cuts(span: Span) -> list[int]:
    """Offsets at which the span's state is needed: 0, the saves, its length; ascending, each once."""
    return sorted({0, span.end - span.begin, *(offset for offset, _ in span.saves)})


def chunk_size(longest_run: int, limit: int) -> int:
    """A power of two: large enough for the longest run, at least 8 and at most ``limit``."""
    return min(limit, max(8, 1 << max(0, longest_run - 1).bit_length()))


def cut_into_chunks(spans: Sequence[Span], size: int, device: torch.device) -> SpanChunks:
    """``spans`` in chunks of ``size`` rows, in order."""
    rows: list[Tensor] = []
    lengths: list[int] = []
    walk: list[ChunkStep] = []
    for span in spans:
        stores: dict[int, list[int]] = {}
        for offset, slot in span.saves:
            stores.setdefault(offset, []).append(slot)
        stores.setdefault(span.end - span.begin, []).append(span.dst_slot)
        load: int | None = span.src_slot
        for a, b in itertools.pairwise(state_cuts(span)):
            count = -(-(b - a) // size)
            run = torch.arange(a, a + count * size).clamp_(max=b - 1) + span.begin
            rows.append(run.view(count, size))
            for i in range(count):
                lengths.append(min(size, b - a - i * size))
                walk.append(ChunkStep(load, tuple(stores[b]) if i == count - 1 else ()))
                load = None
    all_rows = torch.cat(rows)
    padding = torch.arange(size)[None] >= torch.tensor(lengths)[:, None]
    places = (~padding).flatten().nonzero()[:, 0]
    return SpanChunks(
        size=size,
        rows=all_rows.to(device),
        padding=padding.to(device) if bool(padding.any()) else None,
        places=places.to(device),
        targets=all_rows.flatten()[places].to(device),
        walk=tuple(walk),
    )
