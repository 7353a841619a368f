"""Which drafts a step has: within its budget, its memory and the request's own end. No torch."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import Any

import pytest

from common.engine.drafting.drafter import Drafter
from common.engine.plan import Segment
from common.engine.sequence import Sequence
from common.engine.speculation import Speculation
from tests.unit.engine.scheduling import BLOCK, Rig, words


class Counting(Drafter):
    """Drafts numbers that no rig samples, so that every draft is wrong."""

    def propose(self, token_ids: ListOf[int], max_tokens: int) -> list[int]:
        return list(range(max_tokens))


class DraftingRig(Rig):
    """Each step's drafts are settled as wrong before the rig samples."""

    def __init__(self, *, max_model_len: int = 1024, saves_each: bool = False, **settings: int) -> None:
        super().__init__(**settings)
        self.scheduler.speculation = Speculation(
            Counting, num_tokens=4, max_model_len=max_model_len, slot_bytes=0 if saves_each else 1 << 30, adapts=False
        )

    def drafts(self) -> list[int]:
        """How many each sequence of the next step has; the step is run and its drafts are wrong."""
        schedule = self.schedule()
        counts = [len(sequence.drafts) for sequence in schedule.sequences]
        for sequence, segment in zip(schedule.sequences, schedule.plan.segments, strict=True):
            self._settle(sequence, segment)
        assert self.manager.check() == []
        return counts

    def _settle(self, sequence: Sequence, segment: Segment) -> None:
        if sequence.drafts:
            known = sequence.num_tokens
            sequence.drafts = []
            sequence.append(900_000 + known)
            done = self.manager.complete_drafts(sequence.seq_id, segment.start + segment.num_tokens, known)
            sequence.num_computed_tokens = done
            assert done == known
            return
        sequence.num_computed_tokens += segment.num_tokens
        self.manager.complete_step(sequence.seq_id, sequence.num_computed_tokens)
        if not sequence.num_uncomputed_tokens:
            if not sequence.is_prompt_done:
                sequence.is_prompt_done = True
                self.manager.finish_prompt(sequence.seq_id, "row")
            sequence.append(900_000 + sequence.num_tokens)


def test_drafts_when_a_step_has_room_then_are_as_many_as_the_drafter_has_and_the_prompt_has_none() -> None:
    rig = DraftingRig()
    rig.add("a", words(1, 10), max_tokens=100)
    rig.add("b", words(2, 10), max_tokens=100)
    assert rig.drafts() == [0, 0]
    assert rig.drafts() == [4, 4]


@pytest.mark.parametrize(("budget", "expected"), [(10, [4, 4]), (7, [4, 1]), (4, [2, 0]), (2, [0, 0])])
def test_drafts_when_the_budget_is_short_then_every_sequence_has_its_row_first(
    budget: int, expected: list[int]
) -> None:
    rig = DraftingRig(max_num_batched_tokens=budget)
    for name in ("a", "b"):
        rig.add(name, words(ord(name), 2), max_tokens=100)
    while not all(sequence.is_decoding for sequence in rig.scheduler.running) or rig.scheduler.waiting:
        rig.drafts()
    assert rig.drafts() == expected


def test_drafts_when_the_answer_or_the_context_ends_then_are_as_many_as_can_be_said() -> None:
    rig = DraftingRig(max_model_len=16)
    rig.add("short", words(1, 8), max_tokens=3)
    rig.add("long", words(2, 13), max_tokens=100)
    rig.drafts()
    # One token is out, and one more comes behind the drafts: 1 of 3, and 1 of the 16 places of the context.
    assert rig.drafts() == [1, 1]


@pytest.mark.parametrize("saves_each", [False, True])
def test_drafts_when_blocks_are_short_then_nobody_is_preempted_for_them(saves_each: bool) -> None:
    rig = DraftingRig(num_blocks=6, saves_each=saves_each)
    for name in ("a", "b"):
        rig.add(name, words(ord(name), 3 * BLOCK - 2), max_tokens=100)
    rig.drafts()
    counts = rig.drafts()
    assert len(counts) == 2
    assert counts[1] == 0 or counts[0] == 0
    assert rig.scheduler.num_preemptions == 0


def test_drafts_when_slots_are_short_then_a_state_behind_the_known_tokens_is_enough() -> None:
    rig = DraftingRig(num_slots=3, saves_each=True)
    rig.add("a", words(1, 10), max_tokens=100)
    rig.drafts()
    rig.drafts()  # the end of the prompt has its own until then
    schedule = rig.schedule()
    (segment,) = schedule.plan.segments
    assert segment.num_tokens == 5
    assert segment.save_offsets[0] == 1
    assert len(segment.save_offsets) == 2  # of four


def test_plan_when_only_generating_sequences_run_then_says_so() -> None:
    rig = DraftingRig()
    rig.add("a", words(1, 10), max_tokens=100)
    assert not rig.schedule().plan.only_decodes
    rig = DraftingRig()
    rig.add("a", words(1, 10), max_tokens=100)
    rig.drafts()
    assert rig.schedule().plan.only_decodes


def test_head_when_it_raises_again_and_again_then_rests_longer_and_longer_until_it_does_not() -> None:
    rig = DraftingRig()
    asked_in: list[int] = []
    step, is_broken = 0, True

    def head(segments: ListOf[Segment], rows: ListOf[Any], limits: ListOf[int]) -> list[list[int]]:
        asked_in.append(step)
        if is_broken:
            raise RuntimeError("injected")
        return [list(range(limit)) for limit in limits]

    rig.scheduler.speculation = Speculation(
        None, num_tokens=4, max_model_len=1024, slot_bytes=1 << 30, adapts=False, head=head
    )
    sequence = rig.add("a", words(1, 10), max_tokens=200)
    for step in range(40):
        sequence.last_row = "row"
        is_broken = step < 30
        assert rig.drafts() == ([0] if step < 35 else [4])
    assert asked_in == [1, 4, 9, 18, 35, 36, 37, 38, 39]
