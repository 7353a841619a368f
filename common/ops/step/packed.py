"""One step as 64-bit words in memory: what compiled kernels read, through one pointer.

Made once per step from plain segments: a few C-level loops over segments and block ids, nothing per token.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

from common.ops.step.segment import SegmentLike, TableLike


class PackedStep:
    """``address`` points to the ``Step`` of ``cpu/src/step.h`` (same fields, same order) and is valid while this lives;
    ``header`` is that struct, for callers that copy it to an address of their own."""

    __slots__ = ("_words", "address", "header")

    def __init__(
        self,
        segments: Sequence[SegmentLike],
        tables: Sequence[TableLike],
        begins: Sequence[int],
        block_ids: array[int],
        table_begins: Sequence[int],
        block_size: int,
    ) -> None:
        """``tables``: of each segment, in one attention group; none without attention layers. ``begins``: packed start
        row of each segment, then the number of rows. ``block_ids``: those of all tables that the step needs, each
        table's from its place in ``table_begins`` on."""
        saves = [sorted(zip(s.save_offsets, s.save_slots, strict=True)) for s in segments]
        flat = list(itertools.chain.from_iterable(saves))
        # Of a step with images whose tokens see each other; else none, and each row sees as far as itself.
        seen = list(itertools.chain.from_iterable(map(_seen_ends, segments))) if any(s.whole for s in segments) else []
        parts: list[Sequence[int]] = [
            seen,
            begins,
            [s.src_slot for s in segments],
            [s.dst_slot for s in segments],
            [s.start for s in segments],
            [table.write_from for table in tables],
            list(itertools.accumulate(map(len, saves), initial=0)),
            [offset for offset, _ in flat],
            [slot for _, slot in flat],
            table_begins,
        ]
        words = array("q", list(itertools.chain.from_iterable(parts)))
        base, _ = words.buffer_info()
        places = itertools.accumulate(map(len, parts[:-1]), initial=0)
        addresses = [base + words.itemsize * place for place in places]
        header = array("q", [len(segments), block_size, *addresses[1:], block_ids.buffer_info()[0]])
        header.append(addresses[0] if seen else 0)
        self._words, self.header = (words, block_ids), header
        self.address: int = header.buffer_info()[0]


def _seen_ends(segment: SegmentLike) -> list[int]:
    """For each row the position behind the last one that it sees."""
    start = segment.start
    ends = list(range(start + 1, start + segment.num_tokens + 1))
    for first, end in segment.whole:
        begin = max(first, start) - start
        ends[begin : end - start] = [end] * (end - start - begin)
    return ends
