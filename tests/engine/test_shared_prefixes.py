"""Prompts with the same beginning that come together, on a real tiny model: the beginning is computed once."""

from __future__ import annotations

from typing import Any

import pytest

from common.engine.core import EngineCore
from common.kv_cache.manager import KVCacheManager
from common.request import FinishReason
from tests.engine.cores import collect, engine, request, tokens, used
from tests.support.models import tiered

SHARED, OWN = 160, 20
ROOMY = {"kv_cache_memory": 64 << 20, "max_model_len": 512}


def num_computed(core: EngineCore, names: list[str]) -> tuple[int, dict[tuple[str, int], list[int]]]:
    """Prompt tokens that were computed until nothing is left to do, and everybody's output."""
    counted: dict[str, int] = {}
    out: dict[tuple[str, int], list[int]] = {}
    while core.has_work():
        for output in core.step():
            assert output.error is None
            out.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            counted[output.request_id] = output.num_local_computed_tokens
    return sum(counted[name] for name in names), out


@pytest.mark.parametrize("family", tiered(("granitemoehybrid", "llama"), ("granitemoehybrid",)))
@pytest.mark.parametrize("chunk", tiered((48, 512), (48,)))
def test_prompts_when_they_begin_alike_and_come_together_then_the_beginning_is_computed_once(
    family: str, chunk: int
) -> None:
    prompts = [tokens(1, SHARED) + tokens(10 + index, OWN) for index in range(5)]
    apart, _ = engine(family, enable_prefix_caching=False, max_num_batched_tokens=512, **ROOMY)
    expected = {}
    for index, prompt in enumerate(prompts):
        apart.add_request(request(f"r{index}", prompt))
        expected.update(collect(apart))
    core, model = engine(family, max_num_batched_tokens=chunk, **ROOMY)
    for index, prompt in enumerate(prompts):
        core.add_request(request(f"r{index}", prompt))
    computed, outputs = num_computed(core, [f"r{index}" for index in range(5)])
    assert outputs == expected
    assert computed <= SHARED + 5 * (OWN + 16), computed
    assert model.manager.check() == []
    assert used(model)[2:] == (0, 0)


def test_prompt_when_another_like_it_came_a_step_later_then_is_not_computed_twice() -> None:
    core, _ = engine(max_num_batched_tokens=48, **ROOMY)
    core.add_request(request("first", tokens(1, SHARED) + tokens(2, OWN)))
    core.step()
    core.add_request(request("second", tokens(1, SHARED) + tokens(3, OWN)))
    core.add_request(request("other", tokens(4, 30)))
    computed, _ = num_computed(core, ["first", "second", "other"])
    assert computed <= SHARED + OWN + OWN + 16 + 30


def test_prompts_when_the_same_one_comes_five_times_then_it_is_computed_once() -> None:
    core, _ = engine(max_num_batched_tokens=64, **ROOMY)
    for index in range(5):
        core.add_request(request(f"r{index}", tokens(1, SHARED)))
    computed, outputs = num_computed(core, [f"r{index}" for index in range(5)])
    assert computed == SHARED
    assert len({tuple(each) for each in outputs.values()}) == 1


def test_prompt_when_the_one_it_waits_for_is_aborted_then_is_computed_by_itself() -> None:
    core, model = engine(max_num_batched_tokens=48, **ROOMY)
    core.add_request(request("first", tokens(1, SHARED)))
    core.add_request(request("second", tokens(1, SHARED) + tokens(2, OWN)))
    core.step()
    core.abort("first")
    outputs = collect(core)
    assert len(outputs["second", 0]) == 12
    assert used(model) == (0, 0, 0, 0)


def test_prompt_when_the_one_it_waits_for_fails_then_is_computed_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, model = engine(max_num_batched_tokens=64, **ROOMY)
    core.add_request(request("first", tokens(1, SHARED)))
    core.add_request(request("second", tokens(1, SHARED) + tokens(2, OWN)))
    core.step()
    with monkeypatch.context() as broken:
        broken.setattr(KVCacheManager, "complete_step", lambda *_: 1 / 0)
        assert [(output.request_id, output.finish_reason) for output in core.step()] == [("first", FinishReason.ERROR)]
    assert sorted(name for name, _ in collect(core)) == ["second"]
    assert used(model) == (0, 0, 0, 0)


@pytest.mark.parametrize("flags", [{"mamba_cache_mode": "none"}, {"enable_prefix_caching": False}])
def test_prompts_when_nothing_is_kept_then_do_not_wait_for_each_other(flags: dict[str, Any]) -> None:
    core, _ = engine(max_num_batched_tokens=512, **{**ROOMY, **flags})
    for index in range(2):
        core.add_request(request(f"r{index}", tokens(1, SHARED)))
    core.step()
    assert len(core.step()) == 2  # both run
    collect(core)
