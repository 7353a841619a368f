"""Prefixes that begin alike and are pulled from one node at the same time: their blocks come once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from common.engine.scheduling.shared_prefixes import MAX_COMPARED, MIN_SHARED_BLOCKS
from common.engine.sequence import Sequence
from tests.unit.engine.scheduling import BLOCK, Rig, names, planned, words

NUM_SHARED = 2 * MIN_SHARED_BLOCKS
SHARED = words(1, NUM_SHARED * BLOCK)
URL = "http://127.0.0.1:1"


@dataclass
class Remote:
    num_tokens: int
    prefix_key: bytes
    url: str = URL
    is_final: bool = True


def add(rig: Rig, name: str, prompt: list[int], *, priority: int = 0, **remote: Any) -> Sequence:
    key = rig.manager.prefix_keys(prompt).key_at(len(prompt))
    return rig.add(name, prompt, priority=priority, remote=Remote(len(prompt), key, **remote))


def pulls(rig: Rig) -> dict[str, list[int]]:
    """By request, the indices of the blocks that the next step begins to pull."""
    return {
        sequence.request.request_id: [index for index, _ in plan.pairs[0]] for sequence, plan in rig.schedule().pulls
    }


def arrive(rig: Rig, sequence: Sequence) -> None:
    rig.manager.commit_remote(sequence.seq_id, f"row of {sequence.seq_id}", seal=True)
    rig.manager.free(sequence.seq_id, donate=True)
    rig.scheduler.remove(sequence)


def test_pulls_when_prompts_begin_alike_then_the_shared_blocks_come_once() -> None:
    rig = Rig()
    first = add(rig, "first", SHARED + words(2, 2 * BLOCK))
    add(rig, "second", SHARED + words(3, BLOCK))
    add(rig, "other", words(4, 2 * BLOCK))
    assert pulls(rig) == {"first": list(range(NUM_SHARED + 2)), "other": [0, 1]}
    assert pulls(rig) == {}
    arrive(rig, first)
    assert pulls(rig) == {"second": [NUM_SHARED]}


def test_pulls_when_prompts_are_the_same_then_nothing_comes_twice() -> None:
    rig = Rig()
    short = words(1, BLOCK + 1)
    first = add(rig, "first", short)
    add(rig, "second", short)
    assert pulls(rig) == {"first": [0, 1]}
    assert pulls(rig) == {}
    arrive(rig, first)
    [(second, plan)] = rig.schedule().pulls
    assert (second.request.request_id, plan.is_empty) == ("second", True)


def test_pulls_when_what_is_shared_is_here_then_nobody_waits() -> None:
    rig = Rig()
    before = add(rig, "before", SHARED)
    assert list(pulls(rig)) == ["before"]
    arrive(rig, before)
    add(rig, "first", SHARED + words(2, 5 * BLOCK))
    add(rig, "second", SHARED + words(3, BLOCK))
    assert pulls(rig) == {"first": list(range(NUM_SHARED, NUM_SHARED + 5)), "second": [NUM_SHARED]}


def test_pulls_when_the_first_one_is_lost_then_the_next_brings_the_blocks() -> None:
    rig = Rig()
    first = add(rig, "first", SHARED)
    add(rig, "second", SHARED + words(3, BLOCK))
    pulls(rig)
    rig.manager.abandon_remote(first.seq_id, quarantine=False)
    rig.scheduler.remove(first)
    assert pulls(rig) == {"second": list(range(NUM_SHARED + 1))}


def test_pulls_when_the_first_ones_reader_has_left_then_the_next_does_not_wait_for_it() -> None:
    rig = Rig()
    add(rig, "first", SHARED)
    [(first, _)] = rig.schedule().pulls
    first.aborted = True
    add(rig, "second", SHARED + words(3, BLOCK))
    assert list(pulls(rig)) == ["second"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"url": "http://127.0.0.1:2"}, {}, id="from another node"),
        pytest.param({"priority": 1}, {"priority": 0}, id="more urgent"),
        pytest.param({"is_final": False}, {"is_final": True}, id="finished before the first one"),
    ],
)
def test_pulls_when_the_first_one_may_come_later_then_nobody_waits_for_it(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    rig = Rig()
    add(rig, "first", SHARED, **first)
    assert list(pulls(rig)) == ["first"]
    add(rig, "second", SHARED + words(3, BLOCK), **second)
    assert pulls(rig) == {"second": list(range(NUM_SHARED + 1))}


def test_pulls_when_many_wait_for_one_then_others_behind_them_begin() -> None:
    rig = Rig(max_num_seqs=64, max_num_batched_tokens=256, num_blocks=2000, num_slots=200)
    num_alike = 3 * MAX_COMPARED
    alike = [add(rig, f"alike {n}", SHARED + words(10 + n, BLOCK), is_final=False) for n in range(num_alike)]
    add(rig, "other", words(5, 2 * BLOCK), url="http://127.0.0.1:2")
    rig.add("local", words(6, 2 * BLOCK))
    step = rig.schedule()
    assert (names([each for each, _ in step.pulls]), names(step.sequences)) == (["alike 0", "other"], ["local"])
    assert rig.schedule().pulls == []
    arrive(rig, alike[0])
    assert list(pulls(rig)) == names(alike[1:])


def test_pulls_when_both_are_being_computed_then_the_second_waits_until_it_is_finished_first() -> None:
    rig = Rig()
    add(rig, "first", SHARED, is_final=False)
    second = add(rig, "second", SHARED + words(3, BLOCK), is_final=False)
    assert list(pulls(rig)) == ["first"]
    assert pulls(rig) == {}
    second.remote.is_final = True
    assert list(pulls(rig)) == ["second"]


def test_new_part_behind_pulls_when_prompts_share_it_then_is_computed_once() -> None:
    """Each brings its own history, and more of it is new to this node and the same for all."""
    rig = Rig(num_blocks=256, num_slots=32)
    new = words(5, 5 * BLOCK)
    first, second = (
        rig.add(
            name,
            SHARED + new + words(seed, 2),
            remote=Remote(len(SHARED), rig.manager.prefix_keys(SHARED).key_at(len(SHARED))),
        )
        for name, seed in (("first", 6), ("second", 7))
    )
    assert list(pulls(rig)) == ["first"]
    for sequence in (first, second):
        rig.manager.commit_remote(sequence.seq_id, None, seal=True)
        rig.manager.free(sequence.seq_id, donate=True)
        sequence.remote = None
        del rig.scheduler.transferring[sequence.seq_id]
        rig.scheduler.add(sequence)
        if sequence is first:
            step = rig.schedule()  # the second's pull begins, of nothing, beside the first one's prompt
            assert planned(step) == [("first", len(SHARED), len(new) + 2)]
            assert [each.request.request_id for each, _ in step.pulls] == ["second"]
            assert len(new) in step.plan.segments[0].save_offsets
            first.num_computed_tokens = first.num_prompt_tokens
            rig.manager.complete_step(first.seq_id, first.num_computed_tokens)
    assert planned(rig.schedule())[-1] == ("second", len(SHARED) + len(new), 2)


@dataclass
class TierPrefix:
    num_tokens: int
    prefix_key: bytes
    is_being_read: bool = False

    def begin(self) -> None:
        self.is_being_read = True


class Tiers:
    """Has every prompt."""

    def find(self, keys: Any, num_tokens: int, hit: Any) -> TierPrefix | None:
        return TierPrefix(num_tokens, keys.key_at(num_tokens)) if hit.num_tokens < num_tokens else None


def test_tier_reads_when_prompts_begin_alike_then_the_shared_blocks_are_read_once() -> None:
    rig = Rig()
    rig.scheduler.tiers = Tiers()
    first = rig.add("first", SHARED + words(2, 2 * BLOCK))
    rig.add("second", SHARED + words(3, BLOCK))
    rig.add("other", words(4, 2 * BLOCK))
    assert pulls(rig) == {"first": list(range(NUM_SHARED + 2)), "other": [0, 1]}
    assert pulls(rig) == {}
    arrive(rig, first)
    assert pulls(rig) == {"second": [NUM_SHARED]}


@pytest.mark.parametrize("mode", ["auto", "align"])
def test_prompts_when_they_begin_alike_for_longer_than_a_chunk_then_that_is_computed_once(mode: str) -> None:
    rig = Rig(mode=mode, num_blocks=256, num_slots=64, max_num_batched_tokens=16)
    shared = words(1, 64)
    for number in range(4):
        rig.add(f"r{number}", shared + words(10 + number, 9), max_tokens=1)
    computed = sum(count for step in rig.run() for _, _, count in planned(step))
    assert computed == len(shared) + 4 * 9


def test_prompts_when_states_are_kept_at_ends_of_chunks_and_they_part_within_one_then_nobody_waits() -> None:
    rig = Rig(mode="align", num_blocks=128, num_slots=64, max_num_batched_tokens=256)
    for number in range(4):
        rig.add(f"r{number}", SHARED + words(10 + number, 9), max_tokens=1)
    assert [name for name, start, _ in planned(rig.step()) if not start] == ["r0", "r1", "r2", "r3"]
