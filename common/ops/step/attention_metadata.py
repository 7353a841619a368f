"""Where the rows of one packed step live: index tensors for every op, made once per step and shared by all layers.

A step packs segments (consecutive tokens of one sequence) one after another. Segments of one token are *decode rows*
and go through one batched update; longer ones are *spans*. Nothing here is per token in Python: loops run over
segments and chunks.

A slot or block that a step writes is read by no other segment of the same step; the planner of the step guarantees it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.ops.step.packed import PackedStep, SegmentLike

_QUERY_TILE = 512
"""Rows of a continuation chunk per attention call: bounds the mask to 512 x context bytes and skips keys after the
tile."""


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
class ChunkIndex:
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


@dataclass(slots=True)
class StateIndex:
    """Rows and slots of one step for the recurrent ops.

    Attributes:
        cu_seqlens: packed start row of each segment, then the number of rows.
        src_slots, dst_slots: per segment.
        spans: segments of more than one token.
        decode_rows, decode_src, decode_dst: [num_decode] row, source and destination slot of each decode row.
        decode_saves, decode_save_slots: [n] which of the decode rows also write which slot.
    """

    num_tokens: int
    cu_seqlens: tuple[int, ...]
    src_slots: tuple[int, ...]
    dst_slots: tuple[int, ...]
    spans: tuple[Span, ...]
    decode_rows: Tensor
    decode_src: Tensor
    decode_dst: Tensor
    decode_saves: Tensor
    decode_save_slots: Tensor
    device: torch.device
    _chunks: dict[int, ChunkIndex] = field(default_factory=dict)

    @property
    def num_decode(self) -> int:
        return self.decode_rows.shape[0]

    @property
    def longest_run(self) -> int:
        """Tokens between two points at which some state is read or written, at most."""
        longest = 0
        for span in self.spans:
            cuts = _cuts(span)
            longest = max(longest, *(b - a for a, b in itertools.pairwise(cuts)))
        return longest

    def store_decode(self, pool: Tensor, state: Tensor) -> None:
        """Write the states [num_decode, ...] after the decode rows to their slots and saves."""
        state = state.to(pool.dtype)
        pool[self.decode_dst] = state
        if self.decode_saves.shape[0]:
            pool[self.decode_save_slots] = state[self.decode_saves]

    def chunks(self, size: int) -> ChunkIndex:
        """The spans cut into chunks of ``size``, cached for the step."""
        if size not in self._chunks:
            self._chunks[size] = _build_chunks(self.spans, size, self.device)
        return self._chunks[size]


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Query rows [begin, end) against ``num_keys`` keys of their sequence.

    ``block_ids`` None: the first chunk of a sequence, keys are the packed rows [key_begin, end) themselves. Else they
    are the first ``num_keys`` places of these blocks (with a window: the blocks from the first one that it reaches).
    ``mask`` [rows, num_keys] is True where a key may be seen; None: causal.
    """

    begin: int
    end: int
    key_begin: int
    num_keys: int
    block_ids: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionIndex:
    """Rows and blocks of one step for paged attention.

    Attributes:
        write_rows: [n] packed rows whose K/V is written (decode rows first), or None: all of them, in order.
        write_blocks, write_offsets: [n] where to.
        tiles: prompt chunks.
        decode_rows: [num_decode]; decode_tables: [num_decode, max_blocks], the blocks that each row reads, padded with
        block 0; decode_hidden: [num_decode, 1, max_blocks * block_size] True where a key is beyond the row's own
        position or before its window.
        decode_last: [num_decode] place in its table of the block with the row's own position; decode_stale:
        [num_decode, block_size, 1] True for the places of that block beyond it, which hold what a former owner left.
    """

    write_rows: Tensor | None
    write_blocks: Tensor
    write_offsets: Tensor
    tiles: tuple[AttentionTile, ...]
    decode_rows: Tensor
    decode_tables: Tensor
    decode_hidden: Tensor
    decode_last: Tensor
    decode_stale: Tensor


class StepIndex:
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
        begins: Sequence[int],
        block_size: int,
        device: torch.device,
        window: int = 0,
    ) -> None:
        self._segments = segments
        self._begins = begins
        self._block_size = block_size
        self.num_tokens = begins[-1]
        self.device = device
        self.window = window

    @classmethod
    def build(
        cls, segments: Sequence[SegmentLike], *, block_size: int, device: torch.device, window: int = 0
    ) -> StepIndex:
        """The index of ``segments``, packed in this order; their block tables are those of one attention group."""
        begins = list(itertools.accumulate((s.num_tokens for s in segments), initial=0))
        return cls(segments, begins, block_size, device, window)

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
    def state(self) -> StateIndex:
        """Index tensors of the recurrent ops."""
        return _build_state(self._segments, self._begins, self.device)

    @functools.cached_property
    def attention(self) -> AttentionIndex:
        """Index tensors of paged attention; the segments must have block tables."""
        return _build_attention(self._segments, self._begins, self._block_size, self.window, self.device)

    @property
    def has_tensors(self) -> bool:
        """Whether any form but ``packed`` was asked for."""
        return not vars(self).keys().isdisjoint(("positions", "state", "attention"))

    @functools.cached_property
    def packed(self) -> PackedStep:
        """The step as compiled kernels read it."""
        return PackedStep(self._segments, self._begins, self._block_size)


def _build_state(segments: Sequence[SegmentLike], begins: Sequence[int], device: torch.device) -> StateIndex:
    spans: list[Span] = []
    decode: list[tuple[int, int, int]] = []
    saves: list[tuple[int, int]] = []
    for begin, segment in zip(begins, segments, strict=False):
        pairs = tuple(sorted(zip(segment.save_offsets, segment.save_slots, strict=True)))
        assert all(0 < offset <= segment.num_tokens for offset, _ in pairs), "save offset outside its segment"
        if segment.num_tokens == 1:
            saves.extend((len(decode), slot) for _, slot in pairs)
            decode.append((begin, segment.src_slot, segment.dst_slot))
        else:
            spans.append(Span(begin, begin + segment.num_tokens, segment.src_slot, segment.dst_slot, pairs))
    rows = torch.tensor(decode, dtype=torch.long).reshape(-1, 3).to(device)
    saved = torch.tensor(saves, dtype=torch.long).reshape(-1, 2).to(device)
    return StateIndex(
        num_tokens=begins[-1],
        cu_seqlens=tuple(begins),
        src_slots=tuple(s.src_slot for s in segments),
        dst_slots=tuple(s.dst_slot for s in segments),
        spans=tuple(spans),
        decode_rows=rows[:, 0].contiguous(),
        decode_src=rows[:, 1].contiguous(),
        decode_dst=rows[:, 2].contiguous(),
        decode_saves=saved[:, 0].contiguous(),
        decode_save_slots=saved[:, 1].contiguous(),
        device=device,
    )


def _cuts(span: Span) -> list[int]:
    """Offsets at which the span's state is needed: 0, the saves, its length; ascending, each once."""
    return sorted({0, span.end - span.begin, *(offset for offset, _ in span.saves)})


def chunk_size(longest_run: int, limit: int) -> int:
    """A power of two: large enough for the longest run, at least 8 and at most ``limit``."""
    return min(limit, max(8, 1 << max(0, longest_run - 1).bit_length()))


def _build_chunks(spans: Sequence[Span], size: int, device: torch.device) -> ChunkIndex:
    rows: list[Tensor] = []
    lengths: list[int] = []
    walk: list[ChunkStep] = []
    for span in spans:
        stores: dict[int, list[int]] = {}
        for offset, slot in span.saves:
            stores.setdefault(offset, []).append(slot)
        stores.setdefault(span.end - span.begin, []).append(span.dst_slot)
        load: int | None = span.src_slot
        for a, b in itertools.pairwise(_cuts(span)):
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
    return ChunkIndex(
        size=size,
        rows=all_rows.to(device),
        padding=padding.to(device) if bool(padding.any()) else None,
        places=places.to(device),
        targets=all_rows.flatten()[places].to(device),
        walk=tuple(walk),
    )


def _build_attention(
    segments: Sequence[SegmentLike], begins: Sequence[int], block_size: int, window: int, device: torch.device
) -> AttentionIndex:
    tiles: list[AttentionTile] = []
    decode: list[int] = []
    span_writes: list[Tensor] = []  # each [3, n]: row, block, offset
    for i, segment in enumerate(segments):
        if segment.num_tokens == 1:
            decode.append(i)
            continue
        table = torch.as_tensor(segment.block_ids, dtype=torch.long)
        end = segment.start + segment.num_tokens
        written = torch.arange(min(max(segment.start, segment.write_from), end), end)  # none: all of it is shared
        rows = written + (begins[i] - segment.start)
        span_writes.append(torch.stack([rows, table[written // block_size], written % block_size]))
        if segment.start == 0 and (not window or segment.num_tokens <= window):
            tiles.append(AttentionTile(begins[i], begins[i + 1], begins[i], segment.num_tokens, None, None))
        else:
            tiles.extend(_masked_tiles(segment, begins[i], table, block_size, window, device))
    rows_written = [
        (begins[i], segments[i].block_ids[segments[i].start // block_size], segments[i].start % block_size)
        for i in decode
        if segments[i].start >= segments[i].write_from
    ]
    decode_writes = torch.tensor(rows_written, dtype=torch.long).reshape(-1, 3).T
    writes = torch.cat([decode_writes, *span_writes], 1)
    in_packed_order = bool((writes[0] == torch.arange(writes.shape[1])).all()) and writes.shape[1] == begins[-1]

    # A decode row reads the blocks [first, last] of its table, of which ``num_keys`` places are keys or before its
    # window.
    positions = torch.tensor([segments[i].start for i in decode], dtype=torch.long)
    lasts = positions // block_size
    earliest = (positions - window + 1).clamp_(min=0) if window else torch.zeros_like(positions)
    firsts = earliest // block_size
    num_keys = positions + 1 - firsts * block_size
    max_blocks = int((lasts - firsts).max()) + 1 if decode else 0
    decode_table = torch.zeros(len(decode), max_blocks, dtype=torch.long)
    for row, (i, first, last) in enumerate(zip(decode, firsts.tolist(), lasts.tolist(), strict=True)):
        decode_table[row, : last + 1 - first] = torch.as_tensor(segments[i].block_ids[first : last + 1])
    places = torch.arange(max_blocks * block_size)[None]
    hidden = places >= num_keys[:, None]
    if window:
        hidden |= places < (earliest - firsts * block_size)[:, None]
    return AttentionIndex(
        write_rows=None if in_packed_order else writes[0].to(device),
        write_blocks=writes[1].to(device),
        write_offsets=writes[2].to(device),
        tiles=tuple(tiles),
        decode_rows=torch.tensor([begins[i] for i in decode], dtype=torch.long).to(device),
        decode_tables=decode_table.to(device),
        decode_hidden=hidden[:, None].to(device),
        decode_last=(lasts - firsts).to(device),
        decode_stale=(torch.arange(block_size) > (positions % block_size)[:, None])[..., None].to(device),
    )


def _masked_tiles(
    segment: SegmentLike, begin: int, table: Tensor, block_size: int, window: int, device: torch.device
) -> list[AttentionTile]:
    """Tiles of a chunk that continues a sequence or is longer than the window."""
    tiles = []
    for a in range(0, segment.num_tokens, _QUERY_TILE):
        b = min(a + _QUERY_TILE, segment.num_tokens)
        first = max(0, segment.start + a - window + 1) if window else 0  # position of the first key
        block_ids = None
        if segment.start:
            block_ids = table[first // block_size : -(-(segment.start + b) // block_size)].to(device)
            first -= first % block_size
        num_keys = segment.start + b - first
        own = num_keys - (b - a)  # place of the first row's own key
        mask = torch.ones(b - a, num_keys, dtype=torch.bool, device=device).tril_(own)
        if window:
            mask.triu_(own - window + 1)
        tiles.append(AttentionTile(begin + a, begin + b, begin + first, num_keys, block_ids, mask))
    return tiles
