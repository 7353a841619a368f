"""Prompts that come together with the same new beginning: who computes it, and for how long that is remembered."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.placement.in_progress import GRACE_S, LIFETIME_S, STRIDE, PromptsInProgress
from proxy.placement.request import Avoided, Placement, PlacementHeader
from proxy.prefix_index.coverage import Coverage
from proxy.prefix_index.node_cache import NodeCache
from tests.unit.proxy.placement.test_placer import Rig, tokens
from tests.unit.proxy.placement.world import BLOCK_SIZE, keys_of, make_request

SHARED = tokens(1600, seed=1)
NODE, OTHER = "http://a", "http://b"


def prompt(number: int, shared: int = 1600) -> list[int]:
    return SHARED[:shared] + tokens(40, seed=100 + number)


def telling(num_prefill: int = 2, num_decode: int = 2, **config: Any) -> Rig:
    """Nodes that tell what they have, and have nothing."""
    rig = Rig(num_prefill, num_decode, **config)
    for node in rig.pool.nodes:
        rig.index.start(node.url, NodeCache(BLOCK_SIZE, ("full",), True))
    return rig


def prefill_urls(placements: list[Placement]) -> set[str]:
    assert not any(each.is_local for each in placements)
    return {each.prefill[0].url for each in placements}


# --- placement


@pytest.mark.parametrize("policy", ["cost", "prefix_aware"])
def test_place_when_prompts_begin_alike_and_come_together_then_one_prefill_node_computes_the_beginning(
    policy: str,
) -> None:
    rig = telling(4, policy=policy)
    assert len(prefill_urls([rig.place(prompt(number)) for number in range(8)])) == 1
    spread = telling(4, policy=policy)
    assert len(prefill_urls([spread.place(tokens(1600, seed=number)) for number in range(8)])) == 4


def test_place_when_the_same_beginning_was_placed_then_the_others_are_charged_for_their_own_part_only() -> None:
    rig = telling()
    first = rig.place(prompt(0))
    for number in range(1, 4):
        rig.place(prompt(number))
    placed = first.prefill[0].load.placed_tokens
    assert 1640 + 3 * 40 <= placed <= 1640 + 3 * (40 + BLOCK_SIZE * STRIDE), placed


def test_place_when_the_first_one_brings_a_prefix_from_another_node_then_the_others_are_told_of_that_node_too() -> None:
    rig = telling()
    rig.has(rig.decode[0], SHARED)
    turn = SHARED + tokens(400, seed=7)
    requests = [make_request(turn + tokens(20, seed=50 + n), placement_header=PlacementHeader.REMOTE) for n in range(3)]
    placements = [rig.placer.place(request, Avoided()) for request in requests]
    assert len(prefill_urls(placements)) == 1
    assert [each.sources for each in placements] == [[rig.decode[0].pull_source()]] * 3


def test_place_when_the_first_one_computes_all_of_it_then_no_source_is_named() -> None:
    rig = telling()
    for number in range(2):
        assert rig.place(prompt(number)).sources == []


def test_place_when_the_node_that_computes_it_has_too_much_to_do_then_another_one_computes_it_too() -> None:
    rig = telling()
    first = rig.place(prompt(0))
    for number in range(12):  # work that no other may take
        rig.placer.place(
            make_request(tokens(3000, seed=50 + number)),
            Avoided(prefill=[node for node in rig.prefill if node is not first.prefill[0]]),
        )
    assert rig.place(prompt(1)).prefill[0] is not first.prefill[0]


def test_place_when_the_first_one_failed_then_nobody_counts_on_it() -> None:
    rig = telling()
    job = make_request(prompt(0))
    first = rig.placer.place(job, Avoided())
    rig.placer.finished(job)
    assert len(rig.placer._in_progress) == 0
    assert rig.place(prompt(1)).prefill[0] is not first.prefill[0]  # the other one's turn


def test_place_when_the_first_one_was_computed_and_its_events_are_late_then_still_the_same_node() -> None:
    rig = telling()
    first = rig.serve(prompt(0))
    rig.now += GRACE_S / 2
    second = rig.serve(prompt(1))
    assert second.prefill == first.prefill
    rig.now += 2 * GRACE_S
    third = rig.serve(prompt(2))
    assert third.prefill != first.prefill  # no event said so: it is not there


def test_place_when_the_index_knows_what_was_computed_then_only_its_word_counts() -> None:
    rig = telling()
    first = rig.serve(prompt(0))
    rig.index.start(first.prefill[0].url, NodeCache(BLOCK_SIZE, ("full",), True))
    rig.has(rig.prefill[1], SHARED, state=False)  # blocks, and no state to go on from
    rig.has(first.prefill[0], SHARED, state=False)
    second = rig.place(prompt(1))
    assert second.prefill[0].load.placed_tokens == 1640
    assert second.prefill != first.prefill  # its turn


def test_place_when_one_node_has_blocks_and_nobody_a_state_then_there_so_that_the_next_one_finds_a_state() -> None:
    rig = telling(4)
    rig.has(rig.prefill[2], SHARED, state=False)
    for number in range(2):
        assert rig.serve(prompt(number)).prefill == [rig.prefill[2]]


def test_placer_when_all_requests_have_ended_then_holds_nothing_of_them() -> None:
    rig = telling()
    jobs = [make_request(prompt(number)) for number in range(20)]
    for job in jobs:
        rig.placer.place(job, Avoided())
        rig.placer.place(job, Avoided())  # a second try
    for job in jobs:
        rig.placer.finished(job)
    assert len(rig.placer._in_progress) == 0


# --- claims


def test_lookup_when_a_longer_prompt_begins_like_one_that_is_computed_then_finds_all_of_it() -> None:
    in_progress = PromptsInProgress()
    in_progress.begin(NODE, keys_of(SHARED[:800]), 0)
    assert in_progress.lookup(keys_of(SHARED), {}) == {NODE: 800}
    assert in_progress.lookup(keys_of(tokens(800, seed=9)), {}) == {}


def test_lookup_when_two_part_inside_a_stride_then_finds_what_is_surely_shared() -> None:
    in_progress = PromptsInProgress()
    in_progress.begin(NODE, keys_of(prompt(1)), 0)
    found = in_progress.lookup(keys_of(prompt(2)), {})[NODE]
    assert 1600 - STRIDE * BLOCK_SIZE < found <= 1600


def test_claim_when_another_one_computes_the_same_then_outlives_the_first_ones_end() -> None:
    in_progress = PromptsInProgress()
    first, second = (in_progress.begin(NODE, keys_of(SHARED), 0) for _ in range(2))
    in_progress.end(first, is_computed=False)
    assert in_progress.lookup(keys_of(SHARED), {}) == {NODE: 1600}
    in_progress.end(second, is_computed=False)
    assert in_progress.lookup(keys_of(SHARED), {}) == {}
    assert len(in_progress) == 0


def test_claim_when_nobody_ends_it_then_counts_for_its_lifetime_and_is_forgotten() -> None:
    now = [0.0]
    in_progress = PromptsInProgress(clock=lambda: now[0])
    claim = in_progress.begin(NODE, keys_of(SHARED), 0)
    now[0] = LIFETIME_S - 1
    assert in_progress.lookup(keys_of(SHARED), {}) == {NODE: 1600}
    now[0] = LIFETIME_S + 1
    assert in_progress.lookup(keys_of(SHARED), {}) == {}
    in_progress.begin(OTHER, keys_of(tokens(100, seed=3)), 0)
    assert in_progress.lookup(keys_of(SHARED), {}) == {}
    assert len(in_progress) <= 2
    in_progress.end(claim, is_computed=True)


def test_claims_when_there_are_too_many_then_the_oldest_are_forgotten() -> None:
    in_progress = PromptsInProgress(max_keys=100)
    claims = [in_progress.begin(NODE, keys_of(tokens(1600, seed=number)), 0) for number in range(20)]
    assert len(in_progress) <= 100
    assert in_progress.lookup(keys_of(tokens(1600, seed=19)), {}) == {NODE: 1600}
    assert in_progress.lookup(keys_of(tokens(1600, seed=0)), {}) == {}
    for claim in claims:
        in_progress.end(claim, is_computed=False)
    assert len(in_progress) == 0


def test_claim_when_its_prompt_alone_has_too_many_places_then_its_beginning_is_remembered() -> None:
    in_progress = PromptsInProgress(max_keys=4)
    before = in_progress.begin(OTHER, keys_of(tokens(300, seed=3)), 0)
    claim = in_progress.begin(NODE, keys_of(SHARED), 0)
    assert len(in_progress) == 4
    assert in_progress.lookup(keys_of(SHARED), {}) == {NODE: 4 * STRIDE * BLOCK_SIZE}
    for each in (before, claim):
        in_progress.end(each, is_computed=False)
    assert len(in_progress) == 0


def test_claims_when_they_ended_behind_one_that_computes_for_long_then_are_forgotten_before_it() -> None:
    now = [0.0]
    in_progress = PromptsInProgress(clock=lambda: now[0])
    in_progress.begin(NODE, keys_of(SHARED[:800]), 0)
    num_places = len(in_progress)
    for number in range(10):
        in_progress.end(in_progress.begin(OTHER, keys_of(tokens(800, seed=number)), 0), is_computed=True)
    now[0] = GRACE_S + 1
    in_progress.begin(NODE, keys_of(SHARED[:800]), 0)
    assert len(in_progress) == num_places
    assert in_progress.lookup(keys_of(SHARED), {}) == {NODE: 800}


def test_lookup_when_computed_and_told_then_leaves_it_to_the_index() -> None:
    in_progress = PromptsInProgress()
    claim = in_progress.begin(NODE, keys_of(SHARED), 0)
    told = {NODE: Coverage(1600, 0)}
    assert in_progress.lookup(keys_of(SHARED), told) == {NODE: 1600}  # it still computes
    in_progress.end(claim, is_computed=True)
    assert in_progress.lookup(keys_of(SHARED), told) == {}
    assert in_progress.lookup(keys_of(SHARED), {NODE: Coverage(640, 640)}) == {NODE: 1600}
