"""The engine as a whole, in process, on a real tiny model: batching, preemption, aborts and forks against requests run
alone.

One engine with a small pool runs many requests with things going wrong; each surviving greedy output must equal that of
an engine with plenty of room that runs the request alone, and after every step the cache's invariants must hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.engine.model_runner import Forward
from common.engine.plan import StepPlan
from common.errors import HandedOverError, InvalidRequestError
from common.request import FinishReason, Request
from tests.engine.cores import collect, engine, prompt_of, request, run, tokens, used
from tests.support.models import tiered


def test_outputs_when_batched_in_a_small_pool_equal_those_of_requests_run_alone(alone: dict[int, list[int]]) -> None:
    core, model = engine(kv_cache_memory=420_000)
    for seed in range(12):
        core.add_request(request(f"r{seed}", prompt_of(seed)))
    outputs = collect(core)
    assert outputs == {(f"r{seed}", 0): alone[seed] for seed in range(12)}
    assert model.manager.check() == []
    assert used(model) == (0, 0, 0, 0)


def test_core_when_a_step_is_in_flight_then_takes_no_command() -> None:
    core, model = engine()
    core.add_request(request("running", prompt_of(0)))
    commands: list[Callable[[], object]] = [
        lambda: core.add_request(request("other", prompt_of(1))),
        lambda: core.abort("running"),
        lambda: core.finish("running", 0),
        lambda: core.end_quarantine("running#0"),
        lambda: core.lease_prefix(model.manager.prefix_keys(prompt_of(0), None), "lease", deeper_than=0),
        lambda: core.hand_over("running", "lease"),
        core.launch,
    ]
    step = core.launch()
    for command in commands:
        with pytest.raises(AssertionError, match="between launch and collect"):
            command()
    core.collect(step)
    core.abort("running")
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize("ahead", [False, True])
def test_stream_when_handed_over_then_its_caller_knows_all_tokens_and_the_state_behind_all_but_the_last_is_leased(
    ahead: bool,
) -> None:
    core, model = engine(async_scheduling=ahead)
    core.add_request(request("other", prompt_of(1), max_tokens=60))
    core.add_request(request("a", prompt_of(5), max_tokens=60))
    told: list[int] = []
    while len(told) < 20:
        for output in core.step():
            told += output.token_ids if output.request_id == "a" else []
    lease = core.hand_over("a", "lease")
    assert lease is not None
    assert core.hand_over("a", "again") is None
    error = None
    while error is None:
        for output in core.step():
            if output.request_id == "a":
                told, error = told + output.token_ids, output.error
    assert isinstance(error, HandedOverError)
    assert lease.num_tokens == len(prompt_of(5)) + len(told) - 1
    collect(core)
    with pytest.raises(InvalidRequestError, match="lease is in use"):
        core.lease_prefix(model.manager.prefix_keys(prompt_of(5), None), "lease", deeper_than=0)
    assert model.manager.release_lease("lease")
    core.add_request(request("b", [*prompt_of(5), *told], max_tokens=60 - len(told)))
    [first, *_] = [output for outputs in run(core) for output in outputs]
    assert first.num_cached_tokens == lease.num_tokens
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize("name", ["unknown", "waiting", "prompt", "over"])
def test_hand_over_when_it_is_no_stream_then_nothing_happens(name: str) -> None:
    core, model = engine()
    core.add_request(request("over", prompt_of(1)))
    over = collect(core)
    assert over
    core.add_request(request("prompt", prompt_of(5)))
    core.step()
    core.add_request(request("waiting", prompt_of(7)))
    assert core.hand_over(name, "lease") is None
    outputs = collect(core)
    assert {key[0] for key in outputs} == {"prompt", "waiting"}
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "sampling",
    [pytest.param({}, marks=pytest.mark.full), {"repetition_penalty": 1.2, "frequency_penalty": 0.1}],
    ids=["", "penalties"],
)
def test_preempted_requests_when_recomputed_give_the_same_output(sampling: dict[str, float]) -> None:
    prompts = [tokens(seed, 60) for seed in range(6)]
    roomy, _ = engine(kv_cache_memory=64 << 20)
    for index, prompt in enumerate(prompts):
        roomy.add_request(request(f"r{index}", prompt, max_tokens=100, **sampling))
    expected = collect(roomy)
    # 28 blocks for six sequences that need ten each in the end.
    core, model = engine(kv_cache_memory=400_000, max_model_len=192)
    for index, prompt in enumerate(prompts):
        core.add_request(request(f"r{index}", prompt, max_tokens=100, **sampling))
    outputs: dict[tuple[str, int], list[int]] = {}
    for step in run(core):
        assert model.manager.check() == []
        for output in step:
            outputs.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    assert core.num_preemptions > 0
    assert outputs == expected
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize("seed", tiered(range(4), (0,)))
def test_random_aborts_when_memory_is_short_leave_the_others_right_and_free_everything(
    seed: int, alone: dict[int, list[int]]
) -> None:
    rng = random.Random(seed)
    core, model = engine(kv_cache_memory=480_000)
    outputs: dict[str, list[int]] = {}
    gone: set[str] = set()
    waiting = [(f"r{number}", number % 12) for number in range(40)]
    while waiting or core.has_work():
        if waiting and rng.random() < 0.5:
            name, which = waiting.pop()
            core.add_request(request(name, prompt_of(which)))
            outputs[name] = []
        if outputs and rng.random() < 0.2:
            name = rng.choice(sorted(outputs))
            core.abort(name)
            gone.add(name)
        for output in core.step():
            assert output.request_id not in gone or not output.token_ids
            outputs[output.request_id].extend(output.token_ids)
        assert model.manager.check() == []
    finished = {name: ids for name, ids in outputs.items() if name not in gone}
    assert len(finished) >= 5
    for name, ids in finished.items():
        assert ids == alone[int(name[1:]) % 12], name
    assert used(model) == (0, 0, 0, 0)


def test_exact_repeat_when_cached_runs_no_forward_before_its_first_token() -> None:
    core, model = engine()
    prompt = tokens(5, 100)
    core.add_request(request("first", prompt))
    first = collect(core)["first", 0]
    forwards: list[int] = []
    forward = model.runner.launch

    def counted(plan: StepPlan) -> Forward:
        forwards.append(sum(segment.num_tokens for segment in plan.segments))
        return forward(plan)

    model.runner.launch = counted  # type: ignore[method-assign]
    core.add_request(request("second", prompt))
    outputs = core.step()
    assert [output.token_ids for output in outputs] == [first[:1]]
    assert sum(forwards) == 0
    assert outputs[0].num_cached_tokens == 100
    assert outputs[0].num_local_computed_tokens == 0
    assert collect(core)["second", 0] == first[1:]
    assert sum(forwards) == len(first) - 1


def test_forks_when_seeded_differ_and_compute_the_prompt_once() -> None:
    core, model = engine()
    prompt = tokens(6, 70)
    core.add_request(request("n", prompt, num_forks=3, temperature=1.0, seed=11, max_tokens=20))
    outputs = collect(core)
    assert sorted(outputs) == [("n", 0), ("n", 1), ("n", 2)]
    assert len({tuple(ids) for ids in outputs.values()}) == 3
    assert model.manager.stats().query_tokens == len(prompt)
    core.add_request(request("again", prompt, num_forks=3, temperature=1.0, seed=11, max_tokens=20))
    assert list(collect(core).values()) == list(outputs.values())
    assert used(model) == (0, 0, 0, 0)


def test_forks_when_there_is_no_room_for_all_wait_and_still_answer() -> None:
    roomy, _ = engine(kv_cache_memory=64 << 20, max_num_seqs=8)
    tight, model = engine(max_num_seqs=2)
    answers = []
    for core in (roomy, tight):
        core.add_request(request("n", tokens(7, 50), num_forks=5, temperature=1.0, seed=3))
        answers.append(dict(sorted(collect(core).items())))
    assert answers[0] == answers[1]
    assert len(answers[0]) == 5
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_forks_when_they_begin_then_their_prompt_was_read_once(max_num_seqs: int) -> None:
    core, model = engine(max_num_seqs=max_num_seqs)
    with patch.object(model.manager, "prefix_keys", wraps=model.manager.prefix_keys) as prefix_keys:
        core.add_request(request("n", tokens(7, 50), num_forks=5, temperature=1.0, seed=3))
        assert len(collect(core)) == 5
    assert prefix_keys.call_count == 1


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_forks_when_only_the_prompt_is_asked_for_then_each_is_ended(with_logprobs: bool) -> None:
    core, model = engine()
    for name in ("computed", "found whole"):
        core.add_request(
            request(name, tokens(3, 40), num_forks=3, max_tokens=0, prompt_logprobs=0 if with_logprobs else None)
        )
        outputs = [output for step in run(core) for output in step]
        assert [(output.index, output.finish_reason) for output in outputs] == [
            (index, FinishReason.LENGTH) for index in range(3)
        ]
        assert all(len(output.prompt_logprobs or ()) == 40 * with_logprobs for output in outputs)
        assert used(model) == (0, 0, 0, 0)


def test_continuation_when_finished_after_its_end_then_its_end_is_told_once_and_its_sibling_goes_on() -> None:
    """A stop string is found one step later than the token that completed it: the next one may have been the last."""
    core, model = engine()
    core.add_request(request("r", prompt_of(5), num_forks=2, max_tokens=12, ignore_eos=True))
    ended: list[int] = []
    for outputs in run(core):
        ended += [output.index for output in outputs if output.finish_reason is not None]
        running = [sequence.index for sequence in core._scheduler.running]
        is_early = running == [0, 1] and core._scheduler.running[0].num_output_tokens == 3
        if is_early or running == [1]:
            core.finish("r", 0)
    assert ended == [0, 1]
    assert used(model) == (0, 0, 0, 0)


def test_prompt_logprobs_when_asked_come_from_a_computation_of_the_whole_prompt() -> None:
    core, model = engine()
    prompt = tokens(8, 100)
    core.add_request(request("warm", prompt))
    collect(core)
    core.add_request(request("echo", prompt, max_tokens=0, prompt_logprobs=2, logprobs=2))
    outputs = [output for step in run(core) for output in step]
    assert len(outputs) == 1
    entries = outputs[0].prompt_logprobs
    assert entries is not None
    assert len(entries) == 100
    assert entries[0] is None
    stock = AutoModelForCausalLM.from_pretrained(model.loaded.folder, dtype=torch.float32)
    with torch.no_grad():
        logits = stock(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    expected = torch.log_softmax(logits.float(), -1)
    for position, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        assert entry.token_id == prompt[position]
        assert entry.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-3)
        assert len(entry.top) == 2


def test_prompt_logprobs_when_preempted_or_forked_are_whole_and_the_same() -> None:
    roomy, _ = engine(kv_cache_memory=64 << 20)
    core, _ = engine(kv_cache_memory=400_000, max_model_len=192)
    seen = []
    for each, others in ((roomy, 0), (core, 5)):
        for index in range(others):
            each.add_request(request(f"a{index}", tokens(index, 60), max_tokens=100))
        echo = request("z", tokens(20, 100), num_forks=2, prompt_logprobs=0, logprobs=0, max_tokens=3)
        each.add_request(echo)
        by_fork: dict[int, list[Any]] = {}
        for step in run(each):
            for output in step:
                if output.request_id == "z" and output.prompt_logprobs is not None:
                    by_fork[output.index] = [e and round(e.logprob, 3) for e in output.prompt_logprobs]
        seen.append(by_fork)
    assert {len(entries) for entries in seen[0].values()} == {100}
    assert sorted(seen[0]) == [0, 1]
    for fork in (0, 1):
        assert seen[1][fork][1:] == pytest.approx(seen[0][0][1:], abs=2e-3)


def test_queue_when_its_head_waits_for_leased_memory_is_no_work_until_the_lease_is_gone() -> None:
    core, model = engine(kv_cache_memory=400_000, max_model_len=192, enable_prefix_caching=False)
    prompt = tokens(1, 150)
    core.add_request(Request("leased", prompt, None))
    while core.has_work():
        core.step()
    core.add_request(Request("leased too", prompt, None))
    while core.has_work():
        core.step()
    core.add_request(request("waits", prompt))
    core.step()
    assert not core.has_work()
    assert core.num_waiting == 1
    assert model.manager.release_lease("leased")
    assert len(core.step()) + sum(len(outputs) for outputs in run(core)) == 12
