"""What nodes of one machine make of each other's steps."""

from __future__ import annotations

import random

import pytest

from proxy.nodes.contention import BUSY_SHARE, FORGET_S, IDLE_SHARE, Contention, DecodeTotals
from proxy.status.board import _describe
from tests.unit.proxy.placement.world import make_pool

FIXED_S, ROW_S, BESIDE_S = 0.007, 0.001, 0.002
REPORT_S = 1.0


class Machine:
    """Two nodes that report in turn; each generates with so many rows, or does not."""

    def __init__(self, seed: int = 1, noise: float = 0.03) -> None:
        self.nodes = [Contention(), Contention()]
        self._totals = [DecodeTotals(), DecodeTotals()]
        self._now = 100.0
        self._random, self._noise = random.Random(seed), noise

    def report(self, rows: tuple[int, int], beside_s: float = BESIDE_S, part: float = 0.9) -> None:
        """What both did for a second; ``part``: of the time of one that generates, in steps."""
        self._now += REPORT_S
        for index, num_rows in enumerate(rows):
            if num_rows:
                step_s = FIXED_S + ROW_S * num_rows + beside_s * (rows[1 - index] > 0)
                step_s *= 1.0 + self._noise * self._random.uniform(-1, 1)
                num_steps = int(part * REPORT_S / step_s)
                new = DecodeTotals(num_steps, num_steps * num_rows, num_steps * step_s)
                self._totals[index] = DecodeTotals(
                    *map(float.__add__, map(float, self._totals[index]), map(float, new))
                )
        for index, node in enumerate(self.nodes):
            node.update(self._totals[index], self._now + 0.1 * index, [self.nodes[1 - index]])


def test_contention_when_two_nodes_generate_together_now_and_then_then_found() -> None:
    machine = Machine()
    for turn in range(60):
        machine.report((1 + turn % 6, turn // 5 % 2))
    assert machine.nodes[0].beside_s == pytest.approx(BESIDE_S, rel=0.3)


def test_contention_when_a_neighbour_makes_no_difference_then_next_to_nothing() -> None:
    machine = Machine()
    for turn in range(60):
        machine.report((1 + turn % 6, turn // 5 % 2), beside_s=0.0)
    assert machine.nodes[0].beside_s < 0.1 * BESIDE_S


def test_contention_when_it_comes_and_goes_then_known_after_a_few_reports_of_both() -> None:
    """What else the machine does decides over it."""
    machine = Machine()
    for turn in range(60):
        machine.report((1 + turn % 6, turn // 5 % 2), beside_s=0.0)
    for beside_s in (2 * BESIDE_S, 0.0, BESIDE_S):
        for turn in range(8):
            machine.report((1 + turn % 6, 1), beside_s=beside_s)
        assert machine.nodes[0].beside_s == pytest.approx(beside_s, abs=0.35 * BESIDE_S)


@pytest.mark.parametrize("other", [0, 1], ids=["never", "always"])
def test_contention_when_never_seen_with_and_without_then_none(other: int) -> None:
    """All of it may be the node's own time then."""
    machine = Machine()
    for turn in range(60):
        machine.report((1 + turn % 6, other))
    assert machine.nodes[0].beside_s < 0.25 * BESIDE_S


def test_contention_when_nothing_speaks_of_it_any_more_then_half_of_it_is_forgotten_by_and_by() -> None:
    """Or no node would ever generate beside another one again, and nothing be learned."""
    machine = Machine()
    for turn in range(60):
        machine.report((1 + turn % 6, turn // 5 % 2))
    learned_s = machine.nodes[0].beside_s
    for turn in range(int(FORGET_S / REPORT_S)):
        machine.report((1 + turn % 6, 0))
    assert machine.nodes[0].beside_s == pytest.approx(learned_s / 2, rel=0.05)


def test_status_when_contention_was_learned_then_says_it_and_what_a_step_takes_without() -> None:
    machine = Machine()
    for turn in range(60):
        machine.report((1 + turn % 6, turn // 5 % 2))
    node = make_pool(1, 1).nodes[0]
    node.contention = machine.nodes[0]
    said = _describe(node)["contention"]
    assert said["seconds_per_step"] == pytest.approx(FIXED_S, rel=0.1)
    assert said["seconds_per_row"] == pytest.approx(ROW_S, rel=0.2)
    assert said["contention_seconds"] == node.contention.beside_s > 0.5 * BESIDE_S


@pytest.mark.parametrize(("last", "alone_s", "together_s"), [((2, 0), 0.0, 1.0), ((2, 1), -1.0, 0.0)])
def test_more_when_the_last_steps_were_beside_others_or_not_then_is_held_against_those(
    last: tuple[int, int], alone_s: float, together_s: float
) -> None:
    """Those are what a node's own line is of."""
    machine = Machine()
    for turn in range(60):
        machine.report((1 + turn % 6, turn // 5 % 2))
    for _ in range(4):
        machine.report(last)
    node = machine.nodes[0]
    more = [node.more_s(share) / node.beside_s for share in (0.0, 1.0)]
    assert more == pytest.approx([alone_s, together_s], abs=0.15)


def test_report_when_it_does_not_say_or_the_node_has_started_again_then_nothing_is_made_of_it() -> None:
    node = Contention()
    shares = []
    reports = (100, 200, 10, 110, None, 210, 310)
    for now, num_steps in enumerate(reports):
        node.update(None if num_steps is None else DecodeTotals(num_steps, num_steps, 0.009 * num_steps), now, [])
        shares.append(node.shares[0])
    assert shares == pytest.approx([0.0, 0.9, 0.0, 0.9, 0.0, 0.0, 0.9])


@pytest.mark.parametrize(
    ("shares", "counts_as"),
    [
        ((IDLE_SHARE, 0.0), "alone"),
        ((0.4, 0.0), None),
        ((0.0, 1.0), None),
        ((1.0, 0.0), None),
        ((BUSY_SHARE, BUSY_SHARE), "beside"),
    ],
)
def test_report_when_a_neighbour_generated_for_a_part_of_the_time_then_not_counted(
    shares: tuple[float, float], counts_as: str | None
) -> None:
    node, other = Contention((0.005, 0.001)), Contention()
    other.shares = shares
    for now in range(3):
        node.update(DecodeTotals(100.0 * now, 100.0 * now, 0.9 * now), now, [other])
    assert (node._regression.weight > 0.0) is (counts_as == "alone")
    assert (node.beside_s > 0.0) is (counts_as == "beside")
