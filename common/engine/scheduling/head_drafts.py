"""When the model's own head drafts, and for whom. Nobody needs a draft: when the head raises, it rests for a while."""

from __future__ import annotations

import logging

from common.engine.plan import Segment
from common.engine.scheduling.segments import Segments
from common.engine.sequence import Sequence
from common.engine.speculation import Head, Speculation
from common.kv_cache.manager import KVCacheManager

logger = logging.getLogger(__name__)

MAX_HEAD_REST_BITS = 10
"""Steps without the model's head after it raised: 2, and twice as many after each further time, 2**10 at most."""


class HeadDrafts:
    """Owned by the engine thread."""

    def __init__(self, manager: KVCacheManager, segments: Segments) -> None:
        self._manager = manager
        self._segments = segments
        self._num_errors = 0  # one after the other
        self._rests_until = 0

    def guess(self, speculation: Speculation, decoding: list[Sequence], max_drafts: int, step_number: int) -> None:
        """Sets what comes next of those who generate (``Sequence.guessed``), if a head drafts and does not rest."""
        head = speculation.head
        if head is None or not max_drafts or step_number <= self._rests_until:
            return
        try:
            self._ask(speculation, head, decoding, max_drafts)
        except Exception:  # nobody needs a draft; what is more than that raises again in the forward
            logger.warning("the model's head could not draft", exc_info=True)
            self._num_errors = min(self._num_errors + 1, MAX_HEAD_REST_BITS)
            self._rests_until = step_number + 2**self._num_errors

    def _ask(self, speculation: Speculation, head: Head, decoding: list[Sequence], max_drafts: int) -> None:
        """Lets the model's head guess for all who generate. It writes to their blocks, so they get those first; where
        the known tokens of all do not fit, nobody drafts."""
        if not all(self._manager.extend(each.seq_id, each.num_tokens) for each in decoding):
            return
        asked: list[Sequence] = []
        segments: list[Segment] = []
        limits: list[int] = []
        for sequence in decoding:
            end = sequence.num_tokens
            sequence.guessed = []
            if sequence.last_row is None or sequence.pending_row is not None or sequence.finish_reason is not None:
                continue
            limit = speculation.num_wanted(sequence, self._manager.max_drafts(end, max_drafts), len(decoding))
            if not limit or not self._manager.extend(sequence.seq_id, end + limit):
                continue
            segments.append(self._segments.to_draft(sequence))
            limits.append(limit)
            asked.append(sequence)
        if asked:
            for sequence, guessed in zip(asked, head(segments, [each.last_row for each in asked], limits), strict=True):
                sequence.guessed = guessed
            self._num_errors = 0
