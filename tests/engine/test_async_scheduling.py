"""Steps that are launched before the tokens of the one before are known (``--async-scheduling``): answers, and what is
cached of them, are those of the ordinary order, however a sequence ends; also on a device that is late.

Controls: a state that the row past the end has advanced, and input ids of a step too old, change what is answered.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from common.engine.core import EngineCore
from common.engine.model_runner import Forward
from common.engine.plan import StepPlan
from common.errors import ConfigError
from common.kv_cache.manager import KVCacheManager
from common.kv_cache.sequences.allocation import SequenceView
from common.node.runtime import NodeModel
from common.request import Request
from tests.engine.cores import collect, engine, prompt_of, request, tokens, used
from tests.support.late_device import late_device
from tests.support.models import CONFIGS, tiered

ROOMY = {"kv_cache_memory": 32 << 20, "max_num_seqs": 8, "max_model_len": 256}
FAMILIES = tiered(tuple(CONFIGS), ("granitemoehybrid",))
NUM_TOKENS = 24
PROMPTS = {
    name: tokens(seed, length)
    for seed, (name, length) in enumerate(
        {"length": 30, "short": 17, "stop": 40, "eos": 33, "aborted": 21, "finished": 50}.items()
    )
}


@dataclass(frozen=True)
class Played:
    """Two turns of a few conversations at once: the answers, and how many tokens of the second prompts were found."""

    first: dict[str, list[int]]
    num_cached: dict[str, int]
    second: dict[str, list[int]]


def make(family: str, *, is_late: bool = False, **flags: Any) -> tuple[EngineCore, NodeModel]:
    with late_device() if is_late else nullcontext():
        return engine(family, **{**ROOMY, **flags})


def step(core: EngineCore, model: NodeModel, answers: dict[str, list[int]]) -> dict[str, int]:
    """Prompt tokens that were found, of those whose first token came."""
    found = {}
    for output in core.step():
        assert output.error is None, output.error
        if output.token_ids and output.request_id not in answers:
            found[output.request_id] = output.num_cached_tokens
        answers.setdefault(output.request_id, []).extend(output.token_ids)
    assert model.manager.check() == []
    return found


def first_turns(base: Mapping[str, list[int]], temperature: float) -> dict[str, Request]:
    """``base``: the answers of ``NUM_TOKENS`` tokens, which say where to end."""
    turns = {
        name: request(name, prompt, max_tokens=NUM_TOKENS, temperature=temperature, seed=7, ignore_eos=False)
        for name, prompt in PROMPTS.items()
    }
    if base:
        for name, changes in (
            ("short", {"max_tokens": 3}),
            ("stop", {"stop_token_ids": frozenset({base["stop"][7]})}),
        ):
            turns[name] = replace(turns[name], sampling=replace(turns[name].sampling, **changes))  # type: ignore[type-var]
        turns["eos"] = replace(turns["eos"], eos_token_ids=frozenset({base["eos"][10]}))
    return turns


def play(core: EngineCore, model: NodeModel, turns: Mapping[str, Request]) -> Played:
    commands = {
        "aborted": (5, lambda: core.abort("aborted")),
        "finished": (9, lambda: core.finish("finished", 0)),
    }
    first: dict[str, list[int]] = {}
    for turn in turns.values():
        core.add_request(turn)
    while core.has_work():
        step(core, model, first)
        for name in list(commands):
            if len(first.get(name, ())) >= commands[name][0]:
                commands.pop(name)[1]()
    assert not commands
    second: dict[str, list[int]] = {}
    num_cached: dict[str, int] = {}
    for name, answer in first.items():
        core.add_request(request(name, second_prompt(name, answer), max_tokens=6))
    while core.has_work():
        num_cached |= step(core, model, second)
    assert used(model) == (0, 0, 0, 0)
    return Played(first, num_cached, second)


def second_prompt(name: str, answer: list[int]) -> list[int]:
    return [*PROMPTS[name], *answer, *tokens(len(name), 10)]


def ordinary(family: str, temperature: float, **flags: Any) -> tuple[dict[str, Request], Played]:
    """What is asked for, and what the ordinary order answers."""
    core, model = make(family, **flags)
    for turn in first_turns({}, temperature).values():
        core.add_request(turn)
    base = {name: answer for (name, _), answer in collect(core).items()}
    core, model = make(family, **flags)
    turns = first_turns(base, temperature)
    return turns, play(core, model, turns)


@pytest.mark.parametrize(
    ("temperature", "is_late"),
    [pytest.param(0.0, False, marks=pytest.mark.full, id="greedy"), pytest.param(0.8, True, id="seeded late")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_when_steps_are_launched_ahead_are_the_same_and_next_turns_find_their_exact_ends(
    family: str, temperature: float, is_late: bool
) -> None:
    turns, expected = ordinary(family, temperature)
    core, model = make(family, is_late=is_late, async_scheduling=True)
    played = play(core, model, turns)
    assert played == expected
    assert core.ahead_steps is not None
    assert core.ahead_steps.counts["ahead"] > 15
    assert {len(answer) for name, answer in played.first.items() if name in ("length", "short")} == {NUM_TOKENS, 3}
    assert played.num_cached == {name: len(PROMPTS[name]) + len(answer) - 1 for name, answer in played.first.items()}
    fresh, _ = make(family, enable_prefix_caching=False)
    for name, answer in played.first.items():
        fresh.add_request(request(name, second_prompt(name, answer), max_tokens=6))
    assert {name: answer for (name, _), answer in collect(fresh).items()} == played.second


@pytest.mark.full
@pytest.mark.parametrize("mode", ["all", "align", "none"])
def test_states_at_boundaries_when_steps_are_launched_ahead_are_kept_as_in_the_ordinary_order(mode: str) -> None:
    flags = {"mamba_cache_mode": mode, "block_size": 4}
    turns, expected = ordinary("granitemoehybrid", 0.0, **flags)
    core, model = make("granitemoehybrid", is_late=True, async_scheduling=True, **flags)
    assert play(core, model, turns) == expected


def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps ahead write the state where they have read it."""
    extend, complete = KVCacheManager.extend_ahead, KVCacheManager.complete_step

    def extend_ahead(self: KVCacheManager, seq_id: str, num_tokens: int, src_slot: int) -> SequenceView | None:
        view = extend(self, seq_id, num_tokens, src_slot)
        return None if view is None else replace(view, dst_slot=view.src_slot)

    def complete_step(self: KVCacheManager, seq_id: str, num_tokens: int, *, is_ahead: bool = False) -> None:
        complete(self, seq_id, num_tokens)

    monkeypatch.setattr(KVCacheManager, "extend_ahead", extend_ahead)
    monkeypatch.setattr(KVCacheManager, "complete_step", complete_step)


def test_second_turns_when_states_are_those_of_the_row_past_the_end_then_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns, expected = ordinary("granitemoehybrid", 0.0)
    in_place(monkeypatch)
    core, model = make("granitemoehybrid", async_scheduling=True)
    played = play(core, model, turns)
    assert (played.first, played.num_cached) == (expected.first, expected.num_cached)
    wrong = {name for name in played.second if played.second[name] != expected.second[name]}
    assert wrong
    assert wrong <= {"stop", "eos", "aborted", "finished"}


def test_answers_when_input_ids_are_those_of_a_step_too_old_then_are_wrong() -> None:
    turns, expected = ordinary("granitemoehybrid", 0.0)
    core, model = make("granitemoehybrid", async_scheduling=True)
    launch, drawn = model.runner.launch, list[torch.Tensor]()

    def too_old(plan: StepPlan) -> Forward:
        if plan.ids_from is not None:
            drawn.append(plan.ids_from.tokens)
            same = [each for each in drawn[-2:-1] if len(each) == len(drawn[-1])]
            plan.ids_from = replace(plan.ids_from, tokens=same[0] if same else drawn[-1])
        return launch(plan)

    model.runner.launch = too_old  # type: ignore[method-assign]
    core.add_request(turns["length"])
    assert collect(core)["length", 0] != expected.first["length"]


def test_answers_when_nobody_waits_for_the_device_then_are_wrong() -> None:
    turns, expected = ordinary("granitemoehybrid", 0.0)
    with late_device(waits=False):
        core, model = engine("granitemoehybrid", **ROOMY, async_scheduling=True)
    model.runner.is_held = True  # type: ignore[attr-defined]
    core.add_request(turns["length"])
    assert collect(core)["length", 0] != expected.first["length"]


def test_end_when_it_is_leased_while_the_row_past_it_is_in_flight_then_the_lease_waits_for_it() -> None:
    core, model = make("granitemoehybrid", is_late=True, async_scheduling=True)
    answers: dict[str, list[int]] = {}
    core.add_request(request("r", PROMPTS["length"], max_tokens=NUM_TOKENS))
    while len(answers.get("r", ())) < 9:
        step(core, model, answers)
    core.finish("r", 0)
    assert used(model)[3] == 1  # the step in flight names its memory
    keys = model.manager.prefix_keys(second_prompt("length", answers["r"]))
    lease = core.lease_prefix(keys, "reader", deeper_than=0)
    assert lease is not None
    assert lease.num_tokens == len(PROMPTS["length"]) + len(answers["r"]) - 1
    told = model.storage.slot_arena[lease.slot_id].clone()
    model.runner.synchronize()
    assert torch.equal(model.storage.slot_arena[lease.slot_id], told)
    assert model.manager.release_lease("reader")
    assert used(model) == (0, 0, 0, 0)


def counts(core: EngineCore) -> dict[str, int]:
    assert core.ahead_steps is not None
    return {order: count for order, count in core.ahead_steps.counts.items() if count}


def test_steps_when_a_sequence_runs_alone_then_all_but_two_are_launched_ahead() -> None:
    core, _ = make("granitemoehybrid", async_scheduling=True)
    core.add_request(request("r", tokens(1, 20), max_tokens=12))
    assert len(collect(core)["r", 0]) == 12
    # The prompt, and the first token behind it. No step runs behind a token that is known to be the last one.
    assert counts(core) == {"others": 1, "sampling": 1, "ahead": 10}


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.3},
        {"logprobs": 2},
        pytest.param({"allowed_token_ids": frozenset(range(40, 90))}, marks=pytest.mark.full),
        pytest.param({"logit_bias": {50: 2.0}}, marks=pytest.mark.full),
        pytest.param({"bad_token_ids": ((50,), (51, 52))}, marks=pytest.mark.full),
        {"min_tokens": 30, "stop_token_ids": frozenset({60})},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_steps_when_the_host_chooses_a_token_then_are_launched_in_the_ordinary_order(sampling: dict[str, Any]) -> None:
    outputs = []
    for flag in (False, True):
        core, model = make("granitemoehybrid", async_scheduling=flag)
        core.add_request(request("host", tokens(1, 20), max_tokens=12, **sampling))
        core.add_request(request("device", tokens(2, 20), max_tokens=20))
        outputs.append(collect(core))
        assert used(model) == (0, 0, 0, 0)
    assert outputs[0] == outputs[1]
    assert counts(core) == {"others": 1, "sampling": 12, "ahead": 7}


def test_request_when_it_comes_while_a_step_is_ahead_then_joins_the_next_but_one() -> None:
    core, model = make("granitemoehybrid", async_scheduling=True, max_num_batched_tokens=256)
    core.add_request(request("first", tokens(1, 20), max_tokens=20))
    answers: dict[str, list[int]] = {}
    while len(answers.get("first", ())) < 5:
        step(core, model, answers)
    core.add_request(request("second", tokens(2, 20), max_tokens=4))
    step(core, model, answers)
    assert "second" not in answers
    step(core, model, answers)
    assert len(answers["second"]) == 1
    collect(core)
    assert used(model) == (0, 0, 0, 0)


def test_request_id_when_its_last_row_is_still_in_flight_can_be_used_again() -> None:
    core, model = make("granitemoehybrid", is_late=True, async_scheduling=True)
    answers: dict[str, list[int]] = {}
    for _ in range(2):
        answers.clear()
        core.add_request(request("r", tokens(1, 20), max_tokens=20))
        while len(answers.get("r", ())) < 5:
            step(core, model, answers)
        core.abort("r")
    core.settle()
    assert used(model) == (0, 0, 0, 0)
    assert not core.has_work()


@pytest.mark.parametrize("is_late", [False, True], ids=["", "late"])
@pytest.mark.full  # ends that are chosen: above
@pytest.mark.parametrize("seed", [0, 1])
def test_random_ends_when_memory_is_short_leave_the_others_right_and_free_everything(
    seed: int, is_late: bool, alone: dict[int, list[int]]
) -> None:
    rng = random.Random(seed)
    core, model = make(
        "granitemoehybrid", is_late=is_late, async_scheduling=True, kv_cache_memory=560_000, max_num_seqs=6
    )
    answers: dict[str, list[int]] = {}
    gone: set[str] = set()
    waiting = [(f"r{number}", number % 12) for number in range(30)]
    while waiting or core.has_work():
        if waiting and rng.random() < 0.3:
            name, which = waiting.pop()
            core.add_request(request(name, prompt_of(which)))
        if answers and rng.random() < 0.1:
            name = rng.choice(sorted(answers))
            rng.choice([lambda name=name: core.abort(name), lambda name=name: core.finish(name, 0)])()
            gone.add(name)
        step(core, model, answers)
    for name, answer in answers.items():
        whole = alone[int(name[1:]) % 12]
        assert answer == (whole[: len(answer)] if name in gone else whole), name
    assert counts(core)["ahead"] > 10
    assert used(model) == (0, 0, 0, 0)


def test_preempted_requests_when_steps_are_launched_ahead_give_the_same_output() -> None:
    outputs = []
    for flags in ({}, {"async_scheduling": True, "kv_cache_memory": 470_000, "max_model_len": 192, "max_num_seqs": 6}):
        core, model = make("granitemoehybrid", **flags)
        for index in range(6):
            core.add_request(request(f"r{index}", tokens(index, 60), max_tokens=100))
        outputs.append(collect(core))
        assert used(model) == (0, 0, 0, 0)
    assert core.num_preemptions > 0
    assert counts(core)["memory"] > 0
    assert outputs[0] == outputs[1]


class Bad:
    """An event behind which the device has failed."""

    def synchronize(self) -> None:
        raise RuntimeError("the device has failed")


@pytest.mark.parametrize("at", ["launch", "event"])
def test_answers_when_a_step_ahead_raises_are_the_same(at: str) -> None:
    core, model = make("granitemoehybrid", async_scheduling=True)
    for name in ("a", "b"):
        core.add_request(request(name, PROMPTS["length"] + tokens(len(name), 3), max_tokens=12))
    expected = collect(core)
    launch, num_ahead = model.runner.launch, iter(range(100))

    def faulty(plan: StepPlan) -> Forward:
        is_due = plan.ids_from is not None and next(num_ahead) == 3
        if is_due and at == "launch":
            raise RuntimeError("the device does not want it")
        forward = launch(plan)
        return replace(forward, event=Bad()) if is_due else forward

    model.runner.launch = faulty  # type: ignore[method-assign]
    for name in ("a", "b"):
        core.add_request(request(name, PROMPTS["length"] + tokens(len(name), 3), max_tokens=12))
    assert collect(core) == expected
    assert counts(core).get("error", 0) == (at == "launch")
    assert model.manager.check() == []
    assert used(model) == (0, 0, 0, 0)


def test_flags_when_they_exclude_each_other_then_both_are_named() -> None:
    with pytest.raises(ConfigError, match="--async-scheduling and --speculative-config exclude each other"):
        make("granitemoehybrid", async_scheduling=True, speculative_config='{"method": "ngram"}')


def test_memory_when_steps_are_launched_ahead_holds_two_states_of_each_sequence() -> None:
    with pytest.raises(ConfigError, match="8 sequences need 17 slots"):
        make("granitemoehybrid", async_scheduling=True, kv_cache_memory=100_000)
