"""Steps that are launched before the tokens of the one before them are known (``--async-scheduling``).

A step of sequences that only generate draws its tokens on the device. 1 ``follow``: the next step of the same
sequences is planned, with those tokens as its input ids, and launched; 2 the first one is collected. A sequence that
turns out to have ended there is still run once more, past its end: each such step reads one of the sequence's two slots
and writes the other, so the state at the end stays as it is, and the row's K/V lie behind what is ever published. 3
when that step is collected, the row is dropped and the sequence gives its memory back.

Whatever else there is to do is done in the ordinary order, after a collect: see ``Order``.
"""

from __future__ import annotations

import enum

from common.engine.model_runner import Forward
from common.engine.plan import DrawnIds
from common.engine.scheduler import Scheduler
from common.engine.scheduling.schedule import Schedule
from common.engine.sequence import Sequence


class Order(enum.Enum):
    """How a step came to be launched: ahead, or why not."""

    AHEAD = "ahead"
    SAMPLING = "sampling"
    OTHERS = "others"
    ENDED = "ended"
    MEMORY = "memory"
    ERROR = "error"


class AheadSteps:
    """Owned by the engine thread. ``counts``: steps that ran a forward, by their order; readable from any thread."""

    def __init__(self, scheduler: Scheduler, *, max_model_len: int) -> None:
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self.counts = dict.fromkeys((order.value for order in Order), 0)

    def count(self, order: Order) -> None:
        self.counts[order.value] += 1

    def follow(self, schedule: Schedule, forward: Forward | None) -> Schedule | Order:
        """The step behind the one that is in flight, of those of its sequences that may go on, its memory taken; or why
        there is none."""
        if forward is None:
            return Order.OTHERS
        if forward.tokens is None:
            return Order.SAMPLING
        if not self._scheduler.runs_the_same_again():
            return Order.OTHERS
        going_on = [row for row, sequence in enumerate(schedule.sequences) if self._may_go_on(sequence)]
        if not going_on:
            return Order.ENDED
        following = Schedule()
        following.plan.ids_from = DrawnIds(forward.tokens, going_on)
        for row in going_on:
            segment = self._scheduler.segments.ahead(schedule.sequences[row], schedule.plan.segments[row])
            if segment is None:
                return Order.MEMORY
            following.plan.segments.append(segment)
            following.sequences.append(schedule.sequences[row])
        self._scheduler.begin_step(following.sequences)
        return following

    def _may_go_on(self, sequence: Sequence) -> bool:
        """Whether the token that is being drawn is not known to be the last one."""
        return not sequence.is_over and sequence.num_left(self._max_model_len) > 1
