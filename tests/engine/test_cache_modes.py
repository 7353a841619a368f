"""The engine in every ``--mamba-cache-mode``: right answers first, then where each mode resumes, what a step computes,
and that no mode pays with forwards.
"""

from __future__ import annotations

from typing import Any

import pytest

from common.engine.core import EngineCore
from common.engine.model_runner import Forward
from common.engine.outputs import RequestOutput
from common.engine.plan import StepPlan
from common.node.runtime import NodeModel
from common.request import FinishReason, Request, SamplingParams
from tests.engine.cores import collect, engine, request, run, tokens, used

MODES: dict[str, dict[str, Any]] = {
    "none": {"mamba_cache_mode": "none"},
    "align": {"mamba_cache_mode": "align"},
    "all": {"mamba_cache_mode": "all"},
    "auto": {"mamba_cache_mode": "auto"},
    "align-64": {"mamba_cache_mode": "align", "prefix_cache_retention_interval": 64},
    "all-64": {"mamba_cache_mode": "all", "prefix_cache_retention_interval": 64},
    "auto-64": {"mamba_cache_mode": "auto", "prefix_cache_retention_interval": 64},
}
ROOMY = {"kv_cache_memory": 64 << 20, "max_model_len": 4096, "max_num_batched_tokens": 512}
BLOCK = 16
# About 20 blocks and 15 slots: four sequences cannot all grow to their ends, and states are evicted.
SMALL = {
    "granitemoehybrid": {"kv_cache_memory": 490_000, "state_memory_share": 0.62},
    "qwen3_next": {"kv_cache_memory": 352_000, "state_memory_share": 0.72},
    "lfm2": {"kv_cache_memory": 182_000, "state_memory_share": 0.09},
    "jamba": {"kv_cache_memory": 548_000, "state_memory_share": 0.8},
}


class Steps:
    """Notes the segments of every forward of an engine."""

    def __init__(self, model: NodeModel) -> None:
        self.plans: list[StepPlan] = []
        self._forward = model.runner.launch
        model.runner.launch = self._noted  # type: ignore[method-assign]

    def _noted(self, plan: StepPlan) -> Forward:
        self.plans.append(plan)
        return self._forward(plan)

    def chunks(self, name: str) -> list[tuple[int, int]]:
        """(start, end) of each segment of request ``name``, decode rows included."""
        return [
            (segment.start, segment.start + segment.num_tokens)
            for plan in self.plans
            for segment in plan.segments
            if segment.request_id == f"{name}#0"
        ]

    def prompt_chunks(self, name: str, num_tokens: int) -> list[tuple[int, int]]:
        return [(start, end) for start, end in self.chunks(name) if end <= num_tokens]


def ask(core: EngineCore, name: str, prompt: list[int], *boundaries: int, **sampling: Any) -> list[RequestOutput]:
    """Runs one request to its end; its outputs."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **sampling})
    core.add_request(Request(name, prompt, params, semantic_boundaries=boundaries))
    return [output for step in run(core) for output in step]


def cached(outputs: list[RequestOutput]) -> int:
    return outputs[0].num_cached_tokens


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("granitemoehybrid", "auto"),
        *(pytest.param("granitemoehybrid", mode, marks=pytest.mark.full) for mode in MODES if mode != "auto"),
        *(
            pytest.param(family, mode, marks=pytest.mark.full)
            for family in ("qwen3_next", "lfm2", "jamba")
            for mode in ("none", "align", "all", "auto")
        ),
    ],
)
def test_answers_when_prompts_share_and_part_in_a_small_pool_equal_those_of_requests_run_alone(
    family: str, mode: str
) -> None:
    shared = tokens(99, 70)
    prompts = [shared[: 10 * index] + tokens(index, 30 + 9 * index) for index in range(7)]
    prompts += [*prompts[3:6], prompts[6] + tokens(50, 20)]
    alone, _ = engine(family, **ROOMY, enable_prefix_caching=False)
    expected = []
    for prompt in prompts:
        alone.add_request(request("r", prompt, max_tokens=24))
        expected.append(collect(alone)["r", 0])
    core, model = engine(family, **SMALL[family], max_model_len=192, max_num_seqs=4, **MODES[mode])
    for sighting in range(2):
        for index, prompt in enumerate(prompts):
            boundaries = (10 * index, 35) if index < 7 else ()
            params = SamplingParams(temperature=0.0, max_tokens=24)
            core.add_request(Request(f"r{index}", prompt, params, semantic_boundaries=boundaries))
        found: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        for step in run(core):
            assert model.manager.check() == []
            for output in step:
                assert output.error is None
                found[int(output.request_id[1:])].extend(output.token_ids)
        assert list(found.values()) == expected, sighting
    assert used(model) == (0, 0, 0, 0)
    stats = model.manager.stats()
    assert core.num_preemptions > 0 or mode == "none"  # its spare slots' bytes are blocks
    if mode == "none":
        assert stats.hit_tokens["joint"] == 0
    elif not mode.startswith("all"):  # which may fill so small a pool with states that none lives to be used
        assert stats.hit_tokens["joint"] > 0
    assert (sum(stats.checkpoints_evicted.values()) > 0) == (mode != "none")


@pytest.mark.parametrize(("num_tokens", "budget"), [(100, 512), (96, 512), (300, 48), (300, 70), (40, 10), (600, 64)])
def test_chunks_when_mode_is_align_then_all_but_the_last_end_on_blocks_and_the_rest_is_cut_as_late_as_can_be(
    num_tokens: int, budget: int
) -> None:
    core, model = engine(**{**ROOMY, "max_num_batched_tokens": budget}, mamba_cache_mode="align")
    steps = Steps(model)
    ask(core, "r", tokens(1, num_tokens))
    chunks = steps.prompt_chunks("r", num_tokens)
    assert [start for start, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
    replay = (num_tokens - 1) // BLOCK * BLOCK
    assert chunks[-1][1] == num_tokens
    if budget >= BLOCK:
        assert all(end % BLOCK == 0 for _, end in chunks[:-1])
        assert chunks[-1][0] == replay
        assert len(chunks) == -(-replay // (budget // BLOCK * BLOCK)) + 1
    else:
        assert {end - start for start, end in chunks} <= set(range(1, budget + 1))
        assert replay in [end for _, end in chunks]


@pytest.mark.parametrize("mode", ["none", "all", "auto", "all-64", "auto-64"])
def test_chunks_when_mode_is_not_align_then_each_fills_the_budget(mode: str) -> None:
    core, model = engine(**{**ROOMY, "max_num_batched_tokens": 70}, **MODES[mode])
    steps = Steps(model)
    ask(core, "r", tokens(1, 300), 33, 150)
    assert steps.prompt_chunks("r", 300) == [(0, 70), (70, 140), (140, 210), (210, 280), (280, 300)]
    core.add_request(request("s", tokens(2, 100)))
    core.add_request(request("t", tokens(3, 100)))
    collect(core)
    assert steps.prompt_chunks("s", 100) == [(0, 70), (70, 100)]
    assert steps.prompt_chunks("t", 100)[0] == (0, 40)


@pytest.mark.parametrize(
    ("mode", "resumed"), [("none", 0), ("align", 96), ("all", 96), ("auto", 100), ("all-64", 96), ("auto-64", 100)]
)
def test_exact_repeat_when_the_prompt_ends_inside_a_block_then_each_mode_resumes_at_its_last_state(
    mode: str, resumed: int
) -> None:
    core, _ = engine(**ROOMY, **MODES[mode])
    prompt = tokens(1, 100)
    first = ask(core, "a", prompt)
    second = ask(core, "b", prompt)
    assert (cached(first), cached(second)) == (0, resumed)
    assert [output.token_ids for output in second] == [output.token_ids for output in first]


@pytest.mark.parametrize(
    ("mode", "resumed"),
    [("none", 0), ("align", 0), ("all", 64), ("auto", 77), ("align-64", 0), ("all-64", 64), ("auto-64", 77)],
)
def test_diverging_prompt_when_seen_for_the_second_time_then_each_mode_resumes_where_it_kept_a_state(
    mode: str, resumed: int
) -> None:
    core, _ = engine(**ROOMY, **MODES[mode])
    shared = tokens(1, 77)
    ask(core, "a", shared + tokens(2, 60), 20, 77)
    assert cached(ask(core, "b", shared + tokens(3, 60), 20, 77)) == resumed


@pytest.mark.parametrize("mode", ["align", "all", "auto"])
def test_raw_prompt_when_seen_for_the_third_time_then_it_resumes_at_the_junction(mode: str) -> None:
    core, _ = engine(**ROOMY, **MODES[mode])
    shared = tokens(1, 77)
    hits = [cached(ask(core, f"r{seed}", shared + tokens(seed, 60))) for seed in (2, 3, 4)]
    assert hits[2] == {"align": 0, "all": 64, "auto": 64}[mode]
    assert hits[:2] == [0, 64 if mode == "all" else 0]


@pytest.mark.parametrize(
    ("mode", "failed", "aborted"),
    [
        ("align", 112, 119),
        ("auto", 70, 119),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("none", 0, 0), ("all", 112, 119))),
    ],
)
def test_generation_when_it_ends_early_then_is_resumed_at_boundaries_it_passed_or_where_it_was_aborted(
    mode: str, failed: int, aborted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_aborted, resumed in ((False, failed), (True, aborted)):
        core, model = engine(**ROOMY, **MODES[mode])
        prompt = tokens(1, 70)
        core.add_request(request("a", prompt, max_tokens=200))
        generated: list[int] = []
        while len(generated) < 50:
            for output in core.step():
                generated += output.token_ids
        if is_aborted:
            core.abort("a")
        else:
            with monkeypatch.context() as broken:
                broken.setattr(core._tokens, "_sampler", None)  # what fails keeps nothing of the running state
                assert [output.finish_reason for output in core.step()] == [FinishReason.ERROR]
        assert used(model) == (0, 0, 0, 0)
        assert cached(ask(core, "b", prompt + generated + tokens(5, 9))) == resumed


def test_preempted_request_when_its_state_is_still_cached_goes_on_from_the_token_it_had_reached() -> None:
    core, model = engine(**ROOMY)
    prompt = tokens(1, 100)
    expected = [output.token_ids for output in ask(core, "a", prompt, max_tokens=20)]
    core, model = engine(**ROOMY)
    steps = Steps(model)
    core.add_request(request("b", prompt, max_tokens=20))
    found = []
    for number, outputs in enumerate(run(core)):
        found += [output.token_ids for output in outputs]
        if number == 9:
            (sequence,) = core._scheduler.running
            core._scheduler.preempt(sequence)
    assert found == expected
    chunks = steps.chunks("b")
    assert chunks == [(0, 100), *((at, at + 1) for at in range(100, 119))]
    assert model.manager.stats().checkpoints_saved["donated"] == 2
    assert core.num_preemptions == 1


def test_preempted_request_when_nothing_of_it_is_cached_any_more_then_keeps_the_end_of_its_prompt_again() -> None:
    core, model = engine(**ROOMY)
    prompt = tokens(1, 100)
    core.add_request(request("b", prompt, max_tokens=20))
    for number, _ in enumerate(run(core)):
        if number == 9:
            (sequence,) = core._scheduler.running
            core._scheduler.preempt(sequence)
            coordinator = model.manager._coordinator
            for checkpoint in list(coordinator.state):
                coordinator._evict_checkpoint(checkpoint, "capacity")
        if number == 13:
            assert model.manager.stats().slots["held"] == 1  # the running one
        assert model.manager.check() == []
    assert used(model) == (0, 0, 0, 0)
    assert cached(ask(core, "c", prompt + tokens(5, 9))) == 100


@pytest.mark.parametrize(
    ("mode", "resumed"),
    [
        ("auto", 1632),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("none", 0), ("align", 0), ("all", 1632))),
    ],
)
def test_five_segments_when_four_of_them_were_seen_then_the_shared_ones_are_resumed(mode: str, resumed: int) -> None:
    """Blocks of 544; the second prompt has 4,584 tokens: one more segment in the middle and the same long tail."""
    first, second, third, new, tail = (tokens(seed, 816 if seed < 5 else 1320) for seed in range(1, 6))
    four, five = first + second + third + tail, first + second + new + third + tail
    core, model = engine(
        kv_cache_memory=64 << 20, max_model_len=8192, max_num_batched_tokens=8192, block_size=544, mamba_cache_mode=mode
    )
    steps = Steps(model)
    ask(core, "four", four, 816, 1632, 2448, max_tokens=1)
    found = cached(ask(core, "five", five, 816, 1632, 2448, 3264, max_tokens=1))
    assert (found, len(five)) == (resumed, 4584)
    # One forward for each prompt, but in align: there the last chunk is cut so that a state is kept before it.
    num_chunks = 2 if mode == "align" else 1
    assert len(steps.prompt_chunks("four", len(four))) == num_chunks
    assert len(steps.prompt_chunks("five", len(five))) == num_chunks


@pytest.mark.parametrize(
    ("mode", "hits"),
    [
        ("auto", [0, 0, 1632]),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("align", [0, 0, 0]), ("all", [0, 1632, 1632]))),
    ],
)
def test_five_segments_when_sent_as_raw_tokens_then_the_third_sighting_resumes_at_the_junction(
    mode: str, hits: list[int]
) -> None:
    core, model = engine(
        kv_cache_memory=64 << 20, max_model_len=8192, max_num_batched_tokens=8192, block_size=544, mamba_cache_mode=mode
    )
    steps = Steps(model)
    shared, prompts = tokens(1, 1632), [tokens(seed, 2952) for seed in (2, 3, 4)]
    assert [cached(ask(core, f"r{i}", shared + own, max_tokens=1)) for i, own in enumerate(prompts)] == hits
    if mode != "align":
        assert [len(steps.prompt_chunks(f"r{index}", 4584)) for index in range(3)] == [1, 1, 1]


def test_node_when_its_flags_keep_no_states_then_warns_at_its_start(caplog: pytest.LogCaptureFixture) -> None:
    engine(mamba_cache_mode="none")
    warnings = [record.getMessage() for record in caplog.records if record.name == "common.node.runtime"]
    assert [text.split(":")[0] for text in warnings] == ["--mamba-cache-mode none keeps no recurrent states"]
