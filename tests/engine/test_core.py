"""The engine as a whole, in process, on a real tiny model: batching, preemption, aborts and forks against requests run
alone.

One engine with a small pool runs many requests with things going wrong; each surviving greedy output must equal that of
an engine with plenty of room that runs the request alone, and after every step the cache's invariants must hold.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.config.node import NodeConfig
from common.engine.core import EngineCore
from common.engine.outputs import RequestOutput
from common.engine.plan import StepPlan
from common.errors import InvalidRequestError, TandemError, TransferError
from common.node.pull.engine_bridge import FinishedPull
from common.node.runtime import NodeModel, create_core, load_node_model
from common.request import FinishReason, Request, SamplingParams
from tests.support.models import VOCAB_SIZE, checkpoint

SMALL_POOL = {"kv_cache_memory": 1 << 20, "max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 48}


def engine(family: str = "granitemoehybrid", **flags: Any) -> tuple[EngineCore, NodeModel]:
    config = NodeConfig(model=str(checkpoint(family)), dtype="float32", device="cpu", **{**SMALL_POOL, **flags})
    model = load_node_model(config)
    return create_core(config, model), model


def request(name: str, prompt: list[int], *, num_forks: int = 1, remote: Any = None, **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})
    return Request(name, prompt, params, num_forks=num_forks, remote=remote, arrival_s=0.0)


def tokens(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(num_tokens)]


def run(core: EngineCore, max_steps: int = 4000) -> Iterator[list[RequestOutput]]:
    for _ in range(max_steps):
        if not core.has_work():
            return
        yield core.step()
    raise AssertionError(f"work left after {max_steps} steps")


def collect(core: EngineCore) -> dict[tuple[str, int], list[int]]:
    """Token ids of every continuation, by (request, fork)."""
    out: dict[tuple[str, int], list[int]] = {}
    for outputs in run(core):
        for output in outputs:
            assert output.error is None
            out.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return out


def used(model: NodeModel) -> tuple[int, int, int, int]:
    """Blocks and slots that somebody holds, leases and sequences: all 0 when nothing runs."""
    stats = model.manager.stats()
    pools = (stats.blocks, stats.slots)
    busy = [sum(n for state, n in pool.items() if state not in ("free", "cached")) for pool in pools]
    return busy[0], busy[1], stats.leases_active, stats.num_sequences


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """Greedy continuations of prompts 0..11, each run alone with plenty of memory and without any cache."""
    core, _ = engine(kv_cache_memory=64 << 20, enable_prefix_caching=False, max_num_batched_tokens=512)
    out = {}
    for seed in range(12):
        core.add_request(request("r", prompt_of(seed)))
        out[seed] = collect(core)["r", 0]
    return out


def prompt_of(seed: int) -> list[int]:
    """Prompts of very different lengths; every third one shares its first 40 tokens with the others."""
    own = tokens(seed, [1, 15, 16, 17, 33, 100, 150, 7, 64, 48, 90, 120][seed])
    return tokens(99, 40) + own if seed % 3 == 0 else own


def test_outputs_when_batched_in_a_small_pool_equal_those_of_requests_run_alone(alone: dict[int, list[int]]) -> None:
    core, model = engine(kv_cache_memory=420_000)
    for seed in range(12):
        core.add_request(request(f"r{seed}", prompt_of(seed)))
    outputs = collect(core)
    assert outputs == {(f"r{seed}", 0): alone[seed] for seed in range(12)}
    assert model.manager.check() == []
    assert used(model) == (0, 0, 0, 0)


def test_preempted_requests_when_recomputed_give_the_same_output() -> None:
    prompts = [tokens(seed, 60) for seed in range(6)]
    roomy, _ = engine(kv_cache_memory=64 << 20)
    for index, prompt in enumerate(prompts):
        roomy.add_request(request(f"r{index}", prompt, max_tokens=100))
    expected = collect(roomy)
    # 28 blocks for six sequences that need ten each in the end.
    core, model = engine(kv_cache_memory=400_000, max_model_len=192)
    for index, prompt in enumerate(prompts):
        core.add_request(request(f"r{index}", prompt, max_tokens=100))
    outputs: dict[tuple[str, int], list[int]] = {}
    for step in run(core):
        assert model.manager.check() == []
        for output in step:
            outputs.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    assert core.num_preemptions > 0
    assert outputs == expected
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(4))
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
    forward = model.runner.forward

    def counted(plan: StepPlan) -> list[torch.Tensor]:
        forwards.append(sum(segment.num_tokens for segment in plan.segments))
        return forward(plan)

    model.runner.forward = counted  # type: ignore[method-assign]
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


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_forks_when_only_the_prompt_is_asked_for_then_each_is_ended(with_logprobs: bool) -> None:
    core, model = engine()
    for name in ("computed", "found whole"):
        core.add_request(request(name, tokens(3, 40), num_forks=3, max_tokens=0, prompt_logprobs=with_logprobs))
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
    core.add_request(request("echo", prompt, max_tokens=0, prompt_logprobs=True, logprobs=2))
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


@dataclass
class _Remote:
    num_tokens: int
    prefix_key: bytes


class _Source:
    """Notes what the engine asks; the test answers."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []

    def start(self, seq_id: str, remote: Any, plan: Any) -> None:
        self.started.append(seq_id)

    def cancel(self, seq_id: str) -> None:
        self.cancelled.append(seq_id)

    def give_up(self, remote: Any) -> None:
        raise AssertionError("no test here waits for that long")


def remote_request(core: EngineCore, model: NodeModel, prompt: list[int]) -> tuple[Request, _Source]:
    source = _Source()
    core.pull_with(source)
    key = model.manager.prefix_keys(prompt).key_at(len(prompt))
    return request("r", prompt, remote=_Remote(len(prompt), key)), source


FAILED = FinishedPull(ok=False, terminal=True, reason="stale_generation", num_bytes=0, num_blocks=0, num_states=0)
LATE = FinishedPull(ok=False, terminal=False, reason="deadline", num_bytes=0, num_blocks=0, num_states=0)


def test_failed_pull_when_policy_is_recompute_gives_the_right_output(alone: dict[int, list[int]]) -> None:
    core, model = engine()
    remote, source = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    assert source.started == ["r#0"]
    core.finish_pull("r#0", FAILED)
    assert collect(core)["r", 0] == alone[5]
    assert used(model) == (0, 0, 0, 0)


def test_failed_pull_when_policy_is_fail_gives_a_typed_error() -> None:
    core, model = engine(kv_load_failure_policy="fail")
    remote, _ = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    core.finish_pull("r#0", FAILED)
    outputs = core.step()
    assert [type(output.error) for output in outputs] == [TransferError]
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert used(model) == (0, 0, 0, 0)


def test_late_pull_when_not_terminal_keeps_its_destination_in_quarantine(alone: dict[int, list[int]]) -> None:
    core, model = engine()
    remote, _ = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    core.finish_pull("r#0", LATE)
    assert collect(core)["r", 0] == alone[5]
    stats = model.manager.stats()
    assert stats.blocks["quarantined"] == 7
    assert stats.slots["quarantined"] == 1
    assert model.manager.check() == []
    core.end_quarantine("r#0")
    assert used(model) == (0, 0, 0, 0)


def test_abort_when_transferring_waits_for_the_read_and_then_frees() -> None:
    core, model = engine()
    remote, source = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    core.abort("r")
    assert source.cancelled == ["r#0"]
    assert used(model)[0] > 0  # still a destination
    core.finish_pull("r#0", FAILED)
    assert used(model) == (0, 0, 0, 0)
    assert model.manager.check() == []


def test_request_id_when_memory_is_still_kept_under_it_then_is_refused_until_that_is_free(
    alone: dict[int, list[int]],
) -> None:
    core, model = engine()
    remote, _ = remote_request(core, model, prompt_of(5))
    core.add_request(remote)
    core.step()
    core.abort("r")
    again = request("r", prompt_of(5))
    with pytest.raises(InvalidRequestError, match="request id r is in use"):
        core.add_request(again)
    core.finish_pull("r#0", LATE)
    with pytest.raises(InvalidRequestError, match="request id r is in use"):
        core.add_request(again)
    core.add_request(request("other", prompt_of(5)))
    assert collect(core) == {("other", 0): alone[5]}
    core.end_quarantine("r#0")
    core.add_request(again)
    assert collect(core) == {("r", 0): alone[5]}
    assert used(model) == (0, 0, 0, 0)


def test_prefix_of_another_prompt_when_handed_over_is_refused() -> None:
    core, model = engine()
    remote, source = remote_request(core, model, prompt_of(5))
    remote.prompt_token_ids = prompt_of(6)
    core.add_request(remote)
    outputs = core.step()
    assert [getattr(output.error, "param", None) for output in outputs] == ["kv_transfer_params.tandem_prefix_key"]
    assert source.started == []


def test_step_that_raises_when_caught_fails_its_requests_and_frees_their_memory() -> None:
    core, model = engine()
    core.add_request(request("r", tokens(1, 30)))
    forward = model.runner.forward
    model.runner.forward = lambda plan: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        core.step()
    outputs = core.fail_running(TandemError("failed"))
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR]
    assert used(model) == (0, 0, 0, 0)
    model.runner.forward = forward  # type: ignore[method-assign]
    core.add_request(request("r", tokens(1, 30)))
    assert len(collect(core)["r", 0]) == 12


def test_prompt_logprobs_when_preempted_or_forked_are_whole_and_the_same() -> None:
    roomy, _ = engine(kv_cache_memory=64 << 20)
    core, _ = engine(kv_cache_memory=400_000, max_model_len=192)
    seen = []
    for each, others in ((roomy, 0), (core, 5)):
        for index in range(others):
            each.add_request(request(f"a{index}", tokens(index, 60), max_tokens=100))
        echo = request("z", tokens(20, 100), num_forks=2, prompt_logprobs=True, logprobs=0, max_tokens=3)
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
