"""What the next step computes: order, budget, memory, and who waits for whom. Over a real cache manager, without
torch."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from common.engine.plan import Rows
from common.engine.scheduler import MAX_TIER_READS
from common.engine.scheduling.shared_prefixes import MAX_COMPARED, MAX_JUNCTIONS
from common.engine.sequence import Sequence, SequenceStatus
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.prefix.hits import PrefixHit
from tests.unit.engine.scheduling import BLOCK, Rig, names, planned, words


def test_scheduler_when_imported_then_torch_is_not() -> None:
    code = "import sys, common.engine.scheduler, common.kv_cache.manager; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- order


def test_queue_when_requests_wait_then_priority_comes_first_and_arrival_second() -> None:
    rig = Rig(max_num_seqs=2)
    rig.add("late", words(1, 8), arrival_s=3.0)
    rig.add("early", words(2, 8), arrival_s=1.0)
    rig.add("urgent", words(3, 8), arrival_s=9.0, priority=-1)
    rig.add("patient", words(4, 8), arrival_s=0.0, priority=1)
    assert planned(rig.step()) == [("urgent", 0, 8), ("early", 0, 8)]
    assert names(rig.scheduler.waiting) == ["late", "patient"]


def test_running_when_an_urgent_request_joined_later_then_it_gets_the_budget_first() -> None:
    rig = Rig(max_num_batched_tokens=8)
    rig.add("first", words(1, 20))
    rig.step()
    rig.add("urgent", words(2, 12), priority=-1)
    assert planned(rig.step()) == [("first", 8, 8)]  # what runs goes on before anything is admitted
    assert planned(rig.step()) == [("first", 16, 4), ("urgent", 0, 4)]
    assert planned(rig.step()) == [("first", 20, 1), ("urgent", 4, 2)]  # but not before a stream's next token


def test_head_of_the_queue_when_it_does_not_fit_then_nobody_overtakes_it() -> None:
    rig = Rig(num_blocks=10, caching=False)
    first = rig.add("first", words(1, 24), max_tokens=4)
    rig.step()
    rig.add("large", words(2, 30))
    rig.add("small", words(3, 4))
    for _ in range(2):
        assert names([*rig.step().sequences]) == ["first"]
    rig.end(first)
    assert names(rig.step().sequences) == ["large", "small"]


# --- budget


def test_prompt_when_longer_than_the_budget_then_is_computed_in_chunks() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.add("long", words(1, 40))
    chunks = [rig.step() for _ in range(3)]
    assert [planned(chunk) for chunk in chunks] == [[("long", 0, 16)], [("long", 16, 16)], [("long", 32, 8)]]
    assert [chunk.plan.segments[0].rows for chunk in chunks] == [Rows.NONE, Rows.NONE, Rows.LAST]


def test_budget_when_somebody_generates_then_prompts_get_a_quarter_of_it() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.add("generates", words(1, 8), max_tokens=4)
    rig.step()
    rig.add("long", words(2, 26))
    rig.add("next", words(3, 8))
    assert planned(rig.step()) == [("generates", 8, 1), ("long", 0, 4)]
    assert planned(rig.step()) == [("generates", 9, 1), ("long", 4, 4)]
    assert planned(rig.step()) == [("generates", 10, 1), ("long", 8, 4)]
    assert planned(rig.step()) == [("long", 12, 14), ("next", 0, 2)]  # all of it when nobody does


def test_streams_when_an_older_prompt_is_long_then_each_step_has_a_token_of_each() -> None:
    rig = Rig(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=4096)
    streams = [rig.add(f"stream{number}", words(2 + number, 8), max_tokens=1000) for number in range(4)]
    rig.step()
    long = rig.add("long", words(1, 1000), arrival_s=0.0)
    chunks = []
    while not long.is_prompt_done:
        *rows, chunk = planned(rig.step())
        assert [(name, count) for name, _, count in rows] == [(each.request.request_id, 1) for each in streams]
        chunks.append(chunk[2])
    assert set(chunks[:-1]) == {16}


def test_streams_when_there_are_more_than_the_budget_then_each_gets_its_turn_and_prompts_come_to_an_end() -> None:
    rig = Rig(max_num_seqs=16, max_num_batched_tokens=8, num_blocks=256)
    streams = [rig.add(f"stream{number}", words(1 + number, 4), max_tokens=100) for number in range(12)]
    while not all(each.is_prompt_done for each in streams):
        rig.step()
    prompt = rig.add("prompt", words(50, 20))
    steps = [rig.step() for _ in range(24)]
    assert prompt.is_prompt_done
    for stream in streams:
        turns = [stream in step.sequences for step in steps]
        assert all(any(turns[start : start + 3]) for start in range(len(turns) - 2)), stream.seq_id


def test_chunks_when_mode_is_align_then_end_on_block_boundaries_and_the_replay_boundary() -> None:
    rig = Rig(max_num_batched_tokens=10, mode="align")
    rig.add("aligned", words(1, 30))
    ends = [start + count for schedule in (rig.step() for _ in range(5)) for _, start, count in planned(schedule)]
    assert ends == [8, 16, 24, 28, 30]


def test_chunks_when_mode_is_not_align_then_take_the_whole_budget() -> None:
    rig = Rig(max_num_batched_tokens=10)
    rig.add("whole", words(1, 30))
    assert [planned(rig.step()) for _ in range(3)] == [[("whole", start, 10)] for start in (0, 10, 20)]


def test_rows_when_prompt_logprobs_are_asked_then_all_are_handed_back_and_no_prefix_is_reused() -> None:
    rig = Rig()
    rig.add("warm-up", words(1, 20), max_tokens=1)
    rig.run()
    rig.add("echo", words(1, 20), prompt_logprobs=0)
    schedule = rig.step()
    assert planned(schedule) == [("echo", 0, 20)]
    assert schedule.plan.segments[0].rows is Rows.ALL


# --- bounds


def test_sequences_when_as_many_run_as_may_then_the_next_one_waits_for_an_end() -> None:
    rig = Rig(max_num_seqs=2)
    first = rig.add("first", words(1, 8))
    for name in ("second", "third"):
        rig.add(name, words(len(name), 8))
    rig.step()
    assert names(rig.scheduler.running) == ["first", "second"]
    assert not rig.scheduler.has_room()
    rig.end(first)
    assert rig.scheduler.has_room()
    rig.step()
    assert names(rig.scheduler.running) == ["second", "third"]


def test_admission_when_a_prompt_is_cut_then_the_blocks_of_all_of_it_are_taken_at_once() -> None:
    rig = Rig(max_num_batched_tokens=8, num_blocks=10, caching=False)
    first = rig.add("first", words(1, 24))
    rig.add("second", words(2, 20))  # 5 blocks; 4 are free, and 2 would do for its first chunk
    rig.step()
    assert rig.manager.stats().blocks["free"] == 4
    for _ in range(4):
        rig.step()
    assert names(rig.scheduler.waiting) == ["second"]
    rig.end(first)
    assert planned(rig.step()) == [("second", 0, 8)]


@pytest.mark.parametrize("seed", range(6))
def test_steps_when_anything_happens_then_keep_their_bounds_and_everything_ends(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(max_num_seqs=4, max_num_batched_tokens=24, num_blocks=24, num_slots=8, mode=rng.choice(["auto", "align"]))
    shared = words(1, 40)
    alive = []
    for number in range(60):
        if number < 40 and rng.random() < 0.6:
            prompt = shared[: rng.randrange(0, 40)] + words(2 + number, rng.randrange(1, 20))
            alive.append(rig.add(f"r{number}", prompt, priority=rng.choice([0, 0, 1]), max_tokens=rng.randrange(1, 12)))
        if alive and rng.random() < 0.1:
            gone = alive.pop(rng.randrange(len(alive)))
            if gone.status is not SequenceStatus.FINISHED:
                rig.end(gone)
        schedule = rig.step()
        assert sum(count for _, _, count in planned(schedule)) <= 24
        assert all(count >= 1 for _, _, count in planned(schedule))
        scheduled = [sequence.seq_id for sequence in (*schedule.sequences, *schedule.row_only)]
        assert len(set(scheduled)) == len(scheduled) <= 4
        assert len(rig.scheduler.running) <= 4
        assert [each.order for each in rig.scheduler.waiting] == sorted(each.order for each in rig.scheduler.waiting)
    rig.run()
    assert all(sequence.finish_reason is not None for sequence in alive)
    assert rig.manager.stats().num_sequences == 0


# --- memory


def test_memory_when_it_runs_out_then_the_last_in_order_is_preempted_and_comes_back_before_later_ones() -> None:
    # Three prompts of 3 blocks fill 9 of 10; each needs a fourth one for its 13th token.
    rig = Rig(num_blocks=10, max_num_seqs=3)
    first, second, third = (rig.add(name, words(seed, 11), max_tokens=9) for seed, name in enumerate(("a", "b", "c")))
    rig.add("later", words(9, 8))
    while not rig.scheduler.num_preemptions:
        schedule = rig.step()
    assert third.status is SequenceStatus.WAITING
    assert (third.num_preemptions, third.num_computed_tokens) == (1, 0)
    assert names(schedule.sequences) == ["a", "b"]  # nobody is admitted in the step that preempts
    assert names(rig.scheduler.waiting) == ["c", "later"]
    assert first.num_preemptions == second.num_preemptions == 0
    admitted = [name for schedule in rig.run() for name in names([*schedule.sequences, *schedule.row_only])]
    assert admitted.index("c") < admitted.index("later")
    assert all(each.num_output_tokens == 9 for each in (first, second, third))


def test_memory_when_somebody_was_preempted_then_nobody_is_admitted_in_the_same_step() -> None:
    rig = Rig(num_blocks=5, caching=False)
    rig.add("first", words(1, 11))  # 3 blocks, and a fourth one for its 13th token
    last = rig.add("last", words(2, 6))
    rig.step()
    rig.step()
    rig.add("urgent", words(3, 3), priority=-1)  # would fit into the block that is left
    assert names(rig.step().sequences) == ["first"]
    assert last.status is SequenceStatus.WAITING
    assert names(rig.step().sequences) == ["first", "urgent"]


def test_preempted_when_its_state_is_still_cached_then_goes_on_from_it() -> None:
    rig = Rig()
    sequence = rig.add("r", words(1, 30))
    rig.step()
    rig.step()
    assert sequence.num_tokens == 32
    rig.scheduler.preempt(sequence)
    assert planned(rig.step()) == [("r", 31, 1)]
    assert sequence.num_local_hit == 0  # what it computed itself is no hit
    assert rig.scheduler.num_preemptions == 1


def test_preempted_when_prompt_logprobs_were_asked_and_are_known_then_goes_on_from_its_state_too() -> None:
    rig = Rig()
    sequence = rig.add("r", words(1, 30), prompt_logprobs=0)
    rig.step()
    rig.step()
    rig.scheduler.preempt(sequence)
    assert planned(rig.step()) == [("r", 31, 1)]


def test_preempted_when_a_tier_is_read_for_it_then_what_was_reported_of_its_prompt_stays() -> None:
    rig = Rig()
    sequence = rig.add("r", words(1, 30))
    rig.step()
    rig.step()
    rig.scheduler.preempt(sequence)
    rig.scheduler.tiers = Tiers()
    assert [each for each, _ in rig.schedule().pulls] == [sequence]
    assert sequence.num_local_hit == 0  # what it computed itself is no hit
    assert sequence.transfer_start_s is None


def test_preempted_when_nothing_is_cached_then_computes_prompt_and_output_again() -> None:
    rig = Rig(caching=False)
    sequence = rig.add("r", words(1, 30))
    rig.step()
    rig.step()
    rig.scheduler.preempt(sequence)
    assert planned(rig.step()) == [("r", 0, 32)]


# --- what is cached


def test_prompt_when_a_prefix_is_cached_then_only_the_rest_is_computed() -> None:
    rig = Rig()
    rig.add("before", words(1, 24), max_tokens=1)
    rig.run()
    longer = rig.add("longer", words(1, 24) + words(2, 6))
    assert planned(rig.step()) == [("longer", 24, 6)]
    assert (longer.num_local_hit, longer.num_prompt_computed) == (24, 6)


def test_prompt_when_it_is_an_exact_repeat_then_its_row_is_there_and_nothing_is_computed() -> None:
    rig = Rig()
    rig.add("before", words(1, 24), max_tokens=1)
    rig.run()
    repeat = rig.add("repeat", words(1, 24))
    schedule = rig.schedule()
    assert planned(schedule) == []
    assert names(schedule.row_only) == ["repeat"]
    assert not schedule.is_empty
    assert repeat.pending_row == "row of before#0"
    assert (repeat.num_local_hit, repeat.num_prompt_computed) == (24, 0)


def test_row_of_a_prompt_that_came_whole_when_others_generate_then_its_token_does_not_wait_for_their_step() -> None:
    rig = Rig()
    rig.add("stream", words(1, 8))
    pulled = rig.add("pulled", words(2, 8))
    rig.step()
    pulled.token_ids.pop()
    pulled.pending_row = "row"
    first, second = rig.step(), rig.step()
    assert (names(first.row_only), planned(first)) == (["pulled"], [])
    assert [name for name, _, _ in planned(second)] == ["stream", "pulled"]


def test_state_of_the_prompts_end_when_the_prompt_is_handed_out_then_takes_no_slot_of_its_own() -> None:
    rig = Rig()
    rig.add("sampled", words(1, 10))
    rig.add("handed out", words(2, 10), sampled=False)
    sampled, handed_out = rig.schedule().plan.segments
    assert sampled.save_offsets == (10,)
    assert handed_out.save_offsets == ()


# --- forks


def test_fork_when_it_shares_its_parents_memory_then_both_get_a_row_in_the_same_step() -> None:
    rig = Rig()
    parent = rig.add("r", words(1, 10))
    rig.step()
    child = rig.add("r", words(1, 10), index=1)
    rig.scheduler.remove(child)  # a fork with memory does not wait
    parent.token_ids.pop()
    parent.keys = rig.manager.prefix_keys(words(1, 10))
    assert rig.manager.fork(parent.seq_id, child.seq_id)
    child.keys = rig.manager.sequence(child.seq_id).keys
    child.num_computed_tokens, child.is_prompt_done = 10, True
    rig.scheduler.add_running(child)
    for sequence in (parent, child):
        sequence.append(5)
    assert planned(rig.step()) == [("r", 10, 1), ("r", 10, 1)]


def test_fork_when_there_is_no_room_for_it_then_waits_and_finds_the_whole_prompt() -> None:
    rig = Rig(max_num_seqs=1)
    parent = rig.add("r", words(1, 10), max_tokens=3)
    rig.step()
    child = rig.add("r", words(1, 10), index=1)
    while parent.status is SequenceStatus.RUNNING:
        assert child.status is SequenceStatus.WAITING
        rig.step()
    schedule = rig.step()
    assert [sequence.seq_id for sequence in schedule.row_only] == ["r#1"]
    assert planned(schedule) == []


# --- aborts


def test_abort_when_waiting_then_is_never_scheduled() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add("first", words(1, 8), max_tokens=2)
    gone = rig.add("gone", words(2, 8))
    rig.add("last", words(3, 8), max_tokens=2)
    rig.step()
    rig.end(gone)
    assert gone.status is SequenceStatus.FINISHED
    scheduled = {name for schedule in rig.run() for name in names(schedule.sequences)}
    assert scheduled == {"first", "last"}


def test_abort_when_in_the_middle_of_its_prompt_then_its_memory_and_its_place_are_the_next_ones() -> None:
    rig = Rig(max_num_seqs=1, max_num_batched_tokens=8, num_blocks=8)
    gone = rig.add("gone", words(1, 28))
    rig.add("next", words(2, 28))
    rig.step()
    rig.end(gone)
    assert planned(rig.step()) == [("next", 0, 8)]
    assert names(rig.scheduler.running) == ["next"]


# --- prompts with the same beginning


def test_prompts_when_they_begin_alike_in_one_step_then_one_computes_and_the_other_goes_on_from_it() -> None:
    rig = Rig(max_num_batched_tokens=32)
    rig.add("first", words(1, 40) + words(2, 8))
    rig.add("alike", words(1, 40) + words(3, 8))
    rig.add("other", words(4, 8))
    schedule = rig.step()
    assert planned(schedule) == [("first", 0, 32)]
    assert names(rig.scheduler.waiting) == ["alike", "other"]
    schedule = rig.step()
    assert schedule.plan.segments[0].save_offsets == (8, 16)  # where they part, and the prompt's end
    assert planned(schedule) == [("first", 32, 16), ("other", 0, 8)]  # it waits, and lets others pass
    assert planned(rig.step()) == [("first", 48, 1), ("other", 8, 1), ("alike", 40, 8)]


def test_prompt_when_another_like_it_comes_while_it_computes_then_a_state_is_kept_where_they_part() -> None:
    rig = Rig(max_num_batched_tokens=16)
    rig.add("first", words(1, 36) + words(2, 20))
    rig.step()
    rig.add("alike", words(1, 36) + words(3, 20))
    rig.step()
    assert rig.step().plan.segments[0].save_offsets == (36 - 32,)
    assert planned(rig.step()) == [("first", 48, 8), ("alike", 36, 8)]


def test_prompt_when_the_other_is_past_the_place_where_they_part_then_does_not_wait() -> None:
    rig = Rig(max_num_batched_tokens=32)
    rig.add("first", words(1, 24) + words(2, 36))
    rig.step()
    rig.add("alike", words(1, 24) + words(3, 8))
    assert names(rig.step().sequences) == ["first", "alike"]


def test_prompt_when_it_shares_too_little_then_does_not_wait() -> None:
    rig = Rig()
    rig.add("first", words(1, 3 * BLOCK) + words(2, 20))
    rig.add("alike", words(1, 3 * BLOCK) + words(3, 20))
    assert names(rig.step().sequences) == ["first", "alike"]


def test_prompt_when_the_one_it_waits_for_is_aborted_then_is_computed_in_the_next_step() -> None:
    rig = Rig(max_num_batched_tokens=16)
    first = rig.add("first", words(1, 60))
    rig.add("alike", words(1, 60) + words(2, 4))
    rig.step()
    rig.end(first)
    assert names(rig.step().sequences) == ["alike"]


@pytest.mark.parametrize("cache", [{"mode": "none"}, {"caching": False}])
def test_prompts_when_nothing_is_kept_then_do_not_wait_for_each_other(cache: dict[str, Any]) -> None:
    rig = Rig(max_num_batched_tokens=256, **cache)
    rig.add("first", words(1, 40))
    rig.add("alike", words(1, 40))
    assert names(rig.step().sequences) == ["first", "alike"]


@pytest.mark.parametrize(("num_alike", "is_seen"), [(MAX_COMPARED - 1, True), (MAX_COMPARED, False)])
def test_queue_when_its_front_waits_for_a_prompt_then_is_looked_at_so_far_and_no_further(
    num_alike: int, is_seen: bool
) -> None:
    rig = Rig(max_num_seqs=64, max_num_batched_tokens=30, num_blocks=512, num_slots=64)
    rig.add("first", words(1, 40))
    for number in range(num_alike):
        rig.add(f"alike{number}", words(1, 40) + words(10 + number, 4))
    rig.add("other", words(2, 4))
    assert names(rig.step().sequences) == ["first"]  # its chunk is the whole budget
    assert ("other" in names(rig.schedule().sequences)) == is_seen


def test_states_when_many_part_from_a_prompt_then_only_so_many_are_kept() -> None:
    rig = Rig(max_num_batched_tokens=512, num_blocks=512, num_slots=64)
    rig.add("first", words(1, 100))
    for number in range(MAX_JUNCTIONS + 3):
        rig.add(f"alike{number}", words(1, 40 + 4 * number) + words(10 + number, 4))
    offsets = rig.schedule().plan.segments[0].save_offsets
    assert offsets == (*(40 + 4 * number for number in range(MAX_JUNCTIONS)), 100)


# --- faults


def raises_for(rig: Rig, place: str, faulty: Sequence) -> Any:
    """``place`` of the cache manager raises for one sequence."""
    kept = getattr(rig.manager, place)

    def raising(subject: Any, *args: Any, **kwargs: Any) -> Any:
        if subject in (faulty.seq_id, faulty.keys):
            raise RuntimeError(place)
        return kept(subject, *args, **kwargs)

    return patch.object(rig.manager, place, raising)


@pytest.mark.parametrize("place", ["lookup", "admit", "plan_saves", "sequence"])
def test_fault_when_a_waiting_request_raises_then_it_fails_alone(place: str) -> None:
    rig = Rig()
    _, faulty, _ = (rig.add(name, words(number, 8)) for number, name in enumerate(("before", "faulty", "after")))
    with raises_for(rig, place, faulty):
        schedule = rig.schedule()
    assert [(each, str(exc)) for each, exc in schedule.failed] == [(faulty, place)]
    assert names(schedule.sequences) == ["before", "after"]


@pytest.mark.parametrize("place", ["extend", "plan_saves"])
def test_fault_when_a_running_request_raises_then_it_fails_alone(place: str) -> None:
    rig = Rig()
    _, faulty, _ = (rig.add(name, words(number, 8)) for number, name in enumerate(("before", "faulty", "after")))
    rig.step()
    with raises_for(rig, place, faulty):
        schedule = rig.schedule()
    assert [(each, str(exc)) for each, exc in schedule.failed] == [(faulty, place)]
    assert names(schedule.sequences) == ["before", "after"]


def test_suspects_when_there_are_some_then_each_runs_alone_until_it_has_caught_up() -> None:
    rig = Rig(max_num_batched_tokens=8)
    suspects = [rig.add(name, words(number, 12)) for number, name in enumerate(("first", "second"))]
    while not all(each.is_prompt_done for each in suspects):
        rig.step()
    rig.add("new", words(7, 4))
    rig.scheduler.suspects.add(suspects)
    for each in suspects:
        rig.scheduler.preempt(each, donate=False)
    for each in suspects:
        while each.num_lone_steps:
            assert set(names(rig.step().sequences)) == {each.request.request_id}
            each.num_lone_steps -= each.num_uncomputed_tokens == 1
    assert set(names(rig.step().sequences)) == {"first", "second", "new"}


class TierPrefix:
    num_tokens = 32
    is_being_read = False

    def begin(self) -> None:
        self.is_being_read = True


class Tiers:
    def __init__(self) -> None:
        self._prefix = TierPrefix()

    def find(self, keys: PrefixKeys, num_tokens: int, hit: PrefixHit) -> TierPrefix:
        return self._prefix


def test_suspect_when_a_tier_is_read_for_it_then_is_not_admitted_again() -> None:
    rig = Rig()
    rig.scheduler.tiers = Tiers()
    suspects = [rig.add(name, words(number, 40)) for number, name in enumerate(("first", "second"))]
    suspects[0].num_tier_reads = MAX_TIER_READS - 1  # what was read before was bad
    rig.scheduler.suspects.add(suspects)
    assert [sequence for sequence, _ in rig.schedule().pulls] == suspects[:1]
    assert rig.schedule().is_empty
    assert rig.manager.is_pulled("first#0")


def test_suspects_when_a_tier_is_read_for_the_first_then_the_second_runs_alone_and_nobody_else_is_admitted() -> None:
    rig = Rig()
    rig.scheduler.tiers = Tiers()
    first, second = (rig.add(name, words(number, 40)) for number, name in enumerate(("first", "second")))
    new = rig.add("new", words(7, 4))
    second.num_tier_reads = new.num_tier_reads = MAX_TIER_READS  # a tier has nothing for them
    rig.scheduler.suspects.add([first, second])
    assert [sequence for sequence, _ in rig.schedule().pulls] == [first]
    assert names(rig.step().sequences) == ["second"]
    rig.end(second)
    assert rig.schedule().is_empty
    rig.end(first)
    assert names(rig.step().sequences) == ["new"]


# --- prefixes from a peer


@dataclass
class Remote:
    num_tokens: int


def test_remote_prefix_when_memory_is_there_then_its_pull_starts_and_takes_a_place() -> None:
    rig = Rig(max_num_seqs=2)
    pulled = rig.add("pulled", words(1, 24), remote=Remote(24))
    rig.add("second", words(2, 8))
    rig.add("third", words(3, 8))
    schedule = rig.step()
    assert [sequence.seq_id for sequence, _ in schedule.pulls] == ["pulled#0"]
    assert pulled.status is SequenceStatus.TRANSFERRING
    assert names(schedule.sequences) == ["second"]  # the third finds no place: two hold memory
    assert rig.step().pulls == []  # once


def test_remote_prefix_when_prompts_before_it_wait_for_tokens_then_its_pull_starts() -> None:
    rig = Rig(max_num_batched_tokens=8)
    running = rig.add("running", words(1, 24))
    rig.step()
    rig.add("next", words(2, 24))
    rig.add("after", words(3, 24))
    pulled = rig.add("pulled", words(4, 24), remote=Remote(24))
    less_urgent = rig.add("less urgent", words(5, 24), remote=Remote(24), priority=1)
    schedule = rig.step()
    assert planned(schedule) == [("running", 8, 8)]
    assert [sequence for sequence, _ in schedule.pulls] == [pulled]
    assert names(rig.scheduler.waiting) == ["next", "after", "less urgent"]
    rig.end(running)
    assert planned(rig.step()) == [("next", 0, 8)]
    assert less_urgent.status is SequenceStatus.WAITING


def test_remote_prefix_when_prompts_before_it_wait_for_memory_then_it_waits_behind_them() -> None:
    rig = Rig(num_blocks=10, caching=False)
    first = rig.add("first", words(1, 24), max_tokens=4)
    rig.step()
    rig.add("large", words(2, 30))
    pulled = rig.add("pulled", words(3, 4), remote=Remote(4))
    for _ in range(2):
        assert rig.step().pulls == []
    rig.end(first)
    schedule = rig.step()
    assert (names(schedule.sequences), [each for each, _ in schedule.pulls]) == (["large"], [pulled])


def test_remote_prefix_when_memory_is_short_then_waits_at_the_head_and_nobody_overtakes_it() -> None:
    rig = Rig(num_blocks=8, caching=False)
    first = rig.add("first", words(1, 16))
    rig.step()
    rig.add("pulled", words(2, 24), remote=Remote(24))
    rig.add("small", words(3, 4))
    schedule = rig.step()
    assert (schedule.pulls, names(schedule.sequences)) == ([], ["first"])
    rig.end(first)
    schedule = rig.step()
    assert [sequence.seq_id for sequence, _ in schedule.pulls] == ["pulled#0"]
    assert names(schedule.sequences) == ["small"]
