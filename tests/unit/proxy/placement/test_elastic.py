"""When a node takes the other role's work, and when targets are not met."""

from __future__ import annotations

import random
from typing import Any

import pytest

from common.engine.pacing.shares import USUAL_ANSWER_TOKENS
from common.errors import NodeUnavailableError
from proxy.nodes.contention import Contention, DecodeTotals
from proxy.nodes.load import Charge, Measured
from proxy.nodes.node import NodeRole
from proxy.placement.estimate import IN_TARGET_PRICE, LATE_PRICE, SAFE_SHARE, Estimator, Targets
from proxy.placement.guests import LOOK_S
from proxy.placement.request import Avoided, Placement, PlacementHeader, PlacementRequest
from tests.unit.proxy.placement.world import DECODE_STEP_S, World, make_request, report

ROW_S, BESIDE_S = 0.001, 0.002
"""Of these nodes, what a row more adds to a step, and another node of the machine."""


def tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(count)]


class Rig:
    def __init__(self, num_prefill: int = 1, num_decode: int = 1, **config: Any) -> None:
        self.world = World(num_prefill, num_decode, **{"elastic": True, **config})
        self._num = 0

    def place(self, num_tokens: int = 1000, **fields: Any) -> tuple[PlacementRequest, Placement]:
        self._num += 1
        request = make_request(tokens(num_tokens, self._num), **fields)
        return request, self.world.placer.place(request, Avoided())

    def generate(self, num: int, url: str) -> None:
        """So many streams run on the node at ``url``."""
        [node] = [node for node in self.world.pool.nodes if node.url == url]
        node.load.num_streams += num
        node.load.num_generating += num


def test_place_when_nodes_are_idle_then_roles_are_kept() -> None:
    rig = Rig()
    for num_tokens in (20, 200, 2000):
        request, placement = rig.place(num_tokens)
        assert (placement.is_local, placement.crosses) == (False, False)
        assert placement.decode.role is NodeRole.DECODE
        rig.world.placer.finished(request)


def test_place_when_prompts_wait_for_prefill_nodes_then_others_are_computed_by_decode_nodes() -> None:
    rig = Rig()
    placed = [rig.place(2000)[1] for _ in range(8)]
    crossing = [each for each in placed if each.crosses]
    assert not placed[0].crosses
    assert crossing
    assert all(each.is_local for each in crossing)
    assert any(each.decode.role is NodeRole.DECODE for each in crossing)


def test_place_when_decode_nodes_are_full_then_a_prefill_node_without_work_generates() -> None:
    rig = Rig(0 + 1, 1)
    decode = next(node for node in rig.world.pool.nodes if node.role is NodeRole.DECODE)
    rig.generate(decode.load.report.max_num_seqs + 8, decode.url)
    _, placement = rig.place(1000)
    assert placement.crosses
    assert placement.is_local
    assert placement.decode.role is NodeRole.PREFILL


@pytest.mark.parametrize(("busy_s", "is_full", "crosses"), [(2.0, False, False), (2.0, True, True), (1.0, False, True)])
def test_place_when_prompts_take_much_of_a_prefill_nodes_time_then_it_generates_only_where_decode_nodes_are_full(
    busy_s: float, is_full: bool, crosses: bool
) -> None:
    """Of the last five seconds."""
    rig = Rig()
    [prefill] = [node for node in rig.world.pool.nodes if node.role is NodeRole.PREFILL]
    [decode] = [node for node in rig.world.pool.nodes if node.role is NodeRole.DECODE]
    decode.load.update(report(decode=Measured(DECODE_STEP_S, 0.02), max_num_seqs=16 if is_full else 64), 0.0)
    rig.generate(20, decode.url)
    charge = Charge(100, busy_s)
    prefill.load.charge(charge, 0.0)
    prefill.load.settle(charge, 0.0)
    _, placement = rig.place(500)
    assert (placement.decode is prefill) is placement.crosses is crosses


@pytest.mark.parametrize("header", [PlacementHeader.LOCAL, PlacementHeader.REMOTE])
def test_place_when_the_request_says_how_then_nobody_crosses(header: PlacementHeader) -> None:
    rig = Rig()
    for _ in range(8):
        _, placement = rig.place(2000, placement_header=header)
        assert not placement.crosses
        assert placement.decode.role is NodeRole.DECODE


def test_place_when_not_elastic_then_nobody_crosses_however_long_the_queue() -> None:
    rig = Rig(elastic=False)
    for _ in range(12):
        _, placement = rig.place(2000)
        assert (placement.is_local, placement.crosses) == (False, False)


def test_place_when_a_prefill_node_is_to_be_avoided_then_it_does_not_generate_either() -> None:
    rig = Rig()
    decode = next(node for node in rig.world.pool.nodes if node.role is NodeRole.DECODE)
    prefill = next(node for node in rig.world.pool.nodes if node.role is NodeRole.PREFILL)
    rig.generate(decode.load.report.max_num_seqs + 8, decode.url)
    request = make_request(tokens(1000, 1))
    assert rig.world.placer.place(request, Avoided(prefill=[prefill])).decode is decode
    assert rig.world.placer.place(request, Avoided(decode=[prefill])).decode is decode


def test_place_when_no_decode_node_is_left_then_a_prefill_node_does_both() -> None:
    rig = Rig()
    [decode] = [node for node in rig.world.pool.nodes if node.role is NodeRole.DECODE]
    [prefill] = [node for node in rig.world.pool.nodes if node.role is NodeRole.PREFILL]
    request, placer = make_request(tokens(1000, 1)), rig.world.placer
    placement = placer.place(request, Avoided(decode=[decode]))
    assert (placement.decode, placement.prefill, placement.is_local, placement.crosses) == (prefill, (), True, True)
    assert placer.place_decode(Avoided(decode=[decode])) is prefill
    with pytest.raises(NodeUnavailableError):
        placer.place(request, Avoided(decode=[decode, prefill]))


@pytest.mark.parametrize("config", [{"elastic": False}, {"policy": "round_robin"}], ids=str)
def test_place_when_roles_are_kept_and_no_decode_node_is_left_then_is_refused(config: dict[str, Any]) -> None:
    rig = Rig(**config)
    avoided = Avoided(decode=[node for node in rig.world.pool.nodes if node.role is NodeRole.DECODE])
    with pytest.raises(NodeUnavailableError):
        rig.world.placer.place(make_request(tokens(1000, 1)), avoided)
    assert rig.world.placer.place_decode(avoided) is None


def estimator(rig: Rig, targets: Targets) -> Estimator:
    nodes = rig.world.pool.nodes
    return Estimator(nodes, rig.world.placer._rates.rates(nodes, 0.0), 0.0, 0.5, targets)


def test_ttft_price_when_there_is_a_target_then_is_less_within_it_and_more_beyond() -> None:
    rig = Rig()
    price = estimator(rig, Targets(ttft_s=1.0)).ttft_price_s
    assert price(0.5) == pytest.approx(0.5 * IN_TARGET_PRICE)
    safe = SAFE_SHARE * IN_TARGET_PRICE
    assert price(1.5) == pytest.approx(safe + (1.5 - SAFE_SHARE) * (1 + LATE_PRICE))
    assert estimator(rig, Targets()).ttft_price_s(100.0) == 100.0


def test_stream_cost_when_the_nodes_steps_are_longer_than_the_target_then_is_higher() -> None:
    rig = Rig()
    node = rig.world.pool.nodes[0]
    rig.generate(4, node.url)
    costs = [estimator(rig, Targets(itl_s=target)).stream_cost_s(node) for target in (None, 10.0, 0.001)]
    assert costs[1] == pytest.approx(IN_TARGET_PRICE * costs[0])
    assert costs[2] > costs[0]


def test_stream_cost_when_others_are_late_already_then_only_what_it_adds_to_them_counts() -> None:
    """These nodes' steps take as long with many rows as with one."""
    rig = Rig()
    node = rig.world.pool.nodes[0]
    alone_s = estimator(rig, Targets(itl_s=DECODE_STEP_S / 2)).stream_cost_s(node)
    rig.generate(8, node.url)
    assert estimator(rig, Targets(itl_s=DECODE_STEP_S / 2)).stream_cost_s(node) == pytest.approx(alone_s)


def on_one_machine(rig: Rig, beside_s: float) -> None:
    """Steps of the nodes take so much longer while both generate, and that was seen."""
    for node in rig.world.pool.nodes:
        other, totals = Contention(), DecodeTotals()
        for turn in range(44):  # at last alone: so are the steps of the line that the node reports
            num_rows, is_beside = 1.0 + turn % 4, turn // 4 % 2 > 0
            node.contention.update(totals, float(turn), [other])
            seconds = 50 * (DECODE_STEP_S + ROW_S * num_rows + beside_s * is_beside)
            totals = DecodeTotals(totals.num_steps + 50, totals.num_rows + 50 * num_rows, totals.seconds + seconds)
            other.shares = (float(is_beside), other.shares[0])
        node.neighbours = [each for each in rig.world.pool.nodes if each is not node]
        node.load.update(report(decode=Measured(DECODE_STEP_S, ROW_S), chunk=128), 0.0)


@pytest.mark.parametrize(
    ("num_decode_rows", "num_prefill_rows", "others_s"),
    [(0, 0, 0.0), (4, 0, 4 * BESIDE_S), (0, 1, ROW_S), (4, 1, BESIDE_S + ROW_S + 4 * BESIDE_S / 2)],
)
def test_stream_cost_when_a_node_generates_for_longer_with_it_then_streams_beside_it_on_the_machine_count(
    num_decode_rows: int, num_prefill_rows: int, others_s: float
) -> None:
    """On the prefill node, where another guest would have ended after half of its time; without contention it is the
    same as if each node had a machine of its own."""
    rig = Rig()
    prefill, decode = rig.world.pool.nodes
    on_one_machine(rig, BESIDE_S)
    rig.generate(num_decode_rows, decode.url)
    rig.generate(num_prefill_rows, prefill.url)
    own_s = DECODE_STEP_S + ROW_S * (num_prefill_rows + 1)
    if num_decode_rows and not num_prefill_rows:
        own_s += BESIDE_S
    cost_s = estimator(rig, Targets()).stream_cost_s(prefill)
    assert cost_s == pytest.approx(0.5 * USUAL_ANSWER_TOKENS * (own_s + others_s), rel=0.03)
    for node in rig.world.pool.nodes:
        node.neighbours = ()
    alone_s = DECODE_STEP_S + ROW_S * (2 * num_prefill_rows + 1)
    cost_s = estimator(rig, Targets()).stream_cost_s(prefill)
    assert cost_s == pytest.approx(0.5 * USUAL_ANSWER_TOKENS * alone_s, rel=0.01)


@pytest.mark.parametrize(("num_guests", "share"), [(1, 0.0), (2, 1 / 2), (3, 2 / 3)])
def test_guest_when_it_leaves_then_the_others_steps_are_shorter_as_soon_as_all_have_left(
    num_guests: int, share: float
) -> None:
    """``share``: of its time, in which those that stay generate."""
    rig = Rig()
    prefill, decode = rig.world.pool.nodes
    on_one_machine(rig, BESIDE_S)
    rig.generate(num_guests, prefill.url)
    rig.generate(4, decode.url)
    nodes, rates = rig.world.pool.nodes, rig.world.placer._rates.rates(rig.world.pool.nodes, 0.0)
    leaving = Estimator(nodes, rates, 0.0, 0.5, leaving=prefill)
    there_s = DECODE_STEP_S + 5 * ROW_S + share * BESIDE_S + 4 * ROW_S
    here_s = DECODE_STEP_S + (2 * num_guests - 1) * ROW_S + BESIDE_S + 4 * (1 - share) * BESIDE_S
    found = [leaving.stream_cost_s(node) / 0.5 / USUAL_ANSWER_TOKENS for node in (decode, prefill)]
    assert found == pytest.approx([there_s, here_s], rel=0.03)


@pytest.mark.parametrize(("beside_s", "crosses"), [(0.0, True), (BESIDE_S, False)])
def test_place_when_a_second_node_that_generates_makes_more_streams_late_than_a_row_more_then_roles_are_kept(
    beside_s: float, crosses: bool
) -> None:
    rig = Rig()
    _, decode = rig.world.pool.nodes
    on_one_machine(rig, beside_s)
    rig.generate(6, decode.url)
    target_s = DECODE_STEP_S + 6.5 * ROW_S  # one more is late, and makes the others late
    _, placement = rig.place(500, targets=Targets(1.0, target_s))
    assert placement.crosses is crosses


def test_delay_price_when_streams_have_time_left_then_is_little() -> None:
    rig = Rig()
    [node] = [node for node in rig.world.pool.nodes if node.role is NodeRole.DECODE]
    rig.generate(2, node.url)

    def price(itl_s: float | None, ttft_s: float | None, num_tokens: int = 500) -> float:
        return estimator(rig, Targets(ttft_s, itl_s)).delay_price_s(node, num_tokens, 0.0)

    usual = price(None, None)
    assert price(10.0, 0.2) == pytest.approx(IN_TARGET_PRICE * usual)
    # No time between two tokens is left: it costs what they lose, unless the prompt can wait until they have ended.
    assert price(0.001, 0.2) > 4 * usual
    assert price(0.001, 3600.0) == price(0.001, None) == pytest.approx(IN_TARGET_PRICE * usual)


def generating_on(rig: Rig, role: NodeRole, **fields: Any) -> PlacementRequest:
    """A stream that a node of ``role`` generates."""
    [other] = [node for node in rig.world.pool.nodes if node.role is not role]
    rig.generate(200, other.url)
    request = make_request(tokens(500, 77), **fields)
    placement = rig.world.placer.place(request, Avoided(decode=[other]))
    assert placement.decode.role is role
    rig.world.placer.started(request, is_answer=True)
    rig.generate(-200, other.url)
    rig.world.now += 1.0
    return request


def test_guest_when_prompts_come_to_its_node_then_leaves_for_a_decode_node() -> None:
    rig = Rig()
    request = generating_on(rig, NodeRole.PREFILL)
    assert not rig.world.placer.leaves(request, lambda node: True, 10)
    for _ in range(6):
        rig.place(2000, placement_header=PlacementHeader.REMOTE)
    assert not rig.world.placer.leaves(request, lambda node: True, 10), "it was looked at a moment ago"
    rig.world.now += LOOK_S
    assert rig.world.placer.leaves(request, lambda node: True, 10)


@pytest.mark.parametrize("beside_s", [0.0, 2 * BESIDE_S])
def test_guest_when_it_makes_many_others_slow_then_leaves_for_a_decode_node(beside_s: float) -> None:
    """There it only makes a step longer by a row."""
    rig = Rig()
    request = generating_on(rig, NodeRole.PREFILL)
    on_one_machine(rig, beside_s)
    [decode] = [node for node in rig.world.pool.nodes if node.role is NodeRole.DECODE]
    rig.generate(4, decode.url)
    assert rig.world.placer.leaves(request, lambda node: True, 10) is (beside_s > 0.0)


@pytest.mark.parametrize("why", ["nobody may", "full", "nearly done", "on a decode node", "another just left"])
def test_guest_when_it_is_no_better_off_elsewhere_then_stays(why: str) -> None:
    rig = Rig()
    role = NodeRole.DECODE if why == "on a decode node" else NodeRole.PREFILL
    request = generating_on(rig, role, max_answer_tokens=100)
    other = generating_on(rig, role, max_answer_tokens=100)
    for _ in range(6):
        rig.place(2000, placement_header=PlacementHeader.REMOTE)
    if why == "full":
        [decode] = [node for node in rig.world.pool.nodes if node.role is NodeRole.DECODE]
        rig.generate(1000, decode.url)
    if why == "another just left":
        assert rig.world.placer.leaves(other, lambda node: True, 10)
    num_output = 99 if why == "nearly done" else 10
    assert not rig.world.placer.leaves(request, lambda node: why != "nobody may", num_output)


def test_charges_when_requests_start_and_end_then_rows_are_counted_back_to_zero() -> None:
    rig = Rig()
    placed = [rig.place(500) for _ in range(6)]
    for request, _ in placed[:3]:
        rig.world.placer.started(request, is_answer=True)
    assert sum(node.load.num_rows for node in rig.world.pool.nodes) == 3
    for request, _ in placed:
        rig.world.placer.finished(request)
    assert [node.load.num_rows for node in rig.world.pool.nodes] == [0, 0]
