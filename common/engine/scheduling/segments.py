"""What a step runs of one sequence, and what memory that reads and writes.

Of a sequence with drafts 1 the states to go back to, 2 the states to keep, are given slots: without a slot for the
first it runs without its drafts, so that 2 is asked for what will be run.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from common.engine.plan import Rows, Segment
from common.engine.scheduling.image_chunks import ImageChunks
from common.engine.sequence import Sequence
from common.engine.speculation import Speculation
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.sequences.allocation import SequenceView

Saves = tuple[tuple[int, int], ...]
"""(position, slot), ascending, of states that a step writes."""


class Segments:
    """Owned by the engine thread."""

    def __init__(self, manager: KVCacheManager, images: ImageChunks) -> None:
        self._manager = manager
        self._images = images

    def next(self, sequence: Sequence, num_tokens: int, speculation: Speculation | None) -> Segment:
        """The next ``num_tokens`` tokens, and the sequence's drafts behind them; it has the blocks for all of them."""
        start = sequence.num_computed_tokens
        end = start + num_tokens
        token_ids = sequence.token_ids[start:end]
        rollback: Saves = ()
        if sequence.drafts:
            assert speculation is not None
            rollback = self._plan_rollback(sequence, end, saves_each=speculation.saves_each)
            token_ids += sequence.drafts
        saves = self._manager.plan_saves(sequence.seq_id, start, start + len(token_ids), _wanted_saves(sequence))
        if rollback:
            saves = tuple(sorted((*saves, *rollback)))
        view = self._manager.sequence(sequence.seq_id)
        if (sequence.prompt_logprobs is not None and not sequence.is_prompt_done) or sequence.drafts:
            rows = Rows.ALL
        else:
            rows = Rows.LAST if end == sequence.num_tokens else Rows.NONE
        return Segment(
            request_id=sequence.seq_id,
            token_ids=token_ids,
            start=start,
            tables=view.tables,
            src_slot=view.src_slot,
            dst_slot=view.dst_slot,
            save_offsets=tuple(position - start for position, _ in saves),
            save_slots=tuple(slot for _, slot in saves),
            rows=rows,
            images=sequence.request.images,
            image_inputs=sequence.request.image_inputs,
            whole=self._images.whole(sequence.request.images, start, end),
        )

    def to_draft(self, sequence: Sequence) -> Segment:
        """The last token alone: behind it the model's head drafts."""
        view = self._manager.sequence(sequence.seq_id)
        return _row(sequence, view, sequence.num_tokens - 1, sequence.token_ids[-1:])

    def ahead(self, sequence: Sequence, before: Segment) -> Segment | None:
        """The token behind that of ``before``, which nobody knows yet. None: there is no memory for it."""
        start = before.start + 1
        view = self._manager.extend_ahead(sequence.seq_id, start + 1, before.dst_slot)
        if view is None:
            return None
        saves = self._manager.plan_saves(sequence.seq_id, start, start + 1, ())
        return _row(sequence, view, start, (0,), saves)

    def _plan_rollback(self, sequence: Sequence, end: int, *, saves_each: bool) -> Saves:
        """States to go back to from the sequence's drafts; without a slot for one it has no drafts."""
        last = end + len(sequence.drafts) - 1 if saves_each else end
        rollback = self._manager.plan_rollback(sequence.seq_id, end, last)
        if rollback is None:
            sequence.drafts = []
            return ()
        return rollback


def _row(sequence: Sequence, view: SequenceView, start: int, token_ids: SequenceOf[int], saves: Saves = ()) -> Segment:
    """One token of a sequence that generates."""
    return Segment(
        request_id=sequence.seq_id,
        token_ids=token_ids,
        start=start,
        tables=view.tables,
        src_slot=view.src_slot,
        dst_slot=view.dst_slot,
        save_offsets=tuple(position - start for position, _ in saves),
        save_slots=tuple(slot for _, slot in saves),
        images=sequence.request.images,
    )


def _wanted_saves(sequence: Sequence) -> Mapping[int, str]:
    """A prompt without sampling keeps its end without a save: the running slot itself becomes that checkpoint."""
    end = sequence.num_prompt_tokens
    if sequence.num_computed_tokens >= end:
        return {}
    if not sequence.request.is_prompt_only:
        return sequence.save_positions
    return {position: why for position, why in sequence.save_positions.items() if position != end}
