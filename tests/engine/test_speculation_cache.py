"""What speculative decoding does to the cache: nothing that a run without drafts does not do, in every mode, whatever
goes wrong in the middle of a step with drafts.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from common.engine.core import EngineCore
from common.engine.model_runner import Forward
from common.engine.plan import StepPlan
from common.node.runtime import NodeModel
from common.request import Request, SamplingParams
from tests.engine.cores import collect, engine, request, run, tokens, used
from tests.support.drafts import speculate
from tests.support.models import tiered

ROOMY = {"kv_cache_memory": 64 << 20, "max_model_len": 1024, "max_num_batched_tokens": 256}
# About 20 blocks and 15 slots: four sequences cannot all grow to their ends, and states are evicted.
SMALL = {
    "granitemoehybrid": {"kv_cache_memory": 490_000, "state_memory_share": 0.62},
    "qwen3_next": {"kv_cache_memory": 315_000, "state_memory_share": 0.82},
    "lfm2": {"kv_cache_memory": 182_000, "state_memory_share": 0.09},
    "jamba": {"kv_cache_memory": 501_500, "state_memory_share": 0.89},
}
MODES = ("none", "align", "all", "auto")
SHORT = [("granitemoehybrid", "align", False)]


def answer(core: EngineCore, prompt: list[int], **sampling: Any) -> list[int]:
    core.add_request(request("r", prompt, **sampling))
    return collect(core)["r", 0]


def cached(core: EngineCore, prompt: list[int], **sampling: Any) -> tuple[int, list[int]]:
    """Prompt tokens that were found, and the answer."""
    core.add_request(request("r", prompt, **sampling))
    outputs = [output for step in run(core) for output in step]
    return outputs[0].num_cached_tokens, [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize(
    ("family", "mode", "saves_each"),
    [
        each if each in SHORT else pytest.param(*each, marks=pytest.mark.full)
        for each in itertools.product(SMALL, MODES, (False, True))
    ],
)
def test_answers_when_drafts_are_run_in_a_small_pool_equal_those_of_requests_run_alone(
    family: str, mode: str, saves_each: bool
) -> None:
    shared = tokens(99, 70)
    prompts = [shared[: 10 * index] + tokens(index, 30 + 9 * index) for index in range(7)]
    alone, _ = engine(family, **ROOMY, enable_prefix_caching=False)
    expected = [answer(alone, prompt, max_tokens=24) for prompt in prompts]
    core, model = engine(family, **SMALL[family], max_model_len=192, max_num_seqs=4, mamba_cache_mode=mode)
    known = [prompt + found for prompt, found in zip(prompts, expected, strict=True)]
    speculation = speculate(core, model, known, 0.7, saves_each=saves_each)
    for sighting in range(2):
        for index, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=24)
            core.add_request(Request(f"r{index}", prompt, params, semantic_boundaries=(10 * index, 35)))
        found: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        for step in run(core):
            assert model.manager.check() == []
            for output in step:
                assert output.error is None
                found[int(output.request_id[1:])].extend(output.token_ids)
        assert list(found.values()) == expected, sighting
    assert used(model) == (0, 0, 0, 0)
    assert speculation.num_accepted_tokens > 50
    assert core.num_preemptions > 0 or mode == "none" or family == "lfm2"  # its spare slots' bytes are blocks


@pytest.mark.parametrize(
    ("mode", "saves_each"),
    [
        ("align", False),
        pytest.param("all", False, marks=pytest.mark.full),
        pytest.param("align", True, marks=pytest.mark.full),
        pytest.param("all", True, marks=pytest.mark.full),
    ],
)
def test_states_of_an_answer_when_drafts_are_run_then_are_kept_at_the_same_boundaries(
    mode: str, saves_each: bool
) -> None:
    prompt, kept = tokens(1, 70), []
    expected: list[int] = []
    for share in (None, 0.0, 1.0, 0.6):
        core, model = engine(**ROOMY, mamba_cache_mode=mode)
        if share is not None:
            speculate(core, model, [prompt + expected], share, saves_each=saves_each)
        found = answer(core, prompt, max_tokens=75)
        expected = expected or found
        assert found == expected
        coordinator = model.manager._coordinator
        kept.append(sorted(each.position for each in coordinator.state if each.origin == "grid"))
        assert model.manager.check() == []
    assert kept[0][-1] == 144
    assert kept == [kept[0]] * 4


@pytest.mark.parametrize("saves_each", [False, True], ids=["replayed", "saved"])
@pytest.mark.parametrize("family", tiered(("granitemoehybrid", "qwen3_5", "lfm2", "gemma3", "llama"), ()))
def test_turn_two_when_the_answer_was_drafted_then_goes_on_from_its_end(family: str, saves_each: bool) -> None:
    """The last sampled token was never run, as without drafts."""
    core, model = engine(family, **ROOMY)
    prompt = tokens(1, 45)
    first = answer(core, prompt, max_tokens=40)
    assert len(first) == 40
    follow = prompt + first + tokens(2, 9)
    fresh, _ = engine(family, **ROOMY, enable_prefix_caching=False)
    expected = answer(fresh, follow, max_tokens=20)
    for share in (1.0, 0.6, 0.0):
        core, model = engine(family, **ROOMY)
        speculate(core, model, [prompt + first], share, saves_each=saves_each)
        assert answer(core, prompt, max_tokens=40) == first
        found, second = cached(core, follow, max_tokens=20)
        assert found == 45 + 39
        assert second == expected


@pytest.mark.parametrize("saves_each", [False, pytest.param(True, marks=pytest.mark.full)], ids=["replayed", "saved"])
def test_turn_two_when_the_answer_ended_behind_a_wrong_draft_then_goes_on_from_its_end(
    saves_each: bool,
) -> None:
    prompt = tokens(1, 45)
    core, _ = engine(**ROOMY)
    first = answer(core, prompt, max_tokens=40)
    stop = next(place for place in range(12, 40) if first[place] not in first[:place])
    fresh, _ = engine(**ROOMY, enable_prefix_caching=False)
    follow = prompt + first[: stop + 1] + tokens(2, 9)
    expected = answer(fresh, follow, max_tokens=20)
    core, model = engine(**ROOMY)
    # It takes another token for the one at which the answer ends, and has it behind three right ones.
    wrong = [*prompt, *first[:stop], first[stop] ^ 1, *first[stop + 1 :]]
    speculation = speculate(core, model, [wrong], 1.0, always=True, saves_each=saves_each, num_tokens=4)
    ended = {"max_tokens": 40, "stop_token_ids": frozenset({first[stop]})}
    assert answer(core, prompt, **ended) == first[: stop + 1]
    assert speculation.num_accepted_tokens < speculation.num_draft_tokens
    found, second = cached(core, follow, max_tokens=20)
    assert found == 45 + stop
    assert second == expected


@pytest.mark.parametrize("is_left", [False, True], ids=["", "left at once"])
def test_answer_when_it_ends_while_a_part_of_it_is_run_again_then_nothing_is_held_and_its_end_is_kept(
    is_left: bool,
) -> None:
    flags = {**ROOMY, "max_num_batched_tokens": 64, "max_num_seqs": 12}
    core, _ = engine(**flags)
    prompt = tokens(1, 12)
    right = answer(core, prompt, max_tokens=80)
    core, model = engine(**flags)
    speculate(core, model, [[*prompt, *right[:59], right[59] ^ 1]], 1.0, always=True, num_tokens=63)
    core.add_request(request("ended", prompt, max_tokens=80))
    core.step()
    core.add_request(request("before", tokens(2, 4), num_forks=8, max_tokens=8))  # its rows come first
    core.step()
    core.step()
    (sequence,) = core._live.of_request("ended")
    assert (sequence.num_output_tokens, sequence.num_uncomputed_tokens) == (60, 3)
    core.finish("ended", 0)
    if is_left:  # as whoever reads one continuation alone does
        core.abort("ended")
    collect(core)
    assert used(model) == (0, 0, 0, 0)
    found, _ = cached(core, prompt + right[:60] + tokens(4, 9), max_tokens=2)
    assert found == 12 + 59


@pytest.mark.full  # without drafts: test_core.py
@pytest.mark.parametrize("seed", range(4))
def test_random_aborts_and_preemptions_when_drafts_are_run_leave_the_others_right_and_free_everything(
    seed: int,
) -> None:
    rng = random.Random(seed)
    prompts = [tokens(index, 20 + 7 * index) for index in range(6)]
    alone, _ = engine(**ROOMY)
    expected = [answer(alone, prompt, max_tokens=30) for prompt in prompts]
    core, model = engine(kv_cache_memory=480_000)
    known = [prompt + found for prompt, found in zip(prompts, expected, strict=True)]
    speculate(core, model, known, 0.7, seed=seed)
    outputs: dict[str, list[int]] = {}
    gone: set[str] = set()
    waiting = [(f"r{number}", number % 6) for number in range(30)]
    while waiting or core.has_work():
        if waiting and rng.random() < 0.5:
            name, which = waiting.pop()
            core.add_request(request(name, prompts[which], max_tokens=30))
            outputs[name] = []
        if outputs and rng.random() < 0.15:
            name = rng.choice(sorted(outputs))
            core.abort(name)
            gone.add(name)
        if core._scheduler.running and rng.random() < 0.1:
            core._scheduler.preempt(rng.choice(core._scheduler.running), donate=rng.random() < 0.5)
        for output in core.step():
            assert output.request_id not in gone or not output.token_ids
            outputs[output.request_id].extend(output.token_ids)
        assert model.manager.check() == []
    finished = {name: found for name, found in outputs.items() if name not in gone}
    assert len(finished) >= 5
    for name, found in finished.items():
        assert found == expected[int(name[1:]) % 6], name
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize("where", tiered(("launch", "wait", "sample"), ("sample",)))
def test_step_with_drafts_when_it_raises_then_answers_are_right_and_nothing_is_lost(where: str) -> None:
    prompts = [tokens(index, 20 + 7 * index) for index in range(3)]
    core, _ = engine(**ROOMY)
    expected = [answer(core, prompt, max_tokens=30) for prompt in prompts]
    core, model = engine(**ROOMY)
    known = [prompt + found for prompt, found in zip(prompts, expected, strict=True)]
    speculate(core, model, known, 0.7, always=True)
    for index, prompt in enumerate(prompts):
        core.add_request(request(f"r{index}", prompt, max_tokens=30))
    fail_once(core, model, where)
    found: dict[str, list[int]] = {}
    for step in run(core):
        assert model.manager.check() == []
        for output in step:
            assert output.error is None
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert found == {f"r{index}": each for index, each in enumerate(expected)}
    assert used(model) == (0, 0, 0, 0)


def fail_once(core: EngineCore, model: NodeModel, where: str) -> None:
    """The third step with drafts raises: before its forward, in it, or when all of its rows are sampled at once."""
    launch, sample, num_left = model.runner.launch, core._tokens._sampler.sample, [3]

    def raising(plan: StepPlan) -> Forward:
        if any(segment.num_tokens > 1 for segment in plan.segments) and plan.only_decodes:
            num_left[0] -= 1
            if num_left[0] == 0 and where == "launch":
                raise RuntimeError("the device is tired")
            if num_left[0] == 0 and where == "wait":
                return Forward(launch(plan).rows, event=Tired())
        return launch(plan)

    def sampled(logits: Any, tasks: Any) -> Any:
        if num_left[0] <= 0 and len(tasks) > 8 and where == "sample":
            num_left[0] = 100
            raise RuntimeError("the sampler is tired")
        return sample(logits, tasks)

    model.runner.launch = raising  # type: ignore[method-assign]
    core._tokens._sampler.sample = sampled  # type: ignore[method-assign]


class Tired:
    def synchronize(self) -> None:
        raise RuntimeError("the device is tired")


def test_drafts_when_no_slot_is_left_to_go_back_to_then_wait() -> None:
    prompts = [tokens(index, 30) for index in range(4)]
    core, _ = engine(**ROOMY)
    expected = [answer(core, prompt, max_tokens=20) for prompt in prompts]
    core, model = engine(max_num_seqs=4, mamba_cache_mode="none", max_model_len=64, kv_cache_memory=320_000)
    known = [prompt + found for prompt, found in zip(prompts, expected, strict=True)]
    speculation = speculate(core, model, known, 1.0, always=True)
    for index, prompt in enumerate(prompts):
        core.add_request(request(f"r{index}", prompt, max_tokens=20))
    assert collect(core) == {(f"r{index}", 0): each for index, each in enumerate(expected)}
    assert speculation.num_drafts < 20  # each of them by itself would have three
    assert used(model) == (0, 0, 0, 0)
