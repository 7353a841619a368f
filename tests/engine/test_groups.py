"""Engines of models with sliding windows or latents, alone and as a prefill and a decode engine: transformers' own
answers, however a prompt came to be known; windows give their blocks back; a handoff moves last windows only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from common.engine.core import EngineCore
from common.engine.outputs import RequestOutput
from common.kv_cache.sharing.remote_prefix import PullPlan
from common.node.runtime import NodeModel
from common.request import Request, SamplingParams
from tests.engine.cores import engine, run, tokens, used
from tests.support.models import WINDOW
from tests.support.pair import Pair
from tests.support.reference import reference

BLOCK_SIZE = 16
NUM_TOKENS = 16
ROOMY = {"kv_cache_memory": 16 << 20, "max_model_len": 1024, "max_num_batched_tokens": 64}
# Some 30 blocks a group for eight sequences of up to 21: they preempt each other and evict what is cached.
SMALL = {
    "mistral": {"kv_cache_memory": 1_050_000},
    "gemma3": {"kv_cache_memory": 1_050_000},
    "kimi_linear": {"kv_cache_memory": 530_000, "state_memory_share": 0.8},
    "lfm3": {"kv_cache_memory": 560_000},
    "bailing_hybrid": {"kv_cache_memory": 530_000, "state_memory_share": 0.8},
}
FULL = [family for family in SMALL if family != "mistral"]
families = pytest.mark.parametrize(
    "family",
    [
        "mistral",
        *(pytest.param(family, marks=pytest.mark.full) for family in FULL),
    ],
)


def ask(name: str, prompt: Sequence[int]) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0)
    return Request(name, list(prompt), params, arrival_s=0.0)


class Answers:
    """Outputs of requests, to be compared with stock's."""

    def __init__(self, family: str) -> None:
        self._reference = reference(family)
        self._outputs: dict[str, list[RequestOutput]] = {}

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.error is None
            self._outputs.setdefault(output.request_id, []).append(output)

    def first(self, name: str) -> RequestOutput:
        return self._outputs[name][0]

    def mismatch(self, name: str, prompt: Sequence[int]) -> object:
        outputs = self._outputs[name]
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        logprobs = [entry.logprob for output in outputs for entry in output.logprobs or ()]
        greedy = self._reference.greedy(prompt, NUM_TOKENS)
        return greedy.mismatch(token_ids, logprobs, self._reference.tolerance)


def finish(core: EngineCore, model: NodeModel, answers: Answers, *requests: Request) -> None:
    for request in requests:
        core.add_request(request)
    for outputs in run(core):
        answers.add(outputs)
        assert model.manager.check() == []


@pytest.mark.parametrize(
    "flags",
    [{}, pytest.param({"prefix_cache_retention_interval": 64, "mamba_cache_mode": "all"}, marks=pytest.mark.full)],
)
@families
def test_answers_when_cold_repeated_resumed_and_parted_then_equal_stock(family: str, flags: dict[str, Any]) -> None:
    core, model = engine(family, **ROOMY, **flags)
    origin, other = tokens(1, 300), tokens(2, 60)
    prompts = {
        "origin": origin,
        "again": origin,
        "goes on inside a block": origin + other[:7],
        "parts at a boundary": origin[:208] + other,
        "parts inside a block": origin[:150] + other,
        "stops short": origin[:90],
        "goes on from there": origin[:90] + other,
    }
    answers = Answers(family)
    for name, prompt in prompts.items():
        finish(core, model, answers, ask(name, prompt))
        assert answers.mismatch(name, prompt) is None, name
    found = {name: answers.first(name).num_cached_tokens for name in prompts}
    if not flags:  # else states are kept at boundaries
        assert (found["again"], found["goes on inside a block"], found["goes on from there"]) == (300, 300, 90)
    assert found["origin"] == 0 < min(found["again"], found["goes on inside a block"], found["goes on from there"])
    assert used(model) == (0, 0, 0, 0)


@families
def test_forks_when_they_go_on_in_copies_of_one_tail_then_each_equals_stock(family: str) -> None:
    core, model = engine(family, **ROOMY)
    prompt, request = tokens(8, 75), ask("r", tokens(8, 75))
    request.num_forks = 3
    core.add_request(request)
    forks = [Answers(family) for _ in range(3)]
    for outputs in run(core):
        assert model.manager.check() == []
        for output in outputs:
            forks[output.index].add([output])
    assert [answers.mismatch("r", prompt) for answers in forks] == [None] * 3


@pytest.mark.parametrize("family", ["mistral", *(pytest.param(each, marks=pytest.mark.full) for each in FULL)])
def test_answers_when_batched_in_a_small_pool_then_equal_stock(family: str) -> None:
    core, model = engine(family, **{**ROOMY, **SMALL[family], "max_model_len": 340, "max_num_seqs": 8})
    shared = tokens(3, 120)
    prompts = {f"r{index}": shared[: 20 * index] + tokens(10 + index, 40 + 23 * index) for index in range(8)}
    for _ in range(2):
        answers = Answers(family)
        finish(core, model, answers, *(ask(name, prompt) for name, prompt in prompts.items()))
        for name, prompt in prompts.items():
            assert answers.mismatch(name, prompt) is None, name
    assert used(model) == (0, 0, 0, 0)
    assert sum(model.manager.stats().evictions.values()) > 0


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(each, marks=pytest.mark.full) for each in ("mistral", "lfm3"))]
)
@pytest.mark.parametrize("caches", [True, False])
def test_blocks_when_a_window_has_passed_them_then_are_given_back(family: str, caches: bool) -> None:
    core, model = engine(family, **ROOMY, enable_prefix_caching=caches)
    prompt, answers, held = tokens(4, 300), Answers(family), []
    core.add_request(ask("r", prompt))
    for outputs in run(core):
        answers.add(outputs)
        assert model.manager.check() == []
        held.append({label: counts["held"] for label, counts in model.manager.stats().group_blocks.items()})
    assert answers.mismatch("r", prompt) is None
    whole, window = -(-300 // BLOCK_SIZE), f"window_{WINDOW}"
    assert held[0][window] == whole - (64 - WINDOW + 1) // BLOCK_SIZE  # after 64 tokens
    decoding = held[-NUM_TOKENS:-1]
    assert {each[window] for each in decoding} == {2, 3}  # what 20 tokens before a new one touch
    assert all(each["attention"] >= whole for each in decoding if "attention" in each)


@pytest.fixture
def pair(family: str) -> Iterator[Pair]:
    made = Pair(family, max_num_batched_tokens=64)
    yield made
    made.close()


def expected(pair: Pair, num_tokens: int, num_known: int = 0) -> tuple[int, int, int]:
    """Bytes, blocks and states that a prompt of ``num_tokens`` takes along, when the full blocks of its first
    ``num_known`` tokens are known."""
    model, num_bytes, num_blocks = pair.decode.model, 0, 0
    for group in model.loaded.geometry.attention_groups:
        reached = max(0, num_tokens - WINDOW + 1) // BLOCK_SIZE if group.window else 0
        moved = -(-num_tokens // BLOCK_SIZE) - max(reached, num_known // BLOCK_SIZE)
        num_blocks += moved
        num_bytes += moved * model.storage.layout.group_block_bytes[group.group_id]
    num_states = int(model.cache_config.has_state)
    return num_bytes + num_states * model.storage.layout.slot_bytes, num_blocks, num_states


@families
def test_handoff_when_prompts_are_longer_than_the_window_then_moves_the_last_one_only(pair: Pair, family: str) -> None:
    stock = reference(family)
    prompt, more = tokens(5, 300), tokens(6, 90)
    turns = {
        "cold": (prompt, expected(pair, 300)),
        "again": (prompt, (0, 0, 0)),
        # Full blocks that are here are not moved again; the tail, the state and what the window newly reaches are.
        "longer": (prompt + more, expected(pair, 390, num_known=300)),
        "short": (prompt[:9], expected(pair, 9)),
    }
    for name, (asked, transferred) in turns.items():
        answer = pair.ask({name: asked}, NUM_TOKENS)[name]
        assert stock.greedy(asked, NUM_TOKENS).mismatch(answer.token_ids, answer.logprobs, stock.tolerance) is None
        assert answer.transferred == transferred, name
        assert pair.prefill.held() == pair.decode.held() == (0, 0, 0)


@families
def test_handoff_when_both_legs_run_at_once_then_finished_blocks_of_the_last_window_are_read_early(
    pair: Pair, family: str
) -> None:
    stock = reference(family)
    # Steps end at 64, 128, 192, 256 and 260 tokens: the last window begins in a block that the fourth one finishes.
    prompt, more = tokens(9, 260), tokens(10, 71)
    turns = {"cold": (prompt, expected(pair, 260)), "longer": (prompt + more, expected(pair, 331, num_known=260))}
    early = {}
    for name, (asked, transferred) in turns.items():
        answer = pair.ask_at_once(name, asked, NUM_TOKENS)
        assert stock.greedy(asked, NUM_TOKENS).mismatch(answer.token_ids, answer.logprobs, stock.tolerance) is None
        assert answer.transferred == transferred, name
        assert pair.prefill.held() == pair.decode.held() == (0, 0, 0)
        early[name] = answer.pull.num_early_parts
    has_windows_only = all(group.window for group in pair.decode.model.loaded.geometry.attention_groups)
    assert early == {"cold": 1 if has_windows_only else 4, "longer": 1}


@families
def test_control_when_the_moved_blocks_of_a_group_are_zeroed_then_the_answer_differs(pair: Pair, family: str) -> None:
    stock = reference(family)
    for group in pair.decode.model.loaded.geometry.attention_groups:
        prompt = [20 + group.group_id, *tokens(7, 300)]

        def damage(plan: PullPlan, group_id: int = group.group_id) -> None:
            assert plan.pairs[group_id]
            for _, block_id in plan.pairs[group_id]:
                pair.decode.model.storage.zero_block(block_id, group_id)

        answer = pair.take_in(pair.hand_out({"damaged": prompt}), NUM_TOKENS, damage)["damaged"]
        greedy = stock.greedy(prompt, NUM_TOKENS)
        assert greedy.mismatch(answer.token_ids, answer.logprobs, stock.tolerance) is not None, group.label
