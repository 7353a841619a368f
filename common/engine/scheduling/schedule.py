"""One step as it was scheduled: what the model runner executes, and of which sequences that is."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.engine.pacing.step_model import StepShape, chunk_attended
from common.engine.plan import StepPlan
from common.engine.sequence import Sequence
from common.kv_cache.sharing.remote_prefix import PullPlan


@dataclass(slots=True)
class Schedule:
    """One step: ``sequences`` goes with ``plan.segments``; ``row_only`` sample from a row they already have; ``pulls``
    are to be started now; for ``failed`` something raised, and they are in no other list."""

    plan: StepPlan = field(default_factory=StepPlan)
    sequences: list[Sequence] = field(default_factory=list)
    row_only: list[Sequence] = field(default_factory=list)
    pulls: list[tuple[Sequence, PullPlan]] = field(default_factory=list)
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.sequences or self.row_only or self.pulls or self.failed)


def shape_of(schedule: Schedule) -> StepShape | None:
    """What a step's time depends on; None when images may be computed in it, which take a time of their own."""
    num_rows = row_attended = num_tokens = attended = 0
    for sequence, segment in zip(schedule.sequences, schedule.plan.segments, strict=True):
        positions = chunk_attended(segment.start, segment.num_tokens)
        if sequence.is_decoding:
            num_rows += segment.num_tokens
            row_attended += positions
        elif segment.image_inputs:
            return None
        else:
            num_tokens += segment.num_tokens
            attended += positions
    return StepShape(num_rows, row_attended, num_tokens, attended)
