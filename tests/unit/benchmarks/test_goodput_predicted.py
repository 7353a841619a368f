"""What is predicted of rounds that were run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.goodput.clients import Targets
from benchmarks.goodput.predicted import Round, Simulated, cache_of, predict_rounds
from benchmarks.goodput.services import ELASTIC, STATIC
from benchmarks.goodput.traffic import Mix
from proxy.nodes.load import Measured
from proxy.nodes.node import NodeRole
from tests.support.simulated import HYBRID, SPEEDS

MIX = Mix(300, 20)
TARGETS = Targets(ttft_s=0.7, itl_s=0.04)
VOCAB = 1000


def rounds(*factors: float) -> list[Round]:
    return [
        Round(factor, {MIX: factor}, seconds=300.0, times_seed=number, targets={MIX: TARGETS})
        for number, factor in enumerate(factors, 1)
    ]


@pytest.fixture
def service(tmp_path: Path) -> Simulated:
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    cache = cache_of(tmp_path, "auto", 1 << 24, SPEEDS.max_num_seqs)
    return Simulated(STATIC, is_told=False, cache=cache, speeds=dict.fromkeys(NodeRole, SPEEDS))


def test_round_when_it_comes_to_another_way_then_at_the_same_times_with_other_prompts() -> None:
    [this] = rounds(1.0)
    ours, theirs = (this.arrivals(VOCAB, seed) for seed in (1, 2))
    assert [each.at_s for each in ours] == [each.at_s for each in theirs]
    assert all(each.prompts != other.prompts for each, other in zip(ours, theirs, strict=True))


def test_rounds_when_simulated_then_each_at_its_own_rate_and_by_its_own_targets(service: Simulated) -> None:
    """A prompt takes 0.31 s: one that finds another half done is late."""
    slow, fast = (service.run(each, VOCAB) for each in rounds(0.2, 3.0))
    assert slow.of_all > 0.9 > fast.of_all
    assert 30 < slow.came[MIX] < 90 < 700 < fast.came[MIX]
    [strict] = rounds(0.2)
    never = Round(strict.factor, strict.rates, strict.seconds, strict.times_seed, {MIX: Targets(0.3, 0.04)})
    assert service.run(never, VOCAB).of_all == 0.0


def test_round_when_its_speeds_are_known_then_simulated_with_those(service: Simulated) -> None:
    [this] = rounds(0.2)
    slower = dataclasses.replace(SPEEDS, decode=Measured(0.05, 0.001))
    this.speeds["another way"] = dict.fromkeys(NodeRole, slower)
    assert service.run(this, VOCAB).of_all > 0.9
    this.speeds[service.way] = dict.fromkeys(NodeRole, slower)
    assert service.run(this, VOCAB).of_all == 0.0  # 51 ms between tokens, 40 are asked


def test_round_when_a_request_alone_took_longer_than_its_steps_then_each_is_taken_to(service: Simulated) -> None:
    """Alone it takes 0.34 s: its prompt's step, a handoff, a pull, and a step."""
    [this] = rounds(0.2)
    near, far = (dataclasses.replace(this, alone={MIX: Targets(alone_s, 0.022)}) for alone_s in (0.36, 0.8))
    assert service.run(near, VOCAB).of_all > 0.9
    assert service.run(far, VOCAB).of_all == 0.0
    slow = dataclasses.replace(this, alone={MIX: Targets(0.36, 0.045)})  # 24 ms longer between two tokens, too
    assert service.run(slow, VOCAB).of_all == 0.0


def test_round_when_its_nodes_are_slower_than_for_a_request_alone_then_that_is_not_taken_from_it(
    service: Simulated,
) -> None:
    """A prompt that took 0.3 s alone, 0.31 s to its first token with all else, takes 0.6 s in the run."""
    [this] = rounds(0.1)
    slower = dict.fromkeys(NodeRole, dataclasses.replace(SPEEDS, prefill=Measured(0.02, 0.00194)))
    this = dataclasses.replace(this, targets={MIX: Targets(0.5, 0.04)}, alone={MIX: Targets(0.36, 0.021)})
    this.speeds[service.way] = slower
    assert service.run(this, VOCAB).of_all > 0.8  # as if a request alone had been faster than its steps
    this = dataclasses.replace(this, alone_speeds=dict.fromkeys(NodeRole, SPEEDS))
    assert service.run(this, VOCAB).of_all == 0.0


def test_round_when_a_node_was_slow_for_a_while_then_what_came_then_is_late(service: Simulated) -> None:
    [this] = rounds(0.2)
    slow = dataclasses.replace(SPEEDS, decode=Measured(0.05, 0.001))
    this.by_second[service.way] = [(100.0, [SPEEDS, slow]), (200.0, [SPEEDS, SPEEDS])]
    came = [each.at_s for each in this.arrivals(VOCAB, seed=1)]
    kept = service.run(this, VOCAB).kept[MIX]
    assert 0 < sum(100.0 <= at_s < 199.0 for at_s in came) <= len(came) - kept < 0.6 * len(came)


def test_round_when_the_proxy_did_not_know_what_two_nodes_cost_each_other_then_the_simulated_one_learns_it(
    tmp_path: Path,
) -> None:
    """A row more costs as much as half of what a second node does: whoever knows of that keeps to one."""
    (tmp_path / "config.json").write_text(json.dumps(HYBRID))
    cache = cache_of(tmp_path, "auto", 1 << 24, SPEEDS.max_num_seqs)
    speeds = dataclasses.replace(SPEEDS, decode=Measured(0.02, 0.004), beside_s=0.02)
    service = Simulated(ELASTIC, is_told=True, cache=cache, speeds=dict.fromkeys(NodeRole, speeds))
    mix = Mix(60, 200)
    this = Round(1.0, {mix: 0.6}, seconds=120.0, times_seed=2, targets={mix: Targets(0.5, 0.036)})
    knowing = service.run(this, VOCAB).of_all
    this.known_contention[ELASTIC] = [0.0, 0.0]
    assert service.run(this, VOCAB).of_all < 0.9 * knowing


def test_prediction_when_rounds_lie_on_both_sides_then_is_between_them(service: Simulated) -> None:
    found = predict_rounds(rounds(0.2, 0.5, 3.0), [service], VOCAB)[service.way].of_all
    assert 0.2 < found.rate < 3.0
