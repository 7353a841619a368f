"""A step that names memory which its sequence cannot have is refused before anything of it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.engine.plan import Segment, StepPlan
from common.errors import StepMemoryError
from common.kv_cache.sequences.allocation import BlockTable
from common.ops.step.attention_metadata import AttentionMetadata
from common.ops.step.check import PoolSizes
from tests.engine.harness import Harness, Work, random_tokens
from tests.support.ops import OPS_BACKENDS

BLOCK_SIZE = 16
NUM_BLOCKS, NUM_SLOTS = 40, 9


def decode(name: str, position: int, blocks: list[int], *, write_from: int = 0, slot: int = 1) -> Segment:
    return Segment(name, [5], position, (BlockTable(blocks, write_from),), slot, slot)


def chunk(name: str, start: int, end: int, blocks: list[int], **changes: object) -> Segment:
    segment = Segment(name, [5] * (end - start), start, (BlockTable(blocks),), 1, 2)
    return replace(segment, **changes)  # type: ignore[arg-type]


def make(*segments: Segment, window: int = 0, sizes: PoolSizes | None = None) -> AttentionMetadata:
    return AttentionMetadata(
        segments,
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
        sizes=sizes or PoolSizes(NUM_BLOCKS, NUM_SLOTS),
        window=window,
    )


GOOD = decode("other#0", 20, [3, 4], slot=5)
# What is wrong, the segment, and what the error says of it.
WRONG: dict[str, tuple[Segment, str]] = {
    "one block for 40 tokens": (chunk("bad#1", 0, 40, [7]), "1 blocks of 16 tokens do not cover positions 0 to 39"),
    "no blocks": (chunk("bad#1", 0, 1, []), "0 blocks of 16 tokens do not cover positions 0 to 0"),
    "a block short": (decode("bad#1", 32, [7, 8]), "2 blocks of 16 tokens do not cover positions 32 to 32"),
    "before the begin": (decode("bad#1", -1, [7]), "do not cover positions -1 to -1"),
    "no table": (replace(decode("bad#1", 0, [7]), tables=()), "has no block table"),
    "behind the pool": (decode("bad#1", 20, [7, NUM_BLOCKS]), "entry 1 of its block table is 40, must be 1 to 39"),
    "negative": (decode("bad#1", 20, [-1, 7]), "entry 0 of its block table is -1, must be 1 to 39"),
    "null": (decode("bad#1", 20, [0, 7]), "entry 0 of its block table is 0, must be 1 to 39"),
    "written from before the begin": (decode("bad#1", 20, [7, 8], write_from=-1), "written from position -1 on"),
    "written from beyond the blocks": (decode("bad#1", 20, [7, 8], write_from=33), "written from position 33 on"),
    "state of no slot": (decode("bad#1", 0, [7], slot=NUM_SLOTS), "from slot 9 to slot 9, must be 0 to 8 and 1 to 8"),
    "state of slot -1": (chunk("bad#1", 0, 2, [7], src_slot=-1), "from slot -1 to slot 2"),
    "state to the zero state": (chunk("bad#1", 0, 2, [7], dst_slot=0), "from slot 1 to slot 0"),
    "save behind the end": (chunk("bad#1", 0, 2, [7], save_offsets=(3,), save_slots=(4,)), r"after \(3,\) tokens"),
    "save of the begin": (chunk("bad#1", 0, 2, [7], save_offsets=(0,), save_slots=(4,)), r"after \(0,\) tokens"),
    "save without a slot": (chunk("bad#1", 0, 2, [7], save_offsets=(1, 2), save_slots=(4,)), r"after \(1, 2\) tokens"),
    "save to no slot": (chunk("bad#1", 0, 2, [7], save_offsets=(1,), save_slots=(9,)), r"saved to slots \(9,\)"),
    "save to the zero state": (chunk("bad#1", 0, 2, [7], save_offsets=(1,), save_slots=(0,)), r"saved to slots \(0,\)"),
}


@pytest.mark.parametrize("what", WRONG)
def test_step_when_a_segment_names_memory_that_is_not_there_then_is_refused_with_the_sequence_and_the_bound(
    what: str,
) -> None:
    segment, reason = WRONG[what]
    with pytest.raises(StepMemoryError, match=rf"sequence bad#1.*{reason}"):
        make(GOOD, segment)
    with pytest.raises(StepMemoryError, match=rf"sequence bad#1.*{reason}"):
        make(segment, GOOD)


@pytest.mark.parametrize(
    "segment",
    [
        decode("r#0", 0, [NUM_BLOCKS - 1], slot=NUM_SLOTS - 1),
        decode("r#0", 31, [1, 2]),
        decode("r#0", 31, [1, 2, 3, 99, -5]),  # entries beyond the last position are not read
        decode("r#0", 31, [1, 2], write_from=32),
        chunk("r#0", 0, 48, [1, 2, 3], src_slot=0, save_offsets=(48, 1), save_slots=(3, 4)),
    ],
)
def test_step_when_memory_is_used_to_its_edges_then_runs(segment: Segment) -> None:
    assert make(segment, GOOD).packed.address
    assert make(GOOD, segment).paged.decode_tables.shape[0] >= 1


@pytest.mark.parametrize(("position", "nulls"), [(100, 4), (100, 3), (100, 0), (111, 5), (31, 0), (79, 3)])
def test_step_when_null_blocks_lie_before_a_window_then_runs(position: int, nulls: int) -> None:
    """With a window of 32 the first position that is read is ``position`` - 31."""
    blocks = [0] * nulls + list(range(1 + nulls, 2 + position // BLOCK_SIZE))
    assert make(decode("r#0", position, blocks), GOOD, decode("s#0", 47, [0, 8, 9]), window=32).paged
    if nulls:
        with pytest.raises(StepMemoryError, match=r"sequence r#0: entry 0 of its block table is 0, must be 1 to 39$"):
            make(decode("r#0", position, blocks), GOOD)


@pytest.mark.parametrize(("position", "nulls"), [(100, 5), (110, 5), (31, 1), (79, 4)])
def test_step_when_a_null_block_lies_in_a_window_then_is_refused(position: int, nulls: int) -> None:
    blocks = [0] * nulls + list(range(1 + nulls, 2 + position // BLOCK_SIZE))
    with pytest.raises(StepMemoryError, match=f"sequence r#0: entry {nulls - 1} of its block table is 0"):
        make(GOOD, decode("s#0", 47, [0, 8, 9]), decode("r#0", position, blocks), window=32)


def test_step_when_a_model_keeps_no_states_or_has_no_attention_then_only_what_it_has_counts() -> None:
    assert make(decode("r#0", 3, [1], slot=0), sizes=PoolSizes(NUM_BLOCKS, 0)).num_tokens == 1
    assert make(replace(decode("r#0", 3, []), tables=()), sizes=PoolSizes(0, NUM_SLOTS)).num_tokens == 1


def memory(harness: Harness) -> list[Tensor]:
    return [arena.clone() for arena in (*harness.storage.block_arenas, harness.storage.slot_arena)]


DAMAGES: dict[str, Callable[[Segment], Segment]] = {
    "short table": lambda s: replace(s, tables=tuple(BlockTable(t.block_ids[:1]) for t in s.tables)),
    "no such block": lambda s: replace(s, tables=tuple(BlockTable([*t.block_ids[:-1], 1 << 40]) for t in s.tables)),
    "no such slot": lambda s: replace(s, dst_slot=1 << 40),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("backend", OPS_BACKENDS)
def test_forward_when_one_table_is_wrong_then_touches_nothing_and_the_next_one_runs(backend: str, damage: str) -> None:
    """Decode steps too, which the C++ backend replays without calling an op."""
    harness, untouched = Harness("granitemoehybrid", backend), Harness("granitemoehybrid", backend)
    run = harness.runner.forward
    for each in (harness, untouched):
        for slot, name in ((1, "A"), (2, "B")):
            each.add(name, slot, 24)
            each.hidden(Work(name, random_tokens(18, slot)))

    def damaged(plan: StepPlan) -> list[Tensor]:
        plan.segments[1] = DAMAGES[damage](plan.segments[1])
        return run(plan)

    for step in range(4):  # the first ones are not replayed
        sequence = harness.sequences["B"]
        kept = (sequence.num_computed, sequence.src_slot, harness.sequences["A"].num_computed)
        before = memory(harness)
        harness.runner.forward = damaged  # type: ignore[method-assign]
        with pytest.raises(StepMemoryError, match="sequence B"):
            harness.hidden(Work("A", [7 + step]), Work("B", [8 + step]))
        harness.runner.forward = run  # type: ignore[method-assign]
        assert all(torch.equal(a, b) for a, b in zip(memory(harness), before, strict=True))
        sequence.num_computed, sequence.src_slot, harness.sequences["A"].num_computed = kept
        found, expected = (each.hidden(Work("A", [7 + step]), Work("B", [8 + step])) for each in (harness, untouched))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
