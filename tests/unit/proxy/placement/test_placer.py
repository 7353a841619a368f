"""One choice at a time: what is where, how busy everybody is, and who gets the request then."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.config.proxy import ProxyConfig
from common.errors import NodeUnavailableError
from common.images.span import ImageSpan
from common.wire.cache_events import TIER_PREFIX, CacheChange, truncate_key
from proxy.nodes.node import Node, NodeRole
from proxy.nodes.pool import NodePool
from proxy.placement.placer import Placer
from proxy.placement.request import Avoided, Placement, PlacementHeader, PlacementRequest
from proxy.prefix_index.index import PrefixIndex
from proxy.prefix_index.node_cache import NodeCache
from proxy.prefix_index.prompt_keys import PromptKeys
from tests.unit.proxy.placement.world import BLOCK_SIZE, keys_of, make_pool, make_request, report, store

NOBODY = Avoided()


class Rig:
    """A placer over nodes that only exist in its pool; ``now`` is the clock."""

    def __init__(self, num_prefill: int = 2, num_decode: int = 2, **config: Any) -> None:
        self.now = 100.0
        self.pool: NodePool = make_pool(num_prefill, num_decode)
        self.index = PrefixIndex(100_000)
        self.started: list[tuple[str, float, float]] = []
        self.placer = Placer(
            ProxyConfig(decode=("http://unused",), **{"elastic": False, **config}),
            self.pool,
            self.index,
            on_start=lambda *values: self.started.append(values),
            clock=lambda: self.now,
        )

    @property
    def prefill(self) -> list[Node]:
        return self.pool.usable(NodeRole.PREFILL)

    @property
    def decode(self) -> list[Node]:
        return self.pool.usable(NodeRole.DECODE)

    def has(self, node: Node, token_ids: list[int], position: int | None = None, *, state: bool = True) -> None:
        """``node`` has the first ``position`` tokens, with or without a state at their end."""
        cache = NodeCache(BLOCK_SIZE, ("full",), True)
        keys = keys_of(token_ids)
        store(cache, keys, position)
        if not state:
            cache.forget(0)
            for key in list(cache._checkpoints._boundary_of):
                cache._checkpoints._remove(key)
        self.index.start(node.url, cache)

    def has_below(
        self, node: Node, token_ids: list[int], s_per_byte: float | None = 1e-9, *, kind: str = "disk", **load: Any
    ) -> None:
        """``node`` has these tokens in a tier alone, which is read so fast; None: not now."""
        cache, keys = NodeCache(BLOCK_SIZE, ("full",), True), keys_of(token_ids)
        key, boundary = keys.key_at(keys.num_tokens), keys.truncated_keys[keys.num_tokens // BLOCK_SIZE]
        cache.apply(CacheChange(True, TIER_PREFIX + kind, (truncate_key(key),), boundary, keys.num_tokens, True))
        self.index.start(node.url, cache)
        busy(node, tiers={} if s_per_byte is None else {kind: (0.005, s_per_byte)}, **load)

    def place(self, token_ids: list[int], avoided: Avoided = NOBODY, **fields: Any) -> Placement:
        return self.placer.place(make_request(token_ids, **fields), avoided)

    def serve(self, token_ids: list[int], **fields: Any) -> Placement:
        """From its placement to its end."""
        job = make_request(token_ids, **fields)
        placement = self.placer.place(job, NOBODY)
        self.placer.started(job, is_answer=True)
        self.placer.finished(job)
        return placement


def tokens(count: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(count)]


def busy(node: Node, **fields: Any) -> None:
    node.load.update(report(**fields), 100.0)


# --- which way


def test_place_when_a_long_prefix_is_on_a_decode_node_then_local_there() -> None:
    rig = Rig()
    prompt = tokens(2040)
    rig.has(rig.decode[1], prompt, 2000)
    placement = rig.place(prompt)
    assert (placement.decode, placement.is_local) == (rig.decode[1], True)


def test_place_when_its_decode_node_runs_streams_then_a_cold_prompt_goes_remote() -> None:
    rig = Rig(1, 1)
    busy(rig.decode[0], num_running=8)
    assert not rig.place(tokens(3000)).is_local


def test_place_when_its_decode_node_runs_streams_then_a_short_suffix_stays_local() -> None:
    rig = Rig(1, 1)
    busy(rig.decode[0], num_running=8)
    prompt = tokens(2040)
    rig.has(rig.decode[0], prompt, 2000)
    assert rig.place(prompt).is_local


@pytest.mark.parametrize(("weight", "is_local"), [(0.0, True), (0.5, False)])
def test_place_when_streams_do_not_count_then_what_is_fastest_for_the_new_one(weight: float, is_local: bool) -> None:
    rig = Rig(1, 1, stream_delay_weight=weight)
    busy(rig.decode[0], num_running=8)
    prompt = tokens(3000)
    rig.has(rig.decode[0], prompt, 1000)
    assert rig.place(prompt).is_local is is_local


@pytest.mark.parametrize(("image_at", "is_local"), [(100, True), (1990, True), (1996, False), (2010, False)])
def test_place_when_an_image_lies_behind_the_decode_nodes_state_then_remote(image_at: int, is_local: bool) -> None:
    rig = Rig(1, 1)
    prompt = tokens(2040)
    keys = PromptKeys.of_prompt(b"root", BLOCK_SIZE, prompt, None, (ImageSpan(image_at, 2, 5, bytes(32)),))
    cache = NodeCache(BLOCK_SIZE, ("full",), True)
    store(cache, keys, 2000)
    rig.index.start(rig.decode[0].url, cache)
    assert rig.place(prompt, prompt_keys=(keys,)).is_local is is_local


@pytest.mark.parametrize("num_tokens", [1, 20, 3000])
def test_place_when_a_prompt_is_new_to_the_decode_node_then_remote_however_short(num_tokens: int) -> None:
    rig = Rig(1, 1)
    prompt = tokens(num_tokens)
    assert not rig.place(prompt).is_local
    rig.has(rig.decode[0], prompt, num_tokens, state=False)
    assert not rig.place(prompt).is_local


def test_place_when_blocks_are_there_without_a_state_then_the_prefix_is_not_taken_for_computed() -> None:
    rig = Rig(1, 1)
    prompt = tokens(3040)
    busy(rig.decode[0], num_running=8)
    rig.has(rig.decode[0], prompt, 3000, state=False)
    assert not rig.place(prompt).is_local


@pytest.mark.parametrize("s_per_byte", [1e-9, 1e-6])
def test_place_when_a_prefill_node_has_the_prefix_in_a_tier_then_that_one_where_reading_pays(s_per_byte: float) -> None:
    rig = Rig()
    rig.has_below(rig.prefill[1], tokens(4000), s_per_byte, num_uncomputed_tokens=3000)
    assert rig.place(tokens(4000)).prefill == [rig.prefill[s_per_byte < 1e-7]]


@pytest.mark.parametrize(("s_per_byte", "is_local"), [(1e-9, True), (1e-6, False), (None, False)])
def test_place_when_a_decode_node_has_the_prefix_in_a_tier_that_is_read_then_local_there_as_if_it_were_in_memory(
    s_per_byte: float | None, is_local: bool
) -> None:
    rig = Rig()
    rig.has_below(rig.decode[1], tokens(4000), s_per_byte)
    placement = rig.place([*tokens(4000), *tokens(30, 2)])
    assert placement.is_local is is_local
    assert not is_local or placement.decode is rig.decode[1]


def test_place_when_all_nodes_have_it_in_one_shared_tier_then_the_one_without_a_queue() -> None:
    for idle in range(2):
        rig = Rig()
        for number, node in enumerate(rig.prefill):
            rig.has_below(node, tokens(4000), kind="shared", num_uncomputed_tokens=0 if number == idle else 3000)
        assert rig.place(tokens(4000)).prefill == [rig.prefill[idle]]


def test_place_when_two_decode_nodes_lack_the_state_then_the_one_with_the_blocks_saves_the_transfer() -> None:
    rig = Rig(1, 2)
    prompt = tokens(3008)
    rig.has(rig.prefill[0], prompt)
    rig.has(rig.decode[1], prompt, 3000, state=False)
    placed = [rig.place(prompt).decode for _ in range(3)]
    assert placed == [rig.decode[1]] * 3


@pytest.mark.parametrize(("header", "is_local"), [(PlacementHeader.LOCAL, True), (PlacementHeader.REMOTE, False)])
def test_place_when_the_header_says_so_then_that_way_whatever_it_costs(header: PlacementHeader, is_local: bool) -> None:
    for policy in ("cost", "round_robin"):
        rig = Rig(policy=policy)
        prompt = tokens(2040)
        rig.has(rig.decode[0], prompt, 2000)
        for each in (prompt, tokens(3000, seed=2)):
            assert rig.place(each, placement_header=header).is_local is is_local


def test_place_when_the_header_says_remote_without_a_prefill_node_then_local() -> None:
    rig = Rig(0, 1)
    assert rig.place(tokens(3000), placement_header=PlacementHeader.REMOTE).is_local


# --- which node


def test_place_when_a_prefill_node_has_the_prefix_then_that_one_unless_its_queue_is_longer_than_it_saves() -> None:
    rig = Rig(2, 1)
    busy(rig.decode[0], num_running=8)
    prompt = tokens(3000)
    rig.has(rig.prefill[1], prompt, 2000)
    assert rig.place(prompt).prefill == [rig.prefill[1]]
    busy(rig.prefill[1], num_uncomputed_tokens=50_000)
    assert rig.place(prompt).prefill == [rig.prefill[0]]


def test_place_when_another_node_has_the_prefix_then_it_is_named_as_source_and_nobody_else() -> None:
    rig = Rig(1, 2)
    prompt = tokens(3000)
    rig.has(rig.decode[1], prompt, 2000)
    busy(rig.decode[1], num_running=64, num_waiting=20)
    placement = rig.place(prompt, placement_header=PlacementHeader.REMOTE)
    assert placement.decode is rig.decode[0]
    assert placement.sources == [rig.decode[1].pull_source()]
    assert rig.place(tokens(3000, seed=5)).sources == []


def test_place_when_sources_are_switched_off_then_nobody_is_named() -> None:
    rig = Rig(1, 2, prefix_sources=False)
    prompt = tokens(3000)
    rig.has(rig.decode[1], prompt, 2000)
    assert rig.place(prompt, placement_header=PlacementHeader.REMOTE).sources == []


def test_place_when_a_decode_node_is_full_then_another_even_if_it_has_the_prefix() -> None:
    rig = Rig(1, 2)
    prompt = tokens(600)
    rig.has(rig.decode[0], prompt, 560)
    busy(rig.decode[0], num_running=64, num_waiting=10, max_num_seqs=64)
    assert rig.place(prompt).decode is rig.decode[1]


def test_place_when_a_node_measured_slow_then_it_gets_less_and_once_that_is_old_is_tried_again() -> None:
    rig = Rig(2, 1)
    busy(rig.decode[0], num_running=8)
    slow = {"prefill": {"seconds_per_step": 0.05, "seconds_per_token": 0.002, "observations": 140}}
    rig.prefill[0].load.update(rig.prefill[0].load.report.from_json({**slow}), 100.0)
    assert {rig.place(tokens(1000, seed)).prefill[0].url for seed in range(3)} == {rig.prefill[1].url}
    slow["prefill"]["age_seconds"] = 300.0
    old = Rig(2, 1)
    busy(old.decode[0], num_running=8)
    old.prefill[0].load.update(old.prefill[0].load.report.from_json({**slow}), 100.0)
    assert {old.place(tokens(1000, seed)).prefill[0].url for seed in range(4)} == {node.url for node in old.prefill}


# --- what was placed counts at once


def test_place_when_many_come_at_once_then_they_spread_before_any_report() -> None:
    rig = Rig(4, 4)
    for node in rig.decode:
        busy(node, num_running=8)
    placed = [rig.place(tokens(1000, seed)) for seed in range(16)]
    assert all(not each.is_local for each in placed)
    for nodes, chosen in ((rig.prefill, [p.prefill[0] for p in placed]), (rig.decode, [p.decode for p in placed])):
        assert {chosen.count(node) for node in nodes} == {4}


def test_finished_when_called_on_any_way_out_then_nothing_is_charged_any_more() -> None:
    rig = Rig()
    jobs = [make_request(tokens(800, seed)) for seed in range(12)]
    for job in jobs:
        rig.placer.place(job, NOBODY)
    assert sum(node.load.num_streams for node in rig.decode) == 12
    assert sum(node.load.placed_tokens for node in rig.pool.nodes) == 12 * 800
    for job in jobs[:6]:
        rig.placer.started(job, is_answer=True)
        rig.placer.started(job, is_answer=True)
    assert sum(node.load.placed_tokens for node in rig.pool.nodes) == 6 * 800
    rig.placer.place(jobs[0], NOBODY)  # a second try charges once
    for job in jobs:
        rig.placer.finished(job)
        rig.placer.finished(job)
    for node in rig.pool.nodes:
        load = node.load
        assert (load.num_streams, load.num_charges, load.num_placed, load.placed_tokens) == (0, 0, 0, 0)
        assert load.queue_s(rig.now) == 0.0


def test_whole_answers_when_their_prompts_must_be_computed_then_wait_for_nothing_and_generate() -> None:
    rig = Rig(1, 1)
    jobs = [make_request(tokens(5000, seed), is_stream=False) for seed in range(8)]
    last = [rig.placer.place(job, NOBODY) for job in jobs][-1]
    [prefill], [decode] = rig.prefill, rig.decode
    assert prefill.load.queue_s(rig.now) > 0.9 * (last.ttft_s - 0.5)
    assert decode.load.num_rows == 0
    rig.now += last.ttft_s / 2
    rig.place(tokens(100, 99))
    assert 0 < decode.load.num_rows < 8
    rig.now += last.ttft_s
    rig.placer.place(make_request(tokens(100, 98)), NOBODY)
    assert (decode.load.num_rows, decode.load.num_streams) == (8, 10)
    assert prefill.load.placed_tokens == 200
    for job in jobs:
        rig.placer.started(job, is_answer=True)
        rig.placer.finished(job)
    assert (decode.load.num_rows, decode.load.num_streams) == (0, 2)


def test_whole_answers_when_they_end_then_what_they_lasted_is_counted_from_their_due_prompt_or_not_at_all() -> None:
    rig = Rig(1, 1)
    [decode] = rig.decode
    decode.load.stream_s = 20.0
    for lasts_s, expected_s in ((30.0, 21.0), (0.01, 21.0)):  # the second is over before its prompt was due
        job = make_request(tokens(3000), is_stream=False)
        due_s = rig.placer.place(job, NOBODY).ttft_s
        rig.now += due_s + lasts_s if lasts_s > 1.0 else due_s / 2
        rig.placer.started(job, is_answer=True)
        rig.placer.finished(job)
        assert decode.load.stream_s == pytest.approx(expected_s)


def test_whole_answers_prompt_when_it_takes_longer_than_estimated_then_those_like_it_still_wait_for_it() -> None:
    rig = Rig(2, 1)
    prompt = tokens(3000)
    first = make_request(prompt, is_stream=False)
    due_s = rig.placer.place(first, NOBODY).ttft_s
    rig.now += due_s + 5.0
    rig.place(tokens(100, 9))
    keys = keys_of(prompt)
    assert rig.placer._in_progress.lookup(keys, {})
    rig.placer.finished(first)
    assert not rig.placer._in_progress.lookup(keys, {})


def test_whole_answer_when_it_fails_before_or_after_its_prompt_was_due_then_nothing_is_left() -> None:
    for waits_s in (0.0, 1000.0):
        rig = Rig(1, 1)
        job = make_request(tokens(5000), is_stream=False)
        rig.placer.place(job, NOBODY)
        rig.now += waits_s
        rig.placer.finished(job)
        rig.now += 1000.0
        rig.placer.finished(job)
        rig.placer.place(job, NOBODY)
        rig.placer.finished(job)
        for node in rig.pool.nodes:
            assert (node.load.num_charges, node.load.num_generating, node.load.placed_tokens) == (0, 0, 0)


def test_placements_when_they_come_to_nothing_then_change_no_estimate() -> None:
    rig = Rig(1, 1)
    rig.placer.place(make_request(tokens(3000, 0)), NOBODY)
    [prefill], [decode] = rig.prefill, rig.decode
    decode.load.stream_s = 20.0
    rig.now += prefill.load.queue_s(rig.now) / 2
    queue_s = prefill.load.queue_s(rig.now)
    for seed in range(1, 21):
        job = make_request(tokens(3000, seed))
        rig.placer.place(job, NOBODY)
        rig.placer.finished(job)
    assert prefill.load.queue_s(rig.now) == pytest.approx(queue_s)
    assert decode.load.stream_s == 20.0


def test_placement_when_given_up_while_it_is_computed_then_the_rest_of_it_is_not_waited_for() -> None:
    rig = Rig(1, 1)
    first, second = make_request(tokens(3000, 0)), make_request(tokens(3000, 1))
    rig.placer.place(first, NOBODY)
    rig.placer.place(second, NOBODY)
    both_s = rig.prefill[0].load.queue_s(rig.now)
    rig.now += both_s / 4
    rig.placer.finished(first)
    assert rig.prefill[0].load.queue_s(rig.now) == pytest.approx(both_s / 2)


def test_stream_when_it_ends_then_what_it_lasted_is_counted_from_its_first_token() -> None:
    rig = Rig(1, 1)
    job = make_request(tokens(3000))
    rig.placer.place(job, NOBODY)
    rig.now += 100.0
    rig.placer.started(job, is_answer=True)
    rig.now += 12.0
    before_s = rig.decode[0].load.stream_s
    rig.placer.finished(job)
    assert rig.decode[0].load.stream_s == pytest.approx(before_s + 0.1 * (12.0 - before_s))


# --- nodes that are only late


def test_place_when_the_decode_node_is_only_late_then_a_prefill_node_generates_and_without_roles_the_late_one() -> None:
    for elastic in (True, False):
        rig = Rig(1, 1, elastic=elastic)
        [prefill], [decode] = rig.prefill, rig.decode
        decode.silent_since_s = time.monotonic()
        decode.client = SimpleNamespace(heard_s=0.0)  # type: ignore[assignment]
        decode.mark_suspect("no connection")
        assert decode.is_late(5.0)
        assert rig.decode == [decode]
        placement = rig.place(tokens(1000))
        assert placement.decode is (prefill if elastic else decode)
        assert rig.placer.generators() == [prefill if elastic else decode]
        assert rig.placer.place_decode(NOBODY) is (prefill if elastic else decode)


def test_queue_when_nobody_answers_then_it_drains_with_time_but_not_to_nothing() -> None:
    rig = Rig(1, 1)
    busy(rig.decode[0], num_running=8)
    rig.place(tokens(4000))
    full_s = rig.prefill[0].load.queue_s(rig.now)
    assert full_s == pytest.approx(0.81, rel=0.1)
    assert rig.prefill[0].load.queue_s(rig.now + 0.4) == pytest.approx(full_s - 0.4, rel=0.1)
    assert rig.prefill[0].load.queue_s(rig.now + 60) == pytest.approx(full_s / 4, rel=0.1)


def test_report_when_it_counts_our_own_requests_then_they_are_not_counted_twice() -> None:
    rig = Rig(1, 1)
    busy(rig.decode[0], num_running=8)
    rig.place(tokens(4000))
    own_s = rig.prefill[0].load.queue_s(rig.now)
    rig.prefill[0].load.update(report(num_running=1, num_uncomputed_tokens=4000), rig.now)
    assert rig.prefill[0].load.queue_s(rig.now) == pytest.approx(own_s)
    rig.prefill[0].load.update(report(num_running=2, num_uncomputed_tokens=9000), rig.now)
    assert rig.prefill[0].load.queue_s(rig.now) == pytest.approx(own_s + 1.0)
    assert rig.prefill[0].load.queue_s(rig.now + 0.5) == pytest.approx(own_s, rel=0.1)


# --- sessions, failures, predictions


def test_session_when_it_comes_again_then_its_decode_node_is_preferred_but_not_at_any_price() -> None:
    rig = Rig(1, 4)
    first = rig.serve(tokens(100), session_id="s").decode
    for seed in range(2, 8):
        assert rig.serve(tokens(100, seed), session_id="s").decode is first
    assert {rig.serve(tokens(100, seed)).decode.url for seed in range(10, 14)} == {node.url for node in rig.decode}
    busy(first, num_running=90, num_waiting=30)
    assert rig.serve(tokens(100, 9), session_id="s").decode is not first


def test_place_when_nodes_are_avoided_then_others_and_when_none_is_left_an_error() -> None:
    rig = Rig()
    busy(rig.decode[1], num_running=8)
    prompt = tokens(3000)
    rig.has(rig.decode[0], prompt, 2900)
    rig.has(rig.prefill[0], prompt, 2900)
    placement = rig.place(prompt, Avoided([rig.decode[0]], [rig.prefill[0]]))
    assert (placement.decode, placement.prefill) == (rig.decode[1], [rig.prefill[1]])
    assert rig.place(prompt, Avoided([], list(rig.prefill))).is_local
    with pytest.raises(NodeUnavailableError):
        rig.place(prompt, Avoided(list(rig.decode), []))


def test_place_when_prefill_has_begun_then_it_is_kept_and_only_the_decode_node_changes() -> None:
    rig = Rig()
    prompt = tokens(500)
    rig.has(rig.decode[1], prompt, 480)
    placement = rig.placer.place(make_request(prompt), Avoided([rig.decode[0]], []), began=[rig.prefill[1]])
    assert (placement.decode, placement.prefill) == (rig.decode[1], [rig.prefill[1]])


def test_place_when_there_are_many_prompts_then_one_prefill_node_each_and_spread() -> None:
    rig = Rig(4, 1)
    busy(rig.decode[0], num_running=20)
    prompts = [tokens(500, seed) for seed in range(40)]
    job = make_request(prompts[0], prompts=prompts, prompt_keys=tuple(map(keys_of, prompts)))
    placement = rig.placer.place(job, NOBODY)
    assert [list(placement.prefill).count(node) for node in rig.prefill] == [10, 10, 10, 10]


def test_started_when_it_is_a_stream_then_the_estimate_is_compared_once() -> None:
    rig = Rig(1, 1)
    busy(rig.decode[0], num_running=8)
    job = make_request(tokens(3000))
    placement = rig.placer.place(job, NOBODY)
    rig.now += 1.5
    rig.placer.started(job, is_answer=True)
    rig.placer.started(job, is_answer=True)
    assert rig.started == [("remote", placement.ttft_s, 1.5)]
    whole = make_request(tokens(3000), is_stream=False)
    rig.placer.place(whole, NOBODY)
    rig.placer.started(whole, is_answer=True)
    refused = make_request(tokens(3000))
    rig.placer.place(refused, NOBODY)
    rig.placer.started(refused, is_answer=False)
    assert len(rig.started) == 1


def test_place_when_there_are_thousands_of_prompts_then_only_those_that_are_weighed_are_read() -> None:
    class Read(str):
        num_read = 0

        def encode(self, *args: Any, **kwargs: Any) -> bytes:
            Read.num_read += 1
            return super().encode(*args, **kwargs)

    def long_list(count: int) -> PlacementRequest:
        prompts = [Read(f"{number:03}" * 1000) for number in range(count)]
        return make_request([], body={"prompt": prompts}, prompts=prompts, prompt_keys=())

    rig, same = Rig(3), Rig(3)
    job = long_list(2048)
    placement = rig.placer.place(job, NOBODY)
    first = same.placer.place(long_list(16), NOBODY)
    names = [node.name for node in first.prefill]
    assert [node.name for node in placement.prefill] == names * 128  # what was not weighed, as what was
    assert Read.num_read == 2 * 16
    assert sum(node.load.num_placed for node in rig.prefill) == 2048
    rig.placer.started(job, is_answer=True)
    assert len(rig.placer._history._sent) == 16 * (3000 // 512)
    rig.placer.finished(job)
    assert not any(node.load.num_charges for node in rig.pool.nodes)


def test_placer_when_the_index_is_full_then_a_prompt_counts_as_used_on_those_that_were_chosen_alone() -> None:
    class Touched(NodeCache):
        num_touched = 0

        def touch(self, truncated: Sequence[bytes]) -> None:
            self.num_touched += len(truncated)
            super().touch(truncated)

    rig, prompt = Rig(4, 4), tokens(1640)
    caches = {node.url: Touched(BLOCK_SIZE, ("full",), True) for node in rig.pool.nodes}
    for url, cache in caches.items():
        if "prefill" in url:
            store(cache, keys_of(prompt), 1600)
        rig.index.start(url, cache)
    rig.index.max_entries = sum(map(len, caches.values()))
    placement = rig.serve(prompt)
    assert {url for url, cache in caches.items() if cache.num_touched} == {
        placement.decode.url,
        placement.prefill[0].url,
    }


# --- prompts that could not be tokenised


def test_place_when_text_was_seen_before_then_it_goes_where_it_went() -> None:
    rig = Rig(2, 4)
    text = "".join(chr(97 + token % 26) for token in tokens(20_000))

    def job(prompt: str) -> Any:
        return make_request([], body={"prompt": prompt}, prompts=[prompt], prompt_keys=())

    first = job(text)
    placement = rig.placer.place(first, NOBODY)
    rig.placer.started(first, is_answer=True)
    rig.placer.finished(first)
    for turn in range(4):
        again = job(text + "more" * turn)
        assert rig.placer.place(again, NOBODY).decode is placement.decode
        rig.placer.finished(again)
    rig.now += 3600
    others = [job(text) for _ in range(8)]
    assert len({rig.placer.place(each, NOBODY).decode.url for each in others}) > 1
