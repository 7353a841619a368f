"""Which blocks the rows of a step write their K/V to, and which blocks each row reads, as tensors: for the torch
attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.ops.step.segment import SegmentLike, TableLike

_QUERY_TILE = 512
"""Most rows of a continuing prompt chunk in one attention call: the mask takes at most 512 x context bytes, and keys
behind a tile's last row are not multiplied."""


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Query rows [begin, end) against ``num_keys`` keys of their sequence.

    ``block_ids`` None: the first chunk of a sequence, keys are the packed rows from ``key_begin`` on. Else they
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
class PagedMetadata:
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


def build_paged(
    segments: Sequence[SegmentLike],
    tables: Sequence[TableLike],
    begins: Sequence[int],
    block_ids: Tensor,
    table_begins: Sequence[int],
    block_size: int,
    window: int,
    device: torch.device,
) -> PagedMetadata:
    """Arguments as :class:`common.ops.step.packed.PackedStep`'s."""
    tiles: list[AttentionTile] = []
    decode: list[int] = []
    span_writes: list[Tensor] = []  # each [3, n]: row, block, offset
    for i, segment in enumerate(segments):
        if segment.num_tokens == 1:
            decode.append(i)
            continue
        table = block_ids[table_begins[i] : table_begins[i + 1]]
        end = segment.start + segment.num_tokens
        written = torch.arange(min(max(segment.start, tables[i].write_from), end), end)  # none: all of it is shared
        rows = written + (begins[i] - segment.start)
        span_writes.append(torch.stack([rows, table[written // block_size], written % block_size]))
        if segment.start == 0 and not segment.whole and (not window or segment.num_tokens <= window):
            tiles.append(AttentionTile(begins[i], begins[i + 1], begins[i], segment.num_tokens, None, None))
        else:
            tiles.extend(_masked_tiles(segment, begins[i], table, block_size, window, device))
    rows_written = [
        (begins[i], tables[i].block_ids[segments[i].start // block_size], segments[i].start % block_size)
        for i in decode
        if segments[i].start >= tables[i].write_from
    ]
    decode_writes = torch.tensor(rows_written, dtype=torch.long).reshape(-1, 3).T
    writes = torch.cat([decode_writes, *span_writes], 1)
    in_packed_order = bool((writes[0] == torch.arange(writes.shape[1])).all()) and writes.shape[1] == begins[-1]

    # A decode row reads the blocks [first, last] of its table. Their first ``num_keys`` places are keys, or lie before
    # its window.
    positions = torch.tensor([segments[i].start for i in decode], dtype=torch.long)
    lasts = positions // block_size
    earliest = (positions - window + 1).clamp_(min=0) if window else torch.zeros_like(positions)
    firsts = earliest // block_size
    num_keys = positions + 1 - firsts * block_size
    max_blocks = int((lasts - firsts).max()) + 1 if decode else 0
    decode_table = torch.zeros(len(decode), max_blocks, dtype=torch.long)
    for row, (i, first) in enumerate(zip(decode, firsts.tolist(), strict=True)):
        held = block_ids[table_begins[i] + first : table_begins[i + 1]]
        decode_table[row, : held.shape[0]] = held
    places = torch.arange(max_blocks * block_size)[None]
    hidden = places >= num_keys[:, None]
    if window:
        hidden |= places < (earliest - firsts * block_size)[:, None]
    return PagedMetadata(
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
        # Positions [start, end) that see each other, of those with rows here; the last of them are behind the tile.
        low, high = segment.start + a, segment.start + b
        whole = [each for each in segment.whole if each[0] < high and each[1] > low]
        end = max([high, *(each[1] for each in whole)])  # behind the last key
        if segment.start:
            block_ids = table[first // block_size : -(-end // block_size)].to(device)
            first -= first % block_size
        num_keys = end - first
        own = segment.start + a - first  # place of the first row's own key
        mask = torch.ones(b - a, num_keys, dtype=torch.bool, device=device).tril_(own)
        for begin_whole, end_whole in whole:
            rows = slice(max(0, begin_whole - segment.start - a), max(0, end_whole - segment.start - a))
            mask[rows, max(0, begin_whole - first) : end_whole - first] = True
        if window:
            mask.triu_(own - window + 1)
        tiles.append(AttentionTile(begin + a, begin + b, begin + first, num_keys, block_ids, mask))
    return tiles
